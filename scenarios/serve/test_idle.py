"""A server that has nothing to do does nothing (field report L05)."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.run.live_loop import LiveLoop
from refimpl.run.options import Options
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live

WATCHED_S = 1.0


def test_an_idle_engine_wakes_up_once_a_second_and_takes_no_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that write to L3 get the interpreter: nobody polls beside them."""
    wakings = 0
    wait = LiveLoop.wait

    def counted(loop: LiveLoop, next_due: int | None = None) -> object:
        nonlocal wakings
        wakings += 1
        return wait(loop, next_due)

    monkeypatch.setattr(LiveLoop, "wait", counted)
    options = Options(enable_hierarchical_cache=True, hicache_storage_backend="memory")
    with serving_null(options) as (url, _), httpx.Client(base_url=url) as client:
        asked = {"input_ids": list(range(700)), "sampling_params": {"max_new_tokens": 2}}
        assert client.post("/generate", json=asked).status_code == 200
        assert client.post("/flush_cache?timeout=30").status_code == 200
        before, cpu = wakings, time.process_time()
        threading.Event().wait(WATCHED_S)  # the time that is measured, not a wait for something
        assert wakings - before <= 3
        assert time.process_time() - cpu < 0.2 * WATCHED_S

"""Server processes one after another on one folder: the second finds what the first has stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from scenarios.serve.server_process import ServerProcess, server_process

pytestmark = [pytest.mark.live, pytest.mark.slow]

PAGE = 16
SECONDS_MAX = 60
WRITERS, STORED_MIN = 4, 80  # pages that are on disk when the first server is killed


@contextmanager
def server_on(folder: Path) -> Iterator[ServerProcess]:
    """A server whose L3 is ``folder``."""
    extra = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": PAGE})
    flags = {
        "--model-path": "tiny-gqa",
        "--arithmetic": "reference",
        "--page-size": str(PAGE),
        "--max-total-tokens": "2048",
        "--hicache-ratio": "4",
        "--hicache-storage-backend": "file",
        "--hicache-storage-backend-extra-config": extra,
        "--hicache-storage-prefetch-policy": "wait_complete",
    }
    words = [word for flag in flags.items() for word in flag]
    log = folder.parent / "server.log"
    with server_process(log, "--enable-hierarchical-cache", *words) as server:
        yield server


def ask(client: httpx.Client, tokens: list[int], **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    answer = client.post("/generate", json={"input_ids": tokens, "sampling_params": params} | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def prompt(number: int) -> list[int]:
    return [(number * 37 + at * (number % 5 + 1)) % 250 for at in range(20 * PAGE + 5)]


def pages_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.bin"))


def test_a_server_that_was_stopped_leaves_its_pages_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with server_on(folder) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        first = ask(client, prompt(1))
        assert first["meta_info"]["cached_tokens"] == 0
        server.stop()  # what is not stored yet is, before it ends
    assert len(pages_in(folder)) == 20
    with server_on(folder) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        second = ask(client, prompt(1))
    assert second["output_ids"] == first["output_ids"]
    assert second["meta_info"]["cached_tokens_details"]["storage"] == 20 * PAGE


def ask_until_killed(url: str, writer: int, killed: Event) -> None:
    with suppress(httpx.TransportError), httpx.Client(base_url=url, timeout=60) as client:
        number = writer
        while not killed.is_set():
            ask(client, prompt(number))
            number += WRITERS


def test_a_server_that_was_killed_in_the_middle_leaves_whole_pages_and_right_answers(
    tmp_path: Path,
) -> None:
    folder, killed = tmp_path / "kv", Event()
    with server_on(folder) as server, ThreadPoolExecutor(WRITERS) as pool:
        for writer in range(WRITERS):
            pool.submit(ask_until_killed, server.url, writer, killed)
        end = monotonic() + SECONDS_MAX
        while len(pages_in(folder)) < STORED_MIN:
            assert monotonic() < end, "nothing is stored"
        server.process.kill()
        killed.set()
    found = pages_in(folder)
    assert len({path.stat().st_size for path in found}) == 1
    hits = []
    with server_on(folder) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for number in range(2 * WRITERS):
            answer = ask(client, prompt(number))
            cold = ask(client, prompt(number), cache_salt="of nobody else")
            assert cold["meta_info"]["cached_tokens"] == 0
            assert answer["output_ids"] == cold["output_ids"]
            details = answer["meta_info"]["cached_tokens_details"] or {}
            hits.append(details.get("storage", 0) // PAGE)
    assert sum(hits) >= STORED_MIN // 2
    assert sum(hits) <= len(found)

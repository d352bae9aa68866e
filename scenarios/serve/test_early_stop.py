"""A server told to stop as soon as it says that it serves ends as it does later: with 0, in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

from scenarios.serve.server_process import server_process

pytestmark = pytest.mark.live


def test_a_server_that_says_it_serves_heeds_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with server_process(log, "--hands", "none", "--max-total-tokens", "2048") as server:
        assert server.stop() == 0
    first, *rest = log.read_text().splitlines()
    assert first.startswith("serving ")
    assert [line.split(" on ")[0] for line in rest] == ["requests over ZMQ"]

"""Clients that do not read what they asked for: they cost little, hold up nobody, and miss nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from refimpl.run.options import Options
from refimpl.serve import app, backlog, generation
from refimpl.serve.backlog import Backlog
from refimpl.serve.bridge import Ended, Tokens
from refimpl.serve.service import Service
from scenarios.serve import served
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live

OPTIONS = Options(page_size=16, max_total_tokens=65_536)
BUFFER_BYTES = 4096  # of the sockets on both sides, before the kernel rounds it
ANSWERS, LENGTH = 16, 200
SECONDS_MAX = 30
QUICK = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


@contextmanager
def not_reading(url: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection that has asked, with next to no room for the answer."""
    place = urlsplit(url)
    raw = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        client.settimeout(SECONDS_MAX)
        client.connect((place.hostname, place.port))
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        client.sendall(head.encode() + raw)
        yield client


def wait_for(is_so: Callable[[], bool]) -> None:
    end, pause = monotonic() + SECONDS_MAX, threading.Event()
    while not is_so():
        assert monotonic() < end, "it does not come about"
        pause.wait(0.01)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's kernel takes next to nothing for a client either, where it would take megabytes."""

    def listening(host: str, port: int) -> socket.socket:
        listener = app.listening(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        return listener

    monkeypatch.setattr(served, "listening", listening)


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How much any answer had waiting at most: words, and tokens in all of them."""
    most = {"words": 0, "tokens": 0}

    class Watched(Backlog):
        def _take(self, said: Tokens | Ended) -> None:
            super()._take(said)
            most["words"] = max(most["words"], len(self))
            tokens = [len(each.tokens) for each in self._waiting if isinstance(each, Tokens)]
            most["tokens"] = max(most["tokens"], sum(tokens))

    monkeypatch.setattr(generation, "Backlog", Watched)
    return most


def is_at_rest(service: Service) -> bool:
    return not service.bridge._asked and service.bridge.ask(lambda engine: engine.idle).result(5)


@pytest.mark.usefixtures("narrow")
def test_a_client_that_stalls_costs_little_and_gets_every_byte_when_it_reads_on(
    longest: dict[str, int],
) -> None:
    body = {
        "prompt": "x" * 100,
        "n": ANSWERS,
        "max_tokens": LENGTH,
        "seed": 1,
        "ignore_eos": True,
    }
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    with serving_null(OPTIONS) as (url, service), httpx.Client(base_url=url, timeout=60) as other:
        with not_reading(url, "/v1/completions", streamed) as client:
            wait_for(lambda: bool(service.bridge.engine.running))
            while not is_at_rest(service):  # all is generated, whether somebody reads or not
                assert other.post("/generate", json=QUICK).status_code == 200
            assert service.running._by_name  # and the client still has it to read
            text = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
        whole = other.post("/v1/completions", json=body).json()
    assert longest["words"] <= backlog.WORDS_MAX + 2  # the rest in one, and the end
    assert longest["tokens"] > backlog.WORDS_MAX  # it has stalled in earnest
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    texts = [""] * ANSWERS
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert chunks[-1]["usage"]["completion_tokens"] == ANSWERS * LENGTH
    assert "data: [DONE]" in text
    assert text.rstrip().endswith("0")  # the last chunk of HTTP, which says that it was all
    check_quiescent(service.bridge.engine)


def test_a_client_that_never_reads_is_dropped_and_its_answers_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps its connection and its window closed: without a limit it would for ever."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("the kernel drops no client that stalls: TCP_USER_TIMEOUT is Linux's")
    monkeypatch.setattr(app, "STALLED_MS", 1000)
    options = replace(OPTIONS, max_total_tokens=1 << 20)
    params = {"max_new_tokens": 15_000, "ignore_eos": True, "n": 16}
    body = {"input_ids": [1, 2, 3], "sampling_params": params, "stream": True}
    with serving_null(options) as (url, service), httpx.Client(base_url=url, timeout=60) as other:
        with not_reading(url, "/generate", body):
            wait_for(lambda: len(service.running._by_name) == 16)
            wait_for(lambda: not service.running._by_name)
            assert other.post("/flush_cache?timeout=30").status_code == 200
        assert service.bridge._loop.record.finished["abort"] == 16
        assert other.post("/generate", json=QUICK).status_code == 200

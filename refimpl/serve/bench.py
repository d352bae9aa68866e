"""How many requests a second the server takes, and what it adds to a first token.

The server runs as a process of its own without a model, so that what is measured is ours: HTTP or ZMQ, the
engine, the lanes. The floor of a request over HTTP is one that asks for nothing, taken in the same run.
Must not know: what an engine decides. Called by: the command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from statistics import median
from threading import local
from time import perf_counter
from typing import Any, Final
from urllib.parse import urlsplit

from refimpl.config import ConfigError

REQUESTS: Final = 2_000
CONNECTIONS: Final = 64
STREAMS: Final = 8
STREAMED: Final = 160
PROMPT_TOKENS: Final = 32  # of which the imitated device computes some 1,000 a second
OUTPUT_TOKENS: Final = 8
STOP_S: Final = 30
SERVER: Final = ("-m", "refimpl", "serve", "--hands", "none", "--port", "0")
FLAGS: Final = ("--enable-hierarchical-cache",)


def bench_serve() -> dict[str, Any]:
    """Rates over HTTP, and the time between the record's first token and the client's."""
    with served() as place:
        http = _Http(place)
        floor = _rate(http.health, REQUESTS)
        rate = _rate(http.generate, REQUESTS)
        overhead = _overhead_ms(http)
    return {
        "http_requests_per_s": round(rate, 1),
        "http_floor_per_s": round(floor, 1),  # GET /health
        "ttft_overhead_ms": round(overhead, 3),  # median, with 8 streams
        "ratios": {"http_to_floor": rate / floor},
    }


@contextmanager
def served() -> Iterator[str]:
    """A server without a model on a free port: its URL. It has stopped at the end."""
    process = subprocess.Popen([sys.executable, *SERVER, *FLAGS], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("serving "):
                break
        else:
            raise ConfigError(f"the server did not start: {' '.join(said)}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stderr.close()


class _Http:
    """A client with a connection a thread."""

    def __init__(self, place: str) -> None:
        self._place = urlsplit(place)
        self._own = local()

    def _connection(self) -> HTTPConnection:
        if not hasattr(self._own, "connection"):
            host, port = self._place.hostname, self._place.port
            assert host is not None
            self._own.connection = HTTPConnection(host, port, timeout=STOP_S)
        connection: HTTPConnection = self._own.connection
        return connection

    def health(self, _: int) -> None:
        """A request that asks for nothing."""
        connection = self._connection()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status

    def generate(self, number: int) -> None:
        """A request of its own prompt, answered as a whole."""
        connection = self._connection()
        connection.request("POST", "/generate", _body(number), {"content-type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status == 200, said

    def overhead_ms(self, number: int) -> float:
        """A streamed request: time to its first token here, less that in the server's record."""
        connection = self._connection()
        body = _body(number, stream=True)
        begun = perf_counter()
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        first: float | None = None
        record_s = 0.0
        while line := answer.readline():
            if line.startswith(b"data: {"):
                first = perf_counter() - begun if first is None else first
                meta = json.loads(line[6:])["meta_info"]
                record_s = meta.get("first_token_latency", record_s)  # in the last one alone
        assert first is not None, "a stream without a token"
        return (first - record_s) * 1e3


def _body(number: int, *, stream: bool = False) -> str:
    tokens = [(number * 31 + at * 7) % 50_000 for at in range(PROMPT_TOKENS)]
    params = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0}
    return json.dumps({"input_ids": tokens, "sampling_params": params, "stream": stream})


def _rate(ask: Callable[[int], None], count: int) -> float:
    """Requests a second of so many, over all connections."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(ask, range(-CONNECTIONS, 0)))  # connections are made before the clock runs
        begun = perf_counter()
        list(pool.map(ask, range(count)))
        return count / (perf_counter() - begun)


def _overhead_ms(http: _Http) -> float:
    with ThreadPoolExecutor(STREAMS) as pool:
        overheads = list(pool.map(http.overhead_ms, range(REQUESTS, REQUESTS + STREAMED)))
    return median(overheads)

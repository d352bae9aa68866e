"""A fixture in place of a server: it computes nothing, and misbehaves as it is told, request by request.

It speaks just enough of the OpenAI and SGLang streams for a client to be put to the test. What a real
server does is tested with the real one.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from time import monotonic_ns
from typing import Any

Answer = Callable[["Exchange"], None]


@dataclass
class Fixture:
    """What it is told to do, and what it was asked. ``answers`` gives the answer of each request in turn."""

    answers: Callable[[int], Answer]
    flush_status: int = 200
    flushes: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    came_ns: list[int] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)  # of clients, one a connection
    resumed: Event = field(default_factory=Event)  # cleared while a pause holds all answers back
    url: str = ""
    lock: Lock = field(default_factory=Lock)


class Exchange(BaseHTTPRequestHandler):
    """One request and its answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fixture: Fixture
    body: dict[str, Any]

    def do_GET(self) -> None:
        self.whole(404, b"{}")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        fixture = self.fixture
        if self.path.endswith("/flush_cache"):
            fixture.flushes += 1
            self.whole(fixture.flush_status, b"Flush cache failed.\nrequests are running\n")
            return
        self.body = json.loads(raw)
        with fixture.lock:
            number = len(fixture.bodies)
            fixture.bodies.append(self.body)
            fixture.came_ns.append(monotonic_ns())
            fixture.ports.add(self.client_address[1])
        fixture.answers(number)(self)

    def whole(self, status: int, text: bytes) -> None:
        """An answer in one."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def begin(self) -> None:
        """Open a stream."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, event: dict[str, Any] | str) -> None:
        """Send one event."""
        text = event if isinstance(event, str) else json.dumps(event)
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def end(self) -> None:
        """The last event, and the end of the stream."""
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(prompt: int, output: int, cached: int = 0, **tiers: int) -> dict[str, Any]:
    details = {"cached_tokens": cached, "cached_tokens_details": tiers or None}
    counted = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": details,
    }
    return {"choices": [], "usage": counted}


def wait(seconds: float) -> None:
    """Let time pass, which is what a slow server does."""
    Event().wait(seconds)


def chat(
    events: int = 3, tokens: int = 3, gap_s: float = 0.0, counts: bool = True, cached: int = 0
) -> Answer:
    """A good answer: ``tokens`` in ``events`` events, each ``gap_s`` after the one before."""

    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event(delta(role="assistant", content=""))
        for _ in range(events):
            wait(gap_s)
            exchange.event(delta(content="word " * (tokens // events)))
        exchange.event(delta(finish="length"))
        if counts and exchange.body["stream_options"]["include_usage"]:
            exchange.event(usage(8, tokens, cached, device=cached))
        exchange.end()

    return answer


def generated(exchange: Exchange) -> None:
    """A good answer of /generate, in one event."""
    wanted = exchange.body["sampling_params"]["max_new_tokens"]
    meta = {
        "finish_reason": {"type": "length", "length": wanted},
        "prompt_tokens": len(exchange.body["input_ids"]),
        "completion_tokens": wanted,
        "cached_tokens": 0,
    }
    exchange.begin()
    exchange.event({"text": "", "output_ids": [1] * wanted, "meta_info": meta})
    exchange.end()


def tiers_apart(exchange: Exchange) -> None:
    """A good answer whose tiers come as SGLang's extension, and whose usage does not know of a cache."""
    exchange.begin()
    exchange.event(delta(content="word"))
    tiers = {"device": 3, "host": 2, "storage": 1, "storage_backend": "file"}
    exchange.event(delta(finish="length") | {"sglext": {"cached_tokens_details": tiers}})
    counted = {"prompt_tokens": 8, "completion_tokens": 1, "prompt_tokens_details": None}
    exchange.event({"choices": [], "usage": counted})
    exchange.end()


def text_after(seconds: float) -> Answer:
    """The role at once, then an empty delta; the text comes ``seconds`` later."""

    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event(delta(role="assistant"))
        exchange.event(delta(content=""))
        wait(seconds)
        exchange.event(delta(content="word"))
        exchange.event(delta(finish="length"))
        exchange.event(usage(8, 1))
        exchange.end()

    return answer


def silent(exchange: Exchange) -> None:
    """An answer without any text."""
    exchange.begin()
    exchange.event(delta(role="assistant", content=""))
    exchange.event(delta(finish="stop"))
    exchange.end()


def reset(exchange: Exchange) -> None:
    """The connection is reset after a first word."""
    exchange.begin()
    exchange.event(delta(content="word"))
    exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.connection.close()
    exchange.close_connection = True


def cut(exchange: Exchange) -> None:
    """The stream ends well-formed, but nobody said that the answer is over."""
    exchange.begin()
    exchange.event(delta(content="word"))
    exchange.end()


def error_500(exchange: Exchange) -> None:
    exchange.whole(500, b'{"error": {"message": "out of memory"}}')


def malformed(exchange: Exchange) -> None:
    exchange.begin()
    exchange.event('{"choices": [')
    exchange.end()


def held(exchange: Exchange) -> None:
    """A good answer, once the pause is over."""
    exchange.fixture.resumed.wait()
    chat()(exchange)


@contextmanager
def answering(answers: Callable[[int], Answer], **told: Any) -> Iterator[Fixture]:
    """A fixture on a free port of loopback; at the end it and its threads have stopped."""
    fixture = Fixture(answers, **told)

    class Bound(Exchange):
        pass

    Bound.fixture = fixture

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024
        daemon_threads = True  # kept-alive connections end with their client

        def handle_error(self, *_: Any) -> None:
            """A client that leaves is no error."""

    with Server(("127.0.0.1", 0), Bound) as server:
        fixture.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fixture
        finally:
            fixture.resumed.set()
            server.shutdown()
            thread.join()

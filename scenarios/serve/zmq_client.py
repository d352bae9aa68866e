"""A client of the ZMQ ingress for tests: it sends maps, waits for maps with a deadline, and closes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

SECONDS_MAX = 30


class ZmqClient:
    """One DEALER."""

    def __init__(self, context: zmq.Context[Any], port: int, reads: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        if reads:
            self.socket.setsockopt(zmq.RCVHWM, reads)
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.setsockopt(zmq.RCVTIMEO, SECONDS_MAX * 1000)
        self.socket.setsockopt(zmq.SNDTIMEO, SECONDS_MAX * 1000)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.kept: list[dict[str, Any]] = []  # what came before the answer to a ping

    def send(self, message: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> dict[str, Any]:
        return self.kept.pop(0) if self.kept else self._next()

    def _next(self) -> dict[str, Any]:
        return msgspec.msgpack.decode(self.socket.recv(), type=dict[str, Any])

    def ask(self, name: str, tokens: Any, **more: Any) -> None:
        """A greedy request; ``more`` goes into its sampling parameters, but for what is beside them."""
        beside = ("stream", "extra_key", "cache_salt", "priority", "api_key")
        outer = {key: more.pop(key) for key in beside if key in more}
        params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True} | more
        message = {"type": "generate", "id": name, "input_ids": tokens, "sampling_params": params}
        self.send(message | outer)

    def answers(self, count: int) -> dict[str, dict[str, Any]]:
        """The ends of ``count`` requests by id, each with all of its tokens, errors too."""
        tokens: dict[str, list[int]] = {}
        done: dict[str, dict[str, Any]] = {}
        while len(done) < count:
            said = self.receive()
            name = said["id"]
            assert name not in done, "something came after the end"
            tokens.setdefault(name, []).extend(said.get("output_ids", ()))
            if said["type"] != "tokens":
                done[name] = said | {"output_ids": tokens[name]}
        return done

    def whole(self, name: str, tokens: Any, **more: Any) -> dict[str, Any]:
        """One request and its end."""
        self.ask(name, tokens, **more)
        return self.answers(1)[name]

    def ping(self) -> list[dict[str, Any]]:
        """Returns what came before the answer, which ``receive`` gives too.

        When it comes, all that was sent before has been read.
        """
        self.send({"type": "ping"})
        while (said := self._next())["type"] != "pong":
            self.kept.append(said)
        return self.kept

    def close(self) -> None:
        self.socket.close(0)


@contextmanager
def zmq_client(port: int, reads: int = 0) -> Iterator[ZmqClient]:
    """A client with a context of its own, which takes ``reads`` messages before it is asked; 0: all."""
    context: zmq.Context[Any] = zmq.Context()
    client = ZmqClient(context, port, reads)
    try:
        yield client
    finally:
        client.close()
        context.term()

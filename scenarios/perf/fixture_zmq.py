"""A fixture in place of a ZMQ ingress: a ROUTER that gives made-up answers to well-formed questions."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import msgspec
import zmq

POLL_MS = 20
FULL = {"code": 503, "message": "the inbox is full", "retry_after": 1}


class Ingress:
    """Where it listens, and what it was asked; requests whose number is in ``refuses`` find no room."""

    def __init__(self, refuses: frozenset[int] = frozenset()) -> None:
        self.address = ""
        self.heard: list[dict[str, Any]] = []
        self._refuses = refuses

    def answers(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """What to say to one message."""
        if message["type"] == "ping":
            return [{"type": "pong"}]
        if message["type"] != "generate":
            return []
        self.heard.append(message)
        name = {"id": message["id"]}
        if len(self.heard) - 1 in self._refuses:
            return [{"type": "error", **name, **FULL}]
        wanted = message["sampling_params"]["max_new_tokens"]
        tokens = [{"type": "tokens", **name, "output_ids": [1], "cached_tokens": 2}] * wanted
        end = {
            "type": "end", "output_ids": [], "finish_reason": {"type": "length", "length": wanted},
            "prompt_tokens": len(prompt_of(message)), "completion_tokens": wanted,
            "cached_tokens": 2, "cached_tokens_details": {"device": 1, "host": 1},
            "e2e_latency": 0.0, "first_token_latency": 0.0,
        }  # fmt: skip
        return [*tokens, end | name]


def prompt_of(message: dict[str, Any]) -> list[int]:
    """The token ids, which may come as little-endian words."""
    given = message["input_ids"]
    return list(struct.unpack(f"<{len(given) // 4}I", given)) if isinstance(given, bytes) else given


@contextmanager
def listening(ingress: Ingress) -> Iterator[Ingress]:
    """``ingress`` on a free port of loopback; at the end its thread has ended."""
    ended = Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        ingress.address = f"tcp://127.0.0.1:{port}"

        def serve() -> None:
            while not ended.is_set():
                if router.poll(POLL_MS):
                    peer, message = router.recv_multipart()
                    for answer in ingress.answers(msgspec.msgpack.decode(message)):
                        router.send_multipart([peer, msgspec.msgpack.encode(answer)])

        thread = Thread(target=serve)
        thread.start()
        try:
            yield ingress
        finally:
            ended.set()
            thread.join()
            router.close(linger=0)

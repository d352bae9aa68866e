"""A subscriber of KV events: it follows sequence numbers and asks again for what it missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

SECONDS_MAX = 30
END = (-1).to_bytes(8, "big", signed=True)


class KvSubscriber:
    """A SUB for what happens and a DEALER for what has happened."""

    def __init__(self, context: zmq.Context[Any], port: int, replay_port: int, topic: str) -> None:
        self.topic = topic.encode()
        self.events = context.socket(zmq.SUB)
        self.events.connect(f"tcp://127.0.0.1:{port}")
        self.events.subscribe(self.topic)
        self.asks = context.socket(zmq.DEALER)
        if replay_port:
            self.asks.connect(f"tcp://127.0.0.1:{replay_port}")
        for each in (self.events, self.asks):
            each.setsockopt(zmq.RCVTIMEO, SECONDS_MAX * 1000)

    def receive(self) -> tuple[int, list[Any]]:
        """(sequence, batch) of what comes next."""
        topic, sequence, payload = self.events.recv_multipart()
        assert topic == self.topic
        assert len(sequence) == 8
        return int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)

    def replay(self, first: int) -> dict[int, list[Any]]:
        """Batches that are kept, from ``first`` on, by their numbers."""
        self.asks.send_multipart([b"", first.to_bytes(8, "big")])
        found: dict[int, list[Any]] = {}
        while True:
            delimiter, topic, sequence, payload = self.asks.recv_multipart()
            assert delimiter == b""
            if sequence == END:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == self.topic
            found[int.from_bytes(sequence, "big")] = msgspec.msgpack.decode(payload)

    def close(self) -> None:
        self.events.close(0)
        self.asks.close(0)


@contextmanager
def kv_subscriber(port: int, replay_port: int = 0, topic: str = "") -> Iterator[KvSubscriber]:
    """A subscriber with a context of its own."""
    context: zmq.Context[Any] = zmq.Context()
    subscriber = KvSubscriber(context, port, replay_port, topic)
    try:
        yield subscriber
    finally:
        subscriber.close()
        context.term()

"""KV events over ZMQ: a PUB socket, and a ROUTER that says again what somebody missed (spec 2.12).

The engine's thread numbers a batch and leaves it in a mailbox, which never waits; a thread of its own sends
it and keeps the last ones. A subscriber that is slow or absent loses batches and sees so by the numbers.
Must not know: what is in an event. Called by: companions.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from threading import Thread
from typing import Final

import msgspec
import zmq

from refimpl.serve.kv_events import KvEventBatch, KvEventRecorder
from refimpl.serve.kv_events_config import FLAG, KvEventsConfig
from refimpl.serve.mailbox import Mailbox
from refimpl.serve.zmq_endpoint import bind, connect, port_of

SEQUENCE_BYTES: Final = 8
END_SEQUENCE: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_LINGER_MS: Final = 1000  # for the last batches when the server stops
_JOIN_S: Final = 10

_log = logging.getLogger(__name__)


class KvEventPublisher:
    """Publishes what ``recorder`` has seen, from ``start`` to ``stop``.

    Bound from the moment it is made. Raises ConfigError for an address that can't be used.
    """

    def __init__(self, config: KvEventsConfig, recorder: KvEventRecorder, dp_rank: int = 0) -> None:
        self._dp_rank = dp_rank
        self._config, self._recorder = config, recorder
        self._topic = config.topic.encode()
        self._mail: Mailbox[tuple[int, KvEventBatch] | None] = Mailbox()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._sequence = 0  # of the next batch; the engine's thread counts
        self._taken_in = self._sent = 0  # one is counted by the engine's thread, one by ours
        self.dropped = 0  # batches that were not taken in, because too many waited
        self._misread = 0  # messages to the ROUTER that ask for nothing
        self._thread = Thread(target=self._run, name="kv_events", daemon=True)
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] | None = None
        self.endpoint = config.endpoint
        self.replay_endpoint: str | None = None
        try:
            self._open()
        except BaseException:
            self._close(linger_ms=0)
            raise

    def _open(self) -> None:
        config, publisher = self._config, self._publisher
        publisher.setsockopt(zmq.SNDHWM, config.hwm)
        if config.binds:
            self.endpoint = bind(publisher, config.endpoint, f"{FLAG}: endpoint")
        else:
            connect(publisher, config.endpoint, f"{FLAG}: endpoint")
        if config.replay_endpoint is not None:
            self._router = self._context.socket(zmq.ROUTER)
            # All that is kept fits at once: what does not, a ROUTER drops in silence.
            self._router.setsockopt(zmq.SNDHWM, 2 * config.buffer_steps)
            self.replay_endpoint = bind(
                self._router, config.replay_endpoint, f"{FLAG}: replay_endpoint"
            )

    # ---- the engine's thread --------------------------------------------------------------------

    def publish(self) -> None:
        """Send what the recorder has seen since the last call; nothing when that is nothing."""
        events = self._recorder.take()
        if not events:
            return
        sequence, self._sequence = self._sequence, self._sequence + 1
        if self._taken_in - self._sent >= self._config.max_queue_size:
            if not self.dropped:
                _log.warning("KV events are lost: %d batches wait to be sent", self._taken_in)
            self.dropped += 1
            return
        self._taken_in += 1
        self._mail.put((sequence, KvEventBatch(time.time(), events, self._dp_rank)))

    # ---- for any thread -------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """Where events are published; 0 where that is no TCP."""
        return port_of(self.endpoint)

    @property
    def replay_port(self) -> int:
        """Where a replay is asked for; 0 where that is no TCP, or nowhere."""
        return port_of(self.replay_endpoint)

    def __str__(self) -> str:
        again = self.replay_endpoint
        return f"KV events on {self.endpoint}" + (f", replay on {again}" if again else "")

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def wind_down(self) -> None:
        """Nothing: the engine goes on until it is idle."""

    def stop(self) -> None:
        """Send what is left, then end; the engine has stopped."""
        if self._thread.ident is None:
            self._close(linger_ms=0)
            return
        self._mail.put(None)
        self._thread.join(_JOIN_S)

    def _close(self, *, linger_ms: int) -> None:
        self._publisher.close(linger_ms)
        if self._router is not None:
            self._router.close(linger_ms)
        self._context.term()
        self._mail.close()

    # ---- its own thread -------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mail.fileno(), zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            is_open = True
            while is_open:
                poller.poll()
                # Read first: whatever was published before somebody asked is in the answer.
                # One a turn: new batches go out between replays, however many are asked for.
                asked = self._read_replay()
                is_open = self._send_mail()
                if asked is not None:
                    self._replay(*asked)
        except BaseException:
            _log.exception("KV events have stopped")
        finally:
            self._close(linger_ms=_LINGER_MS)

    def _send_mail(self) -> bool:
        """False when that was the last of it."""
        for mail in self._mail.take():
            if mail is None:
                return False
            sequence, batch = mail
            payload = self._encode(batch)
            self._kept.append((sequence, payload))
            self._publisher.send_multipart((self._topic, _bytes(sequence), payload))
            self._sent += 1
        return True

    def _read_replay(self) -> tuple[bytes, int] | None:
        """Who asks for what has been, and from which number on; None: nobody, or not understood."""
        if self._router is None:
            return None
        try:
            frames = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) == 3 and len(frames[2]) == SEQUENCE_BYTES:
            return frames[0], int.from_bytes(frames[2], "big")
        if not self._misread:
            _log.warning(
                "a replay was asked for with other frames than delimiter and number;"
                " further ones are left out in silence"
            )
        self._misread += 1
        return None

    def _replay(self, peer: bytes, first: int) -> None:
        assert self._router is not None
        send = self._router.send_multipart
        for sequence, payload in self._kept:
            if sequence >= first:
                send((peer, b"", self._topic, _bytes(sequence), payload), zmq.NOBLOCK)
        send((peer, b"", b"", END_SEQUENCE, b""), zmq.NOBLOCK)


def _bytes(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")

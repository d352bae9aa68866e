"""Requests over ZMQ: one DEALER for all of a class, and a greenlet that gives each answer to its request.

Must not know: workloads, Locust's users. Called by: _users.
"""

from __future__ import annotations

from typing import Any, Final

import gevent
import msgspec
import zmq.green as zmq
from gevent.queue import SimpleQueue

from perf._answer import Answer, RequestError
from perf._http_client import Clock
from perf._options import LoadOptions
from perf._questions import Question

PONG_S_MAX: Final = 5  # a socket connects to nobody without a word, so the server is asked first

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class ZmqClient:
    """All requests of one class of users to one server."""

    transport = "zmq"

    def __init__(self, address: str, options: LoadOptions) -> None:
        self._address, self._timeout_s = address, options.timeout_s
        self._key = {"api_key": options.api_key} if options.api_key else {}
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._open: dict[str, SimpleQueue] = {}
        self._asked = 0
        self._has_answered = gevent.event.Event()
        self._listener: gevent.Greenlet | None = None

    def ask(self, question: Question, answer: Answer, clock: Clock) -> None:
        """Send ``question`` and note in ``answer`` what comes back. Raises RequestError, with the reason."""
        if self._listener is None:
            self._listener = gevent.spawn(self._listen, clock)
        self._asked += 1
        name = str(self._asked)
        message = self._message(name, question)
        self._greet()
        inbox = self._open[name] = SimpleQueue()
        answer.sent_ns = clock()
        self._send(message)
        try:
            self._hear(inbox, answer)
        except (gevent.Timeout, gevent.GreenletExit) as left:
            self._send({"type": "abort", "id": name, **self._key})
            if isinstance(left, gevent.GreenletExit):
                raise
            raise RequestError(f"nothing came for {self._timeout_s} s") from None
        finally:
            del self._open[name]

    def close(self) -> None:
        """Give up the connection."""
        if self._listener is not None:
            self._listener.kill()
        self._socket.close()

    def _message(self, name: str, question: Question) -> dict[str, Any]:
        spec = question.spec
        message = {
            "type": "generate",
            "id": name,
            "input_ids": question.tokens.tobytes(),  # little-endian, as array('I') is on all we run on
            "sampling_params": {
                "max_new_tokens": spec.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
            "extra_key": spec.extra_key,
            "cache_salt": spec.cache_salt,
            "priority": spec.priority or None,
        }
        return {key: value for key, value in message.items() if value is not None} | self._key

    def _greet(self) -> None:
        """Wait until the server has said a word, once."""
        if self._has_answered.is_set():
            return
        self._send({"type": "ping", **self._key})
        if not self._has_answered.wait(PONG_S_MAX):
            raise RequestError(f"no server answers at {self._address}")

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.send(_encode(message))

    def _listen(self, clock: Clock) -> None:
        while True:
            frames = self._socket.recv_multipart()
            now_ns = clock()
            self._has_answered.set()
            try:
                said = _decode(frames[-1])
            except msgspec.DecodeError:
                said = {"type": "malformed"}
            inbox = self._open.get(str(said.get("id")))
            # Nobody knows whose a nameless complaint is, so that all hear of it.
            hearers = [inbox] if inbox is not None else self._all_for(said)
            for hearer in hearers:
                hearer.put((now_ns, said))

    def _all_for(self, said: dict[str, Any]) -> list[SimpleQueue]:
        nameless = said.get("id") is None and said.get("type") in ("error", "malformed")
        return list(self._open.values()) if nameless else []

    def _hear(self, inbox: SimpleQueue, answer: Answer) -> None:
        while not answer.finish:
            with gevent.Timeout(self._timeout_s):
                now_ns, said = inbox.get()
            try:
                _note(said, answer, now_ns)
            except (KeyError, TypeError, AttributeError):
                raise RequestError("malformed message") from None


def _note(said: dict[str, Any], answer: Answer, now_ns: int) -> None:
    match said["type"]:
        case "tokens":
            if said["output_ids"]:
                answer.tokens_came(now_ns)
                answer.output_ids += said["output_ids"]
        case "end":
            answer.prompt_tokens = said["prompt_tokens"]
            answer.output_tokens = said["completion_tokens"]
            answer.cached(said["cached_tokens"], said.get("cached_tokens_details"))
            answer.finish = said["finish_reason"]["type"]
        case "error":
            raise RequestError(f"error {said['code']}: {said['message']}")
        case _:
            raise RequestError("malformed message")

"""Requests over ZMQ: one ROUTER socket in front of the engine's inbox, on a thread of its own.

What the engine's thread has to say comes through a mailbox, so that the socket has one owner. Admission,
limits and answers are those of HTTP. Must not know: text, what an engine decides. Called by: the command
line, app.
"""

from __future__ import annotations

import logging
from functools import partial
from threading import Thread
from typing import Final

import msgspec
import zmq

from refimpl.serve.admin import Keys
from refimpl.serve.bridge import Ended, Tokens
from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Finish, refusal_of
from refimpl.serve.mailbox import Mailbox
from refimpl.serve.native import finish_reason
from refimpl.serve.service import Service, cached_details
from refimpl.serve.zmq_endpoint import bind, port_of, tcp_endpoint
from refimpl.serve.zmq_messages import (
    AbortRequest,
    End,
    Error,
    Generate,
    NewTokens,
    Ping,
    Pong,
    Received,
    Sent,
    named,
)

FRAME_BYTES_MAX: Final = 64 << 20  # a peer that sends more is cut off by libzmq
OPEN_MAX: Final = 10_000  # requests of one peer at a time
_RECEIVED_MAX: Final = 1000  # unread messages of a peer before its connection has to wait
_SENT_MAX: Final = 100_000  # messages a peer has not read before it counts as gone
_AT_ONCE: Final = 256  # messages read before answers are sent again
_HEARTBEAT_MS: Final = 10_000
_LINGER_MS: Final = 2000  # for the last answers when the server stops
_JOIN_S: Final = 60
_RETRY_AFTER_S: Final = 1  # what HTTP says in its header
_TOKEN_BYTES_MAX: Final = 9  # of one token in MessagePack
_SLACK_BYTES: Final = 1 << 20  # beside the tokens of a message

_log = logging.getLogger(__name__)


class _Answer:
    """An open request: whose it is, and what has been said of it."""

    __slots__ = ("count", "id", "is_lost", "is_stream", "last", "peer", "rid", "tokens")

    def __init__(self, peer: bytes, request_id: str, *, is_stream: bool) -> None:
        self.peer, self.id, self.is_stream = peer, request_id, is_stream
        self.rid = 0
        self.tokens: list[int] = []  # those that were not sent yet
        self.count = 0
        self.last: int | None = None
        self.is_lost = False  # its peer is gone


class ZmqIngress:
    """Listens from the moment it is made, answers from ``start`` to ``stop``.

    Port 0 takes a free one. Raises ConfigError for an address that can't be
    bound.
    """

    def __init__(self, service: Service, keys: Keys, host: str, port: int) -> None:
        self._service, self._keys = service, keys
        self._frame_bytes_max = _SLACK_BYTES + _TOKEN_BYTES_MAX * service.context_tokens
        self._open: dict[bytes, dict[str, _Answer]] = {}  # by peer, by its own id
        self._mail: Mailbox[tuple[_Answer, Tokens | Ended] | None] = Mailbox()
        self._decode = msgspec.msgpack.Decoder(Received).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._is_winding_down = False
        self._thread = Thread(target=self._run, name="zmq_ingress", daemon=True)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._configure()
        try:
            self.endpoint = bind(self._router, tcp_endpoint(host, port), "--zmq-port")
        except BaseException:
            self._close(linger_ms=0)
            raise

    def _configure(self) -> None:
        router = self._router
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say when somebody has left
        router.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        router.setsockopt(zmq.RCVHWM, _RECEIVED_MAX)
        router.setsockopt(zmq.SNDHWM, _SENT_MAX)
        router.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)

    # ---- for any thread -------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port it listens on."""
        return port_of(self.endpoint)

    def __str__(self) -> str:
        return f"requests over ZMQ on {self.endpoint}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def wind_down(self) -> None:
        """Refuse new requests; those that are open are answered."""
        self._is_winding_down = True

    def stop(self) -> None:
        """Send what was left in the mailbox, then end; the engine has stopped."""
        if self._thread.ident is None:
            self._close(linger_ms=0)
            return
        self._mail.put(None)
        self._thread.join(_JOIN_S)

    def _close(self, *, linger_ms: int) -> None:
        self._router.close(linger_ms)
        self._context.term()
        self._mail.close()

    # ---- its own thread -------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._mail.fileno(), zmq.POLLIN)
        try:
            while self._deliver():
                self._receive()
                poller.poll()
        except BaseException:
            _log.exception("the ZMQ ingress has stopped")
        finally:
            self._close(linger_ms=_LINGER_MS)

    def _deliver(self) -> bool:
        """Pass on what the engine said; False when that was the last of it."""
        for mail in self._mail.take():
            if mail is None:
                return False
            answer, said = mail
            if answer.is_lost:
                continue
            if isinstance(said, Tokens):
                self._more(answer, said)
            else:
                self._forget(answer)
                self._send(answer.peer, self._end(answer, said))
        return True

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                peer, *_, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(peer, frame)

    def _take(self, peer: bytes, frame: bytes) -> None:
        """One message of a peer; whatever is wrong with it is told to that peer alone."""
        name: str | None = None
        try:
            message = self._read(frame)
            if isinstance(message, Ping):
                self._send(peer, Pong())
                return
            name = message.id
            self._obey(peer, message)
        except RequestError as error:
            self._send(peer, _refused(self._unless_open(peer, name or named(frame)), error))
        except Exception:
            _log.exception("a message over ZMQ could not be handled")
            failed = "internal error: see the server's log"
            self._send(peer, Error(self._unless_open(peer, name), 500, failed))

    def _unless_open(self, peer: bytes, name: str | None) -> str | None:
        """The id that an error is told with; an open request goes on, and must not seem to end by it."""
        return None if name in self._open.get(peer, {}) else name

    def _read(self, frame: bytes) -> Received:
        if len(frame) > self._frame_bytes_max:
            raise RequestError(
                f"a message of {len(frame)} bytes is longer than any prompt that fits:"
                f" this server's context holds {self._service.context_tokens} tokens"
            )
        try:
            return self._decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RequestError(f"not a message of this protocol: {error}") from None

    def _obey(self, peer: bytes, message: Generate | AbortRequest) -> None:
        if not self._keys.lets_in(message.api_key):
            raise RequestError("Unauthorized: send the key as api_key", 401)
        answer = self._open.get(peer, {}).get(message.id)
        if isinstance(message, AbortRequest):
            if answer is not None:
                self._service.ranks.abort(answer.rid)
        elif answer is None:
            self._generate(peer, message)
        else:
            raise RequestError(
                f"the id {message.id!r} is that of an open request: give each its own"
            )

    def _generate(self, peer: bytes, message: Generate) -> None:
        if self._is_winding_down:
            raise RequestError("the server is stopping; try again later", 503)
        mine = self._open.get(peer, {})
        if len(mine) >= OPEN_MAX:
            raise RequestError(
                f"{OPEN_MAX} requests of this connection are open; try again later", 503
            )
        tokens = self._service.check_tokens(message.tokens())
        (asked,) = self._service.asked(tokens, message.wish())
        answer = _Answer(peer, message.id, is_stream=message.stream)
        self._open.setdefault(peer, mine)[message.id] = answer
        answer.rid = self._service.ranks.submit(asked, partial(self._heard, answer))

    # ---- answers --------------------------------------------------------------------------------

    def _heard(self, answer: _Answer, said: Tokens | Ended) -> None:
        """On the engine's thread."""
        self._mail.put((answer, said))

    def _more(self, answer: _Answer, said: Tokens) -> None:
        answer.count += len(said.tokens)
        answer.last = said.tokens[-1]
        if answer.is_stream:
            self._send(answer.peer, NewTokens(answer.id, said.tokens, said.row.hit_tokens))
        else:
            answer.tokens += said.tokens

    def _end(self, answer: _Answer, said: Ended) -> Sent:
        kind, _, detail = said.reason.partition(": ")
        if kind == "error":
            return _refused(answer.id, refusal_of(detail))
        row = said.row
        finish = Finish(kind, answer.last if kind == "stop" else None)
        return End(
            answer.id,
            answer.tokens,
            finish_reason(finish, answer.count),
            row.prompt_tokens,
            answer.count,
            row.hit_tokens,
            cached_details(row, self._service.storage.backend),
            max(row.end_ns - row.arrival_ns, 0) / 1e9,
            max(row.ttft_ns, 0) / 1e9,
            self._service.dp_rank_of(row.rid),
            None if row.account is None else row.account.told(),
        )

    def _forget(self, answer: _Answer) -> None:
        mine = self._open[answer.peer]
        del mine[answer.id]
        if not mine:
            del self._open[answer.peer]

    def _send(self, peer: bytes, message: Sent) -> None:
        try:
            self._router.send_multipart((peer, self._encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: it has left. EAGAIN: it has stopped reading. Either way nobody listens.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._lose(peer)

    def _lose(self, peer: bytes) -> None:
        for answer in self._open.pop(peer, {}).values():
            answer.is_lost = True
            self._service.ranks.abort(answer.rid)


def _refused(request_id: str | None, error: RequestError) -> Error:
    again = _RETRY_AFTER_S if error.status == 503 else None
    return Error(request_id, error.status, error.message, again)

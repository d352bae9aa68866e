"""Between clients and the one thread that calls the engine.

What clients ask goes into the engine's inbox; what comes of it is told to whoever asked, on the engine's
thread: a listener hands it on and returns at once. Must not know: HTTP, text, what an engine decides.
Called by: generation, admin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from threading import Event as Flag
from threading import Lock, Thread
from typing import Final, TypeAlias

from refimpl.config import EngineConfig
from refimpl.core.engine import Engine
from refimpl.messages import (
    Abort,
    Answer,
    AnyEvent,
    AttachStorage,
    BatchDone,
    DetachStorage,
    Flush,
    Reply,
    Submit,
)
from refimpl.model.sampling import Sampling
from refimpl.run.live import LiveExecutor, LiveLoop
from refimpl.run.record import Row
from refimpl.workload.request import RequestSpec

JOIN_S: Final = 60  # for the requests that are under way when the server stops

STOPPED: Final = "error: the engine has stopped; restart the server"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in tokens, and how they are chosen; the bridge gives it its ``rid``."""

    spec: RequestSpec
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Tokens:
    """More of an answer; ``row`` is what the record says of the request so far."""

    tokens: list[int]
    row: Row


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer: "length", "stop", "abort" or "error: …"."""

    reason: str
    row: Row


Heard: TypeAlias = Callable[[Tokens | Ended], None]


class Bridge:
    """Owns the engine and its thread, from ``start`` to ``stop``."""

    def __init__(self, config: EngineConfig, executor: LiveExecutor) -> None:
        executor.keeps_outputs = False
        self.engine = Engine(config)
        self.error: BaseException | None = None  # what stopped the engine
        self.after_turn: Callable[[], None] | None = None  # called on the engine's thread
        self._executor = executor
        self._loop = LiveLoop(self.engine, executor, self._replied, self._answered)
        self._rids = count(1)
        self._asked: dict[int, tuple[RequestSpec, Sampling, Heard]] = {}
        self._lock = Lock()
        self._changes: dict[str, Future[Answer]] = {}  # by what was asked: attach, detach, flush
        self._stopping = Flag()
        self._is_taking = True  # False once the engine has stopped: then nobody reads the inbox
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    # ---- for any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """It runs, and is not about to end."""
        return self._thread.is_alive() and self.error is None and not self._stopping.is_set()

    def submit(self, asked: Asked, heard: Heard) -> int:
        """Ask for an answer; ``heard`` is called on the engine's thread until ``Ended``."""
        rid = next(self._rids)
        spec = replace(asked.spec, rid=rid)
        with self._lock:
            if self._is_taking:
                self._asked[rid] = spec, asked.sampling, heard
                self._executor.inbox.put(spec.submit())
                return rid
        heard(Ended(STOPPED, Row(rid, 0, 0, 0, 0, 0)))
        return rid

    def abort(self, rid: int) -> None:
        """Nobody waits for ``rid`` any more; that it is over already does no harm."""
        self._executor.inbox.put(Abort(rid))

    def change(self, event: AttachStorage | DetachStorage | Flush) -> Future[Answer]:
        """Attach, detach or flush; answered when it is done or refused."""
        kind = {AttachStorage: "attach", DetachStorage: "detach", Flush: "flush"}[type(event)]
        with self._lock:
            future: Future[Answer] = Future()
            if not self._is_taking:
                future.set_result(Answer(kind, False, STOPPED.removeprefix("error: ")))
            elif kind in self._changes:
                busy = f"Reject {kind}: another one is under way"
                future.set_result(Answer(kind, False, busy))
            else:
                self._changes[kind] = future
                self._executor.inbox.put(event)
        return future

    def stop(self) -> None:
        """Let what is under way end, then end all threads."""
        self._stopping.set()
        self._executor.inbox.put(Abort(0))  # of nobody: it wakes the loop
        self._thread.join(JOIN_S)
        try:
            self._executor.close(is_idle=self.engine.idle)
        except BaseException as error:
            self.error = error
            _log.exception("what the server stood on has failed")

    # ---- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopping.is_set() and self.engine.idle):
                self._turn()
        except BaseException as error:
            self.error = error
            _log.exception("the engine has stopped")
        with self._lock:
            self._is_taking = False
            changes = list(self._changes.items())
        for rid in list(self._asked):
            self._end(rid, STOPPED)
        for kind, future in changes:
            future.set_result(Answer(kind, False, STOPPED.removeprefix("error: ")))

    def _turn(self) -> None:
        events = self._loop.wait()
        now = self._loop.now()
        for event in events:
            self._before(event, now)
        self._loop.turn(events, now)
        if self.after_turn is not None:
            self.after_turn()

    def _before(self, event: AnyEvent, now: int) -> None:
        """What others have to know of an event before the engine does."""
        if isinstance(event, Submit):
            spec, sampling, _ = self._asked[event.rid]
            self._loop.record.submitted(spec, 0, now)
            self._executor.tell(event, sampling)
        elif isinstance(event, BatchDone):
            for rid, tokens in event.tokens.items():
                if tokens and rid in self._asked:
                    self._asked[rid][-1](Tokens(tokens, self._loop.record.rows[rid]))

    def _replied(self, reply: Reply, _: int) -> None:
        if reply.finish:
            self._end(reply.rid, reply.finish)

    def _end(self, rid: int, reason: str) -> None:
        """Tell whoever asked, and forget the request."""
        *_, heard = self._asked.pop(rid)
        row = self._loop.record.rows.pop(rid, None) or Row(rid, 0, 0, 0, 0, 0)
        heard(Ended(reason, row))

    def _answered(self, answer: Answer) -> None:
        with self._lock:
            future = self._changes.pop(answer.request)
        future.set_result(answer)

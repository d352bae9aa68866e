"""Between clients and the one thread that calls the engine.

What clients ask goes into the engine's inbox; what comes of it is told to whoever asked, on the engine's
thread: a listener hands it on and returns at once. Must not know: HTTP, text, what an engine decides.
Called by: dispatch, fan_out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty
from threading import Event as Flag
from threading import Lock, Thread
from typing import Final, Protocol, TypeAlias, TypeVar

from refimpl.config import EngineConfig
from refimpl.core.engine import Engine
from refimpl.messages import (
    Abort,
    Answer,
    AnyEvent,
    AttachStorage,
    BatchDone,
    ClearStorage,
    DetachStorage,
    Flush,
    Reply,
    Step,
    Submit,
)
from refimpl.model.choice import Logprob, Sampling
from refimpl.run.account import Account
from refimpl.run.live_loop import LiveLoop, Question, Stepped, WallExecutor
from refimpl.run.record import Row
from refimpl.storage.names import Namespace
from refimpl.workload.request import RequestSpec

JOIN_S: Final = 60  # for the requests that are under way when the server stops

Answered = TypeVar("Answered")

Change: TypeAlias = AttachStorage | DetachStorage | ClearStorage | Flush
_KINDS: Final = {
    AttachStorage: "attach",
    DetachStorage: "detach",
    ClearStorage: "clear",
    Flush: "flush",
}

STOPPED: Final = "error: the engine has stopped; restart the server"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in tokens, and how they are chosen; the bridge gives it its ``rid``.

    ``is_followed``: its tokens are told one by one, as they come.
    """

    spec: RequestSpec
    sampling: Sampling
    is_followed: bool = False
    explains: bool = False  # its row gets an account
    dp_rank: int | None = None  # the rank that is to answer; None: any


@dataclass(frozen=True, slots=True)
class Tokens:
    """More of an answer; ``row`` is what the record says of the request so far."""

    tokens: list[int]
    row: Row
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer: "length", "stop", "abort" or "error: …"."""

    reason: str
    row: Row


class Watcher(Protocol):
    """Who counts what happens; called on the engine's thread."""

    def took(self, events: Iterable[AnyEvent], step: Step, now: int) -> None:
        """One turn of the engine."""

    def followed(self, gap_ns: int, tokens: int) -> None:
        """Tokens of a followed answer, so long after those before."""

    def ended(self, row: Row, *, is_streaming: bool) -> None:
        """A request is over."""


class StoppedError(Exception):
    """The engine has stopped and answers no question."""


Heard: TypeAlias = Callable[[Tokens | Ended], None]


class Bridge:
    """Owns the engine and its thread, from ``start`` to ``stop``. ``rids`` are those it gives away."""

    def __init__(
        self,
        config: EngineConfig,
        executor: WallExecutor,
        watcher: Watcher,
        rids: Iterator[int] | None = None,
    ) -> None:
        self.engine = Engine(config)
        self.error: BaseException | None = None  # what stopped the engine
        self.after_turn: Callable[[], None] | None = None  # called on the engine's thread
        self._executor, self._watcher = executor, watcher
        self._page_size = config.cache.page_size
        self._is_deaf = False  # the watcher has failed, which was logged
        self._last_token_ns: dict[int, int] = {}  # of followed answers, by rid
        self._loop = LiveLoop(self.engine, executor, self._replied, self._answered, self._stepped)
        self._rids = count(1) if rids is None else rids
        self._asked: dict[int, tuple[Asked, Heard]] = {}  # by rid
        self._lock = Lock()
        self._changes: dict[str, Future[Answer]] = {}  # by what was asked, one of _KINDS
        self._stopping = Flag()
        self._is_taking = True  # False once the engine has stopped: then nobody reads the inbox
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    # ---- for any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """It is healthy, and takes new requests."""
        return self.is_healthy and not self.engine.refuses

    @property
    def is_healthy(self) -> bool:
        """It runs, and is not about to end."""
        return self._thread.is_alive() and self.error is None and not self._stopping.is_set()

    def submit(self, asked: Asked, heard: Heard) -> int:
        """Ask for an answer; ``heard`` is called on the engine's thread until ``Ended``."""
        rid = self.offer(asked, heard)
        return self.refuse(heard) if rid is None else rid

    def offer(self, asked: Asked, heard: Heard) -> int | None:
        """The same, but None once the engine has stopped: somebody else can be asked then."""
        rid = next(self._rids)
        asked = replace(asked, spec=replace(asked.spec, rid=rid))
        with self._lock:
            if self._is_taking:
                self._asked[rid] = asked, heard
                self._executor.inbox.put(asked.spec.submit())
                return rid
        return None

    @property
    def _why_stopped(self) -> str:
        return STOPPED if self.error is None else f"{STOPPED} ({self.error})"

    def refuse(self, heard: Heard, why: str | None = None) -> int:
        """Answer in the place of an engine that has stopped."""
        rid = next(self._rids)
        heard(Ended(why or self._why_stopped, Row(rid, 0, 0, 0, 0, 0)))
        return rid

    def abort(self, rid: int) -> None:
        """Nobody waits for ``rid`` any more; that it is over already does no harm."""
        self._executor.inbox.put(Abort(rid))

    def abort_all(self) -> None:
        """Nobody waits for anything any more."""
        with self._lock:
            rids = list(self._asked)
        for rid in rids:
            self.abort(rid)

    def change(self, event: Change) -> Future[Answer]:
        """Attach, detach, clear or flush; answered when it is done or refused."""
        kind = _KINDS[type(event)]
        with self._lock:
            future: Future[Answer] = Future()
            if not self._is_taking:
                future.set_result(Answer(kind, False, self._why_stopped.removeprefix("error: ")))
            elif kind in self._changes:
                busy = f"Reject {kind}: another one is under way"
                future.set_result(Answer(kind, False, busy))
            else:
                self._changes[kind] = future
                self._executor.inbox.put(event)
        return future

    def now(self) -> int:
        """The time of the engine's loop, in ns."""
        return self._loop.now()

    def moved(self) -> dict[str, tuple[int, int]]:
        """(bytes, ns) of the copies so far, by way."""
        return self._executor.moved()

    def names(self) -> Namespace | None:
        """What rank 0's pages are called in L3; None without one, and where pages have no names."""
        return self._executor.names()

    def ask(self, ask: Callable[[Engine], Answered]) -> Future[Answered]:
        """Something to be read off the engine, on its own thread. The future fails once it has stopped."""
        answer: Future[Answered] = Future()
        with self._lock:
            if self._is_taking:
                self._executor.inbox.put(Question(ask, answer))
            else:
                answer.set_exception(StoppedError(STOPPED))
        return answer

    def wind_down(self) -> None:
        """End when what is under way has ended."""
        self._stopping.set()
        self._executor.inbox.put(Abort(0))  # of nobody: it wakes the loop

    def stop(self) -> None:
        """Let what is under way end, then end all threads."""
        self.wind_down()
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
            self._end(rid, self._why_stopped)
        self._refuse_questions()
        for kind, future in changes:
            future.set_result(Answer(kind, False, self._why_stopped.removeprefix("error: ")))

    def _turn(self) -> None:
        events, now = self._loop.wait()
        for event in events:
            self._before(event, now)
        step = self._loop.turn(events, now)
        if step is not Step.NOTHING:
            self._watch(lambda: self._watcher.took(events, step, now))
        if self.after_turn is not None:
            self.after_turn()

    def _before(self, event: AnyEvent, now: int) -> None:
        """What others have to know of an event before the engine does."""
        if isinstance(event, Submit):
            asked, _ = self._asked[event.rid]
            self._loop.record.submitted(asked.spec, 0, now)
            if asked.explains:
                self._open_account(asked.spec, now)
            self._executor.tell(event, asked.sampling, is_followed=asked.is_followed)
        elif isinstance(event, BatchDone):
            self._tell_tokens(event)

    def _open_account(self, spec: RequestSpec, now: int) -> None:
        has_storage = bool(self.engine.cache.host.generation)
        account = Account(spec.prompt.length, self._page_size, now, has_storage=has_storage)
        self._loop.record.explain(spec.rid, account)

    def _tell_tokens(self, done: BatchDone) -> None:
        """To those who do not follow their answer; the others have heard."""
        for rid, tokens in done.tokens.items():
            if not tokens or rid not in self._asked:
                continue
            asked, heard = self._asked[rid]
            if not asked.is_followed:
                heard(Tokens(tokens, self._loop.record.rows[rid]))

    def _stepped(self, stepped: Stepped) -> None:
        for rid, tokens in stepped.tokens.items():
            if rid in self._asked:
                _, heard = self._asked[rid]
                heard(Tokens(tokens, self._loop.record.rows[rid], stepped.logprobs.get(rid, [])))
                self._note_gap(rid, len(tokens))

    def _note_gap(self, rid: int, tokens: int) -> None:
        now = self._loop.now()
        before = self._last_token_ns.get(rid)
        self._last_token_ns[rid] = now
        if before is not None:
            self._watch(lambda: self._watcher.followed(now - before, tokens))

    def _watch(self, tell: Callable[[], None]) -> None:
        """Tell the watcher. Counting must never cost an answer (field report V05)."""
        try:
            tell()
        except Exception:
            if not self._is_deaf:
                _log.exception("metrics have failed; further failures are not logged")
            self._is_deaf = True

    def _refuse_questions(self) -> None:
        """Those that came when nobody was there to answer any more."""
        with suppress(Empty):
            while True:
                item = self._executor.inbox.get_nowait()
                if isinstance(item, Question) and item.answer.set_running_or_notify_cancel():
                    item.answer.set_exception(StoppedError(STOPPED))

    def _replied(self, reply: Reply, _: int) -> None:
        if reply.finish:
            self._end(reply.rid, reply.finish)

    def _end(self, rid: int, reason: str) -> None:
        """Tell whoever asked, and forget the request."""
        asked, heard = self._asked.pop(rid)
        row = self._loop.record.rows.pop(rid, None) or Row(rid, 0, 0, 0, 0, 0)
        self._last_token_ns.pop(rid, None)
        heard(Ended(reason, row))
        self._watch(lambda: self._watcher.ended(row, is_streaming=asked.is_followed))

    def _answered(self, answer: Answer) -> None:
        with self._lock:
            future = self._changes.pop(answer.request)
        future.set_result(answer)

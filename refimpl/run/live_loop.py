"""One engine in real time, whoever carries out its commands: waits, has events handled, passes commands on.

What is no business of the engine goes through the same inbox: tokens of answers that somebody follows,
and questions to the engine, which are answered between two turns.
Must not know: what an engine decides, bytes, HTTP. Called by: live, the server.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Any, Final, Protocol, TypeAlias

from refimpl.core.engine import Engine
from refimpl.messages import (
    Abort,
    Answer,
    AnyEvent,
    AttachStorage,
    ClearStorage,
    Command,
    DetachStorage,
    Flush,
    Reply,
    Step,
    Submit,
    Tick,
)
from refimpl.model.choice import GREEDY, Logprob, Sampling
from refimpl.run.record import Record
from refimpl.storage.names import Namespace
from refimpl.units import NS_PER_S

ASKED: Final = (Submit, Abort, AttachStorage, DetachStorage, ClearStorage, Flush)  # by clients


@dataclass(frozen=True, slots=True)
class Stepped:
    """Tokens of answers that somebody follows, as soon as they are there; their batch may still run."""

    tokens: dict[int, list[int]]
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """Something to be read off the engine, between two turns."""

    ask: Callable[[Engine], Any]
    answer: Future[Any]


Inbox: TypeAlias = SimpleQueue[AnyEvent | Stepped | Question]


class WallExecutor(Protocol):
    """Whoever carries out commands on the wall clock. Completions come out of ``inbox``, or are due."""

    inbox: Inbox

    def tell(
        self, message: Submit | Reply, sampling: Sampling = GREEDY, *, is_followed: bool = False
    ) -> None:
        """A request begins or ends; the tokens of one that is followed are told as ``Stepped``."""

    def submit(self, command: Command, now: int) -> None:
        """Start a command at ``now`` ns of the loop."""

    def next_due(self) -> int | None:
        """When something ends that does not tell the inbox; None: nothing of that kind."""

    def pop_due(self, now: int) -> list[AnyEvent | Stepped]:
        """All that has ended by ``now`` without telling the inbox."""

    def moved(self) -> dict[str, tuple[int, int]]:
        """(bytes, ns) of the copies so far, by way: load_back, backup, l3_read, l3_write."""

    def names(self) -> Namespace | None:
        """What rank 0's pages are called in L3; None without one, and where pages have no names."""

    def check(self) -> None:
        """Raise what stopped a thread of its own, if one has stopped."""

    def close(self, *, is_idle: bool = True) -> None:
        """End all threads. Not ``is_idle``: something may hang and is left behind."""


class LiveLoop:
    """Called by one thread.

    ``replied`` and ``answered`` hear what the engine says to clients, ``stepped`` what comes of answers
    that are followed.
    """

    def __init__(
        self,
        engine: Engine,
        executor: WallExecutor,
        replied: Callable[[Reply, int], None],
        answered: Callable[[Answer], None] | None = None,
        stepped: Callable[[Stepped], None] | None = None,
    ) -> None:
        self.record = Record()
        self._engine, self._executor = engine, executor
        self._replied, self._answered, self._stepped = replied, answered, stepped
        self._begun = perf_counter_ns()

    def now(self) -> int:
        """Nanoseconds since the loop was made."""
        return perf_counter_ns() - self._begun

    def wait(self, next_due: int | None = None) -> tuple[list[AnyEvent], int]:
        """What has happened, and the time; when nothing has, what comes first, or ``next_due``."""
        events: list[AnyEvent] = []
        inbox, patience = self._executor.inbox, self._patience(next_due)
        try:
            self._sort_out(inbox.get(timeout=patience) if patience else inbox.get_nowait(), events)
            while True:
                self._sort_out(inbox.get_nowait(), events)
        except Empty:
            self._executor.check()
        now = self.now()
        for ended in self._executor.pop_due(now):
            self._sort_out(ended, events)
        return events, now

    def _sort_out(self, item: AnyEvent | Stepped | Question, events: list[AnyEvent]) -> None:
        if isinstance(item, Stepped):
            if self._stepped is not None:
                self._stepped(item)
        elif isinstance(item, Question):
            answer_question(item, self._engine)
        else:
            events.append(item)

    def _patience(self, next_due: int | None) -> float:
        """Seconds until something is due by itself; a second at most, to look after the threads."""
        now, engine, executor = self.now(), self._engine, self._executor
        dues = (next_due, engine.deadline(), executor.next_due(), now + NS_PER_S)
        return max(min([at for at in dues if at is not None]) - now, 0) / NS_PER_S

    def turn(self, events: list[AnyEvent], now: int) -> Step:
        """Have ``events`` handled, completions before what clients ask for (contract 7)."""
        deadline = self._engine.deadline()
        if not events and (deadline is None or deadline > now):
            return Step.NOTHING
        events.sort(key=lambda event: isinstance(event, ASKED))
        step = self._engine.handle(events or (Tick(),), now)
        self.record.take(step, 0, now)
        for command in step.commands:
            if isinstance(command, Reply):
                self._executor.tell(command)
                self._replied(command, now)
            elif not isinstance(command, Answer):
                self._executor.submit(command, now)
            elif self._answered is not None:
                self._answered(command)
        return step


def answer_question(question: Question, engine: Engine) -> None:
    """Ask, and hand the answer or the error to whoever waits; one that gave up is not asked for."""
    if not question.answer.set_running_or_notify_cancel():
        return
    try:
        question.answer.set_result(question.ask(engine))
    except BaseException as error:
        question.answer.set_exception(error)

"""The ranks of one instance on the wall clock: orders go out to all, and what all have done comes back.

Rank 0 is where the engine is. In one step it broadcasts what was ordered since the last one, does its
own part, and agrees with the others on the ops in flight; with none in flight there is no agreement.
A step is taken when something was ordered, when rank 0's own part has moved on, and else every
``POLL_NS`` while ops are in flight. A decode is ordered step by step, so that all ranks end it alike.
Where there was nothing to agree on for a while, all ranks meet in a pulse, so that one that is silent is
noticed although nothing needs it.
Must not know: what carries messages between ranks, what an engine decides. Called by: rank_setup.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, Protocol

from msgspec.structs import replace

from refimpl.cluster.ranks import Agreement, OfAChange, RankError, RankLedger, Vector
from refimpl.messages import AnyEvent, BatchDone, Command, CutBatch, Reply, RunBatch, Submit
from refimpl.model.choice import GREEDY, Sampling
from refimpl.run.live import LiveExecutor
from refimpl.run.live_loop import Inbox, Question, Stepped
from refimpl.run.live_storage import HANGING_S
from refimpl.run.pump import JOIN_S
from refimpl.storage.names import Namespace
from refimpl.units import NS_PER_MS, NS_PER_S

DEATH_S: Final = 0.2  # for a process to be seen dead that has closed its connections
POLL_NS: Final = 2 * NS_PER_MS  # how late rank 0 may hear of what another rank has done

PULSES: Final = 5  # in the time that a rank may be silent
_log = logging.getLogger(__name__)


class Minimum(Protocol):
    """``all_reduce(MIN)``."""

    def __call__(self, vector: Vector, patience: float = 1) -> Vector:
        """Raises RankError when a rank does not come within that part of the limit."""


@dataclass(frozen=True, slots=True)
class Told:
    """A request begins or ends, as the hands of a rank hear of it."""

    message: Submit | Reply
    sampling: Sampling = GREEDY
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What rank 0 broadcasts: orders in their order, and the ops that all ranks then agree on.

    ``batches`` have ended on rank 0. What is ordered after them may use slots that they used, so a rank
    first ends them as well: ranks that gather nothing, as with a latent cache, are not in step otherwise.
    """

    orders: list[Command | Told]
    ops: tuple[int, ...] = ()
    batches: int = 0
    is_pulse: bool = False  # there are no ops, and all ranks meet to be heard of
    is_last: bool = False


class WakingInbox(SimpleQueue[AnyEvent | Stepped | Question]):
    """The inbox of rank 0's own hands, which wakes the loop that looks after all ranks."""

    def __init__(self, loop: Inbox) -> None:
        super().__init__()
        self._loop = loop

    def put(
        self,
        item: AnyEvent | Stepped | Question,
        block: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Take an item, and let the loop know."""
        super().put(item, block, timeout)
        self._loop.put(Stepped({}))


class Rank:
    """One rank: carries out steps on its own hands, and answers for the ops in flight."""

    def __init__(self, rank: int, executor: LiveExecutor, minimum: Minimum) -> None:
        self.executor = executor
        self.ledger = RankLedger(rank)
        self.ledger.is_attached = executor.storage.is_attached
        self.batches = 0  # that have ended here
        self._minimum = minimum
        self._others: list[AnyEvent | Stepped] = []  # what is no op's business
        self.reason = ""  # why a change of L3 failed here, until it is told

    def take(self, step: Step) -> Vector | None:
        """Do as ordered; what all ranks have agreed on, None when nothing is in flight.

        Raises RankError when a rank does not come, or whatever stopped this one.
        """
        while self.batches < step.batches:
            self._hear(self.executor.inbox.get())
            self.executor.check()
        for order in step.orders:
            if isinstance(order, Told):
                message, sampling = order.message, order.sampling
                self.executor.tell(message, sampling, is_followed=order.is_followed)
            else:
                self._obey(order)
        if step.is_pulse:
            self._minimum([0], 1 - 1 / PULSES)  # the rest of the limit went by before
        if not step.ops:
            return None
        self.collect()
        agreed = self._minimum(self.ledger.vector(step.ops))
        self.ledger.settle(step.ops, agreed)
        return agreed

    def _obey(self, command: Command) -> None:
        self.collect()
        if not self.ledger.skips(command):
            self.executor.submit(command)

    def collect(self) -> bool:
        """Note what its own threads have done; True if there was anything."""
        self.executor.check()
        has_any = False
        while True:
            try:
                self._hear(self.executor.inbox.get_nowait())
            except Empty:
                return has_any
            has_any = True

    def _hear(self, event: AnyEvent | Stepped | Question) -> None:
        self.batches += isinstance(event, BatchDone)
        if isinstance(event, BatchDone | Stepped):
            self._others.append(event)
        else:
            if isinstance(event, OfAChange) and event.error:
                self.reason = event.error
                _log.warning("rank %d: %s", self.ledger.rank, event.error)
            self.ledger.note(event)  # type: ignore[arg-type]  # all else that hands say

    def take_others(self) -> list[AnyEvent | Stepped]:
        """Batches that have ended, and tokens of answers that are followed."""
        others, self._others = self._others, []
        return others


class Follower(Protocol):
    """Another rank, as rank 0 sees it."""

    def send(self, step: Step) -> None:
        """Give it a step; does not wait for it."""

    def check(self, patience_s: float = 0) -> None:
        """Raise RankError if it has died, or does so within ``patience_s``."""

    def join(self, patience_s: float) -> None:
        """Wait for its end, which it has been told of, so long."""


class ThreadFollower:
    """A rank in a thread of this process."""

    def __init__(self, rank: Rank, on_failure: Callable[[], None]) -> None:
        self._rank, self._on_failure = rank, on_failure
        self._steps: SimpleQueue[Step] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"rank {rank.ledger.rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            follow(self._rank, self._steps.get)
        except BaseException as error:
            self._error = error
            self._on_failure()

    def send(self, step: Step) -> None:
        """Give it a step."""
        self._steps.put(step)

    def check(self, patience_s: float = 0) -> None:
        """Raise RankError if it has died."""
        self._thread.join(patience_s)
        if self._error is not None and not isinstance(self._error, RankError):
            number = self._rank.ledger.rank
            raise RankError(f"rank {number} has died: {self._error!r}") from self._error

    def join(self, patience_s: float) -> None:
        """Wait for its end; a thread that does not come to it is left behind."""
        self._thread.join(patience_s)


def follow(rank: Rank, next_step: Callable[[], Step]) -> None:
    """The life of a rank that is told what to do. Its hands are closed at the end."""
    is_idle = False
    rank.executor.keeps_outputs = False  # rank 0's are the same
    try:
        while True:
            step = next_step()
            rank.take(step)
            rank.take_others()  # rank 0 says the same
            if step.is_last:
                is_idle = True
                return
    finally:
        rank.executor.close(is_idle=is_idle)


class RankGroup:
    """All ranks as one executor on the wall clock."""

    def __init__(
        self, inbox: Inbox, own: Rank, followers: Sequence[Follower], limit_s: float
    ) -> None:
        self.inbox = inbox
        self.agreements = 0  # so far
        self._own, self._followers = own, followers
        self._agreement = Agreement()
        self._orders: list[Command | Told] = []
        self._has_failed = False
        self._last_ns = 0  # when the last step was taken
        self._heard_ns = 0  # when all ranks were last heard of
        self._pulse_ns = int(limit_s * NS_PER_S / PULSES)
        self._has_news = False

    def tell(
        self, message: Submit | Reply, sampling: Sampling = GREEDY, *, is_followed: bool = False
    ) -> None:
        """A request begins or ends."""
        self._orders.append(Told(message, sampling, is_followed))

    def submit(self, command: Command, now: int = 0) -> None:
        """Order something of all ranks; it goes out with the next step."""
        del now
        if isinstance(command, CutBatch):
            return  # a decode ends after each step anyway
        if isinstance(command, RunBatch) and command.is_decode:
            command = replace(command, steps_max=1)
        self._agreement.opened(command)
        self._orders.append(command)

    def next_due(self) -> int | None:
        """When the next step is to be taken at the latest."""
        if self._orders or self._has_news:
            return 0
        return self._last_ns + POLL_NS if self._agreement.ops else self._heard_ns + self._pulse_ns

    def pop_due(self, now: int) -> list[AnyEvent | Stepped]:
        """Take a step if there is reason to; what all ranks have done. Raises RankError."""
        try:
            return self._pop_due(now)
        except BaseException:
            self._has_failed = True
            for at, follower in enumerate(self._followers):
                follower.check(0 if at else DEATH_S)  # a death says more than a silence
            raise

    def _pop_due(self, now: int) -> list[AnyEvent | Stepped]:
        self._has_news = self._own.collect() or self._has_news
        due = self.next_due()
        agreed = self._step(now) if due is not None and due <= now else []
        return [*self._own.take_others(), *agreed]

    def _step(self, now: int) -> list[AnyEvent]:
        self._last_ns, self._has_news = now, False
        ops = self._agreement.ops
        is_pulse = not ops and now - self._heard_ns >= self._pulse_ns
        step = Step(self._orders, ops, self._own.batches, is_pulse)
        self._orders = []
        for follower in self._followers:
            follower.check()
            follower.send(step)
        agreed = self._own.take(step)
        if ops or is_pulse:
            self._heard_ns = now
        if agreed is None:
            return []
        self.agreements += 1
        events = self._agreement.take(step.ops, agreed)
        self._orders += self._agreement.orders
        self._agreement.orders.clear()
        return [self._with_reason(event) for event in events]

    def _with_reason(self, event: AnyEvent) -> AnyEvent:
        """Why a change of L3 has failed, where it has on rank 0 too; of another rank its log says it."""
        if not isinstance(event, OfAChange):
            return event
        reason, self._own.reason = self._own.reason, ""
        return replace(event, error=reason) if event.error and reason else event

    @property
    def keeps_outputs(self) -> bool:
        """Will somebody ask for them?"""
        return self._own.executor.keeps_outputs

    @keeps_outputs.setter
    def keeps_outputs(self, keeps: bool) -> None:
        self._own.executor.keeps_outputs = keeps

    @property
    def outputs(self) -> dict[int, list[int]]:
        """What each request produced, which is the same on all ranks."""
        return self._own.executor.outputs

    @property
    def store_failures(self) -> int:
        """Calls of L3 by rank 0 that raised or answered nonsense."""
        return self._own.executor.store_failures

    def moved(self) -> dict[str, tuple[int, int]]:
        """(bytes, ns) of the copies so far, by way: rank 0's time, and as many bytes from each rank."""
        size = 1 + len(self._followers)
        return {way: (size * done, ns) for way, (done, ns) in self._own.executor.moved().items()}

    def names(self) -> Namespace | None:
        """What rank 0's pages are called in L3; None without one."""
        return self._own.executor.names()

    def check(self) -> None:
        """Raise RankError if a rank has died, or what stopped rank 0's own hands."""
        try:
            for follower in self._followers:
                follower.check()
            self._own.executor.check()
        except BaseException:
            self._has_failed = True
            raise

    def close(self, *, is_idle: bool = True) -> None:
        """End all ranks; none is waited for when one has failed: it may never answer."""
        patience_s = HANGING_S if self._has_failed else JOIN_S
        orders = [order for order in self._orders if isinstance(order, Told)]  # ends of requests
        self._orders.clear()
        for follower in self._followers:
            follower.send(Step([*orders], is_last=True))
        try:
            self._own.take(Step([*orders]))
            self._own.executor.close(is_idle=is_idle)
        finally:
            for follower in self._followers:
                follower.join(patience_s)

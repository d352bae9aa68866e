"""The ranks of one instance on the wall clock: orders go out to all, and what all have done comes back.

Rank 0 is where the engine is. In one step it broadcasts what was ordered since the last one, does its own part,
and agrees with the others on the ops in flight; with none in flight there is no agreement. Steps are taken when
something was ordered, when rank 0's own part has moved on, and else every ``POLL_NS`` while ops are in flight.
Must not know: what carries messages between ranks, what an engine decides. Called by: real, the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty
from typing import Final, Protocol

from refimpl.cluster.ranks import Orders, RankLedger, Vector
from refimpl.messages import (
    AnyEvent,
    BatchDone,
    CancelFetch,
    Reply,
    StorageClosed,
    StorageOpened,
    Submit,
)
from refimpl.model.choice import Sampling
from refimpl.run.live import LiveExecutor
from refimpl.run.live_loop import Question, Stepped
from refimpl.units import NS_PER_MS

POLL_NS: Final = 2 * NS_PER_MS  # how late rank 0 may hear of what another rank has done
LIMIT_S: Final = 5.0  # a rank that is silent for longer is taken for dead


@dataclass(frozen=True, slots=True)
class Told:
    """A request begins or ends, as ranks hear of it."""

    message: Submit | Reply
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Step:
    """What rank 0 broadcasts."""

    orders: Orders
    told: list[Told]


class Collective(Protocol):
    """What ranks do together. Raises RankError when one of them does not come in time."""

    def minimum(self, vector: Vector) -> Vector:
        """``all_reduce(MIN)``."""


class Follower(Protocol):
    """Another rank, as rank 0 sees it."""

    def send(self, step: Step) -> None:
        """Broadcast to it; does not wait."""

    def check(self) -> None:
        """Raise RankError if it has died."""

    def close(self) -> None:
        """Wait for its end, which has been ordered."""


class Rank:
    """One rank: carries out steps on its own hands, and answers for the ops in flight."""

    def __init__(self, executor: LiveExecutor, collective: Collective) -> None:
        self.executor = executor
        self._collective = collective
        self._ledger = RankLedger()
        self.others: list[AnyEvent | Stepped | Question] = []  # what is no op's business

    def take(self, step: Step, *, is_followed: bool = False) -> Vector | None:
        """Do as ordered; what all ranks have agreed on, None when nothing is in flight."""
        for told in step.told:
            self.executor.tell(told.message, told.sampling, is_followed=is_followed)
        for command in step.orders.commands:
            if not (isinstance(command, CancelFetch) and self._has_ended(command.op)):
                self.executor.submit(command)
        self.collect()
        ops = step.orders.ops
        if not ops:
            return None
        agreed = self._collective.minimum(self._ledger.vector(ops))
        self._ledger.settle(ops, agreed)
        return agreed

    def _has_ended(self, op: int) -> bool:
        self.collect()
        return self._ledger.has_ended(op)

    def collect(self) -> bool:
        """Note what its own threads have done; True if there was anything."""
        has_any = False
        while True:
            try:
                event = self.executor.inbox.get_nowait()
            except Empty:
                return has_any
            has_any = True
            if isinstance(event, BatchDone | Stepped | Question | StorageOpened | StorageClosed):
                self.others.append(event)
            else:
                self._ledger.note(event)  # type: ignore[arg-type]  # all that executors say otherwise

"""The ranks of one instance in virtual time, each with lanes and a part of L3 of its own.

So that ranks can differ: one sees fewer pages, answers late, answers short. They agree inline, with the same
ledgers and the same rule as ranks in threads and processes.
Must not know: what an engine decides, requests. Called by: setup, the rank swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from refimpl.cluster.ranks import Agreement, Orders, RankLedger, Vector, minimum
from refimpl.messages import (
    AnyEvent,
    BatchDone,
    CancelFetch,
    CloseStorage,
    Command,
    Reply,
    StorageClosed,
    StorageOpened,
    Submit,
)
from refimpl.run.lanes import LaneExecutor


class VirtualRank:
    """One rank: carries out orders, and answers for the ops in flight."""

    def __init__(self, lanes: LaneExecutor) -> None:
        self.lanes = lanes
        self.ledger = RankLedger()
        self.agreed_on: list[tuple[int, ...]] = []  # every agreement it took part in

    def contribute(self, orders: Orders, now: int) -> Vector | None:
        """Do as ordered; this rank's part of the agreement, None where there is none."""
        for command in orders.commands:
            if not (isinstance(command, CancelFetch) and self.ledger.has_ended(command.op)):
                self.lanes.submit(command, now)
        if not orders.ops:
            return None
        self.agreed_on.append(orders.ops)
        return self.ledger.vector(orders.ops)


class VirtualRanks:
    """Several lanes as one executor, with the interface of lanes."""

    def __init__(
        self,
        lanes: Sequence[LaneExecutor],
        reduce: Callable[[Sequence[Vector]], Vector] = minimum,
    ) -> None:
        self.ranks = [VirtualRank(each) for each in lanes]
        self._reduce = reduce
        self._agreement = Agreement()
        self._commands: list[Command] = []
        self._batch: list[BatchDone] = []  # of the batch in flight, the ranks that have ended
        self._changes: dict[
            int, StorageOpened | StorageClosed
        ] = {}  # of an attach or detach, by rank
        self._failed: StorageOpened | None = None  # while ranks that had opened close again
        self._closing = 0  # how many these are
        self._now = 0

    @property
    def is_idle(self) -> bool:
        """Nothing is in progress on any rank."""
        return self.next_due() is None

    def tell(self, message: Submit | Reply) -> None:
        """A request begins or ends, which takes lanes no time."""

    def submit(self, command: Command, now: int) -> None:
        """Give an order to all ranks."""
        self._agreement.opened(command)
        for rank in self.ranks:
            vector = rank.contribute(Orders([command]), now)
            assert vector is None
        self._now = now

    def next_due(self) -> int | None:
        """When the next thing ends on some rank, in ns."""
        dues = [due for rank in self.ranks if (due := rank.lanes.next_due()) is not None]
        return min(dues, default=None)

    def pop_due(self, now: int) -> list[AnyEvent]:
        """What all ranks have ended by the earliest due time; maybe nothing, if some have not."""
        due = self.next_due()
        if due is None or due > now:
            return []
        events: list[AnyEvent] = []
        self._now = due
        for rank in self.ranks:
            if rank.lanes.next_due() == due:
                for event in rank.lanes.pop_due(due):
                    events += self._note(rank, event)
        return events + self._agree(due)

    def _note(self, rank: VirtualRank, event: AnyEvent) -> list[AnyEvent]:
        match event:
            case BatchDone():
                self._batch.append(event)
                return self._end_of_batch()
            case StorageOpened() | StorageClosed():
                self._changes[self.ranks.index(rank)] = event
                return self._end_of_change()
            case _:
                rank.ledger.note(event)  # type: ignore[arg-type]  # all that lanes say otherwise
                return []

    def _end_of_batch(self) -> list[AnyEvent]:
        """A load that failed on one rank has failed; all ran the same steps."""
        if len(self._batch) < len(self.ranks):
            return []
        done, self._batch = self._batch, []
        assert len({each.steps for each in done}) == 1, "ranks ran different steps"
        failed = dict.fromkeys(rid for each in done for rid in each.loads_failed)
        return [replace(done[0], loads_failed=tuple(failed))]

    def _end_of_change(self) -> list[AnyEvent]:
        """What failed on one rank has failed, and the ranks that had opened close again first."""
        if self._failed is not None:
            if len(self._changes) < self._closing:
                return []
            failed, self._failed, self._changes = self._failed, None, {}
            return [failed]
        if len(self._changes) < len(self.ranks):
            return []
        done, self._changes = self._changes, {}
        errors = [f"rank {at}: {done[at].error}" for at in sorted(done) if done[at].error]
        opened = [
            at for at in sorted(done) if isinstance(done[at], StorageOpened) and not done[at].error
        ]
        ended = type(done[0])(" | ".join(errors))
        if not errors or not opened:
            return [ended]
        assert isinstance(ended, StorageOpened)
        self._failed, self._closing = ended, len(opened)
        for at in opened:
            self.ranks[at].lanes.submit(CloseStorage(), self._now)
        return []

    def _agree(self, now: int) -> list[AnyEvent]:
        """One agreement, if anything is in flight."""
        orders = Orders([], self._agreement.ops)
        vectors = [rank.contribute(orders, now) for rank in self.ranks]
        given = [vector for vector in vectors if vector is not None]
        if not given:
            return []
        assert len(given) == len(self.ranks), "a rank stays away from an agreement"
        agreed = self._reduce(given)
        for rank in self.ranks:
            rank.ledger.settle(orders.ops, agreed)
        return self._agreement.take(orders.ops, agreed)

"""The ranks of one instance in virtual time, each with lanes, faults and a part of L3 of its own.

So that ranks can differ: one sees fewer pages, has a slot less, answers late, answers short, dies. They agree
inline, with the same ledgers and the same rule as ranks in threads and processes.
Without faults ranks do the same at the same time, and the lanes of one stand for all.
Must not know: what an engine decides, requests. Called by: setup, null_hands, scenarios.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from refimpl.cluster.ranks import LIMIT_S, Agreement, RankError, RankLedger, Vector, apart, minimum
from refimpl.messages import (
    AnyEvent,
    BackedUp,
    BatchDone,
    Command,
    Fetched,
    Probed,
    Reply,
    Store,
    Stored,
    Submit,
)
from refimpl.run.cost import Cost
from refimpl.run.faults import Faults
from refimpl.run.lane import Capacity
from refimpl.run.lanes import LaneExecutor, LaneUse
from refimpl.run.store import SharedStore
from refimpl.units import NS_PER_S

LIMIT_NS: Final = LIMIT_S * NS_PER_S
_NAMES: Final[dict[type[AnyEvent], str]] = {
    Probed: "probe",
    Fetched: "fetch",
    BackedUp: "backup",
    Stored: "store",
}


@dataclass(slots=True)
class Tally:
    """What came of it that ranks are several."""

    agreements: int = 0
    disagreements: int = 0  # ops that did not end alike on all ranks
    # By op, pages that some rank had and another had not.
    pages_lost: Counter[str] = field(default_factory=Counter)
    died_ns: dict[int, int] = field(default_factory=dict)  # rank -> when
    unanswered: int = 0  # ops in flight when the instance stopped, whose slots nobody gets any more


def figures_of(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Of all instances, for a report: integers alone."""
    return {
        "agreements": sum(each.agreements for each in tallies),
        "disagreements": sum(each.disagreements for each in tallies),
        "pages_lost": {
            name: sum(each.pages_lost[name] for each in tallies) for name in _NAMES.values()
        },
        "died_ns": {
            f"instance{instance}_rank{rank}": at
            for instance, each in enumerate(tallies)
            for rank, at in each.died_ns.items()
        },
        "unanswered": sum(each.unanswered for each in tallies),
    }


class VirtualRank:
    """One rank: carries out orders, and answers for the ops in flight.

    Not ``is_writer``: another rank writes the same pages, so that writing is done without it.
    """

    def __init__(
        self, rank: int, lanes: LaneExecutor, *, is_attached: bool, is_writer: bool
    ) -> None:
        self.lanes = lanes
        self.ledger = RankLedger(rank)
        self.ledger.is_attached = is_attached
        self.is_dead = False
        self._is_writer = is_writer

    def obey(self, command: Command, now: int) -> None:
        """Carry it out, or die of it."""
        if self.is_dead or self.lanes.faults.dies(now):
            self.is_dead = True
        elif isinstance(command, Store) and not self._is_writer:
            self.ledger.note(Stored(command.op, len(command.keys)))
        elif not self.ledger.skips(command):
            self.lanes.submit(command, now)

    def next_due(self) -> int | None:
        """When the next thing ends here, in ns; nothing ever does on a rank that is dead."""
        return None if self.is_dead else self.lanes.next_due()

    def contribute(self, ops: tuple[int, ...]) -> Vector | None:
        """This rank's part of the agreement; None where there is none, which ``ops`` alone decides."""
        return self.ledger.vector(ops) if ops else None


class VirtualRanks:
    """Several lanes as one executor, with the interface of lanes.

    ``is_attached``: there is a store from the start. ``writers``: so many ranks write to L3, the first ones;
    None: all do.
    """

    def __init__(
        self,
        lanes: Sequence[LaneExecutor],
        reduce: Callable[[Sequence[Vector]], Vector] = minimum,
        *,
        is_attached: bool = False,
        writers: int | None = None,
    ) -> None:
        self.ranks = [
            VirtualRank(
                rank,
                each,
                is_attached=is_attached,
                is_writer=writers is None or rank < writers,
            )
            for rank, each in enumerate(lanes)
        ]
        self.tally = Tally()
        self._reduce = reduce
        self._agreement = Agreement()
        self._batch: list[BatchDone] = []  # of the batch in flight, the ranks that have ended
        self._verdict_ns: int | None = None  # when a rank will have been silent for too long

    @property
    def cost(self) -> Cost:
        """The cost model in use, which is that of a rank."""
        return self.ranks[0].lanes.cost

    def use(self) -> list[LaneUse]:
        """What each lane of rank 0 has done so far; the others do the same, faults apart."""
        return self.ranks[0].lanes.use()

    def tell(self, message: Submit | Reply) -> None:
        """A request begins or ends, which takes lanes no time."""

    def submit(self, command: Command, now: int) -> None:
        """Give an order to all ranks. Once one has died, rank 0 waits for it, and orders wait as well."""
        self._agreement.opened(command)
        if self._verdict_ns is None:
            self._order(command, now)

    def _order(self, command: Command, now: int) -> None:
        for rank in self.ranks:
            rank.obey(command, now)
            if rank.is_dead:
                self.tally.died_ns.setdefault(rank.ledger.rank, now)
                self._verdict_ns = now + LIMIT_NS

    def next_due(self) -> int | None:
        """When the next thing ends on some rank, or one has been silent for too long, in ns."""
        dues = [due for rank in self.ranks if (due := rank.next_due()) is not None]
        if self._verdict_ns is not None:
            dues.append(self._verdict_ns)
        return min(dues, default=None)

    def pop_due(self, now: int) -> list[AnyEvent]:
        """What all ranks have ended by the earliest due time; maybe nothing, if some have not.

        Raises RankError when one has been silent for too long; the instance is at its end then.
        """
        due = self.next_due()
        if due is None or due > now:
            return []
        if due == self._verdict_ns:
            self.tally.unanswered = len(self._agreement.ops)
            silent = ", ".join(str(rank) for rank in self.tally.died_ns)
            raise RankError(
                f"rank {silent} did not answer within {LIMIT_S} s: restart the instance"
            )
        events: list[AnyEvent] = []
        for rank in self.ranks:
            if rank.next_due() == due:
                for event in rank.lanes.pop_due(due):
                    events += self._note(rank, event)
        return events + (self._agree(due) if self._verdict_ns is None else [])

    def _note(self, rank: VirtualRank, event: AnyEvent) -> list[AnyEvent]:
        if not isinstance(event, BatchDone):
            rank.ledger.note(event)  # type: ignore[arg-type]  # all that lanes say otherwise
            return []
        self._batch.append(event)
        return self._end_of_batch()

    def _end_of_batch(self) -> list[AnyEvent]:
        """A load that failed on one rank has failed; all ran the same steps."""
        if len(self._batch) < len(self.ranks):
            return []
        done, self._batch = self._batch, []
        assert len({each.steps for each in done}) == 1, "ranks ran different steps"
        failed = dict.fromkeys(rid for each in done for rid in each.loads_failed)
        return [replace(done[0], loads_failed=tuple(failed))]

    def _agree(self, now: int) -> list[AnyEvent]:
        """Agreements, if anything is in flight; a second one where it led to more orders."""
        events: list[AnyEvent] = []
        while True:
            ops = self._agreement.ops
            vectors = [rank.contribute(ops) for rank in self.ranks]
            given = [vector for vector in vectors if vector is not None]
            assert len(given) in (0, len(self.ranks)), "a rank stays away from an agreement"
            if given:
                events += self._settle(ops, given)
            if not self._agreement.orders:
                return events
            for command in self._agreement.orders:
                self._order(command, now)
            self._agreement.orders.clear()

    def _settle(self, ops: tuple[int, ...], given: list[Vector]) -> list[AnyEvent]:
        agreed = self._reduce(given)
        self._count(ops, given)
        for rank in self.ranks:
            rank.ledger.settle(ops, agreed)
        return self._agreement.take(ops, agreed)

    def _count(self, ops: tuple[int, ...], given: list[Vector]) -> None:
        """One more agreement, and what the least of the ranks lacked that another had."""
        self.tally.agreements += 1
        for op, pages in apart(ops, given):
            self.tally.disagreements += 1
            name = _NAMES.get(self._agreement.ending(op))
            if name is not None:  # a change of storage has no pages
                self.tally.pages_lost[name] += pages


Lanes: TypeAlias = LaneExecutor | VirtualRanks


@dataclass(frozen=True, slots=True)
class L3:
    """What lanes share: how many pages it holds at the start, and once something is attached."""

    pages: int | None
    capacity: Capacity | None
    is_attached: bool


def lanes_of(cost: Cost, faults: Sequence[Faults], l3: L3) -> list[Lanes]:
    """Fresh lanes of each instance, over one L3; lanes of each rank where faults make ranks differ.

    In L3 each rank has its part of every page, but for a latent cache, which rank 0 writes for all.
    """
    size, is_latent = cost.tp_size, cost.model.is_mla
    stores = [SharedStore(l3.pages) for _ in range(1 if is_latent else size)]

    def lanes(rank: int, own: Faults) -> LaneExecutor:
        return LaneExecutor(cost, stores[rank % len(stores)], own.of_rank(rank), l3.capacity)

    if size == 1 or not any(each.has_any for each in faults):
        return [lanes(0, own) for own in faults]
    return [
        VirtualRanks(
            [lanes(rank, own) for rank in range(size)],
            is_attached=l3.is_attached,
            writers=1 if is_latent else None,
        )
        for own in faults
    ]

"""The ranks of one instance in virtual time, each with lanes and a part of L3 of its own.

So that ranks can differ: one sees fewer pages, answers late, answers short. They agree inline, with the same
ledgers and the same rule as ranks in threads and processes.
Must not know: what an engine decides, requests. Called by: scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from refimpl.cluster.ranks import Agreement, RankLedger, Vector, minimum
from refimpl.messages import AnyEvent, BatchDone, Command, Reply, Submit
from refimpl.run.lanes import LaneExecutor


class VirtualRank:
    """One rank: carries out orders, and answers for the ops in flight."""

    def __init__(self, rank: int, lanes: LaneExecutor, *, is_attached: bool) -> None:
        self.lanes = lanes
        self.ledger = RankLedger(rank)
        self.ledger.is_attached = is_attached
        self.agreed_on: list[tuple[int, ...]] = []  # every agreement it took part in

    def obey(self, command: Command, now: int) -> None:
        """Carry it out."""
        if not self.ledger.skips(command):
            self.lanes.submit(command, now)

    def contribute(self, ops: tuple[int, ...]) -> Vector | None:
        """This rank's part of the agreement; None where there is none, which ``ops`` alone decides."""
        if not ops:
            return None
        self.agreed_on.append(ops)
        return self.ledger.vector(ops)


class VirtualRanks:
    """Several lanes as one executor, with the interface of lanes.

    ``is_attached``: there is a store from the start.
    """

    def __init__(
        self,
        lanes: Sequence[LaneExecutor],
        reduce: Callable[[Sequence[Vector]], Vector] = minimum,
        *,
        is_attached: bool = False,
    ) -> None:
        self.ranks = [
            VirtualRank(rank, each, is_attached=is_attached) for rank, each in enumerate(lanes)
        ]
        self._reduce = reduce
        self._agreement = Agreement()
        self._batch: list[BatchDone] = []  # of the batch in flight, the ranks that have ended

    def tell(self, message: Submit | Reply) -> None:
        """A request begins or ends, which takes lanes no time."""

    def submit(self, command: Command, now: int) -> None:
        """Give an order to all ranks."""
        self._agreement.opened(command)
        for rank in self.ranks:
            rank.obey(command, now)

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
        for rank in self.ranks:
            if rank.lanes.next_due() == due:
                for event in rank.lanes.pop_due(due):
                    events += self._note(rank, event)
        return events + self._agree(due)

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
                agreed = self._reduce(given)
                for rank in self.ranks:
                    rank.ledger.settle(ops, agreed)
                events += self._agreement.take(ops, agreed)
            if not self._agreement.orders:
                return events
            for command in self._agreement.orders:
                for rank in self.ranks:
                    rank.obey(command, now)
            self._agreement.orders.clear()

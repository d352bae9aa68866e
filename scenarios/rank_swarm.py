"""A swarm of instances with several ranks, each with faults and an L3 of its own.

One brain decides for all ranks of an instance. What each slot holds is followed for every rank by itself, so
that a page which one rank has and another lacks is seen where it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final
from unittest import mock

from msgspec.structs import replace as changed

from refimpl.cluster.ranks import Vector, minimum
from refimpl.cluster.router import Router
from refimpl.core.check import check_engine
from refimpl.core.engine import Engine
from refimpl.messages import AnyEvent, BackedUp, Fetched, Landed, Probed, Reply, Step, Stored
from refimpl.run import storage_lanes
from refimpl.run.cost import Cost
from refimpl.run.hardware import hardware_named, model_named
from refimpl.run.lanes import LaneExecutor
from refimpl.run.store import SharedStore
from refimpl.run.virtual_ranks import VirtualRank, VirtualRanks
from refimpl.run.world import Instance, World
from scenarios.shadow import Shadow
from scenarios.swarm import Outcome, Swarm, WatchedEngine
from scenarios.swarm_draws import Plan, plan_of

Reduce = Callable[[Sequence[Vector]], Vector]
SIZES: Final = (2, 3, 4)
NOBODY: Final = "error: no instance is left that could answer"
_OF_AN_OP: Final = (BackedUp, Fetched, Landed, Probed, Stored)


class Remembered(list[tuple[int, ...]]):
    """Every agreement that a rank took part in, by the ops it was about."""

    def __init__(self, rank: VirtualRank) -> None:
        super().__init__()
        contribute = rank.contribute

        def remembering(ops: tuple[int, ...]) -> Vector | None:
            vector = contribute(ops)
            if vector is not None:
                self.append(ops)
            return vector

        rank.contribute = remembering  # type: ignore[method-assign]


class FollowedRanks(VirtualRanks):
    """Ranks that remember what each of them had when they agreed: pages, by op and rank."""

    def __init__(self, lanes: Sequence[LaneExecutor], reduce: Reduce, *, is_attached: bool) -> None:
        super().__init__(lanes, reduce, is_attached=is_attached)
        self.had: dict[int, list[int]] = {}
        self.agreed_on = [Remembered(rank) for rank in self.ranks]

    def _agree(self, now: int) -> list[AnyEvent]:
        for op in self._agreement.ops:
            self.had[op] = [rank.ledger.vector([op])[1] for rank in self.ranks]
        return super()._agree(now)


class RankEngine(WatchedEngine):
    """The brain of an instance, with a shadow for each rank."""

    number: int
    ranks: FollowedRanks
    shadows: list[Shadow]

    def handle(self, events: Iterable[AnyEvent], now: int) -> Step:
        events = list(events)
        for event in events:
            for at, shadow in enumerate(self.shadows):
                own = event
                if isinstance(event, _OF_AN_OP):
                    own = changed(event, pages=min(event.pages, self.ranks.had[event.op][at]))
                shadow.hear(own)
        step = super().handle(events, now)
        for shadow in self.shadows:
            shadow.obey(step)
        return step


class _AllFaults:
    """Of all ranks, or, with every other seed, of one of them: else no rank finds much in L3."""

    def __init__(self, plan: Plan, size: int) -> None:
        self.of_ranks = [plan.faults.of_rank(rank) for rank in range(size)]
        odd_one = plan.seed // 2 % size
        for rank in range(size):
            if plan.seed % 2 and rank != odd_one:
                self.of_ranks[rank].stop()

    def stop(self) -> None:
        for faults in self.of_ranks:
            faults.stop()


class RankSwarm(Swarm):
    """A swarm whose instances have ``size`` ranks."""

    def __init__(self, plan: Plan, size: int, reduce: Reduce) -> None:
        self.size, self._reduce = size, reduce
        self.faults = _AllFaults(plan, size)
        self.stores = [SharedStore(plan.store_pages) for _ in range(size)]
        self.failed: Counter[int] = Counter()  # by rid, of instances that ended
        self.left: dict[int, tuple[int, int, int]] = {}  # ops, requests and turns at their end
        super().__init__(replace(plan, faults=self.faults))  # type: ignore[arg-type]

    def make_engine(self) -> WatchedEngine:
        engine = RankEngine(self.plan.engine, self.library, is_watched=True)
        engine.shadows = [Shadow(self.library) for _ in range(self.size)]
        return engine

    def _world(self) -> World:
        plan = self.plan
        hardware, model = hardware_named(plan.hardware), model_named(plan.model)
        page_size = plan.engine.cache.page_size
        cost = Cost(hardware, model, 1, plan.transfer, page_size, plan.storage)
        instances = []
        for number, engine in enumerate(self.engines):
            assert isinstance(engine, RankEngine)
            engine.number = number
            lanes = [
                LaneExecutor(cost, store, faults)
                for store, faults in zip(self.stores, self.faults.of_ranks, strict=True)
            ]
            engine.ranks = FollowedRanks(
                lanes, self._reduce, is_attached=bool(plan.engine.storage_backend)
            )
            instances.append(Instance(engine, engine.ranks))
        return World(instances, Router(plan.instances, plan.router), page_size)

    def stopped(self) -> list[RankEngine]:
        """The engines whose instance is at its end."""
        return [
            engine
            for engine, instance in zip(self.engines, self.world.instances, strict=True)
            if instance.error and isinstance(engine, RankEngine)
        ]

    def engines_at_rest(self) -> list[WatchedEngine]:
        """One whose rank has died is never at rest: what it had in flight stays so."""
        return [engine for engine in self.engines if engine not in self.stopped()]

    def replies_of(self, rid: int) -> int:
        refused = self.world.record.rows[rid].finish == NOBODY
        return super().replies_of(rid) + self.failed[rid] + refused

    def check_answers(self) -> None:
        """Who asks an instance that stops may wait in vain, in this world; a server says so."""
        if self.stopped():
            assert self.answered <= self.asked
        else:
            super().check_answers()
        for engine in self.stopped():
            check_engine(engine)
            left = (len(engine.cache.ops), len(engine.requests()), engine.turns)
            assert self.left[engine.number] == left, "something went on after the end"

    def _after_turn(self, instance: Instance, step: Step) -> None:
        if instance.error:
            self._note_end(instance.engine, step)
        super()._after_turn(instance, step)

    def _note_end(self, engine: Engine, step: Step) -> None:
        """Requests fail with the reason, each once; what was in flight keeps its slots for good."""
        assert isinstance(engine, RankEngine)
        assert engine.number not in self.left, "an instance ends twice"
        self.left[engine.number] = (len(engine.cache.ops), len(engine.requests()), engine.turns)
        for command in step.commands:
            assert isinstance(command, Reply), command
            assert "did not answer within 5 s: restart the instance" in command.finish
            self.failed[command.rid] += 1

    def agreements(self) -> list[list[list[tuple[int, ...]]]]:
        """Of each instance and rank, the agreements it took part in."""
        return [
            list(engine.ranks.agreed_on)
            for engine in self.engines
            if isinstance(engine, RankEngine)
        ]


def run_ranks(seed: int, reduce: Reduce = minimum) -> tuple[RankSwarm, Outcome]:
    """Run one seed. Whatever goes wrong is an AssertionError that says how to see it again."""
    plan = plan_of(seed)
    swarm = RankSwarm(plan, SIZES[seed % len(SIZES)], reduce)
    try:
        with mock.patch.object(storage_lanes, "STORAGE_BATCH_PAGES", plan.call_pages):
            return swarm, swarm.run()
    except Exception as error:
        raise AssertionError(
            f"rank swarm seed {seed} after {swarm.world.now} ns: {type(error).__name__}: {error}\n"
            f"see it again: pytest scenarios/test_rank_swarm.py --swarm-seed {seed}\n{plan}"
        ) from error

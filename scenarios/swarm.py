"""A swarm run: everything that can be configured, sent or broken, drawn from one seed.

After every step of every engine the invariants are checked from scratch, a shadow follows what each
slot holds, and a reader of KV events knows which pages are where. Then the faults stop, some requests
come again, and all must converge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from unittest import mock

from refimpl.cluster.router import Router
from refimpl.config import EngineConfig
from refimpl.core.check import check_engine, check_quiescent, walk
from refimpl.core.engine import Engine
from refimpl.core.page import READY
from refimpl.facts import Prefetch
from refimpl.messages import (
    Abort,
    Answer,
    AnyEvent,
    AttachStorage,
    ClearStorage,
    DetachStorage,
    Flush,
    Step,
    Tick,
)
from refimpl.run import storage_lanes
from refimpl.run.cost import Cost
from refimpl.run.hardware import hardware_named, model_named
from refimpl.run.lanes import LaneExecutor
from refimpl.run.record import Record, Row
from refimpl.run.store import SharedStore
from refimpl.run.world import Instance, World
from refimpl.serve.kv_events import KvEventRecorder
from refimpl.units import NS_PER_MS, Random
from refimpl.workload.request import RequestSpec, Workload
from scenarios.event_reader import EventReader, as_maps, resident
from scenarios.shadow import Library, Shadow
from scenarios.swarm_draws import ADAPTERS, NAMESPACES, Plan, pick, plan_of

TURNS_MAX: Final = 30_000  # a run of this size takes a tenth of that; beyond, it goes in circles
CHANGES_MAX: Final = 40
ABORTS_MAX: Final = 12
BACKENDS: Final = ("memory", "memory", "file", "mooncake", "no such backend")
DRAINS: Final = ("none", "queue", "refuse", "sometime")
POLICIES: Final = (None, None, "timeout", "best_effort", "wait_complete", "whenever")
SPACES: Final = tuple((*space, adapter) for space in NAMESPACES for adapter in ADAPTERS)
WRITES: Final = (None, None, "write_back", "write_through", "write_through_selective", "never")


class WatchedEngine(Engine):
    """An engine whose every step is checked."""

    def __init__(self, config: EngineConfig, library: Library, *, is_watched: bool) -> None:
        super().__init__(config)
        self.shadow = Shadow(library)
        self.turns = 0
        self.recorder = KvEventRecorder(config.cache.page_size)
        self.reader = EventReader(config.cache.page_size, SPACES)
        self.is_watched = is_watched
        if is_watched:
            self.watch(self.recorder)

    def handle(self, events: Iterable[AnyEvent], now: int) -> Step:
        events = list(events)
        self.turns += 1
        assert self.turns < TURNS_MAX, "the engine goes in circles"
        for event in events:
            self.shadow.hear(event)
        step = super().handle(events, now)
        self.shadow.obey(step)
        check_engine(self)
        if self.is_watched:
            self._check_events()
        deadline = self.deadline()
        assert deadline is None or deadline > now, "a deadline that has passed would stop the clock"
        return step

    def _check_events(self) -> None:
        if events := self.recorder.take():
            self.reader.read(as_maps(events))
        there = resident(self.cache, self.shadow.library.spelled)
        assert self.reader.held == there, "events tell of other pages than those that are there"
        anywhere = set().union(*there.values())
        assert len(self.recorder) == len(anywhere), "tokens are kept of pages that are nowhere"

    def check_at_rest(self) -> None:
        check_quiescent(self)
        named = self.shadow.library.named
        for node in walk(self.cache):
            for page in node.pages:
                if page.l1_state == READY:
                    assert named[page.key] == tuple(self.shadow.l1[page.l1_slot]), "L1 is wrong"
                if page.l2_state == READY:
                    assert named[page.key] == tuple(self.shadow.l2[page.l2_slot]), "L2 is wrong"


@dataclass
class Outcome:
    """What a run came to."""

    digest: str
    rows: list[Row]
    counts: Counter[str]
    store: SharedStore
    record: Record
    library: Library


class Swarm:
    """One run, and the interference with it."""

    def __init__(self, plan: Plan, *, is_watched: bool = True) -> None:
        self.plan = plan
        config = plan.engine
        self.library = Library([*plan.specs, *plan.again], config.cache.page_size)
        self.store = SharedStore(plan.store_pages)
        self._is_watched = is_watched
        self.engines = [self.make_engine() for _ in range(plan.instances)]
        self.world = self._world()
        self.world.after_turn = self._after_turn
        self._random = Random(plan.seed).fork(0xABB)
        self._stop_after = self._random.between(50, 1500)  # turns until the faults stop
        self._aborts = self._changes = self._turns = 0
        self._is_over = False
        self.asked = self.answered = 0
        self.counts: Counter[str] = Counter()

    def make_engine(self) -> WatchedEngine:
        return WatchedEngine(self.plan.engine, self.library, is_watched=self._is_watched)

    def _world(self) -> World:
        plan = self.plan
        hardware, model = hardware_named(plan.hardware), model_named(plan.model)
        page_size = plan.engine.cache.page_size
        cost = Cost(hardware, model, 1, plan.transfer, page_size, plan.storage)
        instances = [
            Instance(engine, LaneExecutor(cost, self.store, plan.faults)) for engine in self.engines
        ]
        return World(instances, Router(plan.instances, plan.router), page_size)

    def run(self) -> Outcome:
        plan, world = self.plan, self.world
        world.run(Workload("swarm", plan.specs, plan.parallel_max))
        self._check_at_rest(plan.specs)
        plan.faults.stop()
        self._is_over = True
        world.run(Workload("again", plan.again))
        self._check_at_rest([*plan.specs, *plan.again])
        for spec in plan.again:
            row = world.record.rows[spec.rid]
            assert row.finish in ("length", "") or row.finish.startswith("error: "), row.finish
            assert row.finish != "length" or row.output_tokens == spec.output_tokens
        rows = list(world.record.rows.values())
        return Outcome(
            world.record.digest, rows, self.counts, self.store, world.record, self.library
        )

    # ---- after each turn ------------------------------------------------------------------------

    def _after_turn(self, instance: Instance, step: Step) -> None:
        self._turns += 1
        if self._turns == self._stop_after:
            self.plan.faults.stop()
        self.answered += sum(isinstance(command, Answer) for command in step.commands)
        for fact in step.facts:
            self.counts[type(fact).__name__] += 1
            if isinstance(fact, Prefetch):
                self.counts[fact.step] += 1
        if not self._is_over:
            self._interfere(self.world.instances.index(instance))

    def _interfere(self, index: int) -> None:
        random, plan, world = self._random, self.plan, self.world
        at = world.now + random.exponential(NS_PER_MS)
        if random.chance(plan.aborts) and self._aborts < ABORTS_MAX:
            self._aborts += 1
            rid = pick(random, plan.specs).rid
            live = [request.rid for engine in self.engines for request in engine.requests()]
            if live and random.below(4):
                rid = pick(random, live)
            for each in range(len(self.engines)):
                world.inject(at, each, Abort(rid))
        if random.chance(plan.changes) and self._changes < CHANGES_MAX:
            self._changes += 1
            self.asked += 1
            world.inject(at, index, self._change())
        if random.chance(20_000) and self._changes < CHANGES_MAX:
            world.inject(at, index, Tick())

    def _change(self) -> AnyEvent:
        random = self._random
        match random.below(5):
            case 0:
                return Flush()
            case 4:
                return ClearStorage(pick(random, DRAINS))
            case 1:
                return DetachStorage(pick(random, DRAINS))
            case _:
                return AttachStorage(
                    pick(random, BACKENDS),
                    pick(random, POLICIES),
                    pick(random, WRITES),
                    pick(random, DRAINS),
                )

    # ---- at rest --------------------------------------------------------------------------------

    def engines_at_rest(self) -> list[WatchedEngine]:
        return self.engines

    def check_answers(self) -> None:
        assert self.asked == self.answered, f"{self.asked} changes asked, {self.answered} answers"

    def replies_of(self, rid: int) -> int:
        """How often somebody was told that it is over."""
        return sum(engine.shadow.replies[rid] for engine in self.engines)

    def _check_at_rest(self, specs: list[RequestSpec]) -> None:
        for engine in self.engines_at_rest():
            engine.check_at_rest()
        self.check_answers()
        assert list(self.world.record.rows) != [] or not specs
        for spec in specs:
            row = self.world.record.rows[spec.rid]
            replies = self.replies_of(spec.rid)
            assert replies == 1, f"request {spec.rid} was answered {replies} times"
            assert row.finish
            assert row.end_ns >= row.arrival_ns
            assert row.finish != "length" or row.arrival_ns <= row.first_token_ns <= row.end_ns
            reason = row.finish.partition(":")[0]
            assert reason in ("length", "abort", "error"), row.finish
            assert "L1" not in row.finish or not self._fits(spec), row.finish
        for key in self.store._keys:
            assert self.library.named[key] in self.library.computed, "L3 holds what nobody computed"

    def _fits(self, spec: RequestSpec) -> bool:
        """Alone in L1 it would reach its end; the KV of its last token is never computed."""
        cache = self.plan.engine.cache
        tokens = spec.prompt.length + max(spec.output_tokens - 1, 0)
        return cache.l1_pages is None or tokens <= cache.l1_pages * cache.page_size


def run_seed(seed: int, *, is_watched: bool = True) -> Outcome:
    """Run one seed, with KV events or without.

    Whatever goes wrong is an AssertionError that says how to see it again.
    """
    plan = plan_of(seed)
    swarm = Swarm(plan, is_watched=is_watched)
    try:
        # Prompts are short here, so calls are too: else no read would ever take more than one.
        with mock.patch.object(storage_lanes, "STORAGE_BATCH_PAGES", plan.call_pages):
            return swarm.run()
    except Exception as error:
        raise AssertionError(
            f"swarm seed {seed} after {swarm.world.now} ns: {type(error).__name__}: {error}\n"
            f"see it again: pytest scenarios/test_swarm.py --swarm-seed {seed}\n{plan}"
        ) from error

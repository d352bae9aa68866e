"""Random tiny worlds against a plain model: what was ever computed in which namespace.

The machine chooses a configuration, then submits, aborts, completes, fails, flushes, attaches and
lets time pass in any order. After each step every invariant holds and every slot holds what the
tree says (the table checks both); a request never hits a page that nobody computed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from refimpl.config import (
    EVICTION_POLICIES,
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    CacheConfig,
    EngineConfig,
    EvictionConfig,
    PrefetchConfig,
)
from refimpl.facts import Admitted, Readmitted
from refimpl.keys import PageKey, TokenPrompt, namespace_seed, page_keys
from refimpl.messages import (
    Abort,
    AttachStorage,
    BackUp,
    ClearStorage,
    DetachStorage,
    Fetch,
    Flush,
    Probe,
    Step,
    Store,
    Submit,
    Tick,
)
from scenarios.labels import tokens_of
from scenarios.tabletop import Tabletop

_S = 1_000_000_000

caches = st.builds(
    CacheConfig,
    page_size=st.integers(1, 3),
    l1_pages=st.integers(3, 8),
    l2_pages=st.integers(1, 8),
    write_policy=st.sampled_from(WRITE_POLICIES),
    selective_hits=st.integers(1, 3),
    eviction=st.builds(
        EvictionConfig,
        st.sampled_from(EVICTION_POLICIES),
        protected_threshold=st.integers(1, 3),
        threshold=st.just(4),
        next_prompt_estimate=st.just(1),
    ),
    load_back_threshold_tokens=st.integers(0, 5),
    prefetch=st.builds(
        PrefetchConfig,
        st.sampled_from(PREFETCH_POLICIES),
        threshold_tokens=st.integers(1, 4),
        capacity_percent=st.sampled_from([25, 50, 100]),
    ),
    store_percent=st.sampled_from([25, 50, 100]),
)


@st.composite
def engines(draw: st.DrawFn) -> EngineConfig:
    cache = draw(caches)
    has_l2 = draw(st.integers(0, 9)) > 0
    return EngineConfig(
        cache if has_l2 else replace(cache, l2_pages=0),
        storage_backend="memory" if has_l2 and draw(st.booleans()) else "",
        reuse=draw(st.integers(0, 19)) > 0,
        chunked_prefill_tokens=cache.page_size * draw(st.sampled_from([1, 2, 4, 100])),
        running_max=draw(st.integers(1, 4)),
        queued_max=draw(st.integers(2, 8)),
        decode_reserve_tokens=draw(st.sampled_from([0, 2, 512])),
    )


prompts = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 7)), min_size=1, max_size=3).map(
    lambda runs: "+".join(f"{letter}*{count}" for letter, count in runs)
)
spaces = st.sampled_from([(None, None, None)] * 4 + [("x", None, None), (None, None, "x")])


class CacheMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    table: Tabletop

    @initialize(config=engines())
    def open(self, config: EngineConfig) -> None:
        self.table = Tabletop(config)
        self.computed: dict[PageKey, None] = {}  # pages that some request has computed
        self.rids = 0

    # ---- the model ------------------------------------------------------------------------------

    def note(self, step: Step) -> None:
        """Hits are of pages that were computed, and leave a token to compute."""
        for content in (*self.table.l1.values(), *self.table.storage):
            if content is not None:
                self.computed[content] = None
        for fact in step.facts:
            if isinstance(fact, Admitted):
                tokens = (fact.device_tokens, fact.host_tokens, fact.storage_tokens)
                assert min(tokens) >= 0
                self.check_hits(fact.rid, sum(tokens), fact.prompt_tokens)
            elif isinstance(fact, Readmitted):
                self.check_hits(fact.rid, fact.cached_tokens, fact.tokens)

    def check_hits(self, rid: int, hit: int, length: int) -> None:
        size = self.table.page_size
        assert hit % size == 0
        assert hit < length
        keys = self.table.requests[rid].keys
        assert all(key in self.computed for key in keys[: hit // size])

    # ---- from outside ---------------------------------------------------------------------------

    @rule(prompt=prompts, output=st.integers(0, 12), space=spaces, priority=st.integers(0, 2))
    def submit(
        self, prompt: str, output: int, space: tuple[str | None, ...], priority: int
    ) -> None:
        self.rids += 1
        text = TokenPrompt(tokens_of(prompt))
        self.note(self.table.tell(Submit(self.rids, text, output, *space, priority)))

    @rule(back=st.integers(0, 5))
    def abort(self, back: int) -> None:
        self.note(self.table.tell(Abort(self.rids - back)))

    @rule(ns=st.sampled_from([0, 1, _S, 2 * _S, 40 * _S]))
    def pass_time(self, ns: int) -> None:
        self.table.now += ns
        self.note(self.table.tell(Tick()))

    @rule()
    def flush(self) -> None:
        self.note(self.table.tell(Flush()))

    @precondition(lambda self: self.rids % 4 == 0)  # or little else would ever be under way
    @rule(
        prefetch=st.none() | st.sampled_from(PREFETCH_POLICIES),
        write=st.none() | st.sampled_from(WRITE_POLICIES),
        drain=st.sampled_from(["none", "queue", "refuse"]),
    )
    def attach(self, prefetch: str | None, write: str | None, drain: str) -> None:
        self.note(self.table.tell(AttachStorage("file", prefetch, write, drain)))

    @precondition(lambda self: self.rids % 4 == 3)
    @rule(drain=st.sampled_from(["none", "queue", "refuse"]))
    def detach(self, drain: str) -> None:
        self.note(self.table.tell(DetachStorage(drain)))

    @precondition(lambda self: self.rids % 4 == 1)
    @rule(drain=st.sampled_from(["none", "queue", "refuse"]))
    def clear(self, drain: str) -> None:
        self.note(self.table.tell(ClearStorage(drain)))

    @rule(prompt=prompts, space=spaces)
    def another_instance_stores(self, prompt: str, space: tuple[str | None, ...]) -> None:
        size = self.table.page_size
        for key in page_keys(tokens_of(prompt), size, namespace_seed(*space)):
            self.table.storage[key] = self.computed[key] = None

    @precondition(lambda self: self.table.storage)
    @rule(at=st.integers(0, 20))
    def lose_a_stored_page(self, at: int) -> None:
        stored = list(self.table.storage)
        del self.table.storage[stored[at % len(stored)]]

    # ---- completions ----------------------------------------------------------------------------

    @precondition(lambda self: self.table.batch is not None)
    @rule(steps=st.integers(1, 64))
    def end_batch(self, steps: int) -> None:
        batch = self.table.batch
        assert batch is not None
        self.note(self.table.batch_done(min(steps, batch.steps_max)))

    @precondition(lambda self: self.table.has_load)
    @rule(which=st.integers(0, 3))
    def fail_loads(self, which: int) -> None:
        batch = self.table.batch
        assert batch is not None
        rids = tuple(load.rid for load in batch.loads)
        self.note(self.table.batch_done(loads_failed=(rids[which % len(rids)],)))

    @precondition(lambda self: self.table.ops)
    @rule(at=st.integers(0, 5), missing=st.sampled_from([0, 0, 0, 1, 2, 99]))
    def end_op(self, at: int, missing: int) -> None:
        ops = list(self.table.ops)
        op = ops[at % len(ops)]
        self.note(self.table.op_done(op, max(self.most(op) - missing, self.least(op))))

    @precondition(lambda self: any(isinstance(op, Fetch) for op in self.table.ops.values()))
    @rule(pages=st.integers(0, 8))
    def land(self, pages: int) -> None:
        op = next(op for op, each in self.table.ops.items() if isinstance(each, Fetch))
        self.note(self.table.landed(op, min(max(pages, self.least(op)), self.most(op))))

    def most(self, op: int) -> int:
        """Pages this op could do."""
        match self.table.ops[op]:
            case BackUp() as command:
                return len(command.l2_slots)
            case Store() as command:
                return len(command.keys)
            case Probe() | Fetch() as command:
                stored = self.table.stored_run(command)
                return max(stored, self.least(op))

    def least(self, op: int) -> int:
        """Pages that have landed cannot be taken back."""
        return self.table.has_landed.get(op, 0)

    @precondition(lambda self: self.table.change is not None)
    @rule(error=st.sampled_from(["", "", "no such server"]))
    def end_change(self, error: str) -> None:
        self.note(self.table.change_done(error))

    @rule()
    def come_to_rest(self) -> None:
        while (step := self.table.move()) is not None:
            self.note(step)

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.come_to_rest()
            self.table.finish_all()


# Shrinking is left to whoever studies a failure: the steps that led to it are printed anyway, and
# shrinking worlds like these takes minutes.
_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def test_invariants_hold_whatever_happens_in_tiny_worlds() -> None:
    quick = settings(_SETTINGS, max_examples=300, stateful_step_count=50)
    run_state_machine_as_test(CacheMachine, settings=quick)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_invariants_hold_whatever_happens_in_many_tiny_worlds() -> None:
    many = settings(_SETTINGS, max_examples=3000, stateful_step_count=80)
    run_state_machine_as_test(CacheMachine, settings=many)

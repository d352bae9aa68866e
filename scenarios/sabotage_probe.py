"""Fast checks that a sabotaged engine must fail: ``python -m scenarios.sabotage_probe CHECK``,
where ``swarm 32`` begins with seed 32, one that is known to see it.

Prints what went wrong and ends with 1, or ends with 0.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Final

from refimpl.config import CacheConfig, EngineConfig, PrefetchConfig
from refimpl.core.check import check_engine
from refimpl.core.engine import Engine
from refimpl.keys import TokenPrompt
from refimpl.messages import (
    BackedUp,
    BackUp,
    BatchDone,
    CancelFetch,
    Command,
    Event,
    Fetch,
    Load,
    Probe,
    Probed,
    RunBatch,
    Store,
    Stored,
    Submit,
    Tick,
)
from refimpl.units import Random
from refimpl.workload.request import RequestSpec
from scenarios.oracles import PageLru, hit_tokens, replay, tiers
from scenarios.swarm import run_seed

SWARM_SEEDS: Final = 60


def swarm(first: int = 0) -> None:
    for seed in range(first, first + SWARM_SEEDS):
        run_seed(seed)


def unwatched_swarm(first: int = 0) -> None:
    """Without the reader of KV events, which sees some faults before others do."""
    for seed in range(first, first + SWARM_SEEDS):
        run_seed(seed, is_watched=False)


def page_lru() -> None:
    """Replay of random prompts against the page LRU, L1 alone and L1 with L2."""
    random = Random(11)
    for l1, l2 in ((5, 0), (9, 0), (6, 9), (4, 12)) * 5:
        prompts = [
            [random.below(3) for _ in range(random.between(1, 2 * l1))]
            for _ in range(random.between(5, 30))
        ]
        lru = PageLru(max(l1, l2), 2)
        specs = [
            RequestSpec(rid, TokenPrompt(array("I", tokens)), 0)
            for rid, tokens in enumerate(prompts, 1)
        ]
        found = [hit_tokens(fact) // 2 for fact in replay(specs, tiers(2, l1, l2))]
        assert found == [lru.hits(tokens) for tokens in prompts], "not what a page LRU hits"


# ---- small worlds told by hand ------------------------------------------------------------------


def request(rid: int, tokens: range) -> Submit:
    return Submit(rid, TokenPrompt(array("I", tokens)), 0)


def play(engine: Engine, now: int, *events: Event, store_fails: bool = False) -> list[Command]:
    """All orders that follow from ``events``, each carried out at once."""
    waiting, ordered = list(events), []
    while waiting:
        step = engine.handle(waiting, now)
        check_engine(engine)
        waiting = []
        ordered += step.commands
        for command in step.commands:
            match command:
                case RunBatch(steps_max):
                    waiting.append(BatchDone(steps_max))
                case BackUp(op, slots):
                    waiting.append(BackedUp(op, len(slots)))
                case Store(op, keys):
                    waiting.append(Stored(op, 0 if store_fails else len(keys)))
                case Probe(op):
                    waiting.append(Probed(op, 0))
    return ordered


def timeout() -> None:
    """A request waits for L3 to the very nanosecond that the formula of the timeout gives."""
    for max_ns, expected in ((10_000, 700 + 48 * 2048 // 1024), (750, 750)):
        prefetch = PrefetchConfig("timeout", 1, 700, 2048, max_ns, 100)
        cache = CacheConfig(page_size=16, l1_pages=20, l2_pages=20, prefetch=prefetch)
        engine = Engine(EngineConfig(cache=cache, storage_backend="memory"))
        (probe,) = engine.handle([request(1, range(50))], 1000).commands
        assert isinstance(probe, Probe)
        (fetch,) = engine.handle([Probed(probe.op, 3)], 1010).commands
        assert isinstance(fetch, Fetch)
        assert engine.deadline() == 1000 + expected, "the deadline is not that of the formula"
        assert not engine.handle([Tick()], 1000 + expected - 1).commands, "it stopped too early"
        kinds = [type(each) for each in engine.handle([Tick()], 1000 + expected).commands]
        assert kinds == [CancelFetch, RunBatch], "at its deadline a request must go on"


def load_back() -> None:
    """A host run is loaded from the threshold on, not below it."""
    for threshold, pages in ((24, 6), (25, 0)):
        cache = CacheConfig(
            page_size=4, l1_pages=8, l2_pages=40, load_back_threshold_tokens=threshold
        )
        engine = Engine(EngineConfig(cache=cache))
        play(engine, 1, request(1, range(25)))
        play(engine, 2, request(2, range(100, 132)))  # the first is in L2 alone now
        orders = play(engine, 3, request(3, range(25)))
        loads = [load for each in orders if isinstance(each, RunBatch) for load in each.loads]
        found = sum(len(load.l2_slots) for load in loads if isinstance(load, Load))
        assert found == pages, f"{found} pages loaded at a threshold of {threshold} tokens"


def store_again() -> None:
    """What a failed write left out is offered again by the next hit."""
    cache = CacheConfig(page_size=4, l1_pages=8, l2_pages=40)
    engine = Engine(EngineConfig(cache=cache, storage_backend="memory"))
    play(engine, 1, request(1, range(25)), store_fails=True)
    for rid, pages in ((2, 6), (3, 0)):
        orders = play(engine, rid, request(rid, range(25)))
        found = sum(len(each.keys) for each in orders if isinstance(each, Store))
        assert found == pages, f"request {rid} had {found} pages written to L3"


def selective() -> None:
    """Under selective writing the creation counts as the first hit, and the third writes."""
    cache = CacheConfig(
        page_size=4, l1_pages=8, l2_pages=40, write_policy="write_through_selective"
    )
    engine = Engine(EngineConfig(cache=cache))
    for rid, pages in ((1, 0), (2, 0), (3, 6), (4, 0)):
        orders = play(engine, rid, request(rid, range(25)))
        found = sum(len(each.l1_slots) for each in orders if isinstance(each, BackUp))
        assert found == pages, f"hit {rid} wrote {found} pages"


CHECKS: Final[dict[str, Callable[..., None]]] = {
    check.__name__: check
    for check in (swarm, unwatched_swarm, page_lru, timeout, load_back, store_again, selective)
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*map(int, sys.argv[2:]))

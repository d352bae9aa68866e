"""What a swarm seed stands for: a workload, a configuration, faults and rates of interference."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from refimpl.cluster.router import POLICIES, RouterConfig
from refimpl.config import (
    EVICTION_POLICIES,
    IO_BACKENDS,
    LAYOUTS,
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    CacheConfig,
    EngineConfig,
    EvictionConfig,
    PrefetchConfig,
    Transfer,
    resolve_transfer,
)
from refimpl.keys import BlockPrompt, TokenPrompt
from refimpl.run.faults import KINDS, Chances, Faults
from refimpl.run.hardware import HARDWARE, MODELS, STORAGES
from refimpl.units import NS_PER_MS, NS_PER_S, NS_PER_US, Random, ceil_div
from refimpl.workload.request import RequestSpec
from refimpl.workload.scenario import FAMILIES, parse_scenario

T = TypeVar("T")
SMALL_PAGES: Final = (1, 2, 3, 4, 4, 5, 8, 16)
OF_RANKS: Final = (
    "probe_short",
    "slot_less",
    "die",
)  # drawn last, so that seeds stay what they were
NAMESPACES: Final = ((None, None), ("team", None), (None, "salt"), ("team", "salt"), (None, ""))
ADAPTERS: Final = (None, "adapter")


@dataclass(frozen=True)
class Plan:
    """All that is drawn before the first request is sent."""

    seed: int
    specs: list[RequestSpec]
    parallel_max: int | None
    again: list[RequestSpec]  # sent when the faults are over
    engine: EngineConfig
    instances: int
    router: RouterConfig
    hardware: str
    model: str
    transfer: Transfer
    storage: str
    store_pages: int | None
    call_pages: int  # pages of one storage call
    faults: Faults
    aborts: int  # chance per million of a turn to be followed by one, soon
    changes: int  # the same of an attach, a detach or a flush

    def __str__(self) -> str:
        return (
            f"{self.engine}\n{self.instances} instances, {self.router}, {len(self.specs)} requests"
        )


def pick(random: Random, choices: Sequence[T]) -> T:
    return choices[random.below(len(choices))]


def plan_of(seed: int) -> Plan:
    source = Random(seed).fork(0x5EED)
    page_size = pick(source, SMALL_PAGES)
    specs = _specs(source.fork(1), page_size)
    engine = _engine(source.fork(2), page_size, specs)
    if source.below(3):
        engine = _deepened(source.fork(6), engine, specs)
    random = source.fork(3)
    storage = pick(random, tuple(STORAGES))
    return Plan(
        seed=seed,
        specs=specs,
        parallel_max=pick(random, (None, None, 1, 3)),
        again=_again(source.fork(4), specs),
        engine=engine,
        instances=pick(random, (1, 2, 2, 3)),
        router=RouterConfig(
            pick(random, ("round_robin", *POLICIES)),
            balance_abs=random.below(4),
            index_pages_max=64,
            seed=seed,
        ),
        hardware=pick(random, tuple(HARDWARE)),
        model=pick(random, tuple(MODELS)),
        transfer=_transfer(random, storage),
        storage=storage,
        call_pages=pick(random, (1, 2, 5, 128)),
        store_pages=pick(random, (None, None, None, random.between(1, 60))),
        faults=_faults(source.fork(5)),
        aborts=pick(random, (0, 0, 20_000, 100_000)),
        changes=pick(random, (0, 0, 10_000, 60_000)),
    )


# ---- configuration ------------------------------------------------------------------------------


def _engine(random: Random, page_size: int, specs: list[RequestSpec]) -> EngineConfig:
    longest = max(ceil_div(spec.prompt.length + spec.output_tokens, page_size) for spec in specs)
    l1_pages = pick(random, (None, *[longest * part // 2 + 1 for part in (1, 2, 2, 2, 3, 3, 4, 6)]))
    basis = l1_pages or longest * 3
    l2_pages = pick(
        random, (0, None, *[basis * part // 4 + 1 for part in (2, 2, 2, 3, 3, 4, 4, 4, 6, 8, 16)])
    )
    cache = CacheConfig(
        page_size=page_size,
        l1_pages=l1_pages,
        l2_pages=l2_pages,
        write_policy=pick(random, WRITE_POLICIES),
        selective_hits=random.between(1, 3),
        eviction=EvictionConfig(
            pick(random, ("lru", *EVICTION_POLICIES)),
            protected_threshold=random.between(1, 3),
            threshold=random.between(20, 60),
            next_prompt_estimate=random.below(20),
        ),
        load_back_threshold_tokens=pick(random, (0, 1, 10, 30)),
        prefetch=_prefetch(random),
        store_percent=pick(random, (1, 10, 50, 50, 100, 100)),
    )
    return EngineConfig(
        cache=cache,
        storage_backend="memory" if cache.has_l2 and random.below(6) > 0 else "",
        reuse=random.below(20) > 0,
        chunked_prefill_tokens=page_size * pick(random, (1, 2, 4, 8, 1000)),
        running_max=pick(random, (1, 2, 4, 256)),
        queued_max=pick(random, (3, 1000, 1000, 1000)),
        decode_reserve_tokens=pick(random, (0, 0, 4, 30)),
    )


def _deepened(random: Random, engine: EngineConfig, specs: list[RequestSpec]) -> EngineConfig:
    """Local tiers too small for what is asked again, and an L3 worth asking."""
    page_size = engine.cache.page_size
    longest = max(ceil_div(spec.prompt.length + spec.output_tokens, page_size) for spec in specs)
    cache = replace(
        engine.cache,
        l1_pages=longest + random.below(longest),
        l2_pages=longest // 2 + random.below(longest) + 1,
        write_policy=pick(random, ("write_through", "write_through", *WRITE_POLICIES)),
        load_back_threshold_tokens=pick(random, (0, 1, 10)),
        prefetch=replace(engine.cache.prefetch, threshold_tokens=1, capacity_percent=100),
        store_percent=pick(random, (50, 100)),
    )
    return replace(engine, cache=cache, storage_backend="memory", reuse=True)


def _prefetch(random: Random) -> PrefetchConfig:
    times = (0, *[ms * NS_PER_MS for ms in (1, 20, 20, 200, 2000)])
    return PrefetchConfig(
        policy=pick(random, PREFETCH_POLICIES),
        threshold_tokens=pick(random, (1, 1, 1, 4, 16, 64)),
        timeout_base_ns=pick(random, times),
        timeout_per_ki_token_ns=pick(random, times),
        timeout_max_ns=pick(random, (20 * NS_PER_MS, 200 * NS_PER_MS, 30 * NS_PER_S)),
        capacity_percent=pick(random, (1, 10, 50, 100)),
    )


def _transfer(random: Random, storage: str) -> Transfer:
    layout, io_backend = pick(random, LAYOUTS), pick(random, IO_BACKENDS)
    if layout == "page_head":
        io_backend = "kernel"  # nothing serves the other pair
    return resolve_transfer(layout, io_backend, storage)[0]


def _faults(random: Random) -> Faults:
    often = (0, 0, 0, 20_000, 100_000, 400_000)
    chances = {kind: pick(random, often) for kind in KINDS if kind not in OF_RANKS}
    is_calm = random.below(4) == 0
    if is_calm:
        chances = dict.fromkeys(KINDS, 0)
    chances["delay"] = pick(random, (0, 200_000, 400_000, 900_000))
    delay_ns = pick(
        random, (NS_PER_US, 20 * NS_PER_MS, 50 * NS_PER_MS, 300 * NS_PER_MS, 3 * NS_PER_S)
    )
    seed = random.bits64()
    if not is_calm:
        chances |= {kind: pick(random, often) for kind in OF_RANKS if kind != "die"}
        chances["die"] = pick(
            random, (0, 0, 500, 5_000)
        )  # of each order; one rank alone heeds it not
    return Faults(Chances(chances, {"delay": delay_ns}), seed)


# ---- workload -----------------------------------------------------------------------------------


def _specs(random: Random, page_size: int) -> list[RequestSpec]:
    """One to three scenarios side by side, then spoiled: namespaces, repeats, odd lengths."""
    specs: list[RequestSpec] = []
    for _ in range(random.between(1, 3)):
        family = pick(random, (*FAMILIES, "blocks", "long_document", "shared_prefix"))
        part = _blocks(random) if family == "blocks" else _scenario(random, family, page_size)
        specs += _moved(part, len(specs))
    specs = [_spoiled(random, spec) for spec in specs[:40]]
    last_ns = max(spec.arrival_ns for spec in specs) + NS_PER_S // 2
    for _ in range(random.below(40)):
        twin = replace(pick(random, specs), rid=len(specs) + 1)
        if random.below(4):  # long after, when it may have sunk to L2 or L3
            twin = replace(twin, after=(), arrival_ns=random.below(last_ns))
        specs.append(twin)
    return specs


def _moved(part: list[RequestSpec], offset: int) -> list[RequestSpec]:
    return [
        replace(
            spec,
            rid=spec.rid + offset,
            after=tuple(rid + offset for rid in spec.after),
            session=spec.session + offset,
        )
        for spec in part
    ]


def _spoiled(random: Random, spec: RequestSpec) -> RequestSpec:
    extra_key, cache_salt = NAMESPACES[0]
    if random.below(3) == 0:
        extra_key, cache_salt = NAMESPACES[spec.session % len(NAMESPACES)]
    spec = replace(
        spec,
        extra_key=extra_key,
        cache_salt=cache_salt,
        lora_id=pick(random, (None, None, None, *ADAPTERS)),
        priority=random.below(3),
    )
    if not isinstance(spec.prompt, TokenPrompt):
        return spec
    kind = random.below(24)
    if kind < 4:  # nobody knows what it will say
        return replace(spec, prompt=TokenPrompt(spec.prompt.tokens))
    if kind == 4:
        return replace(spec, output_tokens=0, prompt=TokenPrompt(spec.prompt.tokens, array("I")))
    if kind == 5:
        return replace(spec, prompt=TokenPrompt(spec.prompt.tokens[: random.below(2)]))
    return spec


def _scenario(random: Random, family: str, page_size: int) -> list[RequestSpec]:
    def few(low: int, high: int) -> int:
        return random.between(low, high)

    output, rate = few(1, 24), pick(random, (0, 20, 300, 5000))
    poisson = f"rate={rate},"
    text = {
        "multi_turn": lambda: (
            f"clients={few(1, 4)},rounds={few(2, 4)},request_length={few(1, 30)},"
            f"system_length={few(0, 40)},systems={few(1, 2)},think_ms={few(0, 20)},"
            f"round_barrier={pick(random, ('true', 'false'))},{poisson}"
        ),
        "shared_prefix": lambda: (
            f"groups={few(1, 4)},prompts_per_group={few(2, 5)},system_length={few(1, 60)},"
            f"question_length={few(1, 20)},order={pick(random, ('random', 'tile'))},{poisson}"
        ),
        "long_document": lambda: (
            f"documents={few(1, 6)},questions={few(2, 5)},document_length={few(20, 150)},"
            f"question_length={few(1, 10)},order={pick(random, ('tile', 'grouped'))},{poisson}"
        ),
        "rag": lambda: (
            f"requests={few(6, 16)},documents={few(4, 8)},chunks={few(1, 3)},system_length=0,"
            f"chunk_length={few(4, 24)},question_length={few(1, 10)},{poisson}"
        ),
        "agent": lambda: (
            f"sessions={few(1, 4)},turns={few(2, 4)},tools_length={few(10, 60)},think_ms=1,"
            f"task_length={few(1, 20)},tool_output_min=1,tool_output_max={few(1, 20)},{poisson}"
        ),
        "all_unique": lambda: f"requests={few(4, 12)},request_length={few(1, 60)},{poisson}",
        "all_equal": lambda: (
            f"requests={few(4, 12)},request_length={few(1, 60)},gap_ms={few(0, 4)},"
        ),
    }[family]()
    if family != "all_unique":
        text += f"vocab={pick(random, (2, 3, 1000))},"
    scenario = f"{family}:{text}output_length={output}"
    return parse_scenario(scenario, random.bits64(), page_size).requests


def _blocks(random: Random) -> list[RequestSpec]:
    """A trace without tokens: block ids that continue each other now and then, some linked."""
    block = pick(random, (4, 8, 16))
    chains: list[tuple[int, ...]] = [()]
    specs = []
    fresh = random.below(1 << 20) << 20
    for rid in range(1, random.between(5, 12) + 1):
        opening = pick(random, chains)
        fresh += 8
        ids = opening + tuple(range(fresh, fresh + random.between(1, 4)))
        chains.append(ids)
        output = random.between(1, 20)
        linked = random.below(2)  # the last block or more is said by the model
        length = max((len(ids) - linked) * block - random.below(block), 1)
        specs.append(RequestSpec(rid, BlockPrompt(length, ids, block), output, rid * NS_PER_MS))
    return specs


def _again(random: Random, specs: list[RequestSpec]) -> list[RequestSpec]:
    """Some of the requests once more, as if new."""
    return [
        replace(pick(random, specs), rid=1000 + index, after=(), arrival_ns=0)
        for index in range(random.between(3, 8))
    ]

"""``refimpl bench``: how fast the tree and the simulator are, beside a floor measured in the same run.

Figures are medians of wall time on this machine; ratios to the floor are what carries over to
another. Must not know: the terminal. Called by: the command line.
"""

from __future__ import annotations

import hashlib
import os
import resource
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

from refimpl.config import CacheConfig, ConfigError
from refimpl.core.cache import HiCache
from refimpl.core.outbox import Outbox
from refimpl.keys import page_keys
from refimpl.run.options import Options
from refimpl.run.setup import Simulation, no_cycle_collection
from refimpl.units import NS_PER_S, NS_PER_US
from refimpl.workload.request import Workload
from refimpl.workload.scenario import parse_scenario

# The load of the tree's peer figure: 8 system prompts of 1,024 tokens, 200 conversations, 5 turns.
TREE_LOAD: Final = (
    "multi_turn:clients=200,rounds=5,systems=8,system_length=1024,request_length=512,"
    "output_length=1"
)
# What SGLang's tree core in Rust needs for a request of this load, in us, hash, match and insert:
# measured elsewhere with the same load, for orientation only.
PEER_US: Final = {"hash": 21.0, "match": 5.5, "insert": 13.8}
OF_BYTES: Final = (
    "copy",
    "ttft",
    "unique",
    "storage",
    "backlog",
)  # elsewhere, since they need tensors
_PAGE: Final = 64
_LONG_TOKENS: Final = 131_072


def bench_tree(repeats: int = 5) -> dict[str, Any]:
    """Hash, match and insert of the peer load at page 64, and of one request of 128k tokens."""
    prompts = [
        (spec.turn, spec.prompt.tokens)  # type: ignore[union-attr]  # scenarios carry tokens
        for spec in parse_scenario(TREE_LOAD, 1, _PAGE).requests
    ]
    prompts.sort(key=lambda entry: entry[0])  # turn by turn, as the peer's load
    tokens = [prompt for _, prompt in prompts]
    long = array("I", range(_LONG_TOKENS))
    with no_cycle_collection():
        runs = [_tree_pass(tokens) for _ in range(repeats)]
        floors = [_hash_floor(tokens) for _ in range(repeats)]
        longs = [_tree_pass([long]) for _ in range(repeats)]
    stages = {name: _us(run[name] for run in runs) for name in ("hash", "match", "insert")}
    total, floor = sum(stages.values()), _us(floors)
    return {
        "requests": len(tokens),
        "tokens_mean": sum(map(len, tokens)) // len(tokens),
        "us_per_request": stages | {"all": total},
        "sha256_floor_us": floor,
        "all_to_floor": total / floor,
        "peer_us": PEER_US | {"all": sum(PEER_US.values())},
        "long_request_ms": _us(sum(run.values()) for run in longs) / 1000,
    }


def _tree_pass(prompts: list[array[int]]) -> dict[str, int]:
    """Mean ns of each stage over ``prompts``, through a fresh cache."""
    cache = HiCache(CacheConfig(page_size=_PAGE), Outbox())
    spent = {"hash": 0, "match": 0, "insert": 0}
    for tokens in prompts:
        begun = perf_counter_ns()
        keys = page_keys(tokens, _PAGE)
        hashed = perf_counter_ns()
        match = cache.tree.find(keys)
        cache.tree.touch(match, is_hit=True)
        matched = perf_counter_ns()
        if match.pages < len(keys):
            anchor = match.node.pages[match.taken - 1] if match.pages else None
            slots = cache.device.pool.take(len(keys) - match.pages)
            cache.insert(anchor, keys, match.pages, slots, None)
        done = perf_counter_ns()
        spent["hash"] += hashed - begun
        spent["match"] += matched - hashed
        spent["insert"] += done - matched
    return {name: ns // len(prompts) for name, ns in spent.items()}


def _hash_floor(prompts: list[array[int]]) -> int:
    """Mean ns of the SHA-256 calls alone: nothing that names pages by them can be faster."""
    pages = [memoryview(prompt.tobytes()) for prompt in prompts]
    step, prior, sha256 = _PAGE * 4, bytes(32), hashlib.sha256
    chunks = [
        [prior + bytes(data[at : at + step]) for at in range(0, len(data), step)] for data in pages
    ]
    begun = perf_counter_ns()
    for request in chunks:
        for chunk in request:
            sha256(chunk).digest()
    return (perf_counter_ns() - begun) // len(prompts)


def bench_sim(trace: Path | None, repeats: int = 3) -> dict[str, Any]:
    """Requests per second of a replay through the cache alone and through all three tiers."""
    path = trace or _default_trace()
    source = {"trace": str(path)} if path is not None else {"workload": "multi_turn:clients=400"}
    results: dict[str, Any] = {"source": source.get("trace", source.get("workload"))}
    base = Options(**source)  # type: ignore[arg-type]  # names of Options
    workload = Simulation(base).workload
    results["requests"] = len(workload.requests)
    for name, options in _sim_cases(source):
        simulation = Simulation(options, workload)
        walls = [simulation.run().wall_ns for _ in range(repeats)]
        results[name] = len(workload.requests) * NS_PER_S / median(walls)
    if path is not None:
        floor = median(_lru_floor(workload) for _ in range(repeats))
        results["lru_floor"] = len(workload.requests) * NS_PER_S / floor
        results["cache_only_to_floor"] = results["cache_only"] / results["lru_floor"]
    results["memory_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return results


def _sim_cases(source: dict[str, str]) -> Iterable[tuple[str, Options]]:
    def options(**said: Any) -> Options:
        return Options(**source, **said)  # type: ignore[arg-type]

    tiers = {"enable_hierarchical_cache": True, "hicache_storage_backend": "memory"}
    yield "cache_only", options(page_size=512, max_total_tokens=512 * 10_000, cache_only=True)
    small = options(page_size=512, max_total_tokens=512 * 1000, cache_only=True)
    yield "cache_only_1000_pages", small
    yield "cache_only_no_limit", options(page_size=512, cache_only=True)
    yield "three_tiers_page_512", options(page_size=512, max_total_tokens=512 * 1600, **tiers)
    yield "three_tiers_page_64", options(page_size=64, max_total_tokens=512 * 1600, **tiers)


def _lru_floor(workload: Workload, capacity: int = 10_000) -> int:
    """ns of a bare OrderedDict LRU over the same pages, leaf touched first: what replay adds to."""
    begun = perf_counter_ns()
    cache: OrderedDict[bytes, None] = OrderedDict()
    for spec in workload.requests:
        for key in reversed(spec.prompt.page_keys(512, b"")):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return perf_counter_ns() - begun


def _default_trace() -> Path | None:
    """The conversation trace, where it is at hand."""
    folders = [os.environ.get("HICACHE_TRACES"), "../shared/traces"]
    for folder in folders:
        if folder and (path := Path(folder) / "conversation_trace.jsonl").is_file():
            return path
    return None


def _us(samples_ns: Iterable[int]) -> float:
    return median(samples_ns) / NS_PER_US


BENCHES: Final[dict[str, Callable[[Path | None], dict[str, Any]]]] = {
    "sim": bench_sim,
    "tree": lambda _: bench_tree(),
}


def run_bench(name: str, trace: Path | None) -> dict[str, Any]:
    """One benchmark by name; raises ConfigError when there is none of that name."""
    if name not in BENCHES:
        known = ", ".join((*BENCHES, *OF_BYTES, "serve"))
        raise ConfigError(f"there is no benchmark {name!r}; choose one of {known}")
    return BENCHES[name](trace)

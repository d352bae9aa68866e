"""From options to something that runs: configuration, cost model, workload, world.

All that is impossible is refused here with one line that names the flag; what is switched is said
in ``notices``. Must not know: the terminal. Called by: the command line, golden, tests.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from refimpl.cluster.dispatch import RankRouter, dispatch_config
from refimpl.cluster.router import POLICIES, Router, RouterConfig
from refimpl.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    EvictionConfig,
    PrefetchConfig,
    Transfer,
    require,
    require_choice,
    resolve_transfer,
)
from refimpl.core.engine import Engine
from refimpl.run import notices
from refimpl.run.cost import Cost
from refimpl.run.extra_config import ExtraConfig, prefetch_of, read_extra_config
from refimpl.run.faults import Faults
from refimpl.run.hardware import hardware_named, model_named
from refimpl.run.options import Options
from refimpl.run.record import Listener, Record
from refimpl.run.replay import CacheReplay
from refimpl.run.store import SharedStore
from refimpl.run.virtual_ranks import L3, Lanes, VirtualRanks, figures_of, lanes_of
from refimpl.run.world import Instance, World
from refimpl.units import GB, PER_MILLION, scaled_decimal
from refimpl.workload.family import shown
from refimpl.workload.request import Workload
from refimpl.workload.scenario import parse_scenario
from refimpl.workload.trace import TRACE_FORMATS, read_trace

STORAGE_BACKENDS = ("memory", "file", "mooncake", "hf3fs", "nixl", "aibrix", "dynamic")
_CHUNK_TOKENS = 8192  # upstream's default on large devices
_INSTANCES_MAX = 1024
_DP_MAX = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run."""

    record: Record
    wall_ns: int


class Simulation:
    """A run that can start: everything has been checked.

    ``page_bytes`` is the size of a page on one rank where a real model is served; else it is that of the
    model that is imitated.
    """

    def __init__(
        self, options: Options, workload: Workload | None = None, page_bytes: int | None = None
    ) -> None:
        self.options = options
        self.notices: list[str] = []
        extra = read_extra_config(
            options.hicache_storage_backend_extra_config, options.hicache_storage_backend
        )
        self.transfer = self._transfer()
        # A real model is split by its own heads: what is simulated beside it is not.
        self.cost = self._cost(self.transfer, options.tp_size if page_bytes is None else 1)
        self.page_bytes = self.cost.page_bytes if page_bytes is None else page_bytes
        self.engine = self._engine(extra)
        stored = self.cost.stored_page_bytes
        self._stored_page_bytes = stored if page_bytes is None else page_bytes
        self._store_pages = extra.pages_max(self._stored_page_bytes)
        self._router = self._routing()
        self.dispatch = self._dispatching()
        self._check_replay()
        self._faults = [
            Faults.parse(options.faults or "", options.fault_seed + index)
            for index in range(options.instances * options.dp_size)
        ]
        self._faults[0].check_ranks(options.tp_size)
        self.workload = self._workload() if workload is None else workload
        self.notices += self._more_notices()

    # ---- checking -------------------------------------------------------------------------------

    def _transfer(self) -> Transfer:
        options = self.options
        transfer, notices = resolve_transfer(
            options.hicache_mem_layout, options.hicache_io_backend, options.hicache_storage_backend
        )
        if options.enable_hierarchical_cache:
            self.notices += notices
        return transfer

    def _cost(self, transfer: Transfer, tp_size: int) -> Cost:
        options = self.options
        require(options.page_size >= 1, f"--page-size {options.page_size} must be at least 1 token")
        hardware, model = hardware_named(options.hardware), model_named(options.model)
        given = options.hicache_storage_backend
        storage = "memory" if given is None else given
        require_choice("--hicache-storage-backend", storage, STORAGE_BACKENDS)
        return Cost(hardware, model, tp_size, transfer, options.page_size, storage)

    def _engine(self, extra: ExtraConfig) -> EngineConfig:
        options = self.options
        has_storage = options.hicache_storage_backend is not None
        chunk = options.chunked_prefill_size
        require(
            not (options.disable_radix_cache and options.enable_hierarchical_cache),
            "--disable-radix-cache and --enable-hierarchical-cache are mutually exclusive",
        )
        require(
            not has_storage or options.enable_hierarchical_cache,
            "--hicache-storage-backend needs --enable-hierarchical-cache: L3 is read through L2",
        )
        require(
            has_storage or options.hicache_storage_prefetch_policy is None,
            "--hicache-storage-prefetch-policy needs --hicache-storage-backend",
        )
        l1_pages = self._l1_pages()
        return EngineConfig(
            cache=CacheConfig(
                page_size=options.page_size,
                l1_pages=l1_pages,
                l2_pages=self._l2_pages(l1_pages),
                write_policy=options.hicache_write_policy,
                eviction=_eviction(options),
                prefetch=self._prefetch(extra),
            ),
            storage_backend=options.hicache_storage_backend or "",
            reuse=not options.disable_radix_cache,
            chunked_prefill_tokens=max(_CHUNK_TOKENS, options.page_size)
            if chunk is None
            else chunk,
            running_max=options.max_running_requests,
            queued_max=options.max_queued_requests,
            decode_reserve_tokens=options.num_reserved_decode_tokens,
        )

    def _l1_pages(self) -> int | None:
        options = self.options
        share = _decimal("--mem-fraction-static", options.mem_fraction_static, 100)
        require(
            1 <= share <= 100,
            f"--mem-fraction-static {options.mem_fraction_static} must be above 0 and at most 1",
        )
        tokens = options.max_total_tokens
        if tokens is None:
            if options.cache_only:
                return None
            tokens = self.cost.l1_tokens_default(share)
        require(
            tokens >= options.page_size,
            f"--max-total-tokens {tokens} is below one page of {options.page_size} tokens;"
            " raise it or lower --page-size",
        )
        return tokens // options.page_size

    def _l2_pages(self, l1_pages: int | None) -> int | None:
        options = self.options
        ratio = _decimal("--hicache-ratio", options.hicache_ratio, PER_MILLION)
        size = _decimal("--hicache-size", options.hicache_size, GB)
        require(size >= 0, f"--hicache-size {options.hicache_size} must not be negative")
        require(
            ratio > PER_MILLION or size > 0,
            f"--hicache-ratio {options.hicache_ratio} must be above 1:"
            " a host tier no larger than L1 can hold nothing that L1 does not",
        )
        if not options.enable_hierarchical_cache:
            return 0
        if size:
            pages = size // self.page_bytes
            require(pages >= 1, f"--hicache-size {options.hicache_size} is below one page")
            return pages
        return None if l1_pages is None else l1_pages * ratio // PER_MILLION

    def _prefetch(self, extra: ExtraConfig) -> PrefetchConfig:
        options, config = self.options, PrefetchConfig()
        threshold = extra.prefetch_threshold
        if threshold is not None and threshold < options.page_size:
            self.notices.append(
                f"prefetch_threshold {threshold} is below one page:"
                f" it is now {options.page_size} tokens"
            )
        policy = options.hicache_storage_prefetch_policy
        return prefetch_of(config if policy is None else replace(config, policy=policy), extra)

    def _routing(self) -> RouterConfig:
        count, policy = self.options.instances, self.options.router_policy
        require(
            1 <= count <= _INSTANCES_MAX,
            f"--instances {count} must be 1 to {_INSTANCES_MAX}",
        )
        require_choice("--router-policy", policy, POLICIES)
        return RouterConfig(policy=policy, seed=self.options.seed)

    def _dispatching(self) -> RouterConfig:
        options = self.options
        require(
            1 <= options.dp_size <= _DP_MAX, f"--dp-size {options.dp_size} must be 1 to {_DP_MAX}"
        )
        return dispatch_config(options.load_balance_method, options.seed)

    def _check_replay(self) -> None:
        """Refuse what has no meaning where requests pass through the cache one by one."""
        options = self.options
        if not options.cache_only:
            return
        alone = "--cache-only replays through one cache"
        require(options.instances == 1, f"{alone}: leave --instances at 1")
        require(options.dp_size == 1, f"{alone}: leave --dp-size at 1")
        require(not options.disable_radix_cache, f"{alone}: leave out --disable-radix-cache")
        require(not options.faults, f"{alone}, whose copies can't fail: leave out --faults")

    def _workload(self) -> Workload:
        options = self.options
        require_choice("--trace-format", options.trace_format, tuple(TRACE_FORMATS))
        require(
            options.trace is None or options.workload is None,
            "--trace and --workload exclude each other; keep one",
        )
        if options.trace is not None:
            return read_trace(Path(options.trace), options.trace_format, options.limit)
        require(options.limit is None, "--limit needs --trace; a scenario says its own size")
        return parse_scenario(options.workload or "multi_turn", options.seed, options.page_size)

    def _more_notices(self) -> list[str]:
        options = self.options
        found = notices.lower_bound(self.workload, options.page_size)
        if not options.cache_only:  # which knows no hardware
            share = _decimal("--mem-fraction-static", options.mem_fraction_static, 100)
            budget = self.cost.hardware.hbm_bytes * share // 100
            found += notices.beyond_the_hardware(self.engine.cache, self.cost, budget)
        return found + notices.without_l2(options)

    def configuration(self) -> dict[str, Any]:
        """All that decides a run besides its workload, resolved: the input of a golden's digest."""
        options, cost = self.options, self.cost
        ranks = {"dp_size": options.dp_size, "dispatch": asdict(self.dispatch)}
        return {
            "engine": asdict(self.engine),
            "transfer": asdict(self.transfer),
            "router": asdict(self._router),
            "instances": options.instances,
            "store_pages": self._store_pages,
            "hardware": asdict(cost.hardware),
            "model": asdict(cost.model),
            "storage": asdict(cost.storage),
            "tp_size": options.tp_size,
            "faults": [options.faults or "", options.fault_seed],
            "cache_only": options.cache_only,
        } | (ranks if options.dp_size > 1 else {})  # the digest of one rank stays what it was

    def effective(self) -> dict[str, Any]:
        """What the run uses, where that isn't plain from the flags; None: without a limit."""
        cache = self.engine.cache
        return {
            "layout": self.transfer.layout,
            "io_backend": self.transfer.io_backend,
            "l1_pages": cache.l1_pages,
            "l2_pages": cache.l2_pages,
            "l3_pages": self._store_pages if self.engine.storage_backend else 0,
            "prefetch_policy": cache.prefetch.policy if self.engine.storage_backend else "",
        }

    # ---- running --------------------------------------------------------------------------------

    def run(
        self,
        progress: Callable[[int], None] | None = None,
        listener: Listener | None = None,
    ) -> Outcome:
        """Run to the end; ``progress`` hears how many more requests are over."""
        with no_cycle_collection():
            started = time.perf_counter_ns()
            if self.options.cache_only:
                record = self._replay(progress, listener)
            else:
                world = self.world()
                world.record.listener = listener
                record = world.run(self.workload, progress)
                record.ranks = _tallies(world)
            # Before the collector wakes: what it then does is no part of the run.
            return Outcome(record, time.perf_counter_ns() - started)

    def world(self) -> World:
        """A fresh world of this configuration."""
        instances = [Instance(Engine(self.engine), lanes) for lanes in self.lanes()]
        alone, ranks = Router(self.options.instances, self._router), self.options.dp_size
        router = alone if ranks == 1 else RankRouter(alone, ranks, self.dispatch)
        return World(instances, router, self.options.page_size)

    def lanes(self) -> list[Lanes]:
        """Fresh lanes of each data-parallel rank of each instance, over one L3."""
        l3 = L3(self._store_pages, self._pages_of, is_attached=bool(self.engine.storage_backend))
        return lanes_of(self.cost, self._faults, l3)

    def _pages_of(self, backend: str, extra_config: str) -> int | None:
        """What L3 holds when that is attached; None: no limit. Raises ConfigError."""
        return read_extra_config(extra_config or None, backend).pages_max(self._stored_page_bytes)

    def _replay(self, progress: Callable[[int], None] | None, listener: Listener | None) -> Record:
        record = Record()
        record.listener = listener
        requests = self.workload.requests
        store = SharedStore(self._store_pages) if self.engine.storage_backend else None
        replay = CacheReplay(self.engine.cache, store)
        for spec, step in zip(requests, replay.steps(requests), strict=True):
            record.submitted(spec, 0, 0)
            record.take(step, 0, 0)
            if progress is not None:
                progress(1)
        return record


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """No garbage collector while a run lasts: it would walk the growing tree over and over.

    Nothing is lost by it, since what leaves the tree is in no cycle and goes at once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tallies(world: World) -> dict[str, Any]:
    """What came of it that ranks are several, of all instances together; empty where they can't differ."""
    lanes = [instance.lanes for instance in world.instances]
    tallies = [each.tally for each in lanes if isinstance(each, VirtualRanks)]
    return figures_of(tallies) if tallies else {}


def _eviction(options: Options) -> EvictionConfig:
    text = options.radix_eviction_policy_config
    if text is None:
        return EvictionConfig(options.radix_eviction_policy)
    name = "--radix-eviction-policy-config"
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is malformed: {error}") from None
    require(isinstance(keys, dict), f"{name} must be a JSON object")
    known = {"slru": ("protected_threshold",), "tlru": ("threshold", "next_prompt_estimate")}
    allowed = known.get(options.radix_eviction_policy, ())
    for key, value in keys.items():
        require(
            key in allowed,
            f"{name}: {options.radix_eviction_policy} has no key {key!r}"
            + (f"; it has {', '.join(allowed)}" if allowed else ""),
        )
        require(type(value) is int, f"{name}: {key} must be a whole number, not {value!r}")
    return EvictionConfig(options.radix_eviction_policy, **keys)


def _decimal(name: str, text: str, scale: int) -> int:
    try:
        return scaled_decimal(text, scale)
    except ValueError:
        raise ConfigError(f"{name} {shown(text)} is not a number") from None

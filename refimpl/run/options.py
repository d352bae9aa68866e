"""The flags, under SGLang's own names, as one class that command line and golden cases share.

A flag is a field: its name with dashes, its default, its help and the group ``--help`` shows it
under. Must not know: what the flags lead to (``setup`` does). Called by: the command line, golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final

from refimpl.config import ConfigError
from refimpl.run.faults import KINDS


def flag(default: Any, text: str, *, alias: str = "", choices: str = "") -> Any:
    """A field that is a flag."""
    if choices:
        text = f"{text}: {choices}"
    return field(default=default, metadata={"help": text, "alias": alias})


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that can be said about a simulated run. None: not said."""

    # Load
    workload: str | None = flag(None, "scenario string, see `refimpl workloads`")
    trace: str | None = flag(None, "trace file to replay, plain or gzipped")
    trace_format: str = flag("mooncake", "its format", choices="mooncake bailian azure burstgpt")
    limit: int | None = flag(None, "use only the first N lines of the trace")
    seed: int = flag(0, "seed of everything that is drawn")

    # Cache
    page_size: int = flag(64, "tokens in a page")
    max_total_tokens: int | None = flag(None, "tokens of L1; default: what fits the memory share")
    mem_fraction_static: str = flag("0.85", "share of device memory for weights and L1")
    enable_hierarchical_cache: bool = flag(False, "turn the host tier on", alias="--enable-hicache")
    hicache_ratio: str = flag("2", "size of L2 as a multiple of L1, above 1")
    hicache_size: str = flag("0", "size of L2 in GB (1e9 bytes) a rank; overrides the ratio")
    hicache_write_policy: str = flag(
        "write_through",
        "when pages go to the next tier",
        choices="write_through write_through_selective write_back",
    )
    hicache_mem_layout: str = flag(
        "page_first",
        "how L2 lies in memory",
        choices="layer_first page_first page_first_direct page_head",
    )
    hicache_io_backend: str = flag("kernel", "what copies L1 <-> L2", choices="kernel direct")
    hicache_storage_backend: str | None = flag(
        None, "turn L3 on", choices="memory file mooncake hf3fs nixl aibrix dynamic"
    )
    hicache_storage_prefetch_policy: str | None = flag(
        None,
        "when a request stops waiting for L3; default timeout",
        choices="best_effort wait_complete timeout",
    )
    hicache_storage_backend_extra_config: str | None = flag(
        None, "JSON object, or @FILE in JSON, TOML or YAML"
    )
    radix_eviction_policy: str = flag(
        "lru", "who leaves first", choices="lru lfu fifo mru filo priority slru tlru"
    )
    radix_eviction_policy_config: str | None = flag(
        None, "JSON object with the numbers of slru or tlru"
    )
    disable_radix_cache: bool = flag(False, "keep nothing for later requests")

    # Scheduler
    chunked_prefill_size: int | None = flag(None, "prefill tokens in a batch; default 8192")
    max_running_requests: int = flag(256, "requests decoding at once")
    max_queued_requests: int = flag(100_000, "requests waiting; one more is refused")
    num_reserved_decode_tokens: int = flag(512, "room kept for the output of each running request")

    # Machine
    hardware: str = flag("h200", "what the virtual clock imitates", choices="h200 h100 h20 a100")
    model: str = flag(
        "llama-3.1-8b",
        "whose shape it runs",
        choices="llama-3.1-8b llama-3.1-70b qwen3-8b qwen3-32b deepseek-r1",
    )
    tp_size: int = flag(1, "ranks of an instance", alias="--tp")
    dp_size: int = flag(
        1, "data-parallel ranks of an instance, a cache each, that share L3", alias="--dp"
    )
    load_balance_method: str = flag(
        "round_robin",
        "which data-parallel rank gets a request",
        choices="round_robin shortest_queue cache_aware auto",
    )
    instances: int = flag(1, "instances that share L3")
    router_policy: str = flag(
        "cache_aware",
        "who gets a request",
        choices="cache_aware round_robin random shortest_queue power_of_two consistent_hashing",
    )
    cache_only: bool = flag(
        False, "no engine and no time: requests one after another, copies complete at once"
    )
    faults: str | None = flag(
        None,
        "chances per million, such as fetch_fail=50000,delay=1000:5ms; every rank of --tp-size draws its"
        " own, and rank1.vanish=500 is of one alone",
        choices=" ".join(KINDS),
    )
    fault_seed: int = flag(0, "seed of the faults")


# What `refimpl run` and the table of the README show, unless flags say otherwise.
MULTI_TURN: Final[dict[str, Any]] = {
    "workload": "multi_turn:clients=24,rounds=10,request_length=2048,rate=0.3,think_ms=12000",
    "seed": 1,
    "max_total_tokens": 120_000,
}

GROUPS: Final = {
    "workload": "Load",
    "page_size": "Cache",
    "chunked_prefill_size": "Scheduler",
    "hardware": "Machine",
}  # the first flag of each group


def option_names() -> dict[str, str]:
    """Flag name without dashes in front, as in ``page-size``, to field name."""
    return {entry.name.replace("_", "-"): entry.name for entry in fields(Options)}


def options_from(settings: Mapping[str, object], where: str) -> Options:
    """Options from a mapping of flag names, as a golden case has them.

    Raises ConfigError naming ``where`` for an unknown flag or a value of the wrong type.
    """
    names, types = option_names(), {entry.name: str(entry.type) for entry in fields(Options)}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in names:
            close = get_close_matches(name, names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{where}: unknown flag {name!r}{hint}")
        wanted = types[names[name]].partition(" ")[0]
        if type(value).__name__ != wanted:
            raise ConfigError(f"{where}: {name} must be of type {wanted}, not {value!r}")
        values[names[name]] = value
    return Options(**values)

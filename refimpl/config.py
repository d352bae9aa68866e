"""What can be configured, what is legal together, and the errors that say what to change.

Values are integers in the unit their name ends in. Defaults are the mission's; where upstream
differs its value is named in the comment. Must not know: flags, files, how a value is used.
Called by: core, cost, and the edges that parse flags into these classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from refimpl.units import NS_PER_S

WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES: Final = ("best_effort", "wait_complete", "timeout")
EVICTION_POLICIES: Final = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru")
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")
IO_BACKENDS: Final = ("kernel", "direct")


class ConfigError(ValueError):
    """A setting that can't work. The message is one line: the setting, its value, what to change."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    require(value in choices, f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")


def require_splittable(model: str, tp_size: int, heads: int, kv_heads: int) -> None:
    """Raise ConfigError unless a model's heads go over so many ranks; ``kv_heads`` 0: a latent cache."""
    require(tp_size >= 1, f"--tp-size {tp_size} must be at least 1")
    sizes = [size for size in range(1, heads + 1) if heads % size == 0]
    if kv_heads:
        sizes = [size for size in sizes if kv_heads % size == 0 or size % kv_heads == 0]
    possible = f"choose from {', '.join(map(str, sizes))}"
    require(
        heads % tp_size == 0,
        f"--tp-size {tp_size} does not divide the {heads} heads of {model}: {possible}",
    )
    require(
        tp_size in sizes,
        f"--tp-size {tp_size} can't split or repeat the {kv_heads} KV heads of {model}: {possible}",
    )


def kv_heads_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """First and past the last of ``total`` KV heads on a rank; one is repeated where ranks are more."""
    first = rank * total // size
    return first, first + max(total // size, 1)


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """Order in which both tiers give up pages. The numbers serve slru and tlru alone (spec 2.9)."""

    policy: str = "lru"
    protected_threshold: int = 2  # slru: hits from which a node is protected
    threshold: int = 0  # tlru, tokens
    next_prompt_estimate: int = 0  # tlru, tokens

    def __post_init__(self) -> None:
        require_choice("--radix-eviction-policy", self.policy, EVICTION_POLICIES)
        require(self.protected_threshold >= 1, "protected_threshold must be at least 1")
        if self.policy == "tlru":
            require(
                self.threshold > self.next_prompt_estimate >= 0,
                "tlru needs threshold > next_prompt_estimate >= 0 in --radix-eviction-policy-config",
            )


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """When an L3 -> L2 prefetch starts and when a request stops waiting for it (mission M3)."""

    policy: str = "timeout"
    threshold_tokens: int = 256
    timeout_base_ns: int = 2 * NS_PER_S  # upstream 0.5.23: 1 s
    timeout_per_ki_token_ns: int = NS_PER_S // 10  # upstream 0.5.23: 0.25 s
    timeout_max_ns: int = 30 * NS_PER_S  # upstream 0.5.23: no maximum
    capacity_percent: int = 50  # share of L2 that fetches in flight may hold (spec 6.2)

    def __post_init__(self) -> None:
        require_choice("--hicache-storage-prefetch-policy", self.policy, PREFETCH_POLICIES)
        require(self.threshold_tokens >= 1, "prefetch_threshold must be at least 1 token")
        require(self.timeout_base_ns >= 0, "prefetch_timeout_base must not be negative")
        require(
            self.timeout_per_ki_token_ns >= 0, "prefetch_timeout_per_ki_token must not be negative"
        )
        require(self.timeout_max_ns >= 0, "prefetch_timeout_max must not be negative")
        require(1 <= self.capacity_percent <= 100, "prefetch capacity must be 1 to 100 percent")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The three tiers of one instance. A page count of None is a tier without a limit."""

    page_size: int = 64  # tokens
    l1_pages: int | None = None
    l2_pages: int | None = 0  # 0 turns L2 off
    write_policy: str = "write_through"
    selective_hits: int = 3  # write_through_selective: the creation counts; upstream 0.5.23: 2
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    load_back_threshold_tokens: int = 10
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    store_percent: int = 50  # share of L2 that writes to L3 in flight may pin

    def __post_init__(self) -> None:
        require(self.page_size >= 1, f"--page-size {self.page_size} must be at least 1 token")
        require(
            self.l1_pages is None or self.l1_pages >= 1,
            "--max-total-tokens is below one page; raise it or lower --page-size",
        )
        require(self.l2_pages is None or self.l2_pages >= 0, "the host tier must not be negative")
        require_choice("--hicache-write-policy", self.write_policy, WRITE_POLICIES)
        require(self.selective_hits >= 1, "write_through_selective needs at least 1 hit")
        require(self.load_back_threshold_tokens >= 0, "load_back_threshold must not be negative")
        require(1 <= self.store_percent <= 100, "the store share must be 1 to 100 percent")

    @property
    def has_l2(self) -> bool:
        """True when the host tier exists."""
        return self.l2_pages != 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One serving instance: its cache and the limits of its scheduler."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    storage_backend: str = ""  # L3 from the start; empty: none
    reuse: bool = True  # False: --disable-radix-cache, nothing is kept for a later request
    chunked_prefill_tokens: int = 8192  # prefill tokens in one batch
    running_max: int = 256  # requests decoding at once
    queued_max: int = 100_000  # requests waiting; one more is refused
    decode_reserve_tokens: int = 512  # room kept for each running request's output at admission

    def __post_init__(self) -> None:
        page = self.cache.page_size
        require(
            self.chunked_prefill_tokens >= page,
            f"--chunked-prefill-size {self.chunked_prefill_tokens} is below one page of {page}"
            " tokens; raise it or lower --page-size",
        )
        require(self.running_max >= 1, "--max-running-requests must be at least 1")
        require(self.queued_max >= 1, "--max-queued-requests must be at least 1")
        require(
            self.decode_reserve_tokens >= 0, "--num-reserved-decode-tokens must not be negative"
        )
        require(
            self.cache.has_l2 or not self.storage_backend,
            "--hicache-storage-backend needs --enable-hierarchical-cache: L3 is read through L2",
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """How bytes lie in host memory and what moves them."""

    layout: str = "page_first"
    io_backend: str = "kernel"


def resolve_transfer(
    layout: str, io_backend: str, storage_backend: str | None = None
) -> tuple[Transfer, list[str]]:
    """The pair that will be used, and one notice for each thing that was switched (mission M4).

    ``page_first`` goes with ``kernel`` alone, ``page_first_direct`` with ``direct`` alone, Mooncake
    forbids ``layer_first``. Raises ConfigError for an unknown name or a pair that nothing serves.
    """
    require_choice("--hicache-mem-layout", layout, LAYOUTS)
    require_choice("--hicache-io-backend", io_backend, IO_BACKENDS)
    notices = []
    mooncake = storage_backend == "mooncake"
    if layout == "page_first_direct" and io_backend == "kernel":
        io_backend = "direct"
        notices.append(
            "page_first_direct needs io backend direct: --hicache-io-backend is now direct"
        )
    if layout == "page_first" and io_backend == "direct":
        layout = "page_first_direct" if mooncake else "layer_first"
        notices.append(f"page_first needs io backend kernel: --hicache-mem-layout is now {layout}")
    if mooncake and layout == "layer_first":
        layout = "page_first_direct" if io_backend == "direct" else "page_first"
        notices.append(f"mooncake forbids layer_first: --hicache-mem-layout is now {layout}")
    require(
        not (layout == "page_head" and io_backend == "direct"),
        "--hicache-mem-layout page_head needs --hicache-io-backend kernel",
    )
    return Transfer(layout, io_backend), notices

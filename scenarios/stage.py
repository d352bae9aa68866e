"""Where a story takes place: the engine on its table, the names of pages, what is held back."""

from __future__ import annotations

from typing import TypeAlias

from refimpl.config import CacheConfig, EngineConfig, EvictionConfig, PrefetchConfig
from refimpl.keys import PageKey
from refimpl.messages import Step
from scenarios.labels import Labels, command_line, fact_line, ns_of, tokens_of
from scenarios.tabletop import KINDS, Tabletop

Lines: TypeAlias = list[str]


class Stage:
    """Where a story takes place."""

    def __init__(self) -> None:
        self.held: frozenset[str] = frozenset()
        self.is_left = False
        self.seen = 0  # facts that ``facts`` has shown
        self.open(config_of(""))

    def open(self, config: EngineConfig) -> None:
        """A fresh engine, and nothing in L3."""
        self.table = Tabletop(config)
        self.labels = Labels(config.cache.page_size)
        self.seen = 0

    def reopen(self, config: EngineConfig) -> None:
        """Another engine on the same L3."""
        storage, labels = self.table.storage, self.labels
        self.open(config)
        self.table.storage, self.labels = storage, labels

    def show(self, step: Step) -> Lines:
        commands = [command_line(command, self.table, self.labels) for command in step.commands]
        return commands + [fact_line(fact) for fact in step.facts]

    def close(self) -> None:
        if not self.is_left:
            self.table.finish_all()

    def op(self, kind: str, words: list[str]) -> tuple[int, int | None]:
        """The op that ``[op] [pages]`` means; by default the oldest of its kind."""
        ops = [op for op, command in self.table.ops.items() if isinstance(command, KINDS[kind])]
        named = [int(word.removeprefix("#")) for word in words if word.startswith("#")]
        counts = [int(word) for word in words if not word.startswith("#")]
        assert named or ops, f"no {kind} in flight"
        return (named or ops)[0], counts[0] if counts else None


def words_of(text: str) -> tuple[list[str], dict[str, str]]:
    """Plain words, and those of the form ``name=value``."""
    words = text.split()
    named = dict(word.split("=", 1) for word in words if "=" in word)
    return [word for word in words if "=" not in word], named


def config_of(text: str) -> EngineConfig:
    """Small by default: pages of 2 tokens, and thresholds that nothing falls below."""
    _, given = words_of(text)

    def number(name: str, default: int) -> int:
        return int(given.pop(name, default))

    def time(name: str, default: int) -> int:
        return ns_of(given.pop(name, f"{default}ns"))

    usual = PrefetchConfig()
    eviction = EvictionConfig(
        given.pop("evict", "lru"),
        number("protected", 2),
        number("tail_threshold", 0),
        number("next_prompt", 0),
    )
    prefetch = PrefetchConfig(
        given.pop("prefetch", usual.policy),
        number("prefetch_threshold", 1),
        time("timeout_base", usual.timeout_base_ns),
        time("timeout_per_ki", usual.timeout_per_ki_token_ns),
        time("timeout_max", usual.timeout_max_ns),
        number("prefetch_percent", 100),
    )
    cache = CacheConfig(
        page_size=number("page_size", 2),
        l1_pages=number("l1", 8),
        l2_pages=number("l2", 16),
        write_policy=given.pop("write", "write_through"),
        selective_hits=number("selective_hits", 3),
        eviction=eviction,
        load_back_threshold_tokens=number("load_back", 0),
        prefetch=prefetch,
        store_percent=number("store_percent", 100),
    )
    config = EngineConfig(
        cache,
        storage_backend="memory" if given.pop("storage", "off") == "on" else "",
        reuse=given.pop("reuse", "on") == "on",
        chunked_prefill_tokens=number("chunk", 8192),
        running_max=number("running", 256),
        queued_max=number("queued", 100_000),
        decode_reserve_tokens=number("reserve", 512),
    )
    assert not given, f"unknown settings {given}"
    return config


def keys_of(stage: Stage, text: str) -> list[PageKey]:
    (prompt,), given = words_of(text)
    space = given.get("extra"), given.get("salt"), given.get("lora")
    return stage.labels.learn(tokens_of(prompt), *space)

"""What a cache should come to, told without the cache: a page LRU, and a cache without limits.

Both know prompts as tuples of tokens. Beside them stand the worlds and replays they are held against.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from refimpl.cluster.router import Router, RouterConfig
from refimpl.config import CacheConfig, EngineConfig, EvictionConfig, PrefetchConfig, Transfer
from refimpl.core.engine import Engine
from refimpl.facts import Admitted
from refimpl.keys import TokenPrompt
from refimpl.messages import Fact
from refimpl.run.cost import Cost
from refimpl.run.hardware import hardware_named, model_named
from refimpl.run.lanes import LaneExecutor
from refimpl.run.record import Record
from refimpl.run.replay import CacheReplay
from refimpl.run.store import SharedStore
from refimpl.run.world import Instance, World
from refimpl.workload.request import RequestSpec, Workload
from refimpl.workload.scenario import parse_scenario

Prefix: TypeAlias = tuple[int, ...]

# One of each family, small, and shaped so that it repeats itself.
SCENARIOS: Final = (
    "multi_turn:clients=5,rounds=4,request_length=40,system_length=33,output_length=20,rate=40",
    "shared_prefix:groups=4,prompts_per_group=5,system_length=90,question_length=17,rate=60",
    "long_document:documents=4,document_length=150,questions=4,question_length=9,order=tile",
    "rag:requests=20,documents=6,chunks=2,chunk_length=32,system_length=16,output_length=7,rate=40",
    "agent:sessions=4,turns=4,tools_length=80,task_length=20,tool_output_max=60,output_length=15",
    "all_unique:requests=15,request_length=70,output_length=10,rate=50",
    "all_equal:requests=12,request_length=70,output_length=10,gap_ms=15",
)


def family_of(scenario: str) -> str:
    return scenario.partition(":")[0]


# ---- oracles ------------------------------------------------------------------------------------


def prefixes(tokens: Sequence[int], page_size: int) -> list[Prefix]:
    """Full pages, each told by all tokens up to its end."""
    return [tuple(tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size)]


class PageLru:
    """A cache of pages in the order of their last use; a prompt is touched from its leaf on.

    First it is matched, then touched, then what is too much goes: of a prompt larger than the cache
    its beginning stays.
    """

    def __init__(self, pages_max: int | None, page_size: int) -> None:
        self.pages_max = pages_max
        self._page_size = page_size
        self._pages: OrderedDict[Prefix, None] = OrderedDict()

    def hits(self, tokens: Sequence[int]) -> int:
        """Leading pages that are there, as far as one token is left to compute; then it is touched."""
        pages = prefixes(tokens, self._page_size)
        usable = (len(tokens) - 1) // self._page_size
        found = 0
        while found < usable and pages[found] in self._pages:
            found += 1
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while self.pages_max is not None and len(self._pages) > self.pages_max:
            self._pages.popitem(last=False)
        return found


class Unlimited:
    """A cache that keeps all, outputs included, as soon as a request is let in."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: set[tuple[object, Prefix]] = set()

    def hits(self, spec: RequestSpec) -> int:
        """Leading pages of the prompt that anybody before had in prompt or output."""
        assert isinstance(spec.prompt, TokenPrompt)
        name = (spec.extra_key, spec.cache_salt or None, spec.lora_id)
        tokens = list(spec.prompt.tokens)
        usable = (len(tokens) - 1) // self._page_size
        # Its last token is said, but nothing was ever computed of it.
        said = tokens + list(spec.prompt.script or ())[:-1]
        pages = [(name, page) for page in prefixes(said, self._page_size)]
        found = 0
        while found < usable and pages[found] in self._pages:
            found += 1
        self._pages.update(pages)
        return found


# ---- what they are held against -----------------------------------------------------------------


@dataclass
class Admissions:
    """A listener that remembers who was let in, in order, with what it hit."""

    facts: list[Admitted] = field(default_factory=list)

    def see(self, now: int, instance: int, fact: Fact) -> None:
        del now, instance
        if isinstance(fact, Admitted):
            self.facts.append(fact)

    @property
    def hit_tokens(self) -> int:
        return sum(map(hit_tokens, self.facts))


def hit_tokens(fact: Admitted) -> int:
    return fact.device_tokens + fact.host_tokens + fact.storage_tokens


def tiers(
    page_size: int,
    l1: int | None,
    l2: int | None = 0,
    write_policy: str = "write_through",
    eviction: EvictionConfig | None = None,
) -> CacheConfig:
    """A cache whose thresholds stand in the way of nothing."""
    prefetch = PrefetchConfig("wait_complete", threshold_tokens=1, capacity_percent=100)
    return CacheConfig(
        page_size=page_size,
        l1_pages=l1,
        l2_pages=l2,
        write_policy=write_policy,
        eviction=eviction or EvictionConfig(),
        load_back_threshold_tokens=0,
        prefetch=prefetch,
        store_percent=100,
    )


def simulate(
    workload: Workload,
    cache: CacheConfig,
    *,
    has_storage: bool = False,
    instances: int = 1,
    router: RouterConfig | None = None,
    prepare: Callable[[World], None] | None = None,
) -> tuple[Record, Admissions]:
    """A whole world on the virtual clock."""
    transfer = Transfer("page_first", "kernel")
    model = model_named("llama-3.1-8b")
    cost = Cost(hardware_named("h200"), model, 1, transfer, cache.page_size)
    config = EngineConfig(
        cache=cache, storage_backend="memory" if has_storage else "", decode_reserve_tokens=0
    )
    store = SharedStore()
    world = World(
        [Instance(Engine(config), LaneExecutor(cost, store)) for _ in range(instances)],
        Router(instances, router),
        cache.page_size,
    )
    admissions = world.record.listener = Admissions()
    if prepare is not None:
        prepare(world)
    return world.run(workload), admissions


def replay(
    requests: Sequence[RequestSpec], cache: CacheConfig, *, has_storage: bool = False
) -> list[Admitted]:
    """The same at the level of the cache alone, one request after another."""
    steps = CacheReplay(cache, SharedStore() if has_storage else None).steps(requests)
    return [fact for step in steps for fact in step.facts if isinstance(fact, Admitted)]


def scenario(text: str, page_size: int, seed: int = 1) -> Workload:
    return parse_scenario(text, seed, page_size)

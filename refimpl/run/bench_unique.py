"""``refimpl bench unique``: what the cache costs a load that it can do nothing for (field report Y03).

Prompts that never repeat are served with no cache and with all three tiers under each write policy, in the
same run, turn by turn; L1 holds a few of them, so that all but the first make others leave.
Must not know: the terminal. Called by: the command line.
"""

from __future__ import annotations

from array import array
from statistics import median
from typing import Any, Final
from uuid import uuid4

from refimpl.keys import TokenPrompt
from refimpl.model.catalog import Model
from refimpl.run.model_choice import ModelChoice
from refimpl.run.options import Options
from refimpl.run.real import serve
from refimpl.run.record import Row
from refimpl.run.setup import Simulation
from refimpl.storage.memory import forget
from refimpl.units import Random
from refimpl.workload.request import RequestSpec, Workload

_REQUESTS: Final = 4
_PROMPT_TOKENS: Final = 96
_OUTPUT_TOKENS: Final = 4
_HELD: Final = 2  # prompts that L1 has room for
_PAGE: Final = 16
NO_CACHE: Final = "no_cache"
POLICIES: Final = ("write_through", "write_through_selective", "write_back")


def bench_unique(model_path: str = "smollm2", repeats: int = 9) -> dict[str, Any]:
    """Mean TTFT in ms and tokens a second of the median turn; ratios are medians of those of each turn.

    All are served in each turn, every second time in the opposite order, so that whatever else the machine
    does slows all of them.
    """
    choice = ModelChoice(model_path, "fast")
    model = choice.open(seed=0)
    workload = unique_prompts(model.config.vocab)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in (NO_CACHE, *POLICIES)}
    for turn in range(repeats + 1):
        for name in list(spent)[:: 1 - 2 * (turn % 2)]:
            spent[name].append(_served(name, workload, choice, model))
    for found in spent.values():
        del found[0]  # the first turn warms up
    return {
        "model": model_path,
        "requests": _REQUESTS,
        "prompt_tokens": _PROMPT_TOKENS,
        "ttft_ms": {name: median(ns for ns, _ in found) / 1e6 for name, found in spent.items()},
        "tokens_per_s": {name: median(rate for _, rate in found) for name, found in spent.items()},
        "ratios": {name: _ratios(spent[name], spent[NO_CACHE]) for name in POLICIES},
    }


def _ratios(ours: list[tuple[float, float]], bare: list[tuple[float, float]]) -> dict[str, float]:
    turns = list(zip(ours, bare, strict=True))
    return {
        "ttft_to_no_cache": median(our[0] / their[0] for our, their in turns),
        "throughput_to_no_cache": median(our[1] / their[1] for our, their in turns),
    }


def _served(
    name: str, workload: Workload, choice: ModelChoice, model: Model
) -> tuple[float, float]:
    store = uuid4().hex
    try:
        return _figures(serve(name, _simulation(name, store, workload), choice, model).rows)
    finally:
        forget(store)


def unique_prompts(vocab: int) -> Workload:
    """One after another, none like another."""
    random = Random(1)
    requests = []
    for rid in range(1, _REQUESTS + 1):
        tokens = array("I", [random.below(vocab) for _ in range(_PROMPT_TOKENS)])
        after = (rid - 1,) if rid > 1 else ()
        requests.append(RequestSpec(rid, TokenPrompt(tokens), _OUTPUT_TOKENS, after=after))
    return Workload("unique", requests)


def _simulation(name: str, store: str, workload: Workload) -> Simulation:
    tokens = _HELD * (_PROMPT_TOKENS + 2 * _PAGE)
    if name == NO_CACHE:
        options = Options(page_size=_PAGE, max_total_tokens=tokens, disable_radix_cache=True)
        return Simulation(options, workload)
    options = Options(
        page_size=_PAGE,
        max_total_tokens=tokens,
        enable_hierarchical_cache=True,
        hicache_write_policy=name,
        hicache_storage_backend="memory",
        hicache_storage_backend_extra_config=f'{{"prefetch_threshold": {_PAGE}, "store": "{store}"}}',
    )
    return Simulation(options, workload)


def _figures(rows: list[Row]) -> tuple[float, float]:
    """(mean TTFT in ns, prompt and output tokens a second)."""
    ttft = sum(row.ttft_ns for row in rows) / len(rows)
    tokens = sum(row.prompt_tokens + row.output_tokens for row in rows)
    wall_ns = max(row.end_ns for row in rows) - min(row.arrival_ns for row in rows)
    return ttft, tokens * 1e9 / wall_ns

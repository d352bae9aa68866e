"""``refimpl bench copy`` and ``ttft``: how fast real bytes move, and what that is worth.

Ratios to a floor of the same run carry over to another machine, seconds do not.
Must not know: the terminal. Called by: the command line.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from cuda_numba.bench import plain_copy, take_turns
from cuda_numba.native import CORES, line_aligned
from refimpl.keys import TokenPrompt
from refimpl.memory.layout import AXES, Geometry
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Mover
from refimpl.run.model_choice import ModelChoice
from refimpl.run.options import Options
from refimpl.run.real import serve
from refimpl.run.setup import Simulation
from refimpl.units import Random
from refimpl.workload.request import RequestSpec, Workload

# More than the caches of most processors hold: (pages that move, their shape). Rows of a token, layer and
# K or V are 384 bytes in one and 2 KB in the other, which has a quarter of its model's layers.
_GEOMETRIES: Final = {
    "smollm2": (64, Geometry(layers=30, kvs=2, heads=3, dim=64, page_size=64)),
    "llama-3.1-8b": (128, Geometry(layers=8, kvs=2, heads=8, dim=128, page_size=16)),
}
_PREFIX_TOKENS: Final = 2048


def bench_copy(repeats: int = 9) -> dict[str, Any]:
    """GB/s of both io backends for every layout, beside torch indexing and a plain copy.

    Calls take turns, so that whatever else the machine does slows all of them; of each the median
    turn counts. ``ratios`` are those of the slower direction.
    """
    rates = {
        name: {layout: _copy_rates(geometry, layout, pages, repeats) for layout in AXES}
        for name, (pages, geometry) in _GEOMETRIES.items()
    }
    ratios = {
        name: {layout: _ratios(found) for layout, found in layouts.items()}
        for name, layouts in rates.items()
    }
    return {"gb_per_s": rates, "ratios": ratios}


def _copy_rates(geometry: Geometry, layout: str, pages: int, repeats: int) -> dict[str, float]:
    device, host = Pool(geometry, "layer_first", 2 * pages), Pool(geometry, layout, 2 * pages)
    device.tensor.view(-1).view(torch.int16).random_()
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1))
    l1, l2 = order[:pages].tolist(), order[pages:].tolist()
    size = pages * geometry.page_bytes
    source, target = np.ones(size // 8, np.uint64), line_aligned(size // 8)
    kernel, direct = Mover(device, host, "kernel"), Mover(device, host, "direct")
    # By themselves, because the temporary tensors and the threads of torch disturb what comes next.
    ours: dict[str, Callable[[], None]] = {
        "plain_copy": partial(plain_copy, target, source, size // 8, CORES),
        "kernel_down": partial(kernel.back_up, l1, l2),
        "kernel_up": partial(_load, kernel, l2, l1),
    }
    peers: dict[str, Callable[[], None]] = {
        "direct_down": partial(direct.back_up, l1, l2),
        "direct_up": partial(_load, direct, l2, l1),
        "token_indexing_down": partial(_token_indexing, device, host, l1, l2),
        "token_indexing_up": partial(_token_indexing, host, device, l2, l1),
        "page_indexing_down": partial(_page_indexing, device, host, l1, l2),
        "page_indexing_up": partial(_page_indexing, host, device, l2, l1),
    }
    seconds = {
        name: taken
        for calls in (ours, peers)
        for name, taken in zip(calls, take_turns(repeats, *calls.values()), strict=True)
    }
    return {name: size / taken / 1e9 for name, taken in seconds.items()}


def _ratios(rates: dict[str, float]) -> dict[str, float]:
    ways = ("down", "up")
    ratios = {
        f"kernel_to_{peer}": min(rates[f"kernel_{way}"] / rates[f"{peer}_{way}"] for way in ways)
        for peer in ("token_indexing", "page_indexing", "direct")
    }
    slower = min(rates[f"kernel_{way}"] for way in ways)
    return {"kernel_to_plain_copy": slower / rates["plain_copy"], **ratios}


def _load(mover: Mover, l2: list[int], l1: list[int]) -> None:
    mover.load(l2, l1).wait(mover.host.geometry.layers - 1)


def _token_indexing(fro: Pool, to: Pool, from_slots: list[int], to_slots: list[int]) -> None:
    """What one writes in torch for slots of tokens, as upstream's are: an index a layer."""
    size = fro.geometry.page_size
    (to_pages, to_tokens), (pages, tokens) = (
        _tokens_of(slots, size) for slots in (to_slots, from_slots)
    )
    for layer in range(fro.geometry.layers):
        to.layer(layer)[:, to_pages, to_tokens] = fro.layer(layer)[:, pages, tokens]


def _tokens_of(slots: list[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and place in it of every token of some pages."""
    shape = len(slots), page_size
    pages = torch.tensor(slots)[:, None].expand(shape)
    return pages.flatten(), torch.arange(shape[1]).expand(shape).flatten()


def _page_indexing(fro: Pool, to: Pool, from_slots: list[int], to_slots: list[int]) -> None:
    """The same for slots of pages."""
    for layer in range(fro.geometry.layers):
        to.layer(layer)[:, to_slots] = fro.layer(layer)[:, from_slots]


def bench_ttft(model_path: str = "smollm2", repeats: int = 3) -> dict[str, Any]:
    """TTFT of a prompt whose prefix of 2,048 tokens is in L2, against computing it.

    Each round sends a prompt, two others that push it out of L1, and the prompt with a question more.
    """
    choice = ModelChoice(model_path, "fast")
    model = choice.open(seed=0)
    random = Random(1)
    requests: list[RequestSpec] = []
    for turn in range(repeats):
        prefix = [random.below(model.config.vocab) for _ in range(_PREFIX_TOKENS)]
        others = [[random.below(model.config.vocab) for _ in range(_PREFIX_TOKENS)] for _ in "ab"]
        for tokens in (prefix, *others, [*prefix, 1, 2, 3, 4]):
            rid = len(requests) + 1
            requests.append(_spec(rid, tokens, turn))
    options = Options(
        workload="multi_turn",
        page_size=64,
        max_total_tokens=_PREFIX_TOKENS + 512,
        enable_hierarchical_cache=True,
        hicache_ratio="6",
    )
    served = serve("L1 + L2", Simulation(options, Workload("ttft", requests)), choice, model)
    cold = [row.ttft_ns for row in served.rows if row.rid % 4 == 1]
    warm = [row for row in served.rows if row.rid % 4 == 0]
    return {
        "model": model_path,
        "prefix_tokens": _PREFIX_TOKENS,
        "host_hit_tokens": sum(row.host_tokens for row in warm),
        "computed_ttft_ms": median(cold) / 1e6,
        "from_l2_ttft_ms": median(row.ttft_ns for row in warm) / 1e6,
        "ratios": {"from_l2_to_computed": median(row.ttft_ns for row in warm) / median(cold)},
    }


def _spec(rid: int, tokens: list[int], turn: int) -> RequestSpec:
    after = (rid - 1,) if rid > 1 else ()
    return RequestSpec(rid, TokenPrompt(array("I", tokens)), 1, after=after, turn=turn)

"""``refimpl bench copy`` and ``ttft``: how fast real bytes move, and what that is worth.

Ratios to a floor of the same run carry over to another machine, seconds do not.
Must not know: the terminal. Called by: the command line.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

import numpy as np
import torch

from cuda_numba.bench import plain_copy
from cuda_numba.native import CORES
from refimpl.keys import TokenPrompt
from refimpl.memory.layout import AXES, Geometry
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Mover
from refimpl.model.catalog import open_model
from refimpl.run.options import Options
from refimpl.run.real import serve
from refimpl.run.setup import Simulation
from refimpl.units import Random
from refimpl.workload.request import RequestSpec, Workload

# A page of 0.5 MB, as an 8B model's at 16 tokens with a quarter of the layers; 64 of them.
_GEOMETRY: Final = Geometry(layers=8, kvs=2, heads=8, dim=128, page_size=16)
_PAGES: Final = 64
_PREFIX_TOKENS: Final = 2048


def bench_copy(repeats: int = 7) -> dict[str, Any]:
    """GB/s of both io backends for every layout, beside torch indexing and a plain copy."""
    device = Pool(_GEOMETRY, "layer_first", 2 * _PAGES)
    device.tensor.view(-1).view(torch.int16).random_()
    order = torch.randperm(2 * _PAGES, generator=torch.Generator().manual_seed(1))
    l1, l2 = order[:_PAGES].tolist(), order[_PAGES:].tolist()
    size = _PAGES * _GEOMETRY.page_bytes
    source = np.ones(size // 8, np.uint64)
    target = np.zeros(size // 8, np.uint64)
    plain = _rate(size, partial(plain_copy, target, source, size // 8, CORES), repeats)
    results: dict[str, Any] = {"megabytes": size / 1e6, "plain_copy": plain}
    for layout in AXES:
        host = Pool(_GEOMETRY, layout, 2 * _PAGES)
        indexed = _rate(size, partial(_torch_indexing, device, host, l1, l2), repeats)
        rates: dict[str, float] = {"torch_indexing_down": indexed}
        for io in ("kernel", "direct"):
            mover = Mover(device, host, io)
            rates[f"{io}_down"] = _rate(size, partial(mover.back_up, l1, l2), repeats)
            rates[f"{io}_up"] = _rate(size, partial(_load, mover, l2, l1), repeats)
        rates["kernel_to_plain"] = rates["kernel_down"] / plain
        rates["kernel_to_indexing"] = rates["kernel_down"] / indexed
        results[layout] = rates
    return results


def _load(mover: Mover, l2: list[int], l1: list[int]) -> None:
    mover.load(l2, l1).wait(_GEOMETRY.layers - 1)


def _torch_indexing(device: Pool, host: Pool, l1: list[int], l2: list[int]) -> None:
    """What one writes without kernels: an index and an assignment a layer."""
    for layer in range(_GEOMETRY.layers):
        host.layer(layer)[:, l2] = device.layer(layer)[:, l1]


def _rate(size: int, call: Callable[[], object], repeats: int) -> float:
    call()
    spent = []
    for _ in range(repeats):
        begun = perf_counter_ns()
        call()
        spent.append(perf_counter_ns() - begun)
    return size / median(spent)


def bench_ttft(model_path: str = "smollm2", repeats: int = 3) -> dict[str, Any]:
    """TTFT of a prompt whose prefix of 2,048 tokens is in L2, against computing it.

    Each round sends a prompt, two others that push it out of L1, and the prompt with a question more.
    """
    model = open_model(model_path, arithmetic="fast")
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
    served = serve("L1 + L2", Simulation(options, Workload("ttft", requests)), model)
    cold = [row.ttft_ns for row in served.rows if row.rid % 4 == 1]
    warm = [row for row in served.rows if row.rid % 4 == 0]
    return {
        "model": model_path,
        "prefix_tokens": _PREFIX_TOKENS,
        "host_hit_tokens": sum(row.host_tokens for row in warm),
        "computed_ttft_ms": median(cold) / 1e6,
        "from_l2_ttft_ms": median(row.ttft_ns for row in warm) / 1e6,
        "from_l2_to_computed": median(row.ttft_ns for row in warm) / median(cold),
    }


def _spec(rid: int, tokens: list[int], turn: int) -> RequestSpec:
    after = (rid - 1,) if rid > 1 else ()
    return RequestSpec(rid, TokenPrompt(array("I", tokens)), 1, after=after, turn=turn)

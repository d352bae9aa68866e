"""Bytes and answers end to end on one device, with nothing but torch, numba and NumPy beside them.

Pages leave L1, the pool is poisoned, and they come back into other slots while the rest of the prompt
is computed. Both runs compute the same chunks, so that on any arithmetic equal bytes give equal logits.
`check.py` runs this on a CUDA machine; the tests run it on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from refimpl.memory.layout import AXES, Geometry
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Mover
from refimpl.model.config import TINY_GQA, TINY_MLA, ModelConfig
from refimpl.model.fast import Fast
from refimpl.model.paged import Chunk, KvView
from refimpl.model.transformer import Transformer
from refimpl.model.weights import random_weights

GQA = Geometry(layers=4, kvs=2, heads=2, dim=64, page_size=16)
MLA = Geometry(layers=4, kvs=1, heads=1, dim=96, page_size=16)
PAGES, PAGE = 12, 4
LEFT, BACK, HOST = [5, 6, 0, 3], [1, 2, 4, 7], [2, 3, 10, 7]  # slots in L1 before and after, in L2


def combinations(geometry: Geometry) -> Iterator[tuple[str, str]]:
    """Every layout with every io backend that a geometry allows."""
    for layout, io in product(AXES, ("kernel", "direct")):
        if not (geometry.is_mla and layout == "page_head"):
            yield layout, io


def wrong_bytes(device: str) -> list[str]:
    """The combinations whose pages come back changed, or change others."""
    return [
        f"{'mla' if geometry.is_mla else 'gqa'} {layout} {io}"
        for geometry in (GQA, MLA)
        for layout, io in combinations(geometry)
        if not _comes_back(geometry, layout, io, device)
    ]


def _comes_back(geometry: Geometry, layout: str, io: str, device: str) -> bool:
    near, far = Pool(geometry, "layer_first", PAGES, device), Pool(geometry, layout, PAGES)
    _tag(near)
    before, mover = near.by_page().clone(), Mover(near, far, io)
    mover.back_up(LEFT, HOST)
    near.tensor.zero_()
    mover.finish()  # slots change hands between batches, when the device is at rest
    mover.load(HOST, BACK).wait(geometry.layers - 1)
    others = [slot for slot in range(PAGES) if slot not in BACK]
    after = near.by_page()
    return torch.equal(_bits(after[BACK]), _bits(before[LEFT])) and not _bits(after[others]).any()


def _tag(pool: Pool) -> None:
    """Every element is told apart from its neighbours on all axes."""
    view = _bits(pool.by_page())
    numbers = torch.arange(view.numel(), device=view.device) * 31 + 7
    pool.by_page().copy_(numbers.view(view.shape).to(view.dtype).view(pool.tensor.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(kind)


def wrong_answers(device: str) -> list[str]:
    """The combinations whose loaded prefix gives other logits, or other KV, than the computed one."""
    wrong = []
    for config in (TINY_GQA, TINY_MLA):
        weights = {name: each.to(device) for name, each in random_weights(config, 1).items()}
        model = Transformer(config, weights, Fast())
        geometry = _geometry(config)
        for layout, io in combinations(geometry):
            if not _answers_alike(model, geometry, layout, io):
                wrong.append(f"{config.name} {layout} {io}")
    return wrong


def _geometry(config: ModelConfig) -> Geometry:
    kvs = 1 if config.mla else 2
    return Geometry(
        config.layers, kvs, config.cached_heads, config.key_width, PAGE, dtype=config.dtype
    )


def _answers_alike(model: Transformer, geometry: Geometry, layout: str, io: str) -> bool:
    tokens = [(17 * at + 3) % model.config.vocab for at in range(PAGE * len(LEFT) + 6)]
    first = PAGE * len(LEFT)
    rest = [8, 9]  # the slots of what is computed after the prefix
    near = Pool(geometry, "layer_first", PAGES, model.device)
    kv = near.tensor.flatten(2, 3)  # [kv, layer, row, head, dim]
    view = KvView(kv[0], kv[1] if geometry.kvs > 1 else None, PAGE)

    def compute(prefix: list[int], start: int, mover: Mover | None = None) -> torch.Tensor:
        chunk = Chunk(tokens[start:] if start else tokens[:first], start, [*prefix, *rest])
        loading = mover.load(HOST, prefix) if mover else None
        return model.forward([chunk], view, loading.wait if loading else None)

    compute(LEFT, 0)
    plain = compute(LEFT, first).clone()
    before = near.by_page().clone()
    far = Pool(geometry, layout, PAGES)
    mover = Mover(near, far, io)
    mover.beside_bytes_min = 0
    mover.finish()
    mover.back_up(LEFT, HOST)
    near.tensor.fill_(float("nan"))
    mover.finish()
    loaded = compute(BACK, first, mover)
    mover.finish()
    after = near.by_page()
    rest_alike = torch.equal(_bits(after[rest][0]), _bits(before[rest][0]))
    prefix_alike = torch.equal(_bits(after[BACK]), _bits(before[LEFT]))
    return torch.equal(plain, loaded) and prefix_alike and rest_alike

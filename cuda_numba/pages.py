"""Copies of pages between two pools: gather, scatter and change of layout are all one copy.

Oracle: ``dst[dst_pages] = src[src_pages]`` with both pools seen by axis (`oracle.view`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cuda_numba import checks, native
from cuda_numba.arrays import span
from cuda_numba.backend import Backend, choose, launcher
from cuda_numba.checks import PageIds
from cuda_numba.fold import Nest, Shape, Strides, fold
from cuda_numba.tuning import DEFAULT, Tuning

GROUP_BYTES_MIN: Final = 8 << 20
PIECE_BYTES_MIN: Final = 4096  # a page of memory: then each is looked up once


def copy_pages(
    dst: Any,
    src: Any,
    dst_pages: PageIds,
    src_pages: PageIds,
    dst_strides: Strides,
    src_strides: Strides,
    shape: Shape,
    *,
    layer: int | None = None,
    stream: Any = None,
    backend: Backend | None = None,
    tuning: Tuning = DEFAULT,
) -> None:
    """Copy page ``src_pages[i]`` of ``src`` to page ``dst_pages[i]`` of ``dst``, for every i.

    Pools are flat and of 64-bit words: NumPy arrays (the call returns when all is copied), or device
    arrays (it returns when the copy is launched on ``stream``). Strides are in words. ``layer`` copies
    that layer alone. A copy reads and writes each word once.

    Raises `LayoutError` before anything is written: pages outside a pool, a page written twice, sides
    that share memory, strides that put two words in one place, arrays of a wrong type or form.
    """
    call = _Call(dst, src, (dst_pages, src_pages), (dst_strides, src_strides), shape, backend)
    if call.is_empty:
        return
    nest = call.nest(layer)
    if call.runs_on == "cuda":
        launcher().copy_nest(dst, src, call.pages, nest, stream, tuning)
        return
    threads, past = tuning.cpu_threads, tuning.stream_stores
    native.copy_nest(dst, src, call.ids, nest, threads=threads, stream=past)


def copy_layers(
    dst: Any,
    src: Any,
    dst_pages: PageIds,
    src_pages: PageIds,
    dst_strides: Strides,
    src_strides: Strides,
    shape: Shape,
    *,
    arrived: Callable[[int], None],
    stream: Any = None,
    backend: Backend | None = None,
    tuning: Tuning = DEFAULT,
) -> None:
    """`copy_pages` of all layers, in order, telling of each: ``arrived(layer)``.

    It is told when the layer has been copied, by whichever thread did, or on a device when its copy
    has been launched on ``stream``: what is recorded there then comes after it. A CPU copies layers
    that lie close together in one go and tells of each. Raises as `copy_pages` does, before anything
    is told.
    """
    call = _Call(dst, src, (dst_pages, src_pages), (dst_strides, src_strides), shape, backend)
    if call.is_empty:
        for layer in range(shape.layers):
            arrived(layer)
        return
    if call.runs_on == "cuda":
        for layer in range(shape.layers):
            launcher().copy_nest(dst, src, call.pages, call.nest(layer), stream, tuning)
            arrived(layer)
        return
    groups = call.groups()

    def group_arrived(number: int) -> None:
        for layer in groups[number]:
            arrived(layer)

    native.copy_nests(
        dst,
        src,
        call.ids,
        [call.nest_of(group) for group in groups],
        arrived=group_arrived,
        threads=tuning.cpu_threads,
        stream=tuning.stream_stores,
    )


class _Call:
    """What was asked for, checked: nothing that follows can go out of bounds."""

    def __init__(
        self,
        dst: Any,
        src: Any,
        pages: tuple[PageIds, PageIds],
        strides: tuple[Strides, Strides],
        shape: Shape,
        backend: Backend | None,
    ) -> None:
        self.runs_on = choose(backend, dst=dst, src=src)
        self.pages = checks.page_lists(*pages)
        self._shape, self._strides = shape, strides
        whole = fold(shape, *strides)
        spans = span("dst", dst), span("src", src)
        checks.nest_bounds(whole, (spans[0][1] // 8, spans[1][1] // 8), self.pages)
        checks.apart(shape, strides[0], self.pages[0])
        checks.no_overlap(spans, strides, self.pages)
        self.is_empty = not len(self.pages[0])
        if self.runs_on == "cpu" and not self.is_empty:
            checks.writable(dst)

    def nest(self, layer: int | None) -> Nest:
        return fold(self._shape, *self._strides, layer, far_inside=self.runs_on == "cpu")

    def groups(self) -> list[range]:
        """Layers to copy together on a CPU.

        Where layers lie close together they are read in one go: layer by layer, pieces of 128 bytes 4 KB
        apart came with 3 GB/s, and with 20 in one go. And a copy of a few MB is over before the next one
        has been handed out: groups of 8 MB came with 30 GB/s where layers of 3 MB came with 21.
        """
        closest = 8 * min(strides.layer for strides in self._strides)
        layer_bytes = 8 * len(self.pages[0]) * self._shape.total // self._shape.layers
        size = max(
            -(-PIECE_BYTES_MIN // max(1, closest)), -(-GROUP_BYTES_MIN // max(1, layer_bytes))
        )
        layers = range(self._shape.layers)
        size = min(size, len(layers))
        return [layers[first : first + size] for first in layers[::size]]

    def nest_of(self, layers: range) -> Nest:
        """The loops over some neighbouring layers."""
        strides = (each._replace(base=each.base + layers[0] * each.layer) for each in self._strides)
        return fold(self._shape._replace(layers=len(layers)), *strides, far_inside=True)

    @property
    def ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.pages[0].ids, self.pages[1].ids

"""Copies of pages between two pools: gather, scatter and change of layout are all this one call.

Oracle: ``dst[dst_pages] = src[src_pages]`` with both pools seen by axis (`oracle.view`).
"""

from __future__ import annotations

from typing import Any

from cuda_numba import checks, native
from cuda_numba.arrays import span
from cuda_numba.backend import Backend, choose, launcher
from cuda_numba.checks import PageIds
from cuda_numba.fold import Shape, Strides, fold
from cuda_numba.tuning import DEFAULT, Tuning


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
    runs_on = choose(backend, dst=dst, src=src)
    pages = checks.page_lists(dst_pages, src_pages)
    nest = fold(shape, dst_strides, src_strides, layer)
    spans = span("dst", dst), span("src", src)
    checks.nest_bounds(nest, (spans[0][1] // 8, spans[1][1] // 8), pages)
    checks.apart(shape, dst_strides, pages[0])
    checks.no_overlap(spans, (dst_strides, src_strides), pages)
    if not len(pages[0]):
        return
    if runs_on == "cuda":
        launcher().copy_nest(dst, src, pages, nest, stream, tuning)
        return
    checks.writable(dst)
    ids = pages[0].ids, pages[1].ids
    native.copy_nest(dst, src, ids, nest, threads=tuning.cpu_threads, stream=tuning.stream_stores)

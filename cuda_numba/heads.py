"""Heads of pages into a compact buffer and back, for two sides that split heads differently.

The same copy as any other: a range of heads is a pool with a later base and fewer heads. The buffer
holds page after page in the order kv, layer, token, head, so that one page is one piece to send.

Oracle: ``staging[:n] = pool[pages, :, :, begin:end]`` and back, both seen by axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_numba.backend import Backend
from cuda_numba.checks import PageIds, page_list
from cuda_numba.fold import LayoutError, Shape, Strides, compact
from cuda_numba.pages import copy_pages
from cuda_numba.tuning import DEFAULT, Tuning


def staged_shape(shape: Shape, heads: tuple[int, int]) -> Shape:
    """What the buffer holds of a page of ``shape``: heads ``[begin, end)`` of it.

    Raises `LayoutError` when the shape has no such heads.
    """
    begin, end = heads
    if not 0 <= begin < end <= shape.heads:
        raise LayoutError(f"heads [{begin}, {end}) are not among the {shape.heads} of the pool")
    return shape._replace(heads=end - begin)


def gather_heads(
    staging: Any,
    pool: Any,
    pages: PageIds,
    heads: tuple[int, int],
    pool_strides: Strides,
    shape: Shape,
    *,
    stream: Any = None,
    backend: Backend | None = None,
    tuning: Tuning = DEFAULT,
) -> None:
    """Copy heads ``[begin, end)`` of page ``pages[i]`` to place i of ``staging``.

    ``shape`` is that of the pool's pages. Each word is read and written once. Raises as `copy_pages`.
    """
    staged = staged_shape(shape, heads)
    places = np.arange(len(page_list(pages)))
    copy_pages(
        *(staging, pool, places, pages),
        *(compact(staged), _from_head(pool_strides, heads[0]), staged),
        stream=stream,
        backend=backend,
        tuning=tuning,
    )


def scatter_heads(
    pool: Any,
    staging: Any,
    pages: PageIds,
    heads: tuple[int, int],
    pool_strides: Strides,
    shape: Shape,
    *,
    stream: Any = None,
    backend: Backend | None = None,
    tuning: Tuning = DEFAULT,
) -> None:
    """Copy place i of ``staging`` to heads ``[begin, end)`` of page ``pages[i]``; others stay.

    ``shape`` is that of the pool's pages. Each word is read and written once. Raises as `copy_pages`.
    """
    staged = staged_shape(shape, heads)
    places = np.arange(len(page_list(pages)))
    copy_pages(
        *(pool, staging, pages, places),
        *(_from_head(pool_strides, heads[0]), compact(staged), staged),
        stream=stream,
        backend=backend,
        tuning=tuning,
    )


def _from_head(strides: Strides, head: int) -> Strides:
    return strides._replace(base=strides.base + head * strides.head)

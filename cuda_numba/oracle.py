"""What each kernel must equal, as NumPy lines. Slow, and nothing but array indexing.

Not for use on the way of a copy: the tests and the check on a device compare with it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cuda_numba.checks import Words
from cuda_numba.fold import Shape, Strides, canonical
from cuda_numba.index import mix

ALL: Final = slice(None)


def view(words: Words, pages: int, strides: Strides, shape: Shape) -> Words:
    """Pages of a flat pool by axis: [page, layer, kv, head, token, word]."""
    steps = [8 * step for step in (*strides[:5], 1)]
    return as_strided(words[strides.base :], (pages, *shape), steps)


def copy_pages(dst: Words, src: Words, to: Any, fro: Any, layer: int | None = None) -> None:
    """``dst`` and ``src`` are views by axis, ``to`` and ``fro`` their pages."""
    layers = ALL if layer is None else layer
    dst[to, layers] = src[fro, layers]


def gather_heads(staging: Words, pool: Words, pages: Any, heads: tuple[int, int]) -> None:
    """Views by axis; the heads are those of ``pool``."""
    staging[: len(pages)] = pool[pages, :, :, heads[0] : heads[1]]


def scatter_heads(pool: Words, staging: Words, pages: Any, heads: tuple[int, int]) -> None:
    """Views by axis; the heads are those of ``pool``."""
    pool[pages, :, :, heads[0] : heads[1]] = staging[: len(pages)]


def page_checksums(pool: Words, pages: Any) -> NDArray[np.uint64]:
    """A view by axis; every word is mixed with its position in kv, layer, token, head, word order."""
    shape = Shape(*pool.shape[1:])
    position = view(np.arange(shape.total, dtype=np.uint64), 1, canonical(shape), shape)
    mixed: Any = mix(pool[pages], position)  # type: ignore[arg-type]  # arrays wrap as kernels do
    sums: NDArray[np.uint64] = np.bitwise_xor.reduce(mixed, axis=(1, 2, 3, 4, 5), dtype=np.uint64)
    return sums

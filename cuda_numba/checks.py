"""What a copy needs and a kernel does not ask: checked on the host, before anything is written.

The simulator accepts negative indices, huge blocks and misaligned arrays; a device reads or writes
whatever lies there. So nothing below is left to a kernel, and every error says what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cuda_numba.fold import LayoutError, Nest, Shape, Strides, check_apart

Words: TypeAlias = NDArray[np.uint64]
PageIds: TypeAlias = "Sequence[int] | NDArray[Any] | PageList"

VECTOR_BYTES = 16
CACHE_LINE_BYTES = 64
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, eq=False)
class PageList:
    """Page numbers that have been looked at once, for many copies.

    ``on_device`` is where a device backend keeps its copy of them; a list belongs to one device.
    """

    ids: NDArray[np.int64]
    lowest: int
    highest: int
    repeats: bool
    on_device: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)


def page_list(pages: PageIds) -> PageList:
    """Page numbers as a list that ``copy_pages`` takes without looking at each again.

    Raises `LayoutError` when they are not integers of 64 bits in one dimension.
    """
    if isinstance(pages, PageList):
        return pages
    given = np.asarray(pages)
    if given.size == 0:
        given = given.astype(np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise LayoutError(f"pages are {given.dtype}{list(given.shape)}: pass integers in a row")
    lowest, highest = (int(given.min()), int(given.max())) if given.size else (0, -1)
    if highest > _INT64_MAX:
        raise LayoutError(f"page {highest} does not fit in 64 bits with a sign")
    ids = np.array(given, dtype=np.int64)  # a copy: what was checked must not change
    return PageList(ids, lowest, highest, len(np.unique(ids)) < len(ids))


def page_lists(dst: PageIds, src: PageIds) -> tuple[PageList, PageList]:
    """Both ends of a copy, which must pair up, and write no page twice."""
    to, fro = page_list(dst), page_list(src)
    if len(to) != len(fro):
        raise LayoutError(f"{len(to)} pages to write, but {len(fro)} to read: they go in pairs")
    if to.repeats:
        raise LayoutError("dst_pages names a page twice: which of the two should it hold?")
    return to, fro


def host_words(side: str, words: Any) -> Words:
    """The array as it is, if it is a flat run of 64-bit words.

    Raises `LayoutError` for any other type or form.
    """
    if not isinstance(words, np.ndarray) or words.dtype != np.uint64:
        what = getattr(words, "dtype", type(words).__name__)
        raise LayoutError(f"{side} is {what}: pass a NumPy array, .reshape(-1).view(np.uint64)")
    if words.ndim != 1 or not words.flags.c_contiguous:
        raise LayoutError(
            f"{side} is not flat: pass .reshape(-1) of the whole pool, not of a slice"
        )
    if not words.flags.aligned:
        raise LayoutError(
            f"{side} begins at {words.ctypes.data:#x}, which no word may: align it to 8"
        )
    return words


def writable(words: Words) -> Words:
    """The array, if it may be written to."""
    if not words.flags.writeable:
        raise LayoutError("dst is read-only: pass the pool itself")
    return words


def bounds(side: str, words: int, pages: PageList, base: int, stride: int, reach: int) -> None:
    """Refuse page lists that reach outside ``words``. Python integers, so nothing can wrap."""
    if not len(pages):
        return
    if pages.lowest < 0:
        raise LayoutError(f"{side}: page {pages.lowest} is negative; pages are counted from 0")
    end = base + pages.highest * stride + reach
    if end > words:
        raise LayoutError(
            f"{side}: page {pages.highest} ends at word {end}, but the pool has {words}; "
            "check the page numbers, the strides and that the whole pool was passed"
        )


def nest_bounds(nest: Nest, words: tuple[int, int], pages: tuple[PageList, PageList]) -> None:
    """`bounds` of both sides of a copy; ``words`` and ``pages`` are those of dst, then of src."""
    bounds("dst", words[0], pages[0], nest.to[0], nest.to[1], nest.reach_to)
    bounds("src", words[1], pages[1], nest.fro[0], nest.fro[1], nest.reach_fro)


def apart(shape: Shape, to: Strides, pages: PageList) -> None:
    """Refuse a dst whose words share places, within a page or from page to page."""
    check_apart(shape, to, pages.highest + 1)


def no_overlap(
    spans: tuple[tuple[int, int], tuple[int, int]],
    strides: tuple[Strides, Strides],
    pages: tuple[PageList, PageList],
) -> None:
    """Refuse a copy that may read what it has written. Spans are (address, bytes) of dst and src.

    Within one pool, pages may be copied to other pages.
    """
    (to, to_bytes), (fro, fro_bytes) = spans
    if to + to_bytes <= fro or fro + fro_bytes <= to:
        return
    if to != fro or strides[0] != strides[1]:
        raise LayoutError("dst and src share memory with different strides: copy through a buffer")
    both = np.intersect1d(pages[0].ids, pages[1].ids)
    if both.size:
        raise LayoutError(f"page {both[0]} is read and written by one copy: make it two copies")


def is_paired(nest: Nest, *addresses: int) -> bool:
    """Whether every access may be 16 bytes wide: even runs and steps, aligned addresses."""
    steps = (*nest.to, *nest.fro, nest.sizes[4])
    return all(step % 2 == 0 for step in steps) and not any(a % VECTOR_BYTES for a in addresses)


def is_streamable(nest: Nest, address: int) -> bool:
    """Whether every run is whole cache lines of the side that is written to."""
    words = CACHE_LINE_BYTES // 8
    steps = (*nest.to, nest.sizes[4])
    return all(step % words == 0 for step in steps) and address % CACHE_LINE_BYTES == 0

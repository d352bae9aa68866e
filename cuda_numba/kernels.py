"""The CUDA kernels: page copies and checksums, each for accesses of 16 and of 8 bytes.

A block is (units of a run, items, rows); a grid is as many blocks as the launch allows, however many
rows there are, because a copy must leave most of a device to the model. Bounds of pools and pages
are the host's business (`checks`); a thread checks the bounds of its loops.

Oracle: `dst[dst_pages] = src[src_pages]` over views by axis, and the checksums of `oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda, types

from cuda_numba import index, vector

_split_row = cuda.jit(device=True, inline="always")(index.split_row)
_row_offset = cuda.jit(device=True, inline="always")(index.row_offset)
_mix = cuda.jit(device=True, inline="always")(index.mix)


def _signed(sizes):
    """As 64-bit integers with a sign: numba compares and adds the two kinds as floats."""
    a, b, c, d, e = sizes
    return np.int64(a), np.int64(b), np.int64(c), np.int64(d), np.int64(e)


_signed = cuda.jit(device=True, inline="always")(_signed)
_load_pair, _store_pair = vector.load_pair, vector.store_pair
_load_word, _store_word = vector.load_word, vector.store_word
_as_integer = vector.as_integer


def _build_copy(load: Any, store: Any, width: int) -> Callable[..., None]:
    """A copy by accesses of ``width`` words.

    A thread makes one read and one write for each unit it is given, four reads at a time (`grid.IN_FLIGHT`),
    and two reads of page numbers a row.
    """

    def copy(dst, src, dst_pages, src_pages, to, fro, sizes):
        n0, n1, n2, items, units = _signed(sizes)
        rows = dst_pages.size * n0 * n1 * n2
        row = cuda.blockIdx.x * cuda.blockDim.z + cuda.threadIdx.z
        by = cuda.blockDim.y
        while row < rows:
            page, first, second, third = _split_row(np.uint32(row), sizes)
            one, two, three = np.int64(first), np.int64(second), np.int64(third)
            at = _row_offset(to, dst_pages[page], one, two, three)
            start = _row_offset(fro, src_pages[page], one, two, three)
            unit = cuda.threadIdx.x
            while unit < units:
                d, s = at + unit * width, start + unit * width
                item = cuda.threadIdx.y
                while item + 3 * by < items:
                    i0, i1, i2, i3 = item, item + by, item + 2 * by, item + 3 * by
                    w0 = load(src, s + i0 * fro[5])
                    w1 = load(src, s + i1 * fro[5])
                    w2 = load(src, s + i2 * fro[5])
                    w3 = load(src, s + i3 * fro[5])
                    store(dst, d + i0 * to[5], w0)
                    store(dst, d + i1 * to[5], w1)
                    store(dst, d + i2 * to[5], w2)
                    store(dst, d + i3 * to[5], w3)
                    item += 4 * by
                # At most three are left; a loop would be one more for a compiler to unroll.
                i0, i1, i2 = item, item + by, item + 2 * by
                if i0 < items:
                    store(dst, d + i0 * to[5], load(src, s + i0 * fro[5]))
                if i1 < items:
                    store(dst, d + i1 * to[5], load(src, s + i1 * fro[5]))
                if i2 < items:
                    store(dst, d + i2 * to[5], load(src, s + i2 * fro[5]))
                unit += cuda.blockDim.x
            row += cuda.gridDim.x * cuda.blockDim.z

    return copy


def _build_checksum(load: Any, mix_unit: Any, width: int) -> Callable[..., None]:
    """Checksums by reads of ``width`` words.

    A block (x, items) takes one page and, of its rows, every ``gridDim.y``-th. A thread makes one
    read for each unit it is given, one read of a page number, and one atomic update at its end:
    exclusive or knows no order, so that the result is the same whoever comes first.
    """

    def checksum(out, src, pages, position, fro, sizes):
        page = cuda.blockIdx.x
        n0, n1, n2, items, units = _signed(sizes)
        rows = n0 * n1 * n2
        row = cuda.blockIdx.y
        total = _as_integer(np.uint64(0))
        while row < rows:
            _, first, second, third = _split_row(np.uint32(row), sizes)
            one, two, three = np.int64(first), np.int64(second), np.int64(third)
            place = _row_offset(position, 0, one, two, three)
            start = _row_offset(fro, pages[page], one, two, three)
            unit = cuda.threadIdx.x
            while unit < units:
                s, p = start + unit * width, place + unit * width
                item = cuda.threadIdx.y
                while item < items:
                    value = load(src, s + item * fro[5])
                    total ^= mix_unit(value, np.uint64(p + item * position[5]))
                    item += cuda.blockDim.y
                unit += cuda.blockDim.x
            row += cuda.gridDim.y
        cuda.atomic.xor(out, page, total)

    return checksum


def _mix_pair(pair, position):
    at = _as_integer(position)
    return _mix(_as_integer(pair[0]), at) ^ _mix(
        _as_integer(pair[1]), at | _as_integer(np.uint64(1))
    )


def _mix_word(word, position):
    return _mix(_as_integer(word), _as_integer(position))


_mix_pair = cuda.jit(device=True, inline="always")(_mix_pair)
_mix_word = cuda.jit(device=True, inline="always")(_mix_word)

_WORDS = types.uint64[::1]
_IDS = types.int64[::1]
_STEPS = types.UniTuple(types.int64, 6)
_SIZES = types.UniTuple(types.uint32, 5)
COPY_SIGNATURE = types.void(_WORDS, _WORDS, _IDS, _IDS, _STEPS, _STEPS, _SIZES)
CHECKSUM_SIGNATURE = types.void(_WORDS, _WORDS, _IDS, _STEPS, _STEPS, _SIZES)

# By words an access moves. Plain functions, as the compiler takes them without a device.
COPIES = {2: _build_copy(_load_pair, _store_pair, 2), 1: _build_copy(_load_word, _store_word, 1)}
CHECKSUMS = {
    2: _build_checksum(_load_pair, _mix_pair, 2),
    1: _build_checksum(_load_word, _mix_word, 1),
}
IS_SIMULATED = bool(config.ENABLE_CUDASIM)

"""The CPU twin: the same nests, compiled serially and shared out over threads of our own.

No threading layer of numba is used: GNU OpenMP ends a child that forked after its first parallel
loop, and the fallback layer aborts a process in which two Python threads enter one. Compiled
functions release the GIL, so plain threads do.

Stores past the caches pay above a few MB, where a cached store would first read the line it is
about to overwrite. They write whole lines of 64 bytes and nothing else: a run that is not made of
lines would be overrun, a line that begins elsewhere is a fault of the processor.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

from cuda_numba import index
from cuda_numba.checks import Words, is_streamable
from cuda_numba.fold import Nest

CORES: Final = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
CAN_STREAM: Final = platform.machine().lower() in {"x86_64", "amd64"}

STREAM_BYTES_MIN: Final = 4 << 20  # measured: level at 6 MB, behind at 0.7 MB, ahead at 47 MB
SHARE_BYTES_MIN: Final = 512 << 10  # handing work to a thread takes as long as copying this much
SHARES_A_THREAD: Final = 4  # so that a thread that is held up does not hold up the copy

_LINE_WORDS: Final = 8
_WORD = ir.IntType(64)

# A cached binary is found by the text of this file, not by that of index.py. Each function returns
# the digest of both that it was compiled with, and the closure it stands in is part of its key.
_SOURCES: Final = int.from_bytes(
    sha256(Path(index.__file__).read_bytes() + Path(__file__).read_bytes()).digest()[:7], "big"
)

_split_row = register_jitable(index.split_row)
_row_offset = register_jitable(index.row_offset)
_mix = register_jitable(index.mix)


@register_jitable
def _mix_run(src, start, position, words):
    """What ``words`` words from ``src[start]`` add to a checksum."""
    run = src[start : start + words]  # its indices are not negative, so that loads are not guarded
    total = np.uint64(0)
    for word in range(words):
        total ^= _mix(run[word], np.uint64(position + word))
    return total


# ---- memory access ------------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


@intrinsic
def _copy_cached(typing_context, to, at, fro, start, count):
    """``to[at:at+count] = fro[start:start+count]`` as a memcpy; no bounds are checked."""

    def lower(context, builder, signature, values):
        target = _pointer(context, builder, signature.args[0], values[0], values[1])
        source = _pointer(context, builder, signature.args[2], values[2], values[3])
        cgutils.raw_memcpy(builder, target, source, values[4], 8)
        return context.get_dummy_value()

    return types.void(to, types.int64, fro, types.int64, types.int64), lower


@intrinsic
def _store_line(typing_context, to, at, fro, start):
    """Eight words past the caches. ``to[at]`` must begin a cache line."""

    def lower(context, builder, signature, values):
        line = ir.VectorType(_WORD, _LINE_WORDS).as_pointer()
        target = _pointer(context, builder, signature.args[0], values[0], values[1])
        source = _pointer(context, builder, signature.args[2], values[2], values[3])
        loaded = builder.load(builder.bitcast(source, line), align=8)
        stored = builder.store(loaded, builder.bitcast(target, line), align=64)
        one = ir.Constant(ir.IntType(32), 1)
        stored.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(to, types.int64, fro, types.int64), lower


@intrinsic
def _fence(typing_context):
    """Order stores past the caches before whatever tells another thread about them."""

    def lower(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), []
        )
        return context.get_dummy_value()

    return types.void(), lower


# ---- compiled functions -------------------------------------------------------------------------


def _build(sources: int, *, can_stream: bool) -> tuple[Any, Any, Any]:
    """Copy with cached stores, copy past the caches, checksums; each returns ``sources``."""

    @njit(nogil=True, cache=True, error_model="numpy")
    def copy(dst, src, dst_pages, src_pages, to, fro, sizes, begin, end):
        for row in range(begin, end):
            page, first, second, third = _split_row(row, sizes)
            at = _row_offset(to, dst_pages[page], first, second, third)
            start = _row_offset(fro, src_pages[page], first, second, third)
            for item in range(sizes[3]):
                _copy_cached(dst, at + item * to[5], src, start + item * fro[5], sizes[4])
        return sources

    @njit(nogil=True, cache=True, error_model="numpy")
    def stream(dst, src, dst_pages, src_pages, to, fro, sizes, begin, end):
        for row in range(begin, end):
            page, first, second, third = _split_row(row, sizes)
            at = _row_offset(to, dst_pages[page], first, second, third)
            start = _row_offset(fro, src_pages[page], first, second, third)
            for item in range(sizes[3]):
                for word in range(0, sizes[4], _LINE_WORDS):
                    _store_line(dst, at + item * to[5] + word, src, start + item * fro[5] + word)
        _fence()
        return sources

    @njit(nogil=True, cache=True, error_model="numpy")
    def checksum(out, src, pages, position, fro, sizes, begin, end):
        rows = sizes[0] * sizes[1] * sizes[2]
        for page in range(begin, end):
            total = np.uint64(0)
            for row in range(rows):
                _, first, second, third = _split_row(row, sizes)
                place = _row_offset(position, 0, first, second, third)
                start = _row_offset(fro, pages[page], first, second, third)
                for item in range(sizes[3]):
                    run = start + item * fro[5]
                    total ^= _mix_run(src, run, place + item * position[5], sizes[4])
            out[page] = total
        return sources

    # Compiled when first called, so that no other processor is asked for the fence of x86.
    return copy, stream if can_stream else copy, checksum


_copy, _stream, _checksum = _build(_SOURCES, can_stream=CAN_STREAM)


# ---- threads ------------------------------------------------------------------------------------

_Job = TypeVar("_Job")
_lock = Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    """The threads beside the caller's own. A parallel call leaves them for the next one."""
    with _lock:
        if threads not in _pools:
            _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="cuda_numba")
        return _pools[threads]


def _forget_pools() -> None:
    """A forked child has the executors but not their threads, and perhaps a lock held by one."""
    global _lock
    _lock = Lock()  # that of the parent may never be released here
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


def share(rows: int, bytes_a_row: int, work: Callable[[int, int], None], threads: int) -> None:
    """Call ``work(begin, end)`` for parts of ``range(rows)``, in this thread and in others.

    Returns when all are done; the first error of any part is raised here.
    """
    parts = _cut(rows, bytes_a_row, threads * SHARES_A_THREAD)
    _drain(parts, lambda part: work(*part), threads)


def _cut(rows: int, bytes_a_row: int, parts_max: int) -> list[tuple[int, int]]:
    """``range(rows)`` in at most ``parts_max`` parts, none so small that handing it over costs more."""
    row_min = -(-SHARE_BYTES_MIN // max(1, bytes_a_row))
    parts = max(1, min(parts_max, rows // row_min))
    return list(pairwise(rows * part // parts for part in range(parts + 1)))


def _drain(jobs: Sequence[_Job], work: Callable[[_Job], None], threads: int) -> None:
    """Do ``jobs`` in order, from one queue, so that a thread that is slow takes fewer."""
    todo = deque(jobs)

    def drain() -> None:
        while todo:
            try:
                job = todo.popleft()
            except IndexError:  # another thread took the last one
                return
            work(job)

    others = [_pool(threads - 1).submit(drain) for _ in range(min(threads, len(jobs)) - 1)]
    try:
        drain()
    finally:
        errors = [other.exception() for other in others]  # waits: nobody writes after the return
    for error in filter(None, errors):
        raise error


def line_aligned(words: int) -> Words:
    """An array of zeros that begins a cache line, which those of NumPy need not do."""
    room = np.zeros(words + _LINE_WORDS, np.uint64)
    skip = -room.ctypes.data // 8 % _LINE_WORDS
    return room[skip : skip + words]


# ---- what is called -----------------------------------------------------------------------------


def copy_nest(
    dst: Words,
    src: Words,
    pages: tuple[NDArray[np.int64], NDArray[np.int64]],
    nest: Nest,
    *,
    threads: int = CORES,
    stream: bool | None = None,
) -> bool:
    """Copy pages ``pages[1][i]`` of ``src`` to ``pages[0][i]`` of ``dst``; all is checked already.

    ``stream`` asks for or forbids stores past the caches; by default they are used where they pay.
    Returns whether they were used: never where a run is not whole cache lines of ``dst``.
    """
    rows = len(pages[0]) * nest.rows_a_page
    bytes_a_row = 8 * nest.sizes[3] * nest.sizes[4]
    stream = _goes_past_caches(dst, [nest], rows * bytes_a_row, stream)
    compiled = _stream if stream else _copy

    def work(begin: int, end: int) -> None:
        _fresh(compiled(dst, src, *pages, nest.to, nest.fro, nest.sizes, begin, end))

    share(rows, bytes_a_row, work, threads)
    return stream


def copy_nests(
    dst: Words,
    src: Words,
    pages: tuple[NDArray[np.int64], NDArray[np.int64]],
    nests: Sequence[Nest],
    *,
    arrived: Callable[[int], None],
    threads: int = CORES,
    stream: bool | None = None,
) -> None:
    """`copy_nest` for each nest in turn, without a pause between them; all is checked already.

    ``arrived(i)`` is called when the i-th has been copied, by whichever thread ended it.
    """
    size = 8 * len(pages[0]) * sum(nest.words_a_page for nest in nests)
    if size < 2 * SHARE_BYTES_MIN:
        threads = 1
    compiled = _stream if _goes_past_caches(dst, nests, size, stream) else _copy
    jobs = []
    left = []  # parts of each nest that are not done
    for number, nest in enumerate(nests):
        bytes_a_row = 8 * nest.sizes[3] * nest.sizes[4]
        parts = _cut(len(pages[0]) * nest.rows_a_page, bytes_a_row, threads)
        jobs += [(number, part) for part in parts]
        left.append(len(parts))
    lock = Lock()

    def work(job: tuple[int, tuple[int, int]]) -> None:
        number, part = job
        nest = nests[number]
        _fresh(compiled(dst, src, *pages, nest.to, nest.fro, nest.sizes, *part))
        with lock:
            left[number] -= 1
            is_last = not left[number]
        if is_last:
            arrived(number)

    _drain(jobs, work, threads)


def _goes_past_caches(dst: Words, nests: Sequence[Nest], size: int, asked: bool | None) -> bool:
    """Is it asked for, or else worth it, and may it be?"""
    wanted = size >= STREAM_BYTES_MIN if asked is None else asked
    return wanted and CAN_STREAM and all(is_streamable(n, dst.ctypes.data) for n in nests)


def checksum_nest(
    src: Words, pages: NDArray[np.int64], nest: Nest, *, threads: int = CORES
) -> NDArray[np.uint64]:
    """Checksums of pages of ``src``, [page]; ``nest.to`` counts positions. All is checked already."""
    out = np.empty(len(pages), np.uint64)

    def work(begin: int, end: int) -> None:
        _fresh(_checksum(out, src, pages, nest.to, nest.fro, nest.sizes, begin, end))

    share(len(pages), 8 * nest.words_a_page, work, threads)
    return out


def _fresh(sources: int) -> None:
    if sources != _SOURCES:
        raise RuntimeError("a compiled kernel is older than its source: delete __pycache__")

"""Launching the kernels: grids, streams, page lists on the device. Loaded by `backend.launcher`.

Everything about arrays and indices is checked before; here is what a device asks for.
"""

from __future__ import annotations

import warnings
from threading import Lock
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from cuda_numba import grid, kernels
from cuda_numba.arrays import DeviceView, span
from cuda_numba.checks import PageList, is_paired
from cuda_numba.fold import Nest, cut_run
from cuda_numba.tuning import Tuning

_copies = {width: cuda.jit(kernel) for width, kernel in kernels.COPIES.items()}
_checksums = {width: cuda.jit(kernel) for width, kernel in kernels.CHECKSUMS.items()}
_lock = Lock()  # the simulator runs one kernel at a time; filters of warnings are shared, too


def copy_nest(
    dst: Any, src: Any, pages: tuple[PageList, PageList], nest: Nest, stream: Any, tuning: Tuning
) -> int:
    """Launch one copy on ``stream`` and return the words an access moves, 2 or 1.

    The caller keeps the arrays until the stream has passed.
    """
    width = 2 if is_paired(nest, span("dst", dst)[0], span("src", src)[0]) else 1
    nest = cut_run(nest, grid.RUN_UNITS_MAX * width, grid.IN_FLIGHT)
    form = grid.for_copy(
        nest, width, len(pages[0]), blocks=tuning.blocks, threads=tuning.block_threads
    )
    _launch(
        _copies[width],
        form,
        stream_of(stream),
        (
            *(_words("dst", dst), _words("src", src)),
            *map(_ids, pages),
            *(nest.to, nest.fro, _counts(nest, width)),
        ),
    )
    return width


def checksum_nest(
    src: Any, pages: PageList, nest: Nest, stream: Any, tuning: Tuning
) -> NDArray[np.uint64]:
    """Checksums of pages of ``src``, [page]. Waits for the stream."""
    width = 2 if is_paired(nest, span("src", src)[0]) else 1
    nest = cut_run(nest, grid.RUN_UNITS_MAX * width, grid.IN_FLIGHT)
    form = grid.for_checksum(
        nest, width, len(pages), blocks=tuning.checksum_blocks, threads=tuning.checksum_threads
    )
    on = stream_of(stream)
    out = cuda.to_device(np.zeros(len(pages), np.uint64), stream=on)
    arrays = (out, _words("src", src), _ids(pages))
    _launch(_checksums[width], form, on, (*arrays, nest.to, nest.fro, _counts(nest, width)))
    result: NDArray[np.uint64] = out.copy_to_host(stream=on)
    if on:
        on.synchronize()
    return result


def stream_of(stream: Any) -> Any:
    """A stream of numba from None (the default), a handle, a torch stream, or one of numba's."""
    if stream is None or kernels.IS_SIMULATED:
        return 0  # in the simulator a launch returns when all is done
    handle = getattr(stream, "cuda_stream", stream)
    return cuda.external_stream(handle) if isinstance(handle, int) and handle else handle


def _launch(kernel: Any, form: grid.Geometry, stream: Any, arguments: tuple[Any, ...]) -> None:
    with _lock, warnings.catch_warnings():
        # Few blocks are the point here: a copy leaves the device to the model.
        warnings.filterwarnings("ignore", message="Grid size")
        kernel[form.grid, form.block, stream](*arguments)


def _words(side: str, array: Any) -> Any:
    """The array as a flat device array of 64-bit words, whatever type it is said to have."""
    if kernels.IS_SIMULATED:
        return array
    address, size = span(side, array)
    return cuda.as_cuda_array(DeviceView(address, size // 8, array), sync=False)


def _counts(nest: Nest, width: int) -> tuple[np.uint32, ...]:
    return tuple(np.uint32(size) for size in grid.units_of(nest, width))


def _ids(pages: PageList) -> Any:
    """The page numbers on the device, brought there once, on a stream that is waited for."""
    if kernels.IS_SIMULATED:
        return pages.ids
    if not pages.on_device:
        upload = cuda.stream()
        pages.on_device.append(cuda.to_device(pages.ids, stream=upload))
        upload.synchronize()
    return pages.on_device[0]

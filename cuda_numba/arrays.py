"""Where an array lies and how long it is, for arrays of the host and of devices.

A device array is whatever describes itself by ``__cuda_array_interface__``; no driver is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuda_numba.fold import LayoutError


class DeviceView:
    """Memory that a device can address, by address: another library's, or pinned host memory.

    ``owner`` is kept alive. The host memory must be registered with CUDA (pinned); nothing checks it.
    """

    def __init__(self, address: int, words: int, owner: object = None) -> None:
        self.address, self.words, self.owner = address, words, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.words,),
            "typestr": "<u8",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def device_interface(side: str, array: Any) -> Mapping[str, Any] | None:
    """The array's description if it lies on a device; None for host arrays."""
    if isinstance(array, np.ndarray):
        return None
    try:
        found: Mapping[str, Any] | None = getattr(array, "__cuda_array_interface__", None)
    except TypeError as error:  # torch: a type that the interface has no letter for
        raise LayoutError(f"{side}: {error}; pass .view(torch.uint64)") from error
    return found


def span(side: str, array: Any) -> tuple[int, int]:
    """Address and bytes of a flat array, on either side.

    Raises `LayoutError` for a device array that has gaps or is no whole number of words.
    """
    described = device_interface(side, array)
    if described is None:
        return array.ctypes.data, array.nbytes
    kind, shape = np.dtype(described["typestr"]), described["shape"]
    size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    packed = np.cumprod([kind.itemsize, *reversed(shape)])[:-1][::-1]
    if described.get("strides") is not None and tuple(described["strides"]) != tuple(packed):
        raise LayoutError(f"{side} has gaps: pass the whole pool, contiguous")
    if size % 8:
        raise LayoutError(f"{side} has {size} bytes, which is no whole number of 8-byte words")
    return int(described["data"][0]), size

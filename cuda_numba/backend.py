"""Which of the two backends runs a call, and loading the CUDA half when it is first needed.

NumPy arrays go to the CPU twin, device arrays to the kernels, and NumPy arrays to the kernels in the
simulator when `backend="cuda"` asks for that. Importing this package loads no driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numba import config

from cuda_numba import native
from cuda_numba.checks import host_words
from cuda_numba.fold import LayoutError

Backend: TypeAlias = Literal["cpu", "cuda"]

# 63 GB/s of PCIe 5 need 80 KB in flight if a round trip takes 1.3 us, as measured on another link. A
# block of 512 threads has 32 KB; eight allow for a round trip of 4 us. scenarios/gpu/check.py measures.
COPY_BLOCKS: Final = 8
COPY_THREADS: Final = 512


@dataclass(frozen=True)
class Tuning:
    """What changes the speed of a call and nothing else.

    ``stream_stores`` asks the CPU twin for stores past the caches (True), forbids them (False), or
    leaves it to the size of the copy. ``blocks`` is what a copy may take of a device.
    """

    cpu_threads: int = native.CORES
    stream_stores: bool | None = None
    blocks: int = COPY_BLOCKS
    block_threads: int = COPY_THREADS
    checksum_blocks: int = 256
    checksum_threads: int = 256


DEFAULT: Final = Tuning()


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


def choose(backend: Backend | None, **arrays: Any) -> Backend:
    """The backend for these arrays, or `LayoutError` if they don't go together."""
    on_device = {side: device_interface(side, array) is not None for side, array in arrays.items()}
    if all(on_device.values()) and backend != "cpu":
        return "cuda"
    if any(on_device.values()):
        here = [side for side, far in on_device.items() if not far]
        what = f"{here[0]} is in host memory" if here else "device arrays need the cuda backend"
        raise LayoutError(f"{what}: pass DeviceView(address, words) of pinned memory, or copy it")
    for side, array in arrays.items():
        host_words(side, array)
    if backend != "cuda":
        return "cpu"
    if not config.ENABLE_CUDASIM:
        raise LayoutError(
            'backend="cuda" with NumPy arrays runs in the simulator alone: set '
            "NUMBA_ENABLE_CUDASIM=1 before numba is imported, or pass device arrays"
        )
    return "cuda"


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


def launcher() -> ModuleType:
    """The module that launches kernels. Its first use loads numba.cuda, and with it the driver."""
    from cuda_numba import launch

    return launch

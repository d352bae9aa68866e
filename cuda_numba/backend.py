"""Which of the two backends runs a call, and loading the CUDA half when it is first needed.

NumPy arrays go to the CPU twin, device arrays to the kernels, and NumPy arrays to the kernels in the
simulator when `backend="cuda"` asks for that. Importing this package loads no driver.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, TypeAlias

from numba import config

from cuda_numba.arrays import device_interface
from cuda_numba.checks import host_words
from cuda_numba.fold import LayoutError

Backend: TypeAlias = Literal["cpu", "cuda"]


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


def launcher() -> ModuleType:
    """The module that launches kernels. Its first use loads numba.cuda, and with it the driver."""
    from cuda_numba import launch

    return launch

"""What changes the speed of a call and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cuda_numba import native

# 63 GB/s of PCIe 5 need 80 KB in flight if a round trip takes 1.3 us, as measured on another link. A
# block of 512 threads has 32 KB; eight allow for a round trip of 4 us. scenarios/gpu/check.py measures.
COPY_BLOCKS: Final = 8
COPY_THREADS: Final = 512


@dataclass(frozen=True)
class Tuning:
    """How much of the machine a call may take.

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

"""How many threads a kernel gets, and in which form. Integers only; no device is asked.

The simulator takes any block; a device refuses what passes its limits, so they are checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cuda_numba.fold import LayoutError, Nest

# Devices take 1024, of which each has 64 registers. The copy needs 80 when compiled for sm_100.
BLOCK_THREADS_MAX: Final = 768
BLOCK_Z_MAX: Final = 64
GRID_Y_MAX: Final = 65535
ROWS_MAX: Final = 2**32 - 1  # a kernel divides row numbers in 32 bits

IN_FLIGHT: Final = 4  # reads a copying thread has under way before its first write
WARP: Final = 32
RUN_UNITS_MAX: Final = 64  # a longer run is cut where nothing else keeps reads in flight: 1 KB


@dataclass(frozen=True)
class Geometry:
    """Blocks and threads of a launch: grid (x, y), block (x, y, z)."""

    grid: tuple[int, int]
    block: tuple[int, int, int]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]


def units_of(nest: Nest, width: int) -> tuple[int, int, int, int, int]:
    """Sizes as a kernel wants them: the run in accesses of ``width`` words."""
    return (*nest.sizes[:4], nest.sizes[4] // width)


def for_copy(nest: Nest, width: int, pages: int, *, blocks: int, threads: int) -> Geometry:
    """Block (units of a run, items, rows), and at most ``blocks`` of them.

    Raises `LayoutError` for more rows than a kernel counts, and for blocks no device takes.
    """
    _check_threads(threads, blocks)
    rows = pages * nest.rows_a_page
    if rows > ROWS_MAX:
        raise LayoutError(
            f"{rows} rows in one copy, {ROWS_MAX} at most: pass fewer pages at a time"
        )
    items, units = nest.sizes[3], nest.sizes[4] // width
    x = min(units, threads)
    y = max(1, min(items // IN_FLIGHT, threads // x))
    z = min(rows, threads // (x * y), BLOCK_Z_MAX)
    return Geometry((min(blocks, -(-rows // z)), 1), (x, y, z))


def for_checksum(nest: Nest, width: int, pages: int, *, blocks: int, threads: int) -> Geometry:
    """Block (units of a run, items), a column of the grid a page; ``blocks`` as a rule at least."""
    _check_threads(threads, blocks)
    items, units = nest.sizes[3], nest.sizes[4] // width
    x = min(units, threads)
    y = min(items, threads // x)
    columns = min(nest.rows_a_page, max(1, blocks // pages), GRID_Y_MAX)
    return Geometry((pages, columns), (x, y, 1))


def _check_threads(threads: int, blocks: int) -> None:
    if not 1 <= threads <= BLOCK_THREADS_MAX:
        raise LayoutError(f"{threads} threads a block: from 1 to {BLOCK_THREADS_MAX} are possible")
    if blocks < 1:
        raise LayoutError(f"{blocks} blocks: at least one has to do the work")

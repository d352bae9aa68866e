"""How many threads compute: for measurements, which idle threads of an earlier computation disturb.

Must not know: what is computed. Called by: live_served.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Inside, a model on the processor computes with so many threads, in every thread made there.

    torch keeps a pool of threads for each thread that computes, and they spin for a while when they
    have nothing to do. Where two cores serve several of them, times vary tenfold.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

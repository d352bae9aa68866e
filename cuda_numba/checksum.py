"""A checksum of each page, equal on CPU and GPU and for every layout.

With the words of a page numbered i = 0, 1, ... in the order kv, layer, token, head, word:

    checksum = mix(word_0, 0) xor mix(word_1, 1) xor ...
    mix(w, i): x = w + (i + 1) * 0x9E3779B97F4A7C15; x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
               x = (x ^ x >> 27) * 0x94D049BB133111EB; x ^ x >> 31           (all modulo 2**64)

`mix` is a bijection of the word, so that one changed word always changes the checksum; any other
change goes unseen with probability 2**-64. Exclusive or is a sum without carries: threads may add up
their parts in any order. This finds accidents; it is no defence against someone who means to deceive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_numba import checks, native
from cuda_numba.arrays import span
from cuda_numba.backend import Backend, choose, launcher
from cuda_numba.checks import PageIds
from cuda_numba.fold import Shape, Strides, canonical, fold
from cuda_numba.tuning import DEFAULT, Tuning


def page_checksums(
    pool: Any,
    pages: PageIds,
    strides: Strides,
    shape: Shape,
    *,
    stream: Any = None,
    backend: Backend | None = None,
    tuning: Tuning = DEFAULT,
) -> NDArray[np.uint64]:
    """Checksums of ``pages`` of a flat pool of 64-bit words, [page]. Each word is read once.

    On a device it runs on ``stream`` and waits for it. Raises `LayoutError` as `copy_pages` does.
    """
    runs_on = choose(backend, src=pool)
    listed = checks.page_list(pages)
    nest = fold(shape, canonical(shape), strides)
    words = span("src", pool)[1] // 8
    checks.bounds("src", words, listed, nest.fro[0], nest.fro[1], nest.reach_fro)
    if not len(listed):
        return np.empty(0, np.uint64)
    if runs_on == "cuda":
        found: NDArray[np.uint64] = launcher().checksum_nest(pool, listed, nest, stream, tuning)
        return found
    return native.checksum_nest(pool, listed.ids, nest, threads=tuning.cpu_threads)

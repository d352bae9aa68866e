"""A copy between two pools, and its check against the oracle. Needs NumPy and the kernels alone.

Outputs begin as poison, and whole pools are compared: a word written outside its page is found. The
same seeds give the same cases on the CPU, in the simulator and on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cuda_numba import Shape, Strides, Tuning, bench, copy_pages, oracle, page_checksums
from cuda_numba.checks import Words

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
POISON = 0xDEAD_BEEF_DEAD_BEEF
# As doubles: NaNs, both signalling and quiet with payloads, infinities, zeros, the least denormal.
ODD_BITS = (
    *(0x7FF0000000000001, 0x7FF8DEADBEEF0001, 0xFFF8000000000000, 0x7FF0000000000000),
    *(0xFFF0000000000000, 0x8000000000000000, 0, 1, 0x8000000000000001, 2**64 - 1),
)


@dataclass(frozen=True)
class Case:
    """A copy between two pools of the same pages; ``skew`` words stand before each pool."""

    shape: Shape
    src_layout: str
    dst_layout: str
    pool_pages: int
    dst_pages: tuple[int, ...]
    src_pages: tuple[int, ...]
    layer: int | None = None
    skew: tuple[int, int] = (0, 0)

    @cached_property
    def strides(self) -> tuple[Strides, Strides]:
        """Of dst, then of src."""
        known = bench.layouts(self.shape, self.pool_pages)
        to, fro = known[self.dst_layout], known[self.src_layout]
        return to._replace(base=self.skew[0]), fro._replace(base=self.skew[1])

    def pools(self, seed: int) -> tuple[Words, Words]:
        """A poisoned dst and a random src with odd bit patterns in it."""
        draw = np.random.default_rng(seed)
        words = self.pool_pages * self.shape.total
        src = draw.integers(0, 2**64, words + self.skew[1], dtype=np.uint64)
        odd = draw.integers(0, len(src), min(len(src), len(ODD_BITS)))
        src[odd] = ODD_BITS[: len(odd)]
        return np.full(words + self.skew[0], POISON, np.uint64), src

    def views(self, dst: Words, src: Words) -> tuple[Words, Words]:
        to, fro = self.strides
        return (
            oracle.view(dst, self.pool_pages, to, self.shape),
            oracle.view(src, self.pool_pages, fro, self.shape),
        )

    def expected(self, seed: int) -> Words:
        dst, src = self.pools(seed)
        oracle.copy_pages(
            *self.views(dst, src), list(self.dst_pages), list(self.src_pages), self.layer
        )
        return dst

    def copied(self, seed: int, tuning: Tuning, **how: Any) -> Words:
        dst, src = self.pools(seed)
        copy_pages(
            *(dst, src, self.dst_pages, self.src_pages, *self.strides, self.shape),
            layer=self.layer,
            tuning=tuning,
            **how,
        )
        return dst

    def check(self, tuning: Tuning, seed: int = 1, **how: Any) -> None:
        np.testing.assert_array_equal(self.copied(seed, tuning, **how), self.expected(seed))

    def check_checksums(self, tuning: Tuning, seed: int = 1, **how: Any) -> None:
        dst, src = self.pools(seed)
        pages = list(self.src_pages)
        found = page_checksums(src, pages, self.strides[1], self.shape, tuning=tuning, **how)
        np.testing.assert_array_equal(found, oracle.page_checksums(self.views(dst, src)[1], pages))


def seeded_case(seed: int, words_max: int) -> Case:
    """Up to 257 pages, 17 heads and 64 tokens a page, in pools of up to ``words_max`` words."""
    draw = np.random.default_rng(seed)
    while True:
        layers, heads, tokens, words = (int(draw.integers(1, most)) for most in (4, 18, 65, 17))
        is_mla = bool(draw.integers(0, 4) == 0)
        shape = Shape(layers, 1 if is_mla else 2, 1 if is_mla else heads, tokens, words)
        if shape.total <= words_max:
            break
    pool_pages = int(draw.integers(1, min(257, words_max // shape.total) + 1))
    count = int(draw.integers(0, pool_pages + 1))
    src, dst = (LAYOUTS[at] for at in draw.integers(0, len(LAYOUTS), 2))
    pages = (tuple(draw.permutation(pool_pages)[:count].tolist()) for _ in range(2))
    layer = int(draw.integers(0, layers)) if draw.integers(0, 3) == 0 else None
    skew = int(draw.integers(0, 3)), int(draw.integers(0, 3))
    return Case(shape, src, dst, pool_pages, *pages, layer, skew)

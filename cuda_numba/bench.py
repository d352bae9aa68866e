"""How fast the CPU twin copies, beside floors of the same run: `python -m cuda_numba.bench`.

Seconds do not carry over to another machine; the ratio to a plain copy of as many bytes, made by the
same threads in the same minute, does. Rates count each byte once, though it is read and written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from cuda_numba import native, oracle
from cuda_numba.checks import Words, page_list
from cuda_numba.fold import Shape, Strides
from cuda_numba.pages import copy_pages
from cuda_numba.tuning import Tuning

# KV of a small model: 28 layers, 8 heads of 64 in 16 bits, pages of 64 tokens; 3.7 MB a page.
SHAPE: Final = Shape(layers=28, kvs=2, heads=8, tokens=64, words=16)
PLAIN_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Rate:
    """One pair of layouts: GB/s of the twin, of a plain copy, of NumPy's fancy indexing."""

    src: str
    dst: str
    pages: int
    megabytes: float
    twin: float
    plain: float
    numpy: float

    @property
    def to_plain(self) -> float:
        return self.twin / self.plain

    @property
    def to_numpy(self) -> float:
        return self.twin / self.numpy


def layouts(shape: Shape, pages: int) -> dict[str, Strides]:
    """Strides of the layouts the engine knows, for a pool of ``pages`` pages with K and V apart."""
    layers, _, heads, tokens, words = shape
    token = heads * words
    half = pages * tokens * layers * token
    return {
        "layer_first": Strides(tokens * token, pages * tokens * token, half, words, token),
        "page_first": Strides(tokens * layers * token, token, half, words, layers * token),
        "page_first_direct": Strides(layers * tokens * token, tokens * token, half, words, token),
        "page_head": Strides(
            heads * tokens * layers * words, words, half, tokens * layers * words, layers * words
        ),
    }


def copy_rates(
    shape: Shape = SHAPE,
    *,
    pages: int = 16,
    pool_pages: int = 48,
    repeats: int = 7,
    threads: int = native.CORES,
    only: str = "",
) -> list[Rate]:
    """Rates of copying ``pages`` scattered pages, for every pair of layouts.

    ``only`` keeps the pairs whose ``src:dst`` contains it. Twin and plain copy take turns, so that
    whatever else the machine does slows both.
    """
    draw = np.random.default_rng(0)
    src = draw.integers(0, 2**63, pool_pages * shape.total, dtype=np.uint64)
    dst = native.line_aligned(pool_pages * shape.total)
    dst[:] = 1
    to, fro = (page_list(draw.permutation(pool_pages)[:pages]) for _ in range(2))
    strides = layouts(shape, pool_pages)
    tuning = Tuning(cpu_threads=threads)
    size = 8 * pages * shape.total
    found = []
    for one, two in [(one, two) for one in strides for two in strides if only in f"{one}:{two}"]:
        sides = strides[two], strides[one]
        target = oracle.view(dst, pool_pages, strides[two], shape)
        source = oracle.view(src, pool_pages, strides[one], shape)
        seconds = take_turns(
            repeats,
            partial(copy_pages, dst, src, to, fro, *sides, shape, tuning=tuning),
            partial(plain_copy, dst, src, pages * shape.total, threads),
            partial(oracle.copy_pages, target, source, to.ids, fro.ids),
        )
        found.append(Rate(one, two, pages, size / 1e6, *(size / 1e9 / each for each in seconds)))
    return found


def plain_copy(dst: Words, src: Words, words: int, threads: int) -> None:
    """The first ``words`` words, as they lie, by ``threads`` threads: the floor of any copy."""
    piece = PLAIN_PIECE_BYTES // 8
    pieces = -(-words // piece)

    def work(begin: int, end: int) -> None:
        part = slice(begin * piece, min(end * piece, words))
        np.copyto(dst[part], src[part])

    native.share(pieces, PLAIN_PIECE_BYTES, work, threads)


def take_turns(repeats: int, *calls: Callable[[], None]) -> list[float]:
    """Seconds of the median turn of each call.

    In a turn a call runs twice and the second one counts: the first finds caches and idle threads as
    another call left them.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, seconds, strict=True):
            call()
            began = perf_counter()
            call()
            taken.append(perf_counter() - began)
    return [median(taken) for taken in seconds]


def show(rates: list[Rate]) -> str:
    """The rates as a table of text."""
    lines = [
        f"{'src':18}{'dst':18}{'MB':>8}{'twin':>8}{'plain':>8}{'numpy':>8}{'/plain':>8}{'/numpy':>8}"
    ]
    lines += [
        f"{r.src:18}{r.dst:18}{r.megabytes:8.1f}{r.twin:8.2f}{r.plain:8.2f}{r.numpy:8.2f}"
        f"{r.to_plain:8.2f}{r.to_numpy:8.1f}"
        for r in rates
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the rates, as a table or with ``--json`` as one object a line."""
    parser = argparse.ArgumentParser(description="GB/s of the CPU twin beside a plain copy")
    parser.add_argument("--pages", type=int, default=16)
    parser.add_argument("--pool-pages", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=native.CORES)
    parser.add_argument("--only", default="", help="pairs whose src:dst contains this")
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    rates = copy_rates(**given)
    print("\n".join(json.dumps(asdict(rate)) for rate in rates) if as_json else show(rates))


if __name__ == "__main__":
    main()

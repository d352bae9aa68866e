"""The kernels themselves, run by the CUDA simulator, against the oracle.

The simulator must be chosen before numba is first imported, and a process has either it or the
compiler. So pytest does not collect this file by itself: test_in_the_simulator.py runs it in a
process of its own. Grids have at most 64 threads, because each is a thread of the system.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config, cuda

from cuda_numba import (
    Shape,
    Tuning,
    bench,
    gather_heads,
    launch,
    native,
    oracle,
    page_checksums,
    page_list,
    scatter_heads,
    staged_shape,
)
from cuda_numba.fold import compact, fold
from scenarios.kernels.case import LAYOUTS, POISON, Case, seeded_case
from scenarios.kernels.draws import cases

SHAPE = Shape(layers=2, kvs=2, heads=2, tokens=9, words=4)
PAIRS = list(product(LAYOUTS, LAYOUTS))
SMALL = Tuning(blocks=2, block_threads=24, checksum_blocks=4, checksum_threads=12)
ONE_THREAD = Tuning(blocks=1, block_threads=1, checksum_blocks=1, checksum_threads=1)


def test_this_process_simulates_and_has_no_driver() -> None:
    assert config.ENABLE_CUDASIM
    assert launch.kernels.IS_SIMULATED


@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize("tuning", [ONE_THREAD, SMALL], ids=["one thread", "many threads"])
def test_every_pair_of_layouts_equals_array_indexing(src: str, dst: str, tuning: Tuning) -> None:
    Case(SHAPE, src, dst, 5, (4, 0, 3), (1, 2, 4)).check(tuning, backend="cuda")


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_one_layer_leaves_the_others_alone(src: str, dst: str) -> None:
    for layer in range(SHAPE.layers):
        Case(SHAPE, src, dst, 5, (4, 0), (1, 2), layer).check(ONE_THREAD, backend="cuda")


@settings(max_examples=80)
@given(
    cases(words_max=1500, pages_max=257, heads_max=17, tokens_max=64),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(0, 2**32),
)
def test_drawn_copies_equal_array_indexing(
    drawn: Case, blocks: int, threads: int, seed: int
) -> None:
    drawn.check(Tuning(blocks=blocks, block_threads=threads), seed, backend="cuda")


@settings(max_examples=60)
@given(
    cases(words_max=800, pages_max=8, heads_max=5, tokens_max=17),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 2**32),
)
def test_drawn_checksums_equal_oracle_and_cpu(
    drawn: Case, blocks: int, threads: int, seed: int
) -> None:
    tuning = Tuning(checksum_blocks=blocks, checksum_threads=threads)
    drawn.check_checksums(tuning, seed, backend="cuda")
    drawn.check_checksums(tuning, seed, backend="cpu")


@pytest.mark.parametrize("seed", range(24))
def test_the_seeds_that_a_device_is_checked_with_pass_here(seed: int) -> None:
    case = seeded_case(seed, 3000)
    case.check(SMALL, seed, backend="cuda")
    case.check_checksums(SMALL, seed, backend="cuda")


@pytest.mark.parametrize("payload_bytes", [4096, 5000, 656])
def test_payloads_of_any_size_make_the_round_trip(payload_bytes: int) -> None:
    shape = Shape(layers=1, kvs=1, heads=1, tokens=1, words=payload_bytes // 8)
    case = Case(shape, "page_first", "layer_first", 3, (2, 0), (1, 2))
    case.check(SMALL, backend="cuda")
    case.check_checksums(SMALL, backend="cuda")


@pytest.mark.parametrize(("layout", "heads"), list(product(LAYOUTS, [(0, 1), (1, 3)])))
def test_heads_make_the_round_trip_through_staging(layout: str, heads: tuple[int, int]) -> None:
    shape = SHAPE._replace(heads=3)
    strides, staged = bench.layouts(shape, 4)[layout], staged_shape(shape, heads)
    pool = np.random.default_rng(7).integers(0, 2**64, 4 * shape.total, dtype=np.uint64)
    staging = np.full(2 * staged.total, POISON, np.uint64)
    gather_heads(staging, pool, [3, 1], heads, strides, shape, backend="cuda", tuning=SMALL)
    expected = np.zeros_like(staging)
    views = oracle.view(expected, 2, compact(staged), staged), oracle.view(pool, 4, strides, shape)
    oracle.gather_heads(*views, [3, 1], heads)
    np.testing.assert_array_equal(staging, expected)

    other = np.full_like(pool, POISON)
    scatter_heads(other, staging, [3, 1], heads, strides, shape, backend="cuda", tuning=SMALL)
    right = np.full_like(pool, POISON)
    oracle.scatter_heads(oracle.view(right, 4, strides, shape), views[0], [3, 1], heads)
    np.testing.assert_array_equal(other, right)


@pytest.mark.parametrize(
    ("words", "skew", "width"), [(8, 0, 2), (6, 2, 2), (7, 0, 1), (8, 1, 1), (6, 3, 1)]
)
def test_wide_accesses_are_made_where_all_is_even(words: int, skew: int, width: int) -> None:
    shape = Shape(layers=1, kvs=1, heads=1, tokens=1, words=words)
    room = native.line_aligned(words + skew)
    src = np.arange(words + 2, dtype=np.uint64)
    to, fro = compact(shape)._replace(base=skew), compact(shape)
    pages = page_list([0])
    nest = fold(shape, to, fro)
    used = launch.copy_nest(room, src, (pages, pages), nest, None, ONE_THREAD)
    assert used == width
    np.testing.assert_array_equal(room[skew:], src[:words])


def test_a_stream_may_be_none_a_handle_or_an_object_that_has_one() -> None:
    class OfAnotherLibrary:
        cuda_stream = 0

    for stream in (None, 0, 7, cuda.stream(), OfAnotherLibrary()):
        case = Case(SHAPE, "layer_first", "page_first", 2, (1,), (0,))
        case.check(ONE_THREAD, backend="cuda", stream=stream)


def test_two_threads_may_launch_at_once() -> None:
    case = Case(SHAPE, "layer_first", "page_head", 5, (4, 0, 3), (1, 2, 4))
    expected = case.expected(1)
    with ThreadPoolExecutor(2) as callers:
        for asked in [callers.submit(case.copied, 1, SMALL, backend="cuda") for _ in range(4)]:
            np.testing.assert_array_equal(asked.result(), expected)


def test_no_thread_of_a_checksum_waits_for_another() -> None:
    """Every split of the work gives the same sum."""
    case = Case(SHAPE, "page_head", "page_head", 3, (0, 2), (2, 1))
    _, src = case.pools(4)
    sums = {
        tuple(
            page_checksums(
                *(src, [2, 1], case.strides[1], SHAPE),
                tuning=Tuning(checksum_blocks=blocks, checksum_threads=threads),
                backend="cuda",
            ).tolist()
        )
        for blocks, threads in ((1, 1), (2, 8), (16, 2), (7, 3))
    }
    assert len(sums) == 1

"""The CPU twin against the oracle."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_numba import Shape, Strides, Tuning, copy_pages, native, page_list
from cuda_numba.fold import compact, fold
from scenarios.kernels.case import LAYOUTS, POISON, Case
from scenarios.kernels.draws import cases
from scenarios.tidy import ROOT

ONE = Tuning(cpu_threads=1)
SHAPE = Shape(layers=3, kvs=2, heads=4, tokens=5, words=8)
PAIRS = list(product(LAYOUTS, LAYOUTS))


def case(src: str, dst: str, shape: Shape = SHAPE, layer: int | None = None) -> Case:
    return Case(shape, src, dst, 7, (4, 0, 6), (1, 5, 4), layer)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_pair_of_layouts_equals_array_indexing(src: str, dst: str) -> None:
    case(src, dst).check(ONE)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_one_layer_leaves_the_others_alone(src: str, dst: str) -> None:
    for layer in range(SHAPE.layers):
        case(src, dst, layer=layer).check(ONE)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_latent_pages_without_heads_and_values_are_copied(src: str, dst: str) -> None:
    case(src, dst, Shape(layers=3, kvs=1, heads=1, tokens=5, words=36)).check(ONE)


@settings(max_examples=150)
@given(
    cases(words_max=20000, pages_max=257, heads_max=17, tokens_max=64),
    st.sampled_from([None, True, False]),
    st.integers(0, 2**32),
)
def test_drawn_copies_equal_array_indexing(
    drawn: Case, stream_stores: bool | None, seed: int
) -> None:
    drawn.check(Tuning(cpu_threads=2, stream_stores=stream_stores), seed)


@pytest.mark.parametrize("payload_bytes", [4096, 5000, 656])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_payloads_of_any_size_make_the_round_trip(src: str, dst: str, payload_bytes: int) -> None:
    shape = Shape(layers=1, kvs=1, heads=1, tokens=1, words=payload_bytes // 8)
    case(src, dst, shape).check(Tuning(stream_stores=True))


# ---- stores past the caches ---------------------------------------------------------------------


def streamed(words: int, skew: int) -> tuple[bool, np.ndarray, np.ndarray]:
    """Whether one page of ``words`` words, ``skew`` words after a cache line, was streamed."""
    shape = Shape(layers=1, kvs=1, heads=1, tokens=1, words=words)
    pool = native.line_aligned(words + skew + 16)
    pool[:] = POISON
    src = np.arange(1, words + 1, dtype=np.uint64)
    to = compact(shape)._replace(base=skew)
    page = np.zeros(1, np.int64)
    used = native.copy_nest(
        pool, src, (page, page), fold(shape, to, compact(shape)), threads=1, stream=True
    )
    return used, pool, src


@pytest.mark.skipif(not native.CAN_STREAM, reason="stores past the caches are used on x86-64 alone")
@pytest.mark.parametrize("words", [8, 64, 1024])
def test_whole_cache_lines_go_past_the_caches(words: int) -> None:
    used, pool, src = streamed(words, 8)
    assert used
    np.testing.assert_array_equal(pool[8 : 8 + words], src)
    assert set(np.delete(pool, slice(8, 8 + words)).tolist()) == {POISON}


@pytest.mark.parametrize(("words", "skew"), [(12, 0), (7, 8), (64, 1), (64, 4)])
def test_runs_that_are_no_whole_cache_lines_are_stored_the_usual_way(words: int, skew: int) -> None:
    used, pool, src = streamed(words, skew)
    assert not used
    np.testing.assert_array_equal(pool[skew : skew + words], src)
    assert set(np.delete(pool, slice(skew, skew + words)).tolist()) == {POISON}


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_streamed_copies_by_two_threads_equal_array_indexing(src: str, dst: str) -> None:
    large = Shape(layers=4, kvs=2, heads=4, tokens=64, words=32)  # 0.5 MB a page: four parts
    for stream_stores in (True, False):
        case(src, dst, large).check(Tuning(cpu_threads=2, stream_stores=stream_stores))


# ---- threads ------------------------------------------------------------------------------------


def test_two_threads_copy_at_once_without_mixing_pages() -> None:
    shape = Shape(layers=2, kvs=2, heads=4, tokens=32, words=32)
    both = [Case(shape, "layer_first", one, 9, (0, 8, 3), (7, 2, 5)) for one in LAYOUTS[1:3]]
    expected = [each.expected(seed) for seed, each in enumerate(both)]
    with ThreadPoolExecutor(2) as callers:
        for _ in range(10):
            tuning = Tuning(cpu_threads=2)
            asked = [callers.submit(each.copied, n, tuning) for n, each in enumerate(both)]
            for found, right in zip(asked, expected, strict=True):
                np.testing.assert_array_equal(found.result(), right)


def test_an_error_in_one_part_reaches_the_caller() -> None:
    def work(begin: int, end: int) -> None:
        if begin <= 5 < end:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        native.share(100, native.SHARE_BYTES_MIN, work, 2)


def test_every_row_is_shared_out_exactly_once() -> None:
    seen: list[int] = []
    native.share(101, native.SHARE_BYTES_MIN, lambda begin, end: seen.extend(range(begin, end)), 3)
    assert sorted(seen) == list(range(101))


def run_alone(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(native.os, "fork"), reason="this system has no fork")
def test_a_forked_child_can_copy_after_its_parent_has() -> None:
    run_alone("""
import os
import numpy as np
from cuda_numba import Shape, Tuning, copy_pages
from cuda_numba.fold import compact
shape = Shape(layers=1, kvs=1, heads=1, tokens=4, words=1 << 16)
src = np.arange(8 * shape.total, dtype=np.uint64)
def copied():
    dst = np.zeros_like(src)
    sides = compact(shape), compact(shape)
    copy_pages(dst, src, range(8), range(8), *sides, shape, tuning=Tuning(cpu_threads=2))
    return bool((dst == src).all())
assert copied()
child = os.fork()
if child == 0:
    os._exit(0 if copied() else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_importing_loads_neither_the_cuda_half_nor_a_driver() -> None:
    run_alone("""
import sys
import numpy as np
from cuda_numba import Shape, copy_pages
from cuda_numba.fold import compact
shape = Shape(1, 1, 1, 1, 4)
dst, src = np.zeros(4, np.uint64), np.arange(4, dtype=np.uint64)
copy_pages(dst, src, [0], [0], compact(shape), compact(shape), shape)
assert (dst == src).all()
assert "numba.cuda" not in sys.modules and "cuda_numba.kernels" not in sys.modules
""")


# ---- forms of the call --------------------------------------------------------------------------


def test_a_page_list_serves_many_copies() -> None:
    each = case("page_first", "layer_first")
    dst, src = each.pools(1)
    to, fro = page_list(each.dst_pages), page_list(np.array(each.src_pages, np.int32))
    for layer in range(SHAPE.layers):
        copy_pages(dst, src, to, fro, *each.strides, SHAPE, layer=layer, tuning=ONE)
    np.testing.assert_array_equal(dst, each.expected(1))


def test_pages_may_move_within_one_pool() -> None:
    shape = Shape(layers=1, kvs=1, heads=1, tokens=2, words=3)
    pool = np.arange(4 * shape.total, dtype=np.uint64)
    copy_pages(pool, pool, [3], [1], compact(shape), compact(shape), shape)
    assert pool.reshape(4, -1)[3].tolist() == pool.reshape(4, -1)[1].tolist()


def test_an_empty_page_list_copies_nothing() -> None:
    each = Case(SHAPE, "page_first", "page_head", 1, (), ())
    assert set(each.copied(1, ONE).tolist()) == {POISON}


def test_gaps_between_pages_stay_as_they_are() -> None:
    shape = Shape(layers=2, kvs=1, heads=1, tokens=2, words=8)
    padded = Strides(page=40, layer=16, kv=0, head=0, token=8)
    dst, src = np.full(80, POISON, np.uint64), np.arange(64, dtype=np.uint64)
    copy_pages(dst, src, [1, 0], [0, 1], padded, compact(shape), shape)
    assert dst[40:72].tolist() == list(range(32))
    assert set(dst[32:40].tolist()) == {POISON} == set(dst[72:].tolist())

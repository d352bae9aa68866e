"""From axes to loops, and the index arithmetic: integers alone, no array is touched."""

from __future__ import annotations

import mmap
from itertools import product

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.extending import register_jitable

from cuda_numba import LayoutError, Shape, Strides, bench, copy_pages, grid, index, page_checksums
from cuda_numba.checks import is_paired
from cuda_numba.fold import Nest, compact, cut_run, fold
from scenarios.kernels.case import LAYOUTS, Case
from scenarios.kernels.draws import cases

SHAPE = Shape(layers=3, kvs=2, heads=4, tokens=5, words=8)


def nest(src: str, dst: str, shape: Shape = SHAPE, layer: int | None = None) -> Nest:
    known = bench.layouts(shape, 7)
    return fold(shape, known[dst], known[src], layer)


def places(folded: Nest) -> list[tuple[int, int]]:
    """(dst word, src word) of all words of page 2 to page 1, by the arithmetic of the kernels."""
    found = []
    for row in range(folded.rows_a_page):
        _, *outer = index.split_row(row, folded.sizes)
        to = index.row_offset(folded.to, 1, *outer)
        fro = index.row_offset(folded.fro, 2, *outer)
        for item, word in product(range(folded.sizes[3]), range(folded.sizes[4])):
            found.append((to + item * folded.to[5] + word, fro + item * folded.fro[5] + word))
    return found


@given(cases(words_max=600, pages_max=5, heads_max=4, tokens_max=8))
def test_a_nest_visits_every_word_of_a_page_once(drawn: Case) -> None:
    to, fro = drawn.strides
    axes = [range(size) for size in drawn.shape[:4]]
    if drawn.layer is not None:
        axes[0] = range(drawn.layer, drawn.layer + 1)
    expected = [
        tuple(
            s.base + page * s.page + layer * s.layer + kv * s.kv + head * s.head + token * s.token
            + word
            for page, s in ((1, to), (2, fro))
        )
        for layer, kv, head, token in product(*axes)
        for word in range(drawn.shape.words)
    ]  # fmt: skip
    folded = fold(drawn.shape, to, fro, drawn.layer)
    assert sorted(places(folded)) == sorted(expected)
    assert sorted(places(cut_run(folded, 4, 4))) == sorted(expected)


def test_equal_layouts_fold_to_the_runs_they_have_in_common() -> None:
    half = SHAPE.total // 2
    assert nest("page_first", "page_first").sizes == (1, 1, 1, 2, half)
    assert nest("page_first_direct", "page_first_direct").sizes == (1, 1, 1, 2, half)
    assert nest("layer_first", "layer_first").sizes == (1, 1, 1, 6, half // 3)


def test_layers_of_whole_pages_are_one_run_each() -> None:
    assert nest("layer_first", "page_first_direct").sizes[4] == SHAPE.total // 6
    assert nest("page_first_direct", "layer_first", layer=1).sizes == (1, 1, 1, 2, 160)


def test_heads_that_lie_together_on_both_sides_join_the_run() -> None:
    assert nest("layer_first", "page_first").sizes[4] == SHAPE.heads * SHAPE.words
    assert nest("layer_first", "page_head").sizes[4] == SHAPE.words


def test_a_source_is_read_in_the_order_in_which_it_lies() -> None:
    for src, dst in product(LAYOUTS, LAYOUTS):
        fro = [start for _, start in places(nest(src, dst))]
        assert fro == sorted(fro), (src, dst)


def test_far_places_are_streams_that_move_on() -> None:
    """Layers lie far apart in one layout: innermost, each of them is read or written in order."""
    strides = bench.layouts(SHAPE, 7)
    for src, dst in (("layer_first", "page_head"), ("page_head", "layer_first")):
        found = fold(SHAPE, strides[dst], strides[src], far_inside=True)
        assert found.sizes[3] == SHAPE.layers
        assert sorted(places(found)) == sorted(places(nest(src, dst)))


def test_a_long_run_is_cut_where_nothing_else_keeps_reads_in_flight() -> None:
    whole = fold(Shape(1, 1, 1, 64, 48), *[compact(Shape(1, 1, 1, 64, 48))] * 2)
    assert whole.sizes == (1, 1, 1, 1, 3072)
    cut = cut_run(whole, 128, 4)
    assert cut.sizes == (1, 1, 1, 24, 128)
    assert cut.to[5] == cut.fro[5] == 128


def test_a_run_is_cut_below_the_few_items_that_there_are() -> None:
    long = nest("page_first_direct", "page_first_direct", SHAPE._replace(tokens=64))
    assert long.sizes == (1, 1, 1, 2, 6144)
    cut = cut_run(long, 128, 4)
    assert cut.sizes == (1, 1, 2, 48, 128)
    assert (cut.to[4], cut.to[5]) == (long.to[5], 128)


def test_a_run_that_does_not_divide_stays_whole() -> None:
    prime = Shape(1, 1, 1, 1, 1009)
    whole = fold(prime, compact(prime), compact(prime))
    assert cut_run(whole, 128, 4) == whole


def test_wide_accesses_need_even_words_and_aligned_pools() -> None:
    even = nest("layer_first", "page_first")
    assert is_paired(even, 0x1000, 0x2010)
    assert not is_paired(even, 0x1000, 0x2008)
    odd = fold(Shape(1, 1, 1, 2, 3), *[Strides(8, 8, 8, 8, 4)] * 2)
    assert not is_paired(odd, 0x1000, 0x2000)
    skewed = fold(SHAPE, compact(SHAPE)._replace(base=1), compact(SHAPE))
    assert not is_paired(skewed, 0x1000, 0x2000)


# ---- blocks and threads -------------------------------------------------------------------------


@given(
    st.tuples(*[st.integers(1, 70)] * 4, st.integers(1, 3000)),
    st.integers(1, 300),
    st.integers(1, 768),
    st.sampled_from([1, 2]),
)
def test_every_launch_keeps_the_limits_of_a_device(
    sizes: tuple[int, int, int, int, int], pages: int, threads: int, width: int
) -> None:
    even = (*sizes[:4], sizes[4] * width)
    whole = Nest(even, (0,) * 6, (0,) * 6, 0, 0)
    copy = grid.for_copy(whole, width, pages, blocks=8, threads=threads)
    checksum = grid.for_checksum(whole, width, pages, blocks=256, threads=threads)
    for form in (copy, checksum):
        assert 1 <= form.threads <= threads
        assert 1 <= form.block[2] <= grid.BLOCK_Z_MAX
        assert min(form.block) >= 1 <= form.grid[1] <= grid.GRID_Y_MAX
    assert copy.grid[0] <= 8
    assert checksum.grid[0] == pages


def test_a_block_of_a_usual_page_is_full_warps_with_four_reads_in_flight() -> None:
    usual = SHAPE._replace(tokens=64)
    form = grid.for_copy(nest("layer_first", "page_first", usual), 2, 64, blocks=8, threads=512)
    assert form.block == (16, 16, 2)
    assert form.threads % grid.WARP == 0
    kept = form.threads * grid.IN_FLIGHT * 16 * form.grid[0]
    assert kept >= 250_000  # bytes in flight that 63 GB/s need at a round trip of 4 us


@pytest.mark.parametrize("threads", [0, 769, 2048])
def test_blocks_that_no_device_takes_are_refused(threads: int) -> None:
    with pytest.raises(LayoutError, match="threads a block"):
        grid.for_copy(nest("layer_first", "page_first"), 2, 1, blocks=8, threads=threads)


def test_more_rows_than_a_kernel_counts_are_refused() -> None:
    with pytest.raises(LayoutError, match="pass fewer pages at a time"):
        grid.for_copy(nest("layer_first", "page_head"), 2, 2**32, blocks=8, threads=64)


def test_no_blocks_at_all_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least one"):
        grid.for_copy(nest("layer_first", "page_first"), 2, 1, blocks=0, threads=64)


# ---- field report M04: offsets beyond 32 bits ---------------------------------------------------

_offset = register_jitable(index.row_offset)


@njit
def compiled_offset(steps, page, first, second, third):  # type: ignore[no-untyped-def]
    return _offset(steps, page, first, second, third)


@settings(deadline=None)  # the first call compiles
@given(
    st.integers(2**31, 2**44),
    st.integers(1, 2**12),
    st.tuples(*[st.integers(0, 2**40)] * 3),
    st.tuples(*[st.integers(0, 2**10)] * 3),
)
def test_compiled_offsets_of_huge_pools_equal_those_of_python(
    page_step: int, page: int, steps: tuple[int, int, int], at: tuple[int, int, int]
) -> None:
    all_steps = (2**41 + 1, page_step, *steps, 0)
    expected = (
        2**41 + 1 + page * page_step + sum(one * two for one, two in zip(steps, at, strict=True))
    )
    assert index.row_offset(all_steps, page, *at) == expected
    assert compiled_offset(all_steps, page, *at) == expected


@pytest.mark.parametrize("first_word", [2**31, 2**32 + 6, 2**40])
def test_pages_far_into_a_huge_pool_are_copied_and_checked(first_word: int) -> None:
    size = 8 * (first_word + 64)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        sparse = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"this system lends no {size >> 30} GiB of addresses: {error}")
    pool = np.frombuffer(sparse, np.uint64)
    shape = Shape(layers=1, kvs=1, heads=1, tokens=1, words=8)
    far = Strides(page=first_word // 2, layer=0, kv=0, head=0, token=0)
    src = np.arange(32, dtype=np.uint64)
    copy_pages(pool, src, [2], [3], far, compact(shape), shape)
    assert pool[first_word : first_word + 8].tolist() == list(range(24, 32))
    assert page_checksums(pool, [2], far, shape) == page_checksums(src, [3], compact(shape), shape)

"""Checksums and head ranges of the CPU twin against the oracle and against their formula."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuda_numba import (
    LayoutError,
    Shape,
    Tuning,
    bench,
    gather_heads,
    native,
    oracle,
    page_checksums,
    scatter_heads,
    staged_shape,
)
from cuda_numba.fold import compact
from cuda_numba.index import mix
from scenarios.kernels.case import LAYOUTS, POISON, Case
from scenarios.kernels.draws import cases
from scenarios.tidy import ROOT

SHAPE = Shape(layers=3, kvs=2, heads=4, tokens=5, words=8)
ROW = Shape(layers=1, kvs=1, heads=1, tokens=1, words=4)


def checksum_of(*words: int) -> int:
    """Of a page of these words alone."""
    shape = ROW._replace(words=len(words))
    return int(page_checksums(np.array(words, np.uint64), [0], compact(shape), shape)[0])


@given(cases(words_max=5000, pages_max=30, heads_max=5, tokens_max=17), st.integers(0, 2**32))
def test_drawn_checksums_equal_the_oracle(drawn: Case, seed: int) -> None:
    drawn.check_checksums(Tuning(cpu_threads=2), seed)


def test_the_documented_formula_gives_the_checksum() -> None:
    wrap = 2**64
    expected = 0
    for position, word in enumerate((7, 0, 2**64 - 1)):
        x = (word + (position + 1) * 0x9E3779B97F4A7C15) % wrap
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % wrap
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % wrap
        expected ^= x ^ (x >> 31)
    assert checksum_of(7, 0, 2**64 - 1) == expected


def test_mixing_the_first_word_is_splitmix64_itself() -> None:
    assert mix(0, 0) == 0xE220A8397B1DCDAF  # first output of the published generator for seed 0
    assert mix(0, 1) == 0x6E789E6AA1B965F4  # and the second


def test_a_page_has_one_checksum_in_every_layout() -> None:
    sums = {}
    for one in LAYOUTS:
        case = Case(SHAPE, "layer_first", one, 7, (4, 0), (1, 5))
        dst = case.copied(3, Tuning())
        sums[one] = page_checksums(dst, [4, 0], case.strides[0], SHAPE).tolist()
    assert len(set(map(tuple, sums.values()))) == 1, sums


def test_heads_folded_into_longer_runs_leave_the_checksum_alone() -> None:
    folded = SHAPE._replace(heads=1, words=SHAPE.heads * SHAPE.words)
    pool = np.random.default_rng(5).integers(0, 2**64, 3 * SHAPE.total, dtype=np.uint64)
    found = [page_checksums(pool, [2, 0], compact(shape), shape) for shape in (SHAPE, folded)]
    np.testing.assert_array_equal(*found)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9), st.data())
def test_any_one_changed_word_changes_the_checksum(words: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(words) - 1))
    other = data.draw(st.integers(0, 2**64 - 1).filter(lambda word: word != words[at]))
    changed = [*words[:at], other, *words[at + 1 :]]
    assert checksum_of(*words) != checksum_of(*changed)


def test_swapped_words_and_pages_of_zeros_are_told_apart() -> None:
    assert checksum_of(1, 2) != checksum_of(2, 1)
    assert len({checksum_of(*[0] * length) for length in range(1, 9)}) == 8


# ---- heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "heads"), list(product(LAYOUTS, [(0, 1), (1, 3), (0, 4)])))
def test_heads_are_gathered_as_array_indexing_does(layout: str, heads: tuple[int, int]) -> None:
    strides = bench.layouts(SHAPE, 7)[layout]
    pool = np.random.default_rng(7).integers(0, 2**64, 7 * SHAPE.total, dtype=np.uint64)
    staged, pages = staged_shape(SHAPE, heads), [6, 2, 0]
    found, right = (np.full(4 * staged.total, POISON, np.uint64) for _ in range(2))
    gather_heads(found, pool, pages, heads, strides, SHAPE)
    oracle.gather_heads(
        oracle.view(right, 4, compact(staged), staged),
        oracle.view(pool, 7, strides, SHAPE),
        pages,
        heads,
    )
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(("one", "two"), list(product(LAYOUTS, LAYOUTS)))
def test_heads_of_four_ranks_are_put_together_by_two(one: str, two: str) -> None:
    """A side of 4 ranks with 2 heads each sends to a side of 2 ranks with 4 heads each."""
    narrow, wide = SHAPE._replace(heads=2), SHAPE
    draw = np.random.default_rng(9)
    senders = [draw.integers(0, 2**64, 3 * narrow.total, dtype=np.uint64) for _ in range(4)]
    receivers = [np.full(5 * wide.total, POISON, np.uint64) for _ in range(2)]
    send, take = bench.layouts(narrow, 3)[one], bench.layouts(wide, 5)[two]
    for rank, pool in enumerate(senders):
        staging = np.zeros(2 * narrow.total, np.uint64)
        gather_heads(staging, pool, [2, 0], (0, 2), send, narrow)
        first = 2 * (rank % 2)
        scatter_heads(receivers[rank // 2], staging, [4, 1], (first, first + 2), take, wide)
    for rank, pool in enumerate(receivers):
        view = oracle.view(pool, 5, take, wide)
        parts = [oracle.view(each, 3, send, narrow)[[2, 0]] for each in senders[2 * rank :][:2]]
        np.testing.assert_array_equal(view[[4, 1]], np.concatenate(parts, axis=3))
        assert set(view[[0, 2, 3]].ravel().tolist()) == {POISON}


@pytest.mark.parametrize("heads", [(0, 5), (-1, 2), (2, 2), (3, 1)])
def test_heads_that_a_pool_does_not_have_are_refused(heads: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match="are not among the 4 of the pool"):
        staged_shape(SHAPE, heads)


# ---- compiled code that outlives its source -----------------------------------------------------

SUM = """
import numpy as np
from cuda_numba import Shape, page_checksums
from cuda_numba.fold import compact
shape = Shape(1, 1, 1, 1, 4)
print(page_checksums(np.arange(4, dtype=np.uint64), [0], compact(shape), shape)[0])
"""


def test_an_edit_of_the_shared_arithmetic_is_not_answered_from_the_cache(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "cuda_numba", tmp_path / "cuda_numba", ignore=ignored)
    shared = tmp_path / "cuda_numba" / "index.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run() -> int:
        command = [sys.executable, "-c", SUM]
        return int(subprocess.check_output(command, cwd=tmp_path, env=environment, timeout=60))

    before = run()
    assert before == checksum_of(0, 1, 2, 3)
    text = shared.read_text(encoding="utf-8")
    assert "x >> 30" in text
    shared.write_text(text.replace("x >> 30", "x >> 29"), encoding="utf-8")
    assert run() != before


def test_code_that_is_older_than_its_source_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="delete __pycache__"):
        native._fresh(12345)

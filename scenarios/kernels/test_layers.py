"""Copies that tell of each layer: the same words, and no layer is told of before it is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")

import numpy as np
from hypothesis import given

from cuda_numba import Shape, Tuning, copy_layers
from scenarios.kernels.case import LAYOUTS, Case
from scenarios.kernels.draws import cases

LARGE = Case(Shape(30, 2, 3, 64, 16), "layer_first", "page_head", 9, (7, 3, 4), (0, 5, 8))


@given(drawn=cases(words_max=4000, pages_max=9, heads_max=5, tokens_max=9))
def test_the_layers_together_are_the_whole_copy_and_each_is_told_of_once(drawn: Case) -> None:
    case = replace(drawn, layer=None)
    dst, src = case.pools(1)
    told: list[int] = []
    pages = case.dst_pages, case.src_pages
    copy_layers(dst, src, *pages, *case.strides, case.shape, arrived=told.append)
    np.testing.assert_array_equal(dst, case.expected(1))
    assert sorted(told) == list(range(case.shape.layers))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dst_layout", LAYOUTS)
@pytest.mark.parametrize("src_layout", LAYOUTS)
def test_a_layer_is_there_when_it_is_told_of(
    src_layout: str, dst_layout: str, threads: int
) -> None:
    case = replace(LARGE, src_layout=src_layout, dst_layout=dst_layout)
    dst, src = case.pools(1)
    found, _ = case.views(dst, src)  # [page, layer, kv, head, token, word]
    right, _ = case.views(case.expected(1), src)
    early: list[int] = []

    def look(layer: int) -> None:
        if not np.array_equal(found[:, layer], right[:, layer]):
            early.append(layer)

    copy_layers(
        *(dst, src, case.dst_pages, case.src_pages, *case.strides, case.shape),
        arrived=look,
        tuning=Tuning(cpu_threads=threads),
    )
    assert early == []


def test_no_pages_are_all_layers_at_once() -> None:
    told: list[int] = []
    dst, src = LARGE.pools(1)
    copy_layers(dst, src, [], [], *LARGE.strides, LARGE.shape, arrived=told.append)
    assert told == list(range(LARGE.shape.layers))

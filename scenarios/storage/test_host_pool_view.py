"""A host pool as classes written for SGLang see it (spec 3)."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch

from refimpl.config import ConfigError
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.run.host_pool_view import HostPoolView

GQA = Geometry(layers=3, kvs=2, heads=4, dim=8, page_size=5)
MLA = Geometry(layers=3, kvs=1, heads=1, dim=12, page_size=5)
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
CASES = [*product((GQA,), (*LAYOUTS, "page_head")), *product((MLA,), LAYOUTS)]
PAGES = 3


def view_of(geometry: Geometry, layout: str) -> tuple[Pool, HostPoolView]:
    pool = Pool(geometry, layout, PAGES)
    pool.tensor.view(-1).view(torch.int16).copy_(torch.arange(pool.tensor.numel()))
    return pool, HostPoolView(pool)


@pytest.mark.parametrize(
    ("geometry", "layout", "shape"),
    [
        (GQA, "layer_first", (2, 3, 15, 4, 8)),
        (GQA, "page_first", (2, 15, 3, 4, 8)),
        (GQA, "page_first_direct", (2, 3, 3, 5, 4, 8)),
        (GQA, "page_head", (2, 3, 4, 5, 3, 8)),
        (MLA, "layer_first", (3, 15, 1, 12)),
        (MLA, "page_first", (15, 3, 1, 12)),
        (MLA, "page_first_direct", (3, 3, 5, 1, 12)),
    ],
)
def test_the_buffer_has_upstreams_shape(
    geometry: Geometry, layout: str, shape: tuple[int, ...]
) -> None:
    pool, view = view_of(geometry, layout)
    assert tuple(view.kv_buffer.shape) == shape
    assert view.kv_buffer.data_ptr() == pool.tensor.data_ptr()
    assert (view.size, view.page_num) == (15, 3)


@pytest.mark.parametrize(("geometry", "layout"), CASES)
def test_a_flat_page_is_the_payload_and_goes_back_in(geometry: Geometry, layout: str) -> None:
    pool, view = view_of(geometry, layout)
    page = view.get_data_page(5)
    assert page.view(torch.uint8).numpy().tobytes() == b"".join(pool.pieces(1))
    assert view.get_dummy_flat_data_page().shape == page.shape
    others = [b"".join(pool.pieces(slot)) for slot in (0, 1)]
    view.set_from_flat_data_page(10, page)
    assert [b"".join(pool.pieces(slot)) for slot in range(3)] == [*others, others[1]]
    assert torch.equal(view.get_data_page(10, flat=False).flatten(), page)


@pytest.mark.parametrize(("geometry", "layout"), CASES)
def test_addresses_are_those_of_the_elements(geometry: Geometry, layout: str) -> None:
    pool, view = view_of(geometry, layout)
    addresses, sizes = view.get_page_buffer_meta(view.indices([2, 0]))
    whole = pool.by_page()  # [page, kv, layer, token, head, dim]
    heads = range(geometry.layers) if layout == "layer_first" else (0,)
    wanted = [
        whole[slot, kv, layer, 0, 0, 0].data_ptr()
        for slot in (2, 0)
        for layer in heads
        for kv in range(geometry.kvs)
    ]
    assert addresses == wanted
    assert sum(sizes) == 2 * geometry.page_bytes
    pieces = [ctypes.string_at(*each) for each in zip(addresses, sizes, strict=True)]
    assert sorted(pieces) == sorted(bytes(each) for slot in (2, 0) for each in pool.pieces(slot))


def test_groups_of_heads_are_addressed_page_by_page_and_k_before_v() -> None:
    pool, view = view_of(GQA, "page_head")
    addresses, sizes = view.get_split_heads_page_buffer_meta(view.indices([1]), 2)
    whole = pool.by_page()
    wanted = [whole[1, kv, 0, 0, head, 0].data_ptr() for head in (0, 2) for kv in range(2)]
    assert (addresses, sizes) == (wanted, [GQA.page_bytes // 4] * 4)
    with pytest.raises(ConfigError, match="4 heads can't be split into 3 groups"):
        view.get_split_heads_page_buffer_meta(view.indices([1]), 3)
    with pytest.raises(ConfigError, match="heads of layout page_first can't be split"):
        view_of(GQA, "page_first")[1].get_split_heads_page_buffer_meta([0], 2)


def test_indices_are_whole_pages_of_tokens() -> None:
    view = view_of(GQA, "page_first")[1]
    assert view.indices([2, 0]).tolist() == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="3 indices are no whole pages of 5 tokens"):
        view.get_page_buffer_meta([0, 1, 2])


def test_sizes_are_told_in_bytes() -> None:
    view, latent = view_of(GQA, "page_first")[1], view_of(MLA, "page_first")[1]
    assert (view.get_size_per_token(), view.get_ksize_per_token()) == (384, 192)
    assert (latent.get_size_per_token(), latent.get_ksize_per_token()) == (72, 72)
    assert not view.is_stride_page_aligned()
    wide = HostPoolView(Pool(Geometry(2, 2, 8, 64, 64), "page_first", 2))
    assert wide.is_stride_page_aligned(64)

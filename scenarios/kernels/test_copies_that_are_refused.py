"""What is not copied: each case ends in a named error before anything is written."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")

import numpy as np

from cuda_numba import (
    DeviceView,
    LayoutError,
    Shape,
    Strides,
    copy_pages,
    page_checksums,
    page_list,
)
from cuda_numba.arrays import span
from cuda_numba.backend import choose
from cuda_numba.fold import compact

SHAPE = Shape(layers=2, kvs=2, heads=1, tokens=4, words=4)
STRIDES = compact(SHAPE)
PAGES = 3


def refused(match: str, **changed: Any) -> None:
    """The copy of page 1 to page 2, with ``changed`` in it, fails and writes nothing."""
    call: dict[str, Any] = {
        "dst": np.zeros(PAGES * SHAPE.total, np.uint64),
        "src": np.ones(PAGES * SHAPE.total, np.uint64),
        "dst_pages": [2],
        "src_pages": [1],
        "dst_strides": STRIDES,
        "src_strides": STRIDES,
        "shape": SHAPE,
    }
    call.update(changed)
    with pytest.raises(LayoutError, match=match):
        copy_pages(**call)
    if isinstance(call["dst"], np.ndarray):
        assert not call["dst"].any()


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_page_outside_the_pool_is_refused(side: str) -> None:
    refused(f"{side}: page 3 ends at word 256, but the pool has 192", **{f"{side}_pages": [3]})


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_negative_page_is_not_counted_from_the_end(side: str) -> None:
    refused(f"{side}: page -1 is negative", **{f"{side}_pages": [-1]})


@pytest.mark.parametrize("page", [2**62, 2**63 - 1])
def test_a_page_so_far_out_that_64_bits_would_wrap_is_refused(page: int) -> None:
    refused("ends at word", src_pages=[page])


def test_a_page_number_beyond_64_bits_is_refused() -> None:
    refused("does not fit in 64 bits", src_pages=np.array([2**63], np.uint64))


def test_lists_of_different_lengths_are_refused() -> None:
    refused("go in pairs", src_pages=[0, 1])


def test_a_page_that_is_written_twice_is_refused() -> None:
    refused("names a page twice", dst_pages=[2, 2], src_pages=[0, 1])


@pytest.mark.parametrize("pages", [[0.5], [[1]], ["a"], [True, False]])
def test_page_lists_that_hold_no_page_numbers_are_refused(pages: Any) -> None:
    refused("pass integers in a row", dst_pages=pages, src_pages=pages)


def test_a_pool_of_another_type_is_refused() -> None:
    refused(r"pass a NumPy array, .reshape\(-1\).view\(np.uint64\)", dst=np.zeros(192, np.float64))
    refused("src is list", src=[1, 2, 3])


def test_a_slice_with_gaps_is_refused() -> None:
    refused("src is not flat", src=np.ones(384, np.uint64)[::2])
    refused("dst is not flat", dst=np.zeros((3, 64), np.uint64))


def test_a_pool_between_words_is_refused() -> None:
    refused("align it to 8", src=np.ones(193 * 8, np.uint8)[4:-4].view(np.uint64))


def test_a_read_only_pool_is_not_written_to() -> None:
    pool = np.zeros(PAGES * SHAPE.total, np.uint64)
    pool.flags.writeable = False
    refused("read-only", dst=pool)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    refused("is not one of the 2 layers", layer=layer)


def test_an_axis_without_entries_is_refused() -> None:
    refused("shape.tokens is 0", shape=SHAPE._replace(tokens=0))


def test_strides_that_count_down_are_refused() -> None:
    refused("the layer stride is -16", src_strides=STRIDES._replace(layer=-16))


@pytest.mark.parametrize("axis", ["page", "layer", "kv", "token"])
def test_strides_that_put_two_words_in_one_place_are_refused(axis: str) -> None:
    refused("words, but what it steps over has", dst_strides=STRIDES._replace(**{axis: 3}))


def test_a_source_may_repeat_itself() -> None:
    dst, src = np.zeros(SHAPE.total, np.uint64), np.arange(4, dtype=np.uint64)
    copy_pages(dst, src, [0], [0], STRIDES, Strides(0, 0, 0, 0, 0), SHAPE)
    assert dst.reshape(-1, 4).tolist() == [[0, 1, 2, 3]] * 16


def test_a_page_is_not_read_and_written_by_one_copy() -> None:
    pool = np.zeros(PAGES * SHAPE.total, np.uint64)
    refused("page 1 is read and written", dst=pool, src=pool, dst_pages=[1, 2], src_pages=[0, 1])


def test_views_of_one_memory_with_different_strides_are_refused() -> None:
    pool = np.zeros(PAGES * SHAPE.total + 8, np.uint64)
    refused("share memory", dst=pool[8:], src=pool[:-8])


def test_the_simulator_is_not_entered_by_accident() -> None:
    refused("set NUMBA_ENABLE_CUDASIM=1 before", backend="cuda")


def test_host_and_device_arrays_are_not_mixed() -> None:
    refused("dst is in host memory: pass DeviceView", src=DeviceView(0x1000, 192))


def test_device_arrays_are_not_given_to_the_cpu() -> None:
    far = DeviceView(0x1000, 192), DeviceView(0x9000, 192)
    refused("device arrays need the cuda backend", dst=far[0], src=far[1], backend="cpu")


def test_checksums_look_at_page_numbers_as_well() -> None:
    with pytest.raises(LayoutError, match="page 5 ends at word"):
        page_checksums(np.ones(192, np.uint64), [5], STRIDES, SHAPE)


# ---- device arrays, as far as they can be looked at without a device ----------------------------


class Described:
    """What another library says of an array of its own."""

    def __init__(self, **description: Any) -> None:
        self.__cuda_array_interface__ = {"data": (0x1000, False), "version": 3, **description}


class Unspeakable:
    """A tensor of a type that the interface has no letter for."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise TypeError("bfloat16 is not supported")


def test_device_arrays_choose_the_cuda_backend() -> None:
    assert choose(None, dst=DeviceView(0x1000, 8), src=DeviceView(0x2000, 8)) == "cuda"


def test_a_contiguous_device_array_of_any_type_is_a_run_of_bytes() -> None:
    half = Described(typestr="<f2", shape=(3, 4, 2), strides=(16, 4, 2))
    assert span("src", half) == (0x1000, 48)
    assert span("src", Described(typestr="<f2", shape=(3, 4, 2), strides=None)) == (0x1000, 48)


def test_a_device_array_with_gaps_is_refused() -> None:
    with pytest.raises(LayoutError, match="has gaps"):
        span("src", Described(typestr="<u8", shape=(3, 4), strides=(64, 8)))


def test_a_device_array_of_broken_words_is_refused() -> None:
    with pytest.raises(LayoutError, match="no whole number of 8-byte words"):
        span("src", Described(typestr="<f2", shape=(3,), strides=None))


def test_a_tensor_of_an_unknown_type_is_refused_with_the_remedy() -> None:
    with pytest.raises(LayoutError, match=r"pass .view\(torch.uint64\)"):
        choose(None, dst=Unspeakable(), src=Unspeakable())


def test_a_page_list_does_not_follow_later_changes_of_its_array() -> None:
    pages = np.array([0, 1])
    listed = page_list(pages)
    pages[0] = 1 << 40
    assert listed.ids.tolist() == [0, 1]

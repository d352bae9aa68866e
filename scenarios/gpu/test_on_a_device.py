"""The kernels on a CUDA device, where there is one: the seeds that CPU and simulator are held to."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")
pytest.importorskip(
    "numba_cuda", reason="the kernels are not installed: pip install -e '.[kernels]'"
)

import numpy as np
from numba import config, cuda

from cuda_numba import DeviceView, copy_pages, page_checksums, page_list
from scenarios.kernels.case import Case, seeded_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(config.ENABLE_CUDASIM) or not cuda.is_available(), reason="there is no CUDA device"
    ),
]
PATHS = list(product(("device", "pinned"), ("device", "pinned")))


def placed(words: np.ndarray, where: str) -> tuple[Any, Any]:
    """(array, what the kernels take), on the device or in pinned host memory."""
    if where == "device":
        array = cuda.to_device(words)
        return array, array
    array = cuda.pinned_array(words.shape, words.dtype)
    array[:] = words
    return array, DeviceView(array.ctypes.data, array.size, array)


def on_host(array: Any) -> np.ndarray:
    return array.copy_to_host() if hasattr(array, "copy_to_host") else np.array(array)


@pytest.mark.parametrize(("src_place", "dst_place"), PATHS)
@pytest.mark.parametrize("seed", range(12))
def test_copies_and_checksums_on_a_device_equal_the_oracle(
    seed: int, src_place: str, dst_place: str
) -> None:
    case: Case = seeded_case(seed, 40_000)
    dst, src = case.pools(seed)
    (target, far_dst), (_source, far_src) = placed(dst, dst_place), placed(src, src_place)
    stream = cuda.stream()
    copy_pages(
        *(far_dst, far_src, case.dst_pages, case.src_pages, *case.strides, case.shape),
        layer=case.layer,
        stream=stream,
    )
    stream.synchronize()
    np.testing.assert_array_equal(on_host(target), case.expected(seed))
    pages, shape = page_list(case.src_pages), case.shape
    found = page_checksums(far_src, pages, case.strides[1], shape, stream=stream)
    np.testing.assert_array_equal(found, page_checksums(src, pages, case.strides[1], shape))

"""Kernels that move pages of KV between pools, on CPU and on CUDA devices, each with its oracle.

Pools are flat arrays of 64-bit words; a layout is a tuple of strides in words. Knows nothing of the
engine, of tensors or of layouts by name. Importing it loads neither a driver nor numba.cuda.
"""

from __future__ import annotations

from cuda_numba.arrays import DeviceView
from cuda_numba.checks import PageList, page_list
from cuda_numba.checksum import page_checksums
from cuda_numba.fold import LayoutError, Shape, Strides
from cuda_numba.heads import gather_heads, scatter_heads, staged_shape
from cuda_numba.pages import copy_layers, copy_pages
from cuda_numba.tuning import Tuning

__all__ = [
    "DeviceView",
    "LayoutError",
    "PageList",
    "Shape",
    "Strides",
    "Tuning",
    "copy_layers",
    "copy_pages",
    "gather_heads",
    "page_checksums",
    "page_list",
    "scatter_heads",
    "staged_shape",
]

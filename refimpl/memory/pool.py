"""A pool of pages: one tensor in one layout, on the device or on the host.

Must not know: who holds a page, policies, what the values mean. Called by: transfer, model, hands.
"""

from __future__ import annotations

import mmap as _mmap
from contextlib import suppress
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from refimpl.config import ConfigError
from refimpl.memory.layout import Geometry, axes_of, shape_of, strides_of

TORCH_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
HOST_RESERVE_BYTES: Final = 1 << 30  # left to everybody else; upstream leaves 10 GiB (spec 1.6)
HUGE_PAGE_BYTES: Final = 2 << 20  # of x86-64, and of 64-bit Arm with small pages of 4 KB
_CGROUP_LIMITS: Final = (  # (limit, what is used of it)
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


class Pool:
    """``pages`` pages of ``geometry`` in ``layout``; slots are page numbers."""

    def __init__(
        self, geometry: Geometry, layout: str, pages: int, device: str | torch.device = "cpu"
    ) -> None:
        self.geometry = geometry
        self.layout = layout
        self.pages = pages
        self.device = torch.device(device)
        self.strides = strides_of(layout, geometry, pages)
        shape = shape_of(layout, geometry, pages)
        if self.device.type == "cpu":
            check_host_memory(pages * geometry.page_bytes, geometry)
        dtype, size = TORCH_DTYPES[geometry.dtype], pages * geometry.page_bytes
        if self.device.type != "cpu":
            self.tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        elif torch.cuda.is_available():
            self.tensor = torch.zeros(shape, dtype=dtype, pin_memory=True)
        elif size < 2 * HUGE_PAGE_BYTES:
            self.tensor = torch.zeros(shape, dtype=dtype)
        else:
            self.tensor = _in_huge_pages(size).view(dtype).view(shape)

    def words(self) -> NDArray[np.uint64]:
        """The whole pool as flat 8-byte words; shares its memory. For a pool in host memory."""
        words: NDArray[np.uint64] = self.tensor.view(-1).view(torch.uint64).numpy()
        return words

    def pieces(self, slot: int) -> tuple[memoryview, ...]:
        """The bytes of a page in the order of its layout, as contiguous pieces; they share its memory.

        For a pool in host memory. Joined they are what upstream's ``get_data_page`` gives (spec 3).
        """
        outer = axes_of(self.layout, self.geometry)
        outer = outer[: outer.index("page")]
        sizes = self.geometry.sizes(self.pages)
        count = prod(sizes[axis] for axis in outer)  # pieces lie a part of the pool apart
        size = self.geometry.page_bytes // count
        whole = self.tensor.view(-1).view(torch.uint8)
        step = whole.numel() // count
        view: memoryview = whole.numpy().data
        starts = (part * step + slot * size for part in range(count))
        return tuple(view[start : start + size] for start in starts)

    def by_page(self) -> torch.Tensor:
        """The pool seen as [page, kv, layer, token, head, dim], whatever its layout."""
        order = ("page", "kv", "layer", "token", "head", "dim")
        from_axes = {axis: at for at, axis in enumerate(axes_of(self.layout, self.geometry))}
        return self.tensor.permute([from_axes[axis] for axis in order])

    def layer(self, layer: int) -> torch.Tensor:
        """One layer seen as [kv, page, token, head, dim]."""
        return self.by_page()[:, :, layer].transpose(0, 1)


def _in_huge_pages(size: int) -> torch.Tensor:
    """Zeros in huge pages where the system gives them: copies of scattered pages gain 8 %, measured."""
    memory = mmap(-1, size + HUGE_PAGE_BYTES)
    if (advice := getattr(_mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # a kernel may be built without them
            memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skip : skip + size]


def check_host_memory(wanted_bytes: int, geometry: Geometry, ranks: int = 1) -> None:
    """Raise ConfigError unless the host has that much to give for each of ``ranks``; says what fits."""
    usable = max(host_bytes_available() - HOST_RESERVE_BYTES, 0)
    if wanted_bytes * ranks > usable:
        tokens = usable // ranks // geometry.page_bytes * geometry.page_size
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"a pool of {wanted_bytes / 1e9:.1f} GB{each} does not fit into the"
            f" {usable / 1e9:.1f} GB this host has to give: {tokens} tokens fit;"
            " lower --max-total-tokens, --hicache-ratio or --hicache-size"
        )


def host_bytes_available() -> int:
    """Memory that can be had without swapping, within the limit of the container."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in _CGROUP_LIMITS:
        limit_bytes, used_bytes = _number_in(limit), _number_in(used)
        if limit_bytes is not None:
            available = min(available, max(limit_bytes - (used_bytes or 0), 0))
    return available


def _number_in(path: str) -> int | None:
    """The number a file holds; None where there is no file, or no number in it."""
    file = Path(path)
    text = file.read_text(encoding="ascii").strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None

"""A host pool as classes written for SGLang see one: its names, indices in tokens, flat pages.

Facts in spec 3. An index is the first token slot of a page. Must not know: storage classes, keys.
Called by: dynamic, through what opens backends; storage classes themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from refimpl.config import require
from refimpl.memory.pool import Pool
from refimpl.run.sglang_stand_in import HostKVCache
from refimpl.storage.backend import HostPage

_TOKENS_APART: Final = ("layer_first", "page_first")  # layouts that write pages as runs of tokens


class HostPoolView(HostKVCache):
    """``pool``, in host memory; everything here shares its memory unless it says otherwise."""

    def __init__(self, pool: Pool) -> None:
        assert pool.device.type == "cpu", "a host pool lies in host memory"
        geometry = pool.geometry
        self._pool = pool
        self.layout = pool.layout
        self.page_size = geometry.page_size
        self.page_num = pool.pages
        self.size = pool.pages * geometry.page_size  # tokens
        self.dtype: torch.dtype = pool.tensor.dtype
        self.device = "cpu"
        self.pin_memory: bool = pool.tensor.is_pinned() if torch.cuda.is_available() else False
        self.layer_num = geometry.layers
        self.start_layer, self.end_layer = 0, geometry.layers
        self.size_per_token = geometry.token_bytes
        self.dcp_size, self.dcp_rank = 1, 0
        self.is_mla = geometry.is_mla
        if self.is_mla:
            self.kv_cache_dim = geometry.dim
        else:
            self.head_num = geometry.heads
            self.head_dim = self.v_head_dim = geometry.dim
        self.token_stride_size = geometry.heads * geometry.dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * geometry.layers
        self.kv_buffer = _as_upstream(pool)

    # ---- what storage classes call ------------------------------------------------------------------

    def get_size_per_token(self) -> int:
        """Bytes of a token over all layers."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """Bytes of its keys alone; all of it for MLA."""
        return self.size_per_token // self._pool.geometry.kvs

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pieces of pages: page by page, layer by layer, K before V."""
        addresses: list[int] = []
        for slot in self._slots(indices):
            addresses += [piece.data_ptr() for piece in self._pieces(slot)]
        size = self._pool.geometry.page_bytes // len(self._pieces(0))
        return addresses, [size] * len(addresses)

    def get_split_heads_page_buffer_meta(
        self, indices: Any, split_factor: int
    ) -> tuple[list[int], list[int]]:
        """The same for ``split_factor`` groups of heads a page, group by group; ``page_head`` only."""
        require(self.layout == "page_head", f"heads of layout {self.layout} can't be split")
        require(
            self.head_num % split_factor == 0,
            f"{self.head_num} heads can't be split into {split_factor} groups",
        )
        heads = self.head_num // split_factor
        addresses = [
            self.kv_buffer[kv, slot, group * heads].data_ptr()
            for slot in self._slots(indices)
            for group in range(split_factor)
            for kv in range(2)
        ]
        size = self._pool.geometry.page_bytes // 2 // split_factor
        return addresses, [size] * len(addresses)

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        """A page in the order of its layout; flat, it may be a copy."""
        first = int(index)
        page = self._pool.tensor.narrow(self._page_axis, first // self.page_size, 1)
        page = page if self.layout not in _TOKENS_APART else _merged(page, self._page_axis)
        page = page if not self.is_mla else _without_kv(page)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A fresh flat page of zeros."""
        return torch.zeros(self._pool.geometry.page_bytes, dtype=torch.uint8).view(self.dtype)

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        """Fill a page from what ``get_data_page`` gave."""
        page = self._pool.tensor.narrow(self._page_axis, int(index) // self.page_size, 1)
        page.copy_(data_page.reshape(page.shape))

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether every piece of a page begins at a multiple of ``page_size_bytes`` and fills it."""
        size = self._pool.geometry.page_bytes // len(self._pieces(0))
        starts = (piece.data_ptr() for piece in self._pieces(0))
        return size % page_size_bytes == 0 and all(at % page_size_bytes == 0 for at in starts)

    # ---- what the adapter calls ---------------------------------------------------------------------

    def indices(self, slots: Sequence[int]) -> torch.Tensor:
        """The token slots of pages, as the v1 calls take them."""
        first = torch.tensor(slots, dtype=torch.int64) * self.page_size
        return (first[:, None] + torch.arange(self.page_size)).flatten()

    def copy_of(self, page: HostPage) -> torch.Tensor:
        """The payload of a page as a flat tensor with memory of its own.

        A class may keep the tensor it is given, and a page of the pool is soon another's.
        """
        flat = torch.frombuffer(bytearray(b"".join(page.pieces)), dtype=torch.uint8)
        return flat if page.slot is None else flat.view(self.dtype)

    def empty_for(self, page: HostPage) -> torch.Tensor:
        """Where a class may put the payload of a page."""
        if page.slot is None:
            return torch.zeros(page.nbytes, dtype=torch.uint8)
        return self.get_dummy_flat_data_page()

    def fill(self, page: HostPage, value: Any) -> bool:
        """Copy what a class gave into a page; False unless it is a tensor of exactly that size."""
        if not isinstance(value, torch.Tensor):
            return False
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        data: memoryview = flat.numpy().data
        return page.fill(data)

    # ---- where things lie ---------------------------------------------------------------------------

    @property
    def _page_axis(self) -> int:
        return 2 if self.layout == "layer_first" else 1

    def _pieces(self, slot: int) -> list[torch.Tensor]:
        tensor = self._pool.tensor  # kv first, then layer where layers lie apart
        if self.layout == "layer_first":
            return [tensor[kv, layer, slot] for layer in range(self.layer_num) for kv in self._kvs]
        return [tensor[kv, slot] for kv in self._kvs]

    @property
    def _kvs(self) -> range:
        return range(self._pool.geometry.kvs)

    def _slots(self, indices: Any) -> list[int]:
        tokens = [int(index) for index in indices]
        require(
            len(tokens) % self.page_size == 0,
            f"{len(tokens)} indices are no whole pages of {self.page_size} tokens",
        )
        return [first // self.page_size for first in tokens[:: self.page_size]]


def _as_upstream(pool: Pool) -> torch.Tensor:
    axis = 2 if pool.layout == "layer_first" else 1
    tensor = _merged(pool.tensor, axis) if pool.layout in _TOKENS_APART else pool.tensor
    return _without_kv(tensor) if pool.geometry.is_mla else tensor


def _merged(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Pages and their tokens as one axis: they follow each other in these layouts."""
    return tensor.flatten(axis, axis + 1)


def _without_kv(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(0)

"""Copies between L1 and L2: io backend ``kernel`` or ``direct``, whole pages or layer by layer.

``kernel`` gathers and scatters with our kernels (their CPU twin where there is no GPU), ``direct``
issues plain copies of contiguous runs, as a DMA engine would get them. Both move the same bytes.
Must not know: requests, ops, why pages move. Called by: hands, bench.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch

import cuda_numba
from refimpl.config import require
from refimpl.memory.pool import Pool


@dataclass(slots=True)
class Moved:
    """What went one way so far: bytes, and the time until they had arrived or were on their way."""

    bytes: int = 0
    ns: int = 0


class Mover:
    """Moves pages between one device pool and one host pool."""

    def __init__(self, device: Pool, host: Pool, io_backend: str) -> None:
        require(
            device.geometry == host.geometry,
            "a device pool and a host pool hold different pages: give both one geometry",
        )
        self.device = device
        self.host = host
        self.io_backend = io_backend
        self.moved = {"load_back": Moved(), "backup": Moved()}
        self._on_gpu = device.device.type == "cuda"
        self._up = torch.cuda.Stream() if self._on_gpu else None
        self._down = torch.cuda.Stream() if self._on_gpu else None

    def back_up(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> None:
        """Copy pages L1 -> L2, all layers; returns when the bytes are there."""
        begun = perf_counter_ns()
        if self.io_backend == "kernel":
            self._kernel(self.host, self.device, l2_slots, l1_slots, None, self._down)
        else:
            for layer in range(self.device.geometry.layers):
                self._direct(self.host, self.device, l2_slots, l1_slots, layer)
        if self._down is not None:
            self._down.synchronize()
        self._note("backup", len(l1_slots) * self.device.geometry.page_bytes, begun)

    def load_layer(
        self, layer: int, l2_slots: Sequence[int], l1_slots: Sequence[int]
    ) -> torch.cuda.Event | None:
        """Copy one layer of pages L2 -> L1. On a GPU the event says when it has arrived."""
        begun, geometry = perf_counter_ns(), self.device.geometry
        if self.io_backend == "kernel":
            self._kernel(self.device, self.host, l1_slots, l2_slots, layer, self._up)
        else:
            self._direct(self.device, self.host, l1_slots, l2_slots, layer)
        layer_bytes = len(l1_slots) * geometry.page_bytes // geometry.layers
        self._note("load_back", layer_bytes, begun)
        if self._up is None:
            return None
        event = torch.cuda.Event()
        event.record(self._up)
        return event

    def _note(self, way: str, size: int, begun: int) -> None:
        self.moved[way].bytes += size
        self.moved[way].ns += perf_counter_ns() - begun

    def _kernel(
        self,
        to: Pool,
        fro: Pool,
        to_slots: Sequence[int],
        from_slots: Sequence[int],
        layer: int | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        cuda_numba.copy_pages(
            _words(to, on_gpu=self._on_gpu),
            _words(fro, on_gpu=self._on_gpu),
            to_slots,
            from_slots,
            to.strides,
            fro.strides,
            self.device.geometry.words,
            layer=layer,
            stream=stream,
        )

    def _direct(
        self,
        to: Pool,
        fro: Pool,
        to_slots: Sequence[int],
        from_slots: Sequence[int],
        layer: int,
    ) -> None:
        target, source = to.layer(layer), fro.layer(layer)  # [kv, page, token, head, dim]
        for (first_to, first_from), count in runs(to_slots, from_slots):
            target[:, first_to : first_to + count].copy_(
                source[:, first_from : first_from + count], non_blocking=self._on_gpu
            )


def runs(to: Sequence[int], fro: Sequence[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Merge pages that are neighbours on both sides: ((first to, first from), count)."""
    begin = 0
    for at in range(1, len(to) + 1):
        is_next = at < len(to) and to[at] == to[at - 1] + 1 and fro[at] == fro[at - 1] + 1
        if not is_next:
            yield (to[begin], fro[begin]), at - begin
            begin = at


def _words(pool: Pool, *, on_gpu: bool) -> object:
    if not on_gpu:
        return pool.words()
    tensor = pool.tensor
    words = tensor.numel() * tensor.element_size() // 8
    return cuda_numba.DeviceView(tensor.data_ptr(), words, tensor)

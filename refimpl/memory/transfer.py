"""Copies between L1 and L2: io backend ``kernel`` or ``direct``, whole pages or layer by layer.

``kernel`` gathers and scatters with our kernels (their CPU twin where there is no GPU), ``direct``
issues plain copies of contiguous runs, as a DMA engine would get them. Both move the same bytes.
Must not know: requests, ops, why pages move. Called by: hands, bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event as Flag
from threading import Thread
from time import perf_counter_ns
from typing import Any, Final

import torch

import cuda_numba
from refimpl.config import require
from refimpl.memory.pool import Pool


@dataclass(slots=True)
class Moved:
    """What went one way so far: bytes, and the time until they had arrived or were on their way."""

    bytes: int = 0
    ns: int = 0


# A thread costs as much as copying a MB: 0.3 ms, measured on one CPU.
BESIDE_BYTES_MIN: Final = 4 << 20


class Loading:
    """A load-back under way: layers arrive in order, and each can be waited for by itself.

    On a GPU the copies run on a stream of their own and a layer is an event of it. On a CPU they run
    on a thread where that pays, so that layer l + 1 is copied while layer l is computed.
    """

    def __init__(
        self, layers: int, copy: Callable[[Callable[[int], None]], None], *, beside: bool
    ) -> None:
        self._arrived = [Flag() for _ in range(layers)]
        self._error: BaseException | None = None
        self._copy = copy
        self._thread = Thread(target=self._run, name="load_back", daemon=True)
        self._thread.start() if beside else self._run()

    def wait(self, layer: int) -> None:
        """Return when ``layer`` is in L1; raises what stopped the copies."""
        self._arrived[layer].wait()
        if layer == len(self._arrived) - 1 and self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._copy(lambda layer: self._arrived[layer].set())
        except BaseException as error:  # it is raised where the layer is waited for
            self._error = error
        for flag in self._arrived:
            flag.set()


class LoadingOnGpu:
    """The same with events: who waits is the stream that computes, not the caller."""

    def __init__(self, layers: int, copy: Callable[[Callable[[int], None]], None]) -> None:
        self._events = [torch.cuda.Event() for _ in range(layers)]
        copy(lambda layer: self._events[layer].record())

    def wait(self, layer: int) -> None:
        """Have the current stream wait until ``layer`` is in L1."""
        torch.cuda.current_stream().wait_event(self._events[layer])


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
        self.beside_bytes_min = BESIDE_BYTES_MIN
        self.moved = {"load_back": Moved(), "backup": Moved()}
        self._on_gpu = device.device.type == "cuda"
        self._up = torch.cuda.Stream(device.device) if self._on_gpu else None
        self._down = torch.cuda.Stream(device.device) if self._on_gpu else None

    def back_up(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> None:
        """Copy pages L1 -> L2, all layers; returns when the bytes are there."""
        begun = perf_counter_ns()
        with torch.cuda.stream(self._down):
            if self.io_backend == "kernel":
                cuda_numba.copy_pages(
                    *self._ends(self.host, self.device, l2_slots, l1_slots), stream=self._down
                )
            else:
                for layer in range(self.device.geometry.layers):
                    self._direct(self.host, self.device, l2_slots, l1_slots, layer)
        if self._down is not None:
            self._down.synchronize()
        self._note("backup", len(l1_slots), begun)

    def load(self, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> Loading | LoadingOnGpu:
        """Begin to copy pages L2 -> L1, layer by layer; what it returns says when each is there.

        Until the last layer has been waited for, nobody may write the pages of either side.
        """
        begun, pages = perf_counter_ns(), len(l1_slots)

        def copy(arrived: Callable[[int], None]) -> None:
            with torch.cuda.stream(self._up):
                if self.io_backend == "kernel":
                    ends = self._ends(self.device, self.host, l1_slots, l2_slots)
                    cuda_numba.copy_layers(*ends, arrived=arrived, stream=self._up)
                else:
                    for layer in range(self.device.geometry.layers):
                        self._direct(self.device, self.host, l1_slots, l2_slots, layer)
                        arrived(layer)
            self._note("load_back", pages, begun)

        geometry = self.device.geometry
        if self._on_gpu:
            return LoadingOnGpu(geometry.layers, copy)
        beside = pages * geometry.page_bytes >= self.beside_bytes_min
        return Loading(geometry.layers, copy, beside=beside)

    def finish(self) -> None:
        """Return when all that was launched on the device has been done."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device.device)

    def _note(self, way: str, pages: int, begun: int) -> None:
        self.moved[way].bytes += pages * self.device.geometry.page_bytes
        self.moved[way].ns += perf_counter_ns() - begun

    def _ends(
        self, to: Pool, fro: Pool, to_slots: Sequence[int], from_slots: Sequence[int]
    ) -> tuple[Any, ...]:
        """What a copy of our kernels begins with: both pools, both page lists, both layouts."""
        words = (_words(pool, on_gpu=self._on_gpu) for pool in (to, fro))
        return (*words, to_slots, from_slots, to.strides, fro.strides, to.geometry.words)

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

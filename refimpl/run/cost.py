"""How long each thing takes, in whole nanoseconds: the cost model of the virtual clock.

A pass costs the larger of its FLOPs over the rate and its bytes over the bandwidth, plus a launch;
a copy costs its bytes over the link, plus what each piece costs to issue. Integers throughout, so
that a figure is equal on every machine.
Must not know: requests, slots, events, who waits for what. Called by: lanes, setup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from refimpl.config import Transfer, require, require_splittable
from refimpl.run.hardware import GIB, Hardware, Model, storage_named
from refimpl.storage.backend import BATCH_NAMES
from refimpl.units import NS_PER_S, ceil_div

STORAGE_BATCH_PAGES: Final = BATCH_NAMES  # a page is a name
HOST_RESERVE_BYTES: Final = 10 * GIB  # host memory that L2 must leave alone (spec 1.6)

_FRACTION_BITS: Final = 32  # of the costs kept per unit of work, whose sums are rounded up once
_ROUND_UP: Final = (1 << _FRACTION_BITS) - 1


def overlapped_ns(layers: int, launch_ns: int, load_ns: int, compute_ns: int) -> int:
    """End of a pass that loads layer l+1 beside computing layer l, both uniform over the layers.

    Layer l is loaded at ``(l + 1) * load_ns`` and ends at ``max(end[l - 1], loaded[l]) +
    compute_ns``, where ``end[-1]`` is the launch. Unrolled, the end is the largest over l of
    ``loaded[l] + (layers - l) * compute_ns``; that is linear in l, so one of its two ends is the
    largest.
    """
    all_computed = max(launch_ns, load_ns) + layers * compute_ns
    return max(all_computed, layers * load_ns + compute_ns)


class Cost:
    """Times of one rank of an instance; all ranks do the same at the same time.

    Raises ConfigError when the model can't be split over ``tp_size`` or the storage is unknown.
    """

    def __init__(
        self,
        hardware: Hardware,
        model: Model,
        tp_size: int,
        transfer: Transfer,
        page_size: int,
        storage: str = "memory",
    ) -> None:
        require_splittable(model.name, tp_size, model.heads, 0 if model.is_mla else model.kv_heads)
        self.hardware, self.model, self.tp_size = hardware, model, tp_size
        self.transfer, self.page_size = transfer, page_size
        self.storage = storage_named(storage)
        self.kv_bytes_per_token = _kv_bytes_per_token(model, tp_size)  # of one rank (spec 1.6)
        self.page_bytes = self.kv_bytes_per_token * page_size
        # In L3: what is the same on all ranks is there once.
        self.stored_page_bytes = self.page_bytes * (1 if model.is_mla else tp_size)
        self.weight_bytes = ceil_div(model.params * model.weight_bytes, tp_size)
        self._set_compute()
        self._set_copies()
        self._set_storage()

    def with_storage(self, storage: str) -> Cost:
        """The same with another L3 store; raises ConfigError when its name is unknown."""
        return Cost(self.hardware, self.model, self.tp_size, self.transfer, self.page_size, storage)

    def _set_compute(self) -> None:
        model, hardware, tp = self.model, self.hardware, self.tp_size
        flops = hardware.flops_per_s * hardware.flops_percent // 100 * tp
        hbm = hardware.hbm_bytes_per_s * hardware.hbm_percent // 100
        active = model.active_params or model.params
        value_dim = model.value_dim or model.head_dim
        # The embedding is looked up, and the output head runs for the last token of an item alone.
        self._token_q = _per_unit(2 * (active - 2 * model.vocab * model.hidden), flops)
        self._head_q = _per_unit(2 * model.vocab * model.hidden, flops)
        pair = 2 * model.layers * model.heads
        self._pair_q = _per_unit(pair * (model.head_dim + value_dim), flops)
        latent = 2 * model.kv_lora_rank + model.rope_dim  # MLA decodes in the latent space
        self._decode_pair_q = _per_unit(pair * latent, flops) if model.is_mla else self._pair_q
        self._kv_q = _per_unit(self.kv_bytes_per_token, hbm)
        self._weights_q = _per_unit(self.weight_bytes, hbm)
        self._active_q = _per_unit(ceil_div(active * model.weight_bytes, tp), hbm)
        self._set_all_reduce()

    def _set_all_reduce(self) -> None:
        """Two all-reduces a layer; a ring moves 2 * (tp - 1) / tp of the bytes over each link."""
        model, hardware, tp = self.model, self.hardware, self.tp_size
        count = 2 * model.layers if tp > 1 else 0
        self._all_reduces_ns = count * hardware.all_reduce_ns
        token_bytes = ceil_div(count * model.hidden * 2 * 2 * (tp - 1), tp)  # activations: BF16
        self._wire_q = _per_unit(token_bytes, hardware.peer_bytes_per_s)

    def _set_copies(self) -> None:
        """What a page and what a call cost, L2 -> L1 and L1 -> L2 (spec 4.2).

        ``direct``: one copy call for each page, layer and buffer, in both layouts. That L1 is kept
        layer by layer decides it, and so does the load that runs layer by layer:
        ``page_first_direct`` makes a page contiguous for L3, not for this copy. What it gains here
        is that its calls go out in batches. Pages that happen to be neighbours are not merged.
        ``kernel``: one launch a layer to load, one for all layers to back up.
        """
        hardware, kernel = self.hardware, self.transfer.io_backend == "kernel"
        batched = self.transfer.layout == "page_first_direct"
        piece_ns = hardware.batched_piece_ns if batched else hardware.piece_ns
        pieces_ns = 0 if kernel else self.model.layers * self.model.pieces * piece_ns
        percent = hardware.kernel_link_percent if kernel else 100
        if self.transfer.layout == "page_head":
            percent = percent * hardware.head_rows_percent // 100
        up = hardware.link_up_bytes_per_s * percent // 100
        down = hardware.link_down_bytes_per_s * percent // 100
        pieces_q = pieces_ns << _FRACTION_BITS
        self._load_page_q = _per_unit(self.page_bytes, up) + pieces_q
        self._backup_page_q = _per_unit(self.page_bytes, down) + pieces_q
        self._load_call_ns = hardware.kernel_launch_ns * self.model.layers if kernel else 0
        self._backup_call_ns = hardware.kernel_launch_ns if kernel else 0

    def _set_storage(self) -> None:
        """A layer_first page lies in pieces, so it is staged through a buffer for L3 (spec 3)."""
        storage, staged_q = self.storage, 0
        if self.transfer.layout == "layer_first":
            staged_q = _per_unit(self.page_bytes, self.hardware.host_copy_bytes_per_s)
        page_q = (storage.page_ns << _FRACTION_BITS) + staged_q
        self._fetch_page_q = page_q + _per_unit(self.page_bytes, storage.read_bytes_per_s)
        self._store_page_q = page_q + _per_unit(self.page_bytes, storage.write_bytes_per_s)

    # ---- forward passes -------------------------------------------------------------------------

    def prefill_ns(self, items: Sequence[tuple[int, int]], load_pages: int = 0) -> int:
        """One pass over ``items`` of (start, tokens), with loads that run layer by layer beside it.

        A token attends to all before it and itself, so an item costs more the later it starts.
        """
        tokens = pairs = context = 0
        for start, count in items:
            tokens += count
            pairs += count * start + count * (count + 1) // 2
            context += start + count
        flops_q = tokens * self._token_q + pairs * self._pair_q + len(items) * self._head_q
        bytes_q = min(self._weights_q, tokens * self._active_q) + context * self._kv_q
        compute_ns = _whole(max(flops_q, bytes_q) + tokens * self._wire_q) + self._all_reduces_ns
        layers = self.model.layers
        return overlapped_ns(
            layers,
            self.hardware.prefill_launch_ns,
            ceil_div(self.load_ns(load_pages), layers),
            ceil_div(compute_ns, layers),
        )

    def decode_ns(self, running: int, context_tokens: int, steps: int) -> int:
        """End of step ``steps`` of a decode whose ``running`` contexts sum to ``context_tokens``.

        Each step adds ``running`` tokens of context. Grows strictly with ``steps``; 0 at 0.
        """
        # A sparse model reads the experts that its tokens choose, at most all.
        weights_q = min(self._weights_q, running * self._active_q)
        bytes_q = weights_q + (context_tokens + running) * self._kv_q
        flops_q = running * (self._token_q + self._head_q)
        flops_q += (context_tokens + running) * self._decode_pair_q
        work_q = _sum_of_larger(
            (bytes_q, running * self._kv_q), (flops_q, running * self._decode_pair_q), steps
        )
        step_ns = self.hardware.step_launch_ns + self._all_reduces_ns
        return _whole(work_q + steps * running * self._wire_q) + steps * step_ns

    def decode_steps_within(
        self, running: int, context_tokens: int, steps_max: int, elapsed_ns: int
    ) -> int:
        """Smallest number of steps, 1 to ``steps_max``, that ends ``elapsed_ns`` or later.

        ``steps_max`` when even that ends earlier.
        """
        low, high = 1, steps_max
        while low < high:
            middle = (low + high) // 2
            if self.decode_ns(running, context_tokens, middle) >= elapsed_ns:
                high = middle
            else:
                low = middle + 1
        return low

    # ---- copies ---------------------------------------------------------------------------------

    def load_ns(self, pages: int) -> int:
        """L2 -> L1 of all layers, alone on the link."""
        return _whole(pages * self._load_page_q) + self._load_call_ns if pages else 0

    def backup_ns(self, pages: int) -> int:
        """L1 -> L2 of all layers, alone on the link."""
        return _whole(pages * self._backup_page_q) + self._backup_call_ns if pages else 0

    # ---- L3 -------------------------------------------------------------------------------------

    def probe_ns(self, keys: int) -> int:
        """Asking for ``keys`` keys, a call for each 128."""
        calls = ceil_div(keys, STORAGE_BATCH_PAGES)
        return calls * self.storage.probe_call_ns + keys * self.storage.probe_key_ns

    def fetch_batch_ns(self, pages: int) -> int:
        """One read call for ``pages`` pages, at most 128."""
        assert 0 < pages <= STORAGE_BATCH_PAGES, pages
        return self.storage.call_ns + _whole(pages * self._fetch_page_q)

    def store_batch_ns(self, pages: int) -> int:
        """One write call for ``pages`` pages, at most 128; their existence is asked before."""
        assert 0 < pages <= STORAGE_BATCH_PAGES, pages
        return self.storage.call_ns + _whole(pages * self._store_page_q)

    @property
    def open_ns(self) -> int:
        """Building and connecting the L3 backend."""
        return self.storage.open_ns

    @property
    def close_ns(self) -> int:
        """Letting the L3 backend go."""
        return self.storage.close_ns

    # ---- capacities -----------------------------------------------------------------------------

    def l1_tokens_default(self, mem_fraction_percent: int) -> int:
        """Tokens of KV, in whole pages, that fit beside the weights in that share of the memory.

        ConfigError when the share can't hold the weights and one page.
        """
        budget = self.hardware.hbm_bytes * mem_fraction_percent // 100
        pages = (budget - self.weight_bytes) // self.page_bytes
        require(
            pages >= 1 or budget <= self.weight_bytes,
            f"a page of {self.page_size} tokens takes {self.page_bytes} bytes, more than"
            f" {self.hardware.name} has beside the weights: lower --page-size",
        )
        require(
            pages >= 1,
            f"{self.model.name} does not fit into {mem_fraction_percent}% of {self.hardware.name}"
            f" at --tp-size {self.tp_size}: raise --tp-size or --mem-fraction-static",
        )
        return pages * self.page_size


def _kv_bytes_per_token(model: Model, tp_size: int) -> int:
    if model.is_mla:
        return (model.kv_lora_rank + model.rope_dim) * model.layers * model.kv_bytes
    heads = ceil_div(model.kv_heads, tp_size)  # repeated when there are more ranks than heads
    width = model.head_dim + (model.value_dim or model.head_dim)
    return width * heads * model.layers * model.kv_bytes


def _per_unit(amount: int, per_s: int) -> int:
    """Nanoseconds for ``amount`` at ``per_s``, with the fraction bits, rounded up."""
    return ceil_div((amount * NS_PER_S) << _FRACTION_BITS, per_s)


def _whole(value_q: int) -> int:
    """Nanoseconds without fraction bits, rounded up."""
    return (value_q + _ROUND_UP) >> _FRACTION_BITS


def _sum_of_larger(one: tuple[int, int], other: tuple[int, int], steps: int) -> int:
    """Sum over i in 0..steps-1 of the larger of two lines, each given as (at 0, slope)."""
    gap, slope = one[0] - other[0], one[1] - other[1]
    if gap < 0 or (gap == 0 and slope < 0):
        one, other, gap, slope = other, one, -gap, -slope
    if gap + slope * (steps - 1) >= 0:
        return _sum_of_line(one, steps)
    ahead = gap // -slope + 1  # steps before the other line is the larger one
    return _sum_of_line(one, ahead) + _sum_of_line(other, steps) - _sum_of_line(other, ahead)


def _sum_of_line(line: tuple[int, int], steps: int) -> int:
    return line[0] * steps + line[1] * (steps * (steps - 1) // 2)

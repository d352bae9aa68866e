"""What the model needs of a KV cache: rows to write, rows to read, and who owns which.

A *row* is the place of one token: ``slot * page_size + position % page_size``. The pools belong to
whoever made them; a view is the device pool in the layout ``layer_first``, and plain tensors will do.
Must not know: where slots come from, trees, requests, transfers, arithmetic.
Called by: transformer; the views are made by whoever owns the pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvView:
    """The device pool, all layers.

    ``keys`` is ``[layers, slots * page_size, cached_heads, key_width]``, ``values`` likewise with
    ``value_width``. MLA has no values of its own: ``values`` is None, and a row of ``keys`` is the
    latent followed by the rotated key.
    """

    keys: Tensor  # [layer, row, head, dim]
    values: Tensor | None  # [layer, row, head, dim]
    page_size: int

    @staticmethod
    def zeros(config: ModelConfig, slots: int, page_size: int, device: str = "cpu") -> KvView:
        """A pool of its own, all zeros, for a model that is used without a cache."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        rows = (config.layers, slots * page_size, config.cached_heads)
        keys = torch.zeros(*rows, config.key_width, dtype=dtype, device=device)
        width = config.value_width
        values = torch.zeros(*rows, width, dtype=dtype, device=device) if width else None
        return KvView(keys, values, page_size)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Put the keys and values of new tokens, ``[token, head, dim]``, at ``rows``, ``[token]``."""
        assert (values is None) == (self.values is None)
        self.keys[layer].index_copy_(0, rows, keys)
        if self.values is not None and values is not None:
            self.values[layer].index_copy_(0, rows, values)

    def read_keys(self, layer: int, rows: Tensor) -> Tensor:
        """The keys at ``rows``, ``[token]``, as ``[token, head, dim]``."""
        return self.keys[layer].index_select(0, rows)

    def read_values(self, layer: int, rows: Tensor) -> Tensor:
        """The values at ``rows``; with MLA there are none."""
        assert self.values is not None
        return self.values[layer].index_select(0, rows)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute: a part of its prompt, or its newest token.

    ``slots`` is the sequence's page table, from its first page to at least the page of the last token
    here. What stands before ``start`` must have been written, by this model or by a copy.
    """

    tokens: Sequence[int]
    start: int
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one chunk lies in the batch, and the rows of its sequence up to its last token."""

    first: int  # row of the batch
    count: int
    start: int  # position in the sequence
    context: Tensor  # [start + count], rows of the pool


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch of chunks side by side: token by token what to embed and where to write."""

    tokens: Tensor  # [token]
    positions: Tensor  # [token]
    rows: Tensor  # [token], rows of the pool
    spans: tuple[Span, ...]

    @property
    def last(self) -> list[int]:
        """Of each chunk, the row in the batch of its last token."""
        return [span.first + span.count - 1 for span in self.spans]


def plan(chunks: Sequence[Chunk], page_size: int, device: torch.device) -> Plan:
    """Lay chunks out as one batch.

    Raises ValueError when a chunk is empty or its page table ends before its last token.
    """
    spans: list[Span] = []
    tokens: list[int] = []
    positions: list[Tensor] = []
    for chunk in chunks:
        count, end = len(chunk.tokens), chunk.start + len(chunk.tokens)
        if not count:
            raise ValueError("a chunk has no tokens")
        if end > len(chunk.slots) * page_size:
            raise ValueError(
                f"a chunk ends at position {end}, its {len(chunk.slots)} pages of {page_size} before"
            )
        where = torch.arange(end)
        slots = torch.tensor(chunk.slots)
        context = slots[where // page_size] * page_size + where % page_size
        spans.append(Span(len(tokens), count, chunk.start, context.to(device)))
        tokens.extend(chunk.tokens)
        positions.append(where[chunk.start :])
    return Plan(
        tokens=torch.tensor(tokens).to(device),
        positions=torch.cat(positions).to(device),
        rows=torch.cat([span.context[span.start :] for span in spans]),
        spans=tuple(spans),
    )

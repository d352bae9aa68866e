"""Batch-invariant arithmetic: a token's bits depend on its sequence alone.

How a matrix product adds up is the library's choice, and it chooses by shape: with float32 on CPU a
row of ``x @ w`` differs in its last bits between one row and two. So every product here has one fixed
shape, rows padded with zeros to ``ROWS``. What was measured with torch 2.13 on CPU (MKL and oneDNN,
AVX-512, 1 and 2 threads, float32 and bfloat16), and is verified again at each start:

- in a product of fixed shape a row's bits depend neither on its place nor on the other rows;
- a column's bits depend on neither its place nor the number of columns, from 12 columns on: below that
  float32 is added up in another order. So a narrow matrix gets columns of zeros up to ``COLUMNS``, and a
  rank that has a part of the columns computes the bits that one rank computes;
- ``torch.exp`` gives an element the same bits anywhere in a buffer, while ``sigmoid`` and ``silu`` do
  not: the last few elements of a buffer take a scalar path. So silu is written with ``exp``;
- ``sum`` over the last axis is invariant in a fixed shape; for one row of 40,001 it is not.

``+ - * /``, ``sqrt`` and ``max`` are exact and need no care. A sum over a context runs tile by tile
from position 0, whatever the chunks were. Tiles of keys beyond a query's position add exact zeros.

Must not know: caches, page tables, layers. Called by: transformer, self_check, scenarios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

ROWS: Final = 16  # tokens a tile: a decode of one pays for 16, a prefill fills them
KEYS: Final = 64  # positions a tile of a context
COLUMNS: Final = 16  # of a product at least: what a rank has of a small matrix may be narrower


class Reference:
    """The batch-invariant implementation of ``Arithmetic``. Attention is computed in float32."""

    name = "reference"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Product in tiles of ``[ROWS, in] x [in, out]``; the bias is added afterwards, exactly."""
        wide = _padded(weight, COLUMNS) if len(weight) < COLUMNS else weight
        product = _by_tiles(lambda tile: functional.linear(tile, wide), x)[:, : len(weight)]
        return product if bias is None else product + bias

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Product in tiles of ``[head, ROWS, in] x [head, in, out]``."""
        return _by_tiles(
            lambda tile: torch.bmm(tile.transpose(0, 1).contiguous(), weight).transpose(0, 1), x
        )

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Mean square in tiles of ``[ROWS, dim]``; the root and the division are exact."""
        wide = x.float().reshape(-1, x.shape[-1])  # [token * head, dim]
        squares = _by_tiles(lambda tile: tile.square().sum(-1, keepdim=True), wide)
        root = (squares / x.shape[-1] + epsilon).sqrt()
        return (wide / root).to(x.dtype).reshape(x.shape) * weight

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """``gate / (1 + exp(-gate)) * up``, the exponentials in tiles of ``[ROWS, dim]``."""
        wide = gate.float()
        return (wide / (1 + _by_tiles(torch.exp, -wide))).to(gate.dtype) * up

    def attention(
        self, query: Tensor, keys: Tensor, values: Tensor, *, start: int, scale: float
    ) -> Tensor:
        """ROWS queries of a KV head's group at a time, over tiles of KEYS positions."""
        count, heads, width = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        key_tiles, value_tiles = _tiled_context(keys), _tiled_context(values)
        padded = _padded(query.float() * scale, ROWS)
        results = []
        for first in range(0, count, ROWS):
            tile = padded[first : first + ROWS].reshape(ROWS, kv_heads, group, width)
            tile = tile.permute(1, 2, 0, 3).reshape(kv_heads, group * ROWS, width)
            end = start + min(first + ROWS, count)  # positions anyone here may see
            tiles = -(-end // KEYS)
            positions = torch.arange(start + first, start + first + ROWS, device=query.device)
            result = _attend(tile, key_tiles[:tiles], value_tiles[:tiles], positions)
            result = result.reshape(kv_heads, group, ROWS, -1).permute(2, 0, 1, 3)
            results.append(result.reshape(ROWS, heads, -1))  # [ROWS, head, value]
        return torch.cat(results)[:count].to(query.dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Softmax over tiles, in two passes: the maximum first, which no order can change.

    ``query [kv_head, group * ROWS, dim]``, ``keys [tile, kv_head, KEYS, dim]``, ``values`` likewise,
    ``positions [ROWS]``. Returns ``[kv_head, group * ROWS, value]``.
    """
    kv_heads, rows, _ = query.shape
    seen_by = positions.repeat(rows // ROWS)[:, None]  # [group * ROWS, 1]
    offsets = torch.arange(KEYS, device=query.device)
    scores = []
    for index, tile in enumerate(keys):
        hidden = offsets + index * KEYS > seen_by  # [group * ROWS, KEYS]
        score = torch.bmm(query, tile.transpose(1, 2))  # [kv_head, group * ROWS, KEYS]
        scores.append(score.masked_fill(hidden, -torch.inf))
    highest = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
    total = torch.zeros_like(highest)  # [kv_head, group * ROWS, 1]
    weighted = torch.zeros(kv_heads, rows, values.shape[-1], device=query.device)
    for score, tile in zip(scores, values, strict=True):
        share = torch.exp(score - highest)
        total = total + share.sum(-1, keepdim=True)
        weighted = weighted + torch.bmm(share, tile)
    return weighted / total


def _tiled_context(rows: Tensor) -> Tensor:
    """``[position, kv_head, dim]`` as float32 tiles ``[tile, kv_head, KEYS, dim]``, zeros at the end."""
    padded = _padded(rows.float(), KEYS)
    return padded.reshape(-1, KEYS, *rows.shape[1:]).transpose(1, 2).contiguous()


def _by_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to every ROWS rows of ``x`` and put the results together again."""
    padded = _padded(x, ROWS).contiguous()
    if len(padded) == ROWS:
        return function(padded)[: len(x)]
    return torch.cat([function(tile) for tile in padded.reshape(-1, ROWS, *x.shape[1:])])[: len(x)]


def _padded(x: Tensor, multiple: int) -> Tensor:
    """``x`` with rows of zeros up to a multiple."""
    missing = -len(x) % multiple
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])

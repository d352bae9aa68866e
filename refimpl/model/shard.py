"""One rank's part of a decoder: heads, and columns of every matrix. Gathers put parts together again.

All splits are along the output of a matrix, so that a part is a view, no sum is taken apart, and what is
computed is bit for bit what one rank computes. A latent cache is the same on every rank: a model with
one is not split at all.
Must not know: what carries a gather. Called by: transformer, self_check, hands, whoever builds ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from refimpl.config import kv_heads_of, require_splittable
from refimpl.model.config import ModelConfig

# ([token, part] of this rank, width) -> [token, width]: all parts in the order of ranks, split as ``widths``.
Gather: TypeAlias = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for a model that can't be split so."""
        kv_heads = 0 if config.mla else config.kv_heads
        require_splittable(config.name, self.size, config.heads, kv_heads)

    def cached_heads(self, config: ModelConfig) -> int:
        """Heads axis of this rank's KV pools."""
        first, last = kv_heads_of(config.cached_heads, self.rank, self.size)
        return last - first

    def heads(self, weight: Tensor, first: int, count: int, total: int) -> Tensor:
        """The rows of ``count`` heads from ``first`` on, of a weight or bias of ``total`` heads."""
        width = len(weight) // total
        return weight[first * width : (first + count) * width]

    def columns(self, weight: Tensor) -> Tensor:
        """This rank's share of the output of a matrix, or of its bias."""
        return torch.tensor_split(weight, self.size)[self.rank]

    def widths(self, total: int) -> list[int]:
        """How many of ``total`` columns each rank has, as ``columns`` splits them, and heads as well."""
        fewest, more = divmod(total, self.size)
        return [fewest + (rank < more) for rank in range(self.size)]

    def part(self, name: str, weight: Tensor, config: ModelConfig) -> Tensor:
        """The rows that this rank has of a weight or bias, by its name in a layer: a view.

        Heads of a projection, columns of a matrix, all of a norm.
        """
        if self.size == 1 or "norm" in name:
            return weight
        if name.startswith("self_attn.q_proj"):
            count = config.heads // self.size
            return self.heads(weight, self.rank * count, count, config.heads)
        if name.startswith(("self_attn.k_proj", "self_attn.v_proj")):
            first, last = kv_heads_of(config.kv_heads, self.rank, self.size)
            return self.heads(weight, first, last - first, config.kv_heads)
        return self.columns(weight)


ALONE = Shard()

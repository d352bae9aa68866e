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

from refimpl.config import require
from refimpl.model.config import ModelConfig

# [token, part] of this rank -> [token, all parts] in the order of ranks, which may differ in width.
Gather: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for a model that can't be split so."""
        heads, kv_heads = config.heads, config.kv_heads
        require(self.size >= 1, f"--tp-size {self.size} must be at least 1")
        require(
            heads % self.size == 0,
            f"--tp-size {self.size} does not divide the {heads} heads of {config.name}",
        )
        require(
            config.mla is not None or kv_heads % self.size == 0 or self.size % kv_heads == 0,
            f"--tp-size {self.size} can't split or repeat the {kv_heads} KV heads of {config.name}",
        )

    def cached_heads(self, config: ModelConfig) -> int:
        """Heads axis of this rank's KV pools."""
        return 1 if config.mla else max(config.kv_heads // self.size, 1)

    def first_kv_head(self, config: ModelConfig) -> int:
        """Which head of the model its first one is; a head is repeated where there are more ranks."""
        return self.rank * config.kv_heads // self.size

    def heads(self, weight: Tensor, first: int, count: int, total: int) -> Tensor:
        """The rows of ``count`` heads from ``first`` on, of a weight or bias of ``total`` heads."""
        width = len(weight) // total
        return weight[first * width : (first + count) * width]

    def columns(self, weight: Tensor) -> Tensor:
        """This rank's share of the output of a matrix, or of its bias."""
        return torch.tensor_split(weight, self.size)[self.rank]

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
            first, count = self.first_kv_head(config), self.cached_heads(config)
            return self.heads(weight, first, count, config.kv_heads)
        return self.columns(weight)


ALONE = Shard()

"""Rotary position embedding: a table by position, and the rotation.

Must not know: caches, attention, who rotates what. Called by: transformer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refimpl.model.config import ModelConfig


class RopeTable:
    """Cosine and sine of every position and frequency, ``[positions_max, width / 2]`` each.

    Built once, in double precision, for all positions: a position's numbers then can't depend on
    which positions share its batch. Pair ``i`` of a head is its numbers ``i`` and ``i + width / 2``.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        width = config.rope_width
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        frequencies = config.rope_theta**-exponents
        if config.rope_divisors:
            frequencies = frequencies / torch.tensor(config.rope_divisors, dtype=torch.float64)
        angles = torch.outer(torch.arange(config.positions_max).double(), frequencies)
        self._cosines = angles.cos().float().to(device)  # [position, width / 2]
        self._sines = angles.sin().float().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``positions``, ``[token]``, as ``[token, 1, width / 2]``."""
        return self._cosines[positions][:, None], self._sines[positions][:, None]


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x``, ``[token, head, width]``, in float32; the result has the dtype of ``x``.

    Products, sums and differences only, each rounded exactly, so that batching can't change a bit.
    """
    cosines, sines = turns  # [token, 1, width / 2]
    left, right = x.float().chunk(2, dim=-1)  # [token, head, width / 2]
    turned = (left * cosines - right * sines, right * cosines + left * sines)
    return torch.cat(turned, dim=-1).to(x.dtype)

"""From logits to a token: greedy, or by chance that depends on seed and position alone.

One row at a time, in float64 on the CPU: the company of a request can't change what it draws.
Must not know: batches, requests, tokenizers. Called by: whoever carries out batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from refimpl.config import require
from refimpl.units import Random

_POSITION_STRIDE: Final = 0xD1342543DE82EF95  # odd and large: neighbours start far apart
_MANTISSA_BITS: Final = 53  # of a float64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen. Temperature 0 is greedy, whatever the rest says.

    ``top_k`` 0 keeps all tokens, ``top_p`` 1 keeps all of their mass. Raises ConfigError on values
    out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()  # beside the model's own
    ignores_eos: bool = False  # the model's own do not end the answer

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature {self.temperature} must not be negative")
        require(0 < self.top_p <= 1, f"top_p {self.top_p} must be above 0 and at most 1")
        require(self.top_k >= 0, f"top_k {self.top_k} must not be negative")


GREEDY: Final = Sampling()


def choose(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token that comes at ``position`` of its sequence, given ``logits [vocab]``.

    Of equal logits the lowest token wins. The same logits, sampling and position give the same token
    in any batch and after any retraction.
    """
    row = logits.detach().to("cpu", torch.float64)
    if sampling.temperature == 0:
        return int((row == row.max()).nonzero()[0])
    kept, order = torch.sort(row / sampling.temperature, descending=True, stable=True)
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    shares = torch.softmax(kept, dim=-1)
    before = shares.cumsum(-1) - shares  # mass of likelier tokens
    shares = shares[before < sampling.top_p]
    return int(order[_draw(shares, sampling.seed, position)])


def _draw(shares: Tensor, seed: int, position: int) -> int:
    """Index into descending ``shares``, which need not add up to 1."""
    bits = Random(seed + position * _POSITION_STRIDE).bits64() >> (64 - _MANTISSA_BITS)
    cumulative = shares.cumsum(-1)
    point = cumulative[-1] * (bits / 2**_MANTISSA_BITS)
    return min(int(torch.searchsorted(cumulative, point, right=True)), len(shares) - 1)

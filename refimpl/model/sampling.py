"""From logits to a token: greedy, or by chance that depends on seed and position alone.

One row at a time, in float64 on the CPU: the company of a request can't change what it draws.
Must not know: batches, requests, tokenizers. Called by: whoever carries out batches.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from refimpl.model.choice import Logprob, Sampling
from refimpl.units import Random

_POSITION_STRIDE: Final = 0xD1342543DE82EF95  # odd and large: neighbours start far apart
_MANTISSA_BITS: Final = 53  # of a float64


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


def logprob(logits: Tensor, sampling: Sampling, token: int) -> Logprob:
    """What ``sampling`` wants to know of the choice of ``token`` from ``logits [vocab]``."""
    row = torch.log_softmax(logits.detach().to("cpu", torch.float64), dim=-1)
    values, tokens = torch.topk(row, min(sampling.top_logprobs, len(row)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Logprob(float(row[token]), top)

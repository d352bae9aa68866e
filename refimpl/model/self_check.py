"""Whether an arithmetic is batch-invariant on this machine, found by trying.

Every shape of product that a model has is computed for rows alone, among others and in another place,
and a context whole and in chunks; all bits must agree. Takes well under a second for a small model.
Must not know: caches, page tables, requests. Called by: catalog, scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from refimpl.model.arithmetic import Arithmetic
from refimpl.model.config import ModelConfig
from refimpl.model.weights import Weights

_TOKENS: Final = 37  # neither a multiple of a tile nor below two of them
_COMPANIES: Final = (1, 2, 5, 16, 31)  # batch sizes that rows are computed in
_CONTEXT: Final = 150  # more than two tiles of keys
_CHUNKS: Final = (1, 7, 64)


class NotBatchInvariantError(RuntimeError):
    """The reference path does not hold its promise here. The message is one line."""


def check_batch_invariance(arithmetic: Arithmetic, config: ModelConfig, weights: Weights) -> None:
    """Raise NotBatchInvariantError when company or chunking changes a bit of what a model computes."""
    device = weights["embed_tokens.weight"].device
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, config.dtype)
        return torch.randn(shape, generator=generator).to(device, dtype)

    with torch.inference_mode():
        for what, function, rows in _row_operations(arithmetic, config, weights, draw):
            if not _rows_agree(function, rows):
                raise _failure(arithmetic, what, "company", device)
        if not _chunks_agree(arithmetic, config, draw):
            raise _failure(arithmetic, "attention", "chunking", device)


def _failure(
    arithmetic: Arithmetic, what: str, cause: str, device: torch.device
) -> NotBatchInvariantError:
    threads = torch.get_num_threads()
    return NotBatchInvariantError(
        f"{arithmetic.name} arithmetic: {what} depends on {cause} with torch {torch.__version__} on "
        f"{device} ({threads} threads), so answers would depend on the cache; try one thread, or the "
        "fast path, which promises a tolerance only"
    )


_Operation = tuple[str, Callable[[Tensor], Tensor], Tensor]


def _row_operations(
    do: Arithmetic, config: ModelConfig, weights: Weights, draw: Callable[..., Tensor]
) -> Iterator[_Operation]:
    """What is computed token by token: a name, a function of rows, and rows to try."""
    seen = set()
    for name, weight in weights.items():
        if weight.dim() != 2 or weight.shape in seen:
            continue
        seen.add(weight.shape)
        rows = draw(_TOKENS, weight.shape[1])
        yield f"the product with {name}", _bound(do, weight), rows
    weight = weights["norm.weight"]
    epsilon = config.norm_epsilon
    yield "RMSNorm", lambda x: do.norm(x, weight, epsilon), draw(_TOKENS, config.hidden)
    yield "SwiGLU", lambda x: do.swiglu(x, x), draw(_TOKENS, config.intermediate)
    if config.mla:
        heads, mla = config.heads, config.mla
        for wide, narrow in ((mla.nope, mla.latent), (mla.latent, mla.value)):
            matrices, rows = draw(heads, wide, narrow), draw(_TOKENS, heads, wide)
            yield "the product of each head", _bound_heads(do, matrices), rows


def _bound(do: Arithmetic, weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: do.linear(x, weight)


def _bound_heads(do: Arithmetic, matrices: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: do.per_head(x, matrices)


def _rows_agree(function: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    together = function(rows)
    backwards = function(rows.flip(0)).flip(0)
    return torch.equal(together, backwards) and all(
        torch.equal(function(rows[-count:]), together[-count:]) for count in _COMPANIES
    )


def _chunks_agree(do: Arithmetic, config: ModelConfig, draw: Callable[..., Tensor]) -> bool:
    width = config.key_width
    query = draw(_CONTEXT, config.heads, width)
    keys = draw(_CONTEXT, config.cached_heads, width)
    values = keys[..., : config.mla.latent] if config.mla else draw(*keys.shape)

    def attend(start: int, end: int) -> Tensor:
        scale = width**-0.5
        return do.attention(query[start:end], keys[:end], values[:end], start=start, scale=scale)

    whole = attend(0, _CONTEXT)
    return all(
        torch.equal(attend(start, min(start + size, _CONTEXT)), whole[start : start + size])
        for size in _CHUNKS
        for start in range(0, _CONTEXT, size)
    )

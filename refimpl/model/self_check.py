"""Whether an arithmetic is batch-invariant on this machine, found by trying.

Every shape of product that a model has is computed for rows alone, among others and in another place,
and a context whole and in chunks; all bits must agree. A rank's part of each is computed beside the
whole, and must agree likewise. Takes well under a second for a small model.
Must not know: caches, page tables, requests. Called by: catalog, scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from refimpl.config import ConfigError
from refimpl.model.arithmetic import Arithmetic
from refimpl.model.config import ModelConfig
from refimpl.model.shard import Shard
from refimpl.model.weights import Weights

_TOKENS: Final = 37  # neither a multiple of a tile nor below two of them
_COMPANIES: Final = (1, 2, 5, 16, 31)  # batch sizes that rows are computed in
_CONTEXT: Final = 150  # more than two tiles of keys
_CHUNKS: Final = (1, 7, 64)


class NotBatchInvariantError(ConfigError):
    """The reference path does not hold its promise here: another arithmetic has to be configured."""


def check_batch_invariance(arithmetic: Arithmetic, config: ModelConfig, weights: Weights) -> None:
    """Raise NotBatchInvariantError when company or chunking changes a bit of what a model computes."""
    draw = _draws(config, weights)
    with torch.inference_mode():
        for what, function, rows in _row_operations(arithmetic, config, weights, draw):
            if not _rows_agree(function, rows):
                raise _failure(arithmetic, weights, f"{what} depends on company", "the cache")
        if not _chunks_agree(arithmetic, config, draw):
            raise _failure(arithmetic, weights, "attention depends on chunking", "the cache")


def check_split(
    arithmetic: Arithmetic, config: ModelConfig, weights: Weights, shard: Shard
) -> None:
    """Raise NotBatchInvariantError when a bit of what ``shard`` computes is not that of one rank.

    A model with a latent cache is not split, and passes. ``config`` can be split so.
    """
    if shard.size == 1 or config.mla:
        return
    draw = _draws(config, weights)
    with torch.inference_mode():
        for what, agrees in _split_operations(arithmetic, config, weights, shard, draw):
            if not agrees:
                fault = f"{what} on rank {shard.rank} depends on the split over {shard.size} ranks"
                raise _failure(arithmetic, weights, fault, "--tp-size")


_Draw: TypeAlias = Callable[..., Tensor]


def _draws(config: ModelConfig, weights: Weights) -> _Draw:
    device = weights["embed_tokens.weight"].device
    dtype: torch.dtype = getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


def _failure(
    arithmetic: Arithmetic, weights: Weights, fault: str, cause: str
) -> NotBatchInvariantError:
    threads, device = torch.get_num_threads(), weights["embed_tokens.weight"].device
    return NotBatchInvariantError(
        f"{arithmetic.name} arithmetic: {fault} with torch {torch.__version__} on {device} "
        f"({threads} threads), so answers would depend on {cause}; try one thread, or the fast path, "
        "which promises a tolerance only"
    )


_Operation = tuple[str, Callable[[Tensor], Tensor], Tensor]


def _row_operations(
    do: Arithmetic, config: ModelConfig, weights: Weights, draw: _Draw
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


def _chunks_agree(do: Arithmetic, config: ModelConfig, draw: _Draw) -> bool:
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


def _split_operations(
    do: Arithmetic, config: ModelConfig, weights: Weights, shard: Shard, draw: _Draw
) -> Iterator[tuple[str, bool]]:
    """What is computed in parts: a name, and whether the part has the bits of the whole."""

    def part(name: str, whole: Tensor) -> Tensor:
        return shard.part(name, whole.transpose(0, 1), config).transpose(0, 1)

    seen = set()
    for name, weight in weights.items():
        local = name.split(".", 2)[2] if name.startswith("layers.") else name
        if weight.dim() != 2 or local in seen:
            continue
        seen.add(local)
        rows = draw(_TOKENS, weight.shape[1])
        alone = do.linear(rows, shard.part(local, weight, config))
        yield f"the product with {name}", torch.equal(alone, part(local, do.linear(rows, weight)))
    gate, up = draw(_TOKENS, config.intermediate), draw(_TOKENS, config.intermediate)
    alone = do.swiglu(part("mlp", gate), part("mlp", up))
    yield "SwiGLU", torch.equal(alone, part("mlp", do.swiglu(gate, up)))
    query = draw(_CONTEXT, config.heads, config.head_dim)
    keys, values = (draw(_CONTEXT, config.kv_heads, config.head_dim) for _ in range(2))
    own = [part(f"self_attn.{name}_proj", x) for name, x in (("k", keys), ("v", values))]
    scale = config.head_dim**-0.5
    alone = do.attention(part("self_attn.q_proj", query), *own, start=0, scale=scale)
    whole = do.attention(query, keys, values, start=0, scale=scale)
    yield "attention", torch.equal(alone, part("self_attn.q_proj", whole))

"""The models of these scenarios, and what they compute token by token with nobody beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from refimpl.model.config import TINY_GQA, TINY_MLA, ModelConfig
from refimpl.model.paged import Chunk, KvView
from refimpl.model.reference import Reference
from refimpl.model.transformer import Transformer
from refimpl.model.weights import Weights, random_weights

TOKENS = 150  # of each sequence: more than two tiles of keys
SEQUENCES = 4
_QWEN = replace(
    TINY_GQA, name="tiny-qwen", ties_embeddings=True, has_qkv_bias=True, has_output_bias=True,
    has_qk_norm=True, rope_divisors=(1.0, 1.0, 1.5, 2.0, 8.0, 8.0),
)  # fmt: skip
CONFIGS = {
    config.name: config
    for config in (
        TINY_GQA,
        TINY_MLA,
        _QWEN,
        replace(TINY_GQA, name="tiny-gqa-bfloat16", dtype="bfloat16"),
        replace(TINY_MLA, name="tiny-mla-bfloat16", dtype="bfloat16"),
    )
}


@cache
def weights_of(name: str) -> Weights:
    return random_weights(CONFIGS[name], seed=5)


@cache
def transformer_of(name: str) -> Transformer:
    return Transformer(CONFIGS[name], weights_of(name), Reference())


def tokens_of(sequence: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 + sequence)
    drawn: list[int] = torch.randint(0, TINY_GQA.vocab, (TOKENS,), generator=generator).tolist()
    return drawn


@dataclass(frozen=True)
class Alone:
    """A sequence computed token by token: logits after each token, and the rows it left."""

    logits: Tensor  # [token, vocab]
    keys: Tensor  # [layer, token, head, dim]
    values: Tensor | None


@cache
def alone(name: str, sequence: int) -> Alone:
    tokens, transformer = tokens_of(sequence), transformer_of(name)
    kv = KvView.zeros(transformer.config, slots=TOKENS, page_size=1)
    slots = list(range(TOKENS))
    rows = [
        transformer.forward([Chunk([token], start, slots)], kv)
        for start, token in enumerate(tokens)
    ]
    return Alone(torch.cat(rows), kv.keys, kv.values)


def empty(config: ModelConfig, slots: int, page_size: int) -> KvView:
    """A pool full of what nobody may read."""
    kv = KvView.zeros(config, slots, page_size)
    kv.keys.fill_(torch.nan)
    if kv.values is not None:
        kv.values.fill_(torch.nan)
    return kv


def rows_of(slots: list[int], page_size: int, count: int) -> Tensor:
    return torch.tensor([slots[i // page_size] * page_size + i % page_size for i in range(count)])

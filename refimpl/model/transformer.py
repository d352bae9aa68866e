"""One decoder over paged KV: RMSNorm, rotary positions, GQA or MLA, SwiGLU.

A call computes chunks of several sequences, prompts and single tokens alike: a decode step is a batch
of chunks of one token. Keys and values of new tokens are written to the pool layer by layer, and
attention reads the pool, whoever filled it. Must not know: trees, requests, transfers, sampling.
Called by: whoever carries out batches, and scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from refimpl.model.arithmetic import Arithmetic
from refimpl.model.config import ModelConfig
from refimpl.model.paged import Chunk, KvView, Plan, plan
from refimpl.model.rope import RopeTable, rotate
from refimpl.model.shard import ALONE, Gather, Shard
from refimpl.model.weights import Weights, weight_shapes

Turns: TypeAlias = tuple[Tensor, Tensor]


def _as_it_is(part: Tensor, width: int) -> Tensor:
    """What one rank computed is all there is."""
    del width
    return part


class Transformer:
    """A decoder with its weights and the arithmetic it computes with.

    All weights lie on one device and have the dtype of ``config``. With a ``shard`` of several ranks it
    computes that rank's part, and ``gather`` puts the parts of all together; ranks of one process share
    the weights. Raises ValueError when a tensor is missing or has another shape, ConfigError when the
    model can't be split so.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        arithmetic: Arithmetic,
        shard: Shard = ALONE,
        gather: Gather = _as_it_is,
    ) -> None:
        for name, shape in weight_shapes(config).items():
            if name not in weights or tuple(weights[name].shape) != shape:
                raise ValueError(f"{config.name} needs {name} of shape {shape}")
        shard.check(config)
        if config.mla:
            shard, gather = ALONE, _as_it_is
        self.config = config
        self.weights = weights
        self.arithmetic = arithmetic
        self._gather = gather
        self._embedding = weights["embed_tokens.weight"]  # [vocab, hidden]
        self._norm = weights["norm.weight"]
        head = "embed_tokens.weight" if config.ties_embeddings else "lm_head.weight"
        self._head = shard.columns(weights[head])  # [vocab of this rank, hidden]
        self.device = self._embedding.device
        self._rope = RopeTable(config, self.device)
        self._layers = [
            _Layer(config, _of_layer(weights, layer, config, shard), arithmetic, shard, gather)
            for layer in range(config.layers)
        ]

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        kv: KvView,
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute ``chunks``, write their KV, and return the logits after each chunk's last token.

        Returns ``[chunk, vocab]`` in float32. A sequence appears in one chunk at most.
        ``before_layer(l)`` is called before anything of layer ``l`` is read or written: there a load
        of that layer is awaited and the next one begun. Raises ValueError on a token outside the
        vocabulary, a position beyond ``positions_max`` or a page table that is too short.
        """
        self._check(chunks)
        batch = plan(chunks, kv.page_size, self.device)
        turns = self._rope.at(batch.positions)
        x = self._embedding[batch.tokens]  # [token, hidden]
        for number, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(number)
            x = layer.forward(x, batch, turns, kv, number)
        last = self.arithmetic.norm(x[batch.last], self._norm, self.config.norm_epsilon)
        logits = self.arithmetic.linear(last, self._head)
        return self._gather(logits, self.config.vocab).float()  # [chunk, vocab]

    def _check(self, chunks: Sequence[Chunk]) -> None:
        vocab, positions_max = self.config.vocab, self.config.positions_max
        for chunk in chunks:
            if chunk.tokens and not 0 <= min(chunk.tokens) <= max(chunk.tokens) < vocab:
                raise ValueError(f"a token lies outside the vocabulary of {vocab}")
            if chunk.start + len(chunk.tokens) > positions_max:
                raise ValueError(f"{self.config.name} has no position beyond {positions_max}")


class _Layer:
    """Attention and MLP with their residuals."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        arithmetic: Arithmetic,
        shard: Shard,
        gather: Gather,
    ) -> None:
        self._weights, self._arithmetic, self._gather = weights, arithmetic, gather
        self._epsilon, self._hidden = config.norm_epsilon, config.hidden
        self._intermediate = config.intermediate
        self._attention: _Gqa | _Mla
        if config.mla:
            self._attention = _Mla(config, weights, arithmetic)
        else:
            self._attention = _Gqa(config, weights, arithmetic, shard, gather)

    def forward(self, x: Tensor, batch: Plan, turns: Turns, kv: KvView, layer: int) -> Tensor:
        do, weights = self._arithmetic, self._weights
        normed = do.norm(x, weights["input_layernorm.weight"], self._epsilon)
        x = x + self._attention.forward(normed, batch, turns, kv, layer)  # [token, hidden]
        normed = do.norm(x, weights["post_attention_layernorm.weight"], self._epsilon)
        gate = do.linear(normed, weights["mlp.gate_proj.weight"])  # [token, intermediate]
        up = do.linear(normed, weights["mlp.up_proj.weight"])
        wide = self._gather(do.swiglu(gate, up), self._intermediate)
        return x + self._gather(do.linear(wide, weights["mlp.down_proj.weight"]), self._hidden)


class _Gqa:
    """Grouped-query attention: heads share the keys and values of their group. Of one rank's heads."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        arithmetic: Arithmetic,
        shard: Shard,
        gather: Gather,
    ) -> None:
        self._config, self._weights, self._arithmetic = config, weights, arithmetic
        self._head_count = config.heads // shard.size
        self._kv_head_count = shard.cached_heads(config)
        self._gather = gather

    def forward(self, x: Tensor, batch: Plan, turns: Turns, kv: KvView, layer: int) -> Tensor:
        query = self._heads(x, "q", self._head_count)  # [token, head, dim]
        keys = self._heads(x, "k", self._kv_head_count)  # [token, kv_head, dim]
        values = self._heads(x, "v", self._kv_head_count)
        query, keys = rotate(query, turns), rotate(keys, turns)
        kv.write(layer, batch.rows, keys, values)
        scale = self._config.head_dim**-0.5
        parts = [
            self._arithmetic.attention(
                query[span.first : span.first + span.count],
                kv.read_keys(layer, span.context),
                kv.read_values(layer, span.context),
                start=span.start,
                scale=scale,
            )
            for span in batch.spans
        ]
        width = self._config.heads * self._config.head_dim
        result = self._gather(torch.cat(parts).flatten(1), width)  # [token, heads * dim]
        return self._gather(self._linear(result, "o"), self._config.hidden)

    def _heads(self, x: Tensor, name: str, heads: int) -> Tensor:
        result = self._linear(x, name).reshape(len(x), heads, -1)  # [token, head, dim]
        norm = self._weights.get(f"self_attn.{name}_norm.weight")
        if norm is None:
            return result
        return self._arithmetic.norm(result, norm, self._config.norm_epsilon)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"self_attn.{name}_proj.weight"]
        bias = self._weights.get(f"self_attn.{name}_proj.bias")
        return self._arithmetic.linear(x, weight, bias)


class _Mla:
    """Multi-head latent attention, absorbed: queries and results move to the latent space.

    Expanding the latents into keys and values of every head would give the same numbers. Here the
    query of a head is multiplied by that head's expansion instead, so that all heads attend to the
    cached latents as if they were one KV head.
    """

    def __init__(self, config: ModelConfig, weights: Weights, arithmetic: Arithmetic) -> None:
        assert config.mla is not None
        self._config, self._mla = config, config.mla
        self._weights, self._arithmetic = weights, arithmetic
        expand = weights["self_attn.kv_b_proj.weight"]
        expand = expand.reshape(config.heads, -1, self._mla.latent)
        self._to_latent = expand[:, : self._mla.nope].contiguous()  # [head, nope, latent]
        self._to_value = expand[:, self._mla.nope :].transpose(1, 2).contiguous()
        assert self._to_value.shape[1:] == (self._mla.latent, self._mla.value)

    def forward(self, x: Tensor, batch: Plan, turns: Turns, kv: KvView, layer: int) -> Tensor:
        do, weights, mla = self._arithmetic, self._weights, self._mla
        query = do.linear(x, weights["self_attn.q_proj.weight"])
        query = query.reshape(len(x), self._config.heads, -1)  # [token, head, nope + rope]
        nope, rope = query[..., : mla.nope], query[..., mla.nope :]
        nope = do.per_head(nope, self._to_latent)  # [token, head, latent]
        query = torch.cat((nope, rotate(rope, turns)), dim=-1)  # [token, head, latent + rope]

        kv.write(layer, batch.rows, self._cached(x, turns), None)
        scale = (mla.nope + mla.rope) ** -0.5
        parts = []
        for span in batch.spans:
            keys = kv.read_keys(layer, span.context)  # [position, 1, latent + rope]
            mine = query[span.first : span.first + span.count]
            values = keys[..., : mla.latent]
            parts.append(do.attention(mine, keys, values, start=span.start, scale=scale))
        result = do.per_head(torch.cat(parts), self._to_value)  # [token, head, value]
        return do.linear(result.flatten(1), weights["self_attn.o_proj.weight"])

    def _cached(self, x: Tensor, turns: Turns) -> Tensor:
        """What a token leaves in the pool: its normed latent and the rotated key of all heads."""
        weights, mla = self._weights, self._mla
        both = self._arithmetic.linear(x, weights["self_attn.kv_a_proj_with_mqa.weight"])
        latent, rope = both[:, : mla.latent], both[:, mla.latent :]
        norm = weights["self_attn.kv_a_layernorm.weight"]
        latent = self._arithmetic.norm(latent, norm, self._config.norm_epsilon)
        return torch.cat((latent[:, None], rotate(rope[:, None], turns)), dim=-1)


def _of_layer(weights: Weights, layer: int, config: ModelConfig, shard: Shard) -> Weights:
    """The weights of a layer by their names in it, of one rank; views of the whole ones."""
    prefix = f"layers.{layer}."
    return {
        (local := name.removeprefix(prefix)): shard.part(local, weight, config)
        for name, weight in weights.items()
        if name.startswith(prefix)
    }

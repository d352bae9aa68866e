"""A decoder as the papers write it: float64, whole sequences, no cache, nothing shared with ours."""

from __future__ import annotations

import torch
from torch import Tensor

from refimpl.model.config import ModelConfig
from refimpl.model.weights import Weights


def logits(config: ModelConfig, weights: Weights, tokens: list[int]) -> Tensor:
    """Logits after each token, ``[token, vocab]``."""
    w = {name: weight.double() for name, weight in weights.items()}
    x = w["embed_tokens.weight"][tokens]
    for layer in range(config.layers):
        mine = {
            name.removeprefix(f"layers.{layer}."): weight
            for name, weight in w.items()
            if name.startswith(f"layers.{layer}.")
        }
        h = norm(x, mine["input_layernorm.weight"], config)
        x = x + (mla(config, mine, h) if config.mla else gqa(config, mine, h))
        h = norm(x, mine["post_attention_layernorm.weight"], config)
        gate = h @ mine["mlp.gate_proj.weight"].T
        h = gate * torch.sigmoid(gate) * (h @ mine["mlp.up_proj.weight"].T)
        x = x + h @ mine["mlp.down_proj.weight"].T
    head = "embed_tokens.weight" if config.ties_embeddings else "lm_head.weight"
    return norm(x, w["norm.weight"], config) @ w[head].T


def norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_epsilon) * weight


def turn(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotate ``[token, head, width]``: pairs as complex numbers times e^(i position frequency)."""
    half = x.shape[-1] // 2
    frequencies = config.rope_theta ** (-torch.arange(half).double() / half)
    if config.rope_divisors:
        frequencies = frequencies / torch.tensor(config.rope_divisors).double()
    angles = torch.arange(len(x)).double()[:, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """All ``[token, head, dim]``; causal."""
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)


def gqa(config: ModelConfig, w: Weights, h: Tensor) -> Tensor:
    def heads(name: str, count: int) -> Tensor:
        x = h @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)
        x = x.reshape(len(h), count, config.head_dim)
        scale = w.get(f"self_attn.{name}_norm.weight")
        return x if scale is None else norm(x, scale, config)

    group = config.heads // config.kv_heads
    query = turn(heads("q", config.heads), config)
    keys = turn(heads("k", config.kv_heads), config).repeat_interleave(group, 1)
    values = heads("v", config.kv_heads).repeat_interleave(group, 1)
    result = attend(query, keys, values) @ w["self_attn.o_proj.weight"].T
    return result + w.get("self_attn.o_proj.bias", 0)


def mla(config: ModelConfig, w: Weights, h: Tensor) -> Tensor:
    """Latents expanded into keys and values of every head."""
    dims, count = config.mla, config.heads
    assert dims is not None
    query = (h @ w["self_attn.q_proj.weight"].T).reshape(len(h), count, -1)
    query = torch.cat((query[..., : dims.nope], turn(query[..., dims.nope :], config)), -1)
    both = h @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = norm(both[:, : dims.latent], w["self_attn.kv_a_layernorm.weight"], config)
    expanded = (latent @ w["self_attn.kv_b_proj.weight"].T).reshape(len(h), count, -1)
    shared = turn(both[:, None, dims.latent :], config).expand(-1, count, -1)
    keys = torch.cat((expanded[..., : dims.nope], shared), -1)
    return attend(query, keys, expanded[..., dims.nope :]) @ w["self_attn.o_proj.weight"].T

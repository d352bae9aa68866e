"""The tensors of a decoder: their names, their shapes, and seeded random ones.

Names are those of Hugging Face checkpoints without the leading ``model.``; a matrix is ``[out, in]``.
Must not know: files, caches, arithmetic. Called by: checkpoint, gguf_file, catalog, transformer.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, TypeAlias

import torch

from refimpl.model.config import ModelConfig

Weights: TypeAlias = dict[str, torch.Tensor]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

_EMBEDDING_SIZE: Final = 0.3  # of seeded models, see random_weights
_QUERY_SIZE: Final = 4.0
_SAMPLES: Final = 1024  # of a tensor, for its fingerprint


def weight_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a model with its shape."""
    shapes: Shapes = {"embed_tokens.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        block = _attention_shapes(config) | _mlp_shapes(config)
        shapes |= {prefix + name: shape for name, shape in block.items()}
    shapes["norm.weight"] = (config.hidden,)
    if not config.ties_embeddings:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def _mlp_shapes(config: ModelConfig) -> Shapes:
    wide, hidden = config.intermediate, config.hidden
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }


def _attention_shapes(config: ModelConfig) -> Shapes:
    if config.mla:
        return _mla_shapes(config)
    hidden, width = config.hidden, config.head_dim
    rows = {"q": config.heads * width, "k": config.kv_heads * width, "v": config.kv_heads * width}
    shapes: Shapes = {f"self_attn.{name}_proj.weight": (rows[name], hidden) for name in rows}
    shapes["self_attn.o_proj.weight"] = (hidden, config.heads * width)
    if config.has_qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (rows[name],) for name in rows}
    if config.has_output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.has_qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (width,) for name in ("q", "k")}
    return shapes


def _mla_shapes(config: ModelConfig) -> Shapes:
    mla, hidden, heads = config.mla, config.hidden, config.heads
    assert mla is not None
    return {
        "self_attn.q_proj.weight": (heads * (mla.nope + mla.rope), hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (mla.latent + mla.rope, hidden),
        "self_attn.kv_a_layernorm.weight": (mla.latent,),
        "self_attn.kv_b_proj.weight": (heads * (mla.nope + mla.value), mla.latent),
        "self_attn.o_proj.weight": (hidden, heads * mla.value),
    }


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Weights of a model that knows nothing, but whose answers depend on every token it reads.

    Matrices keep the size of what passes through. Small embeddings and long queries let attention
    outweigh the newest token: of 64 greedy tokens 31 or more then differ, with 12 seeds; with plain
    ones some seeds repeat a single token. Equal for equal seeds and versions of torch.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights: Weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + noise / 8
        elif name == "embed_tokens.weight":
            noise = noise * _EMBEDDING_SIZE
        elif len(shape) == 2:
            noise = noise / shape[1] ** 0.5
        if name.endswith("q_proj.weight"):
            noise = noise * _QUERY_SIZE
        weights[name] = noise.to(dtype)
    return weights


def fingerprint(weights: Weights) -> str:
    """16 hexadecimal digits that tell revisions of a model apart: names, shapes and samples of all tensors.

    Of each tensor it reads some evenly spaced values, not all: a few milliseconds for any model.
    """
    digest = sha256()
    for name in sorted(weights):
        weight = weights[name]
        flat = weight.detach().reshape(-1)
        sample = flat[:: -(-flat.numel() // _SAMPLES)].to("cpu").contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]

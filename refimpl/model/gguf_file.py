"""GGUF files: metadata and dequantised tensors of the Llama, Qwen2 and Qwen3 families.

Must not know: arithmetic, caches. Called by: catalog; bpe_gguf reads the metadata it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from refimpl.config import ConfigError
from refimpl.model.checkpoint import (
    FAMILIES,
    NEEDS_EXTRA,
    Checkpoint,
    CheckpointError,
    check_weights,
)
from refimpl.model.config import ModelConfig
from refimpl.model.weights import Weights

Metadata: TypeAlias = Mapping[str, Any]

_TOP: Final = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS: Final = "rope_freqs.weight"  # Llama 3's scaling, as divisors of the frequencies
_DAMAGED: Final = (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError)


def load_gguf(path: Path, dtype: str = "") -> tuple[Checkpoint, Metadata]:
    """Read a GGUF file; tensors are dequantised to float32 and rounded to ``dtype``, float32 if empty.

    Raises CheckpointError: no such file, truncated or no GGUF, a family that is not supported, tensors
    that are missing, unexpected or of another shape.
    """
    metadata, tensors = _read(path)
    divisors = tensors.pop(_ROPE_FREQS, None)
    config = _config(path, metadata, tensors, dtype, () if divisors is None else divisors.tolist())
    family = metadata["general.architecture"]
    target: torch.dtype = getattr(torch, config.dtype)
    weights: Weights = {}
    for name, tensor in tensors.items():
        ours = _our_name(name)
        halved = _in_halves(ours, tensor, config) if family == "llama" else tensor
        weights[ours] = halved.to(target)
    check_weights(config, weights, path)
    return Checkpoint(config, weights), metadata


def _read(path: Path) -> tuple[dict[str, Any], Weights]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        import gguf
    except ModuleNotFoundError:
        raise CheckpointError(f"{path}: gguf {NEEDS_EXTRA}") from None
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy()).float()
            for each in reader.tensors
        }
    except NotImplementedError as error:
        raise CheckpointError(f"{path}: a quantisation that gguf can't undo: {error}") from error
    except _DAMAGED as error:
        raise CheckpointError(f"{path}: truncated or no GGUF file: {error}") from error
    return metadata, tensors


def _config(
    path: Path, metadata: Metadata, tensors: Weights, dtype: str, divisors: list[float] | tuple[()]
) -> ModelConfig:
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"{path}: general.architecture {family!r} is none of {known}")
    scaling = metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none" and not divisors:
        raise CheckpointError(f"{path}: rope scaling {scaling!r} is not supported")
    try:
        heads = metadata[f"{family}.attention.head_count"]
        hidden = metadata[f"{family}.embedding_length"]
        return ModelConfig(
            name=str(metadata.get("general.name", path.stem)),
            layers=metadata[f"{family}.block_count"],
            hidden=hidden,
            heads=heads,
            kv_heads=metadata.get(f"{family}.attention.head_count_kv", heads),
            head_dim=metadata.get(f"{family}.attention.key_length", hidden // heads),
            intermediate=metadata[f"{family}.feed_forward_length"],
            vocab=len(tensors["token_embd.weight"]),
            positions_max=metadata[f"{family}.context_length"],
            rope_theta=metadata.get(f"{family}.rope.freq_base", 10_000.0),
            rope_divisors=tuple(divisors),
            norm_epsilon=metadata[f"{family}.attention.layer_norm_rms_epsilon"],
            ties_embeddings="output.weight" not in tensors,
            has_qkv_bias="blk.0.attn_q.bias" in tensors,
            has_output_bias="blk.0.attn_output.bias" in tensors,
            has_qk_norm="blk.0.attn_q_norm.weight" in tensors,
            dtype=dtype or "float32",
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: {error.args[0]} is missing") from error
    except (TypeError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _our_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_TOP.get(stem, stem)}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"layers.{layer}.{_BLOCK.get(part, part)}.{kind}"


def _in_halves(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Undo the row order that GGUF gives queries and keys of the Llama family.

    GGUF puts the two numbers that are rotated together next to each other; here they stand half a
    head apart, as in the checkpoints the files are made from.
    """
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    pairs = tensor.reshape(heads, config.head_dim // 2, 2, -1)  # [head, pair, 2, in]
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()

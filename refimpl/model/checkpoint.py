"""Hugging Face directories: config.json and safetensors of the dense Llama, Qwen2 and Qwen3 families.

Everything that is wrong with a checkpoint ends in CheckpointError, one line that names the file.
Must not know: arithmetic, caches, tokenizers. Called by: catalog; gguf_file and bpe share its checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from refimpl.config import ConfigError
from refimpl.model.config import DTYPES, ModelConfig, llama3_divisors
from refimpl.model.weights import Weights, weight_shapes

FAMILIES: Final = ("llama", "qwen2", "qwen3")
NEEDS_EXTRA: Final = "is not installed: pip install 'hicache-refimpl[torch]'"
_SHOWN_MAX: Final = 3  # names in a message; a wrong family would list hundreds
# Buffers that some checkpoints carry and that follow from the config.
_DERIVED: Final = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class CheckpointError(ConfigError):
    """A checkpoint that can't be used. The message is one line: the file, what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as read: its shape, and its weights on the CPU in ``config.dtype``."""

    config: ModelConfig
    weights: Weights


def load_directory(folder: Path, dtype: str = "") -> Checkpoint:
    """Read a Hugging Face directory; ``dtype`` overrides the one it names.

    Raises CheckpointError: no such file, not JSON, a truncated file, a family or a feature that is not
    supported, tensors that are missing, unexpected or of another shape.
    """
    raw = read_json(folder / "config.json")
    config = config_from_json(raw, folder / "config.json", dtype)
    target: torch.dtype = getattr(torch, config.dtype)
    weights: Weights = {}
    for path in _weight_files(folder):
        for name, tensor in _read_safetensors(path).items():
            if not name.endswith(_DERIVED):
                weights[name.removeprefix("model.")] = tensor.to(target)
    if config.ties_embeddings:
        weights.pop("lm_head.weight", None)  # some files repeat the embedding under this name
    check_weights(config, weights, folder)
    return Checkpoint(config, weights)


# ---- config.json --------------------------------------------------------------------------------


def config_from_json(raw: Mapping[str, Any], path: Path, dtype: str = "") -> ModelConfig:
    """The shape that a config.json describes. Raises CheckpointError, naming ``path``."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"{path}: model_type {family!r} is none of {', '.join(FAMILIES)}")
    if raw.get("use_sliding_window"):
        raise CheckpointError(f"{path}: sliding-window attention is not supported")
    if raw.get("mlp_bias"):
        raise CheckpointError(f"{path}: mlp_bias is not supported")
    try:
        return _config(raw, family, dtype)
    except KeyError as error:
        raise CheckpointError(f"{path}: {error.args[0]} is missing") from error
    except (TypeError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _config(raw: Mapping[str, Any], family: str, dtype: str) -> ModelConfig:
    heads = raw["num_attention_heads"]
    width = raw.get("head_dim") or raw["hidden_size"] // heads
    # Newer files gather everything about rotation in rope_parameters.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
    return ModelConfig(
        name=family,
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=width,
        intermediate=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        positions_max=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_divisors=_divisors(rope, theta, width),
        norm_epsilon=raw["rms_norm_eps"],
        ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=family == "qwen2" or bool(raw.get("attention_bias")),
        has_output_bias=family != "qwen2" and bool(raw.get("attention_bias")),
        has_qk_norm=family == "qwen3",
        dtype=dtype or _dtype(raw),
    )


def _dtype(raw: Mapping[str, Any]) -> str:
    named = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return named if named in DTYPES else "float32"


def _divisors(rope: Mapping[str, Any], theta: float, width: int) -> tuple[float, ...]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ()
    if kind == "llama3":
        return llama3_divisors(theta, width, rope)
    raise ConfigError(f"rope scaling {kind!r} is not supported")


# ---- files --------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: an object is expected")
    return found


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{folder}: neither {single.name} nor {index.name}")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"{index}: weight_map is missing")
    paths = [folder / name for name in sorted(set(shards.values()))]
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"{path}: no such file, but {index.name} names it")
    return paths


def _read_safetensors(path: Path) -> Weights:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise CheckpointError(f"{path}: safetensors {NEEDS_EXTRA}") from None
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or no safetensors file: {error}") from error


def check_weights(config: ModelConfig, weights: Weights, path: Path) -> None:
    """Raise CheckpointError unless ``weights`` are exactly those of ``config``."""
    expected = weight_shapes(config)
    if missing := expected.keys() - weights.keys():
        raise CheckpointError(f"{path}: tensors are missing: {_some(missing)}")
    if unexpected := weights.keys() - expected.keys():
        raise CheckpointError(f"{path}: tensors nobody expects: {_some(unexpected)}")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            found = tuple(weights[name].shape)
            raise CheckpointError(f"{path}: {name} has shape {found}, not {shape}")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _SHOWN_MAX
    return ", ".join(ordered[:_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")

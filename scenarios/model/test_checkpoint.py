"""Checkpoints: what is read equals what was written, and what is wrong is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")
pytest.importorskip("safetensors", reason="no safetensors: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

import gguf
import torch
from safetensors.torch import save_file

from refimpl.model.catalog import open_model
from refimpl.model.checkpoint import CheckpointError, load_directory
from refimpl.model.config import TINY_GQA, ModelConfig, llama3_divisors
from refimpl.model.gguf_file import load_gguf
from refimpl.model.weights import Weights, random_weights

LLAMA = replace(TINY_GQA, name="llama")
QWEN2 = replace(TINY_GQA, name="qwen2", has_qkv_bias=True, ties_embeddings=True)
QWEN3 = replace(TINY_GQA, name="qwen3", has_qk_norm=True)
FAMILIES = [LLAMA, QWEN2, QWEN3]
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
by_family = pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.name)


def described(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": config.name,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.positions_max,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.ties_embeddings,
        "torch_dtype": config.dtype,
    }


def written(config: ModelConfig, folder: Path, **changes: Any) -> Weights:
    """A Hugging Face directory of one file; the weights in it under our names."""
    weights = random_weights(config, seed=9)
    (folder / "config.json").write_text(json.dumps(described(config) | changes))
    save_file(_their_names(weights), folder / "model.safetensors")
    return weights


def _their_names(weights: Weights) -> Weights:
    return {
        name if name.startswith("lm_head") else f"model.{name}": weight
        for name, weight in weights.items()
    }


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- Hugging Face directories -------------------------------------------------------------------


@by_family
def test_a_directory_is_read_as_it_was_written(config: ModelConfig, tmp_path: Path) -> None:
    weights = written(config, tmp_path)
    found = load_directory(tmp_path)
    assert found.config == config
    assert_same(found.weights, weights)


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    weights = written(LLAMA, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    theirs = _their_names(weights)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(theirs)}
    for file in set(files.values()):
        save_file({name: theirs[name] for name in theirs if files[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_same(load_directory(tmp_path).weights, weights)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1.*no such file, but .*index\.json names it"):
        load_directory(tmp_path)


def test_another_dtype_than_the_files_can_be_asked_for(tmp_path: Path) -> None:
    weights = written(LLAMA, tmp_path)
    found = load_directory(tmp_path, "bfloat16")
    assert found.config.dtype == "bfloat16"
    assert_same(found.weights, {name: weight.bfloat16() for name, weight in weights.items()})


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_the_rope_scaling_of_llama_3_are_read(field: str, tmp_path: Path) -> None:
    written(LLAMA, tmp_path, **{field: SCALING})
    divisors = load_directory(tmp_path).config.rope_divisors
    assert divisors == llama3_divisors(LLAMA.rope_theta, LLAMA.head_dim, SCALING)


def test_the_rope_scaling_of_llama_3_keeps_short_waves_and_stretches_long_ones() -> None:
    divisors = llama3_divisors(10_000.0, 64, SCALING)
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(8.0)
    assert list(divisors) == sorted(divisors)
    assert any(1.0 < each < 8.0 for each in divisors)


Damage = Callable[[Path], None]


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _rewrite(change: Callable[[Weights], None]) -> Damage:
    def damage(folder: Path) -> None:
        weights = dict(_their_names(random_weights(LLAMA, seed=9)))
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


def _lose_a_product(weights: Weights) -> None:
    for layer in range(LLAMA.layers):
        del weights[f"model.layers.{layer}.mlp.up_proj.weight"]


def _redescribe(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        fields = {**described(LLAMA), **changes}
        kept = {name: value for name, value in fields.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


FAULTS: dict[str, tuple[Damage, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
    "config no JSON": (
        lambda folder: (folder / "config.json").write_text("{") and None,
        "can't be read as JSON",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model"),
    "truncated": (_truncate, r"model\.safetensors: truncated"),
    "family": (_redescribe(model_type="mamba"), "'mamba' is none of llama, qwen2, qwen3"),
    "field": (_redescribe(rms_norm_eps=...), "rms_norm_eps is missing"),
    "type": (_redescribe(hidden_size="wide", head_dim=8), "config.json: "),
    "scaling": (_redescribe(rope_scaling={"type": "yarn"}), "rope scaling 'yarn' is not supported"),
    "window": (_redescribe(use_sliding_window=True), "sliding-window"),
    "bias": (_redescribe(mlp_bias=True), "mlp_bias is not supported"),
    "missing": (
        _rewrite(_lose_a_product),
        r"missing: layers\.0.*layers\.2",
    ),
    "unexpected": (
        _rewrite(lambda weights: weights.update({"model.extra": torch.ones(1)})),
        "nobody expects: extra",
    ),
    "shape": (
        _rewrite(lambda weights: weights.update({"model.norm.weight": torch.ones(7)})),
        r"norm\.weight has shape \(7,\), not \(48,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_directory_that_cannot_be_used_says_why_in_one_line(fault: str, tmp_path: Path) -> None:
    written(LLAMA, tmp_path)
    damage, said = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=said) as raised:
        load_directory(tmp_path)
    assert "\n" not in str(raised.value)


# ---- GGUF ---------------------------------------------------------------------------------------

GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_written(config: ModelConfig, path: Path, *, omit: str = "", arch: str = "") -> Weights:
    """A GGUF file as converters write it; the weights in it under our names."""
    weights = random_weights(config, seed=9)
    family = config.name
    writer = gguf.GGUFWriter(path, arch or family)
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_context_length(config.positions_max)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    for name, weight in weights.items():
        theirs = _gguf_name(name)
        if theirs != omit:
            writer.add_tensor(theirs, _gguf_order(name, weight, config).numpy())
    if config.rope_divisors:
        writer.add_tensor("rope_freqs.weight", torch.tensor(config.rope_divisors).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def _gguf_order(name: str, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Llama's queries and keys: number i of the first half of a head, then number i of the second."""
    if config.name != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    width = config.head_dim
    order = [
        head * width + half * (width // 2) + number
        for head in range(len(weight) // width)
        for number in range(width // 2)
        for half in range(2)
    ]
    return weight[order]


@by_family
def test_a_gguf_file_is_read_as_it_was_written(config: ModelConfig, tmp_path: Path) -> None:
    weights = gguf_written(config, tmp_path / "a.gguf")
    found, _ = load_gguf(tmp_path / "a.gguf")
    expected = replace(config, name="a", norm_epsilon=found.config.norm_epsilon)
    assert found.config == expected
    assert found.config.norm_epsilon == pytest.approx(config.norm_epsilon)  # stored as float32
    assert_same(found.weights, weights)


def test_rope_divisors_of_a_gguf_file_are_read(tmp_path: Path) -> None:
    config = replace(LLAMA, rope_divisors=(1.0, 1.0, 2.0, 4.0, 8.0, 8.0))
    gguf_written(config, tmp_path / "a.gguf")
    assert load_gguf(tmp_path / "a.gguf")[0].config.rope_divisors == config.rope_divisors


def test_a_truncated_gguf_file_is_named_wherever_it_ends(tmp_path: Path) -> None:
    gguf_written(LLAMA, tmp_path / "a.gguf")
    whole = (tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    for length in (0, 3, 20, 100, 700, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"b\.gguf: truncated or no GGUF file") as raised:
            load_gguf(path)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"omit": "blk.1.ffn_up.weight"}, r"missing: layers\.1\.mlp\.up_proj\.weight"),
        ({"omit": "token_embd.weight"}, r"token_embd\.weight is missing"),
        ({"arch": "mamba"}, "'mamba' is none of llama, qwen2, qwen3"),
    ],
)
def test_a_gguf_file_that_cannot_be_used_says_why(
    changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    gguf_written(LLAMA, tmp_path / "a.gguf", **changes)
    with pytest.raises(CheckpointError, match=said):
        load_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize("path", ["no-such-model", "no-such-model.gguf"])
def test_a_path_that_does_not_exist_is_named(path: str) -> None:
    with pytest.raises(CheckpointError, match=path):
        open_model(path)

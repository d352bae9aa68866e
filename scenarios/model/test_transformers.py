"""Directories that transformers writes are read, and computed, as transformers does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")
if find_spec("transformers") is None:
    pytest.skip(
        "no transformers to compare with: pip install -e '.[test]'", allow_module_level=True
    )

import torch

from refimpl.model.checkpoint import load_directory
from refimpl.model.paged import Chunk, KvView
from refimpl.model.reference import Reference
from refimpl.model.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("ignore")  # those of another library
SIZES = {
    "vocab_size": 260, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama 3": ("llama", {"rope_parameters": SCALING}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes = CASES[case]
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | changes))
    for name, weight in theirs.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # neither zeros nor ones, which would hide them
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    found = load_directory(tmp_path, "float32")
    tokens = torch.randint(0, 260, (300,)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0, -1]
    kv = KvView.zeros(found.config, slots=20, page_size=16)
    transformer = Transformer(found.config, found.weights, Reference())
    logits = transformer.forward([Chunk(tokens, 0, list(range(20)))], kv)[0]
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()

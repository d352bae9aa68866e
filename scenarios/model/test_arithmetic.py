"""Both arithmetics compute the decoder of the papers, and the reference path's promise is checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")

import torch
from torch import Tensor

from refimpl.model.config import TINY_GQA, TINY_MLA, ModelConfig
from refimpl.model.fast import TOLERANCE, Fast
from refimpl.model.paged import Chunk, KvView
from refimpl.model.reference import Reference
from refimpl.model.self_check import NotBatchInvariantError, check_batch_invariance
from refimpl.model.transformer import Transformer
from refimpl.model.weights import random_weights, weight_shapes
from scenarios.model import plain_decoder
from scenarios.model import small_models as small

SEEDED = [
    replace(config, dtype=dtype) for config in (TINY_GQA, TINY_MLA) for dtype in sorted(TOLERANCE)
]


@pytest.mark.parametrize("name", [each for each in small.CONFIGS if "bfloat16" not in each])
def test_the_decoder_computes_what_the_papers_write(name: str) -> None:
    expected = plain_decoder.logits(small.CONFIGS[name], small.weights_of(name), small.tokens_of(0))
    found = small.alone(name, 0).logits.double()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("config", SEEDED, ids=lambda each: f"{each.name}-{each.dtype}")
def test_the_fast_path_stays_within_its_tolerance(config: ModelConfig) -> None:
    weights = random_weights(config, seed=3)
    found = []
    for arithmetic in (Reference(), Fast()):
        transformer = Transformer(config, weights, arithmetic)
        kv = KvView.zeros(config, slots=20, page_size=16)
        tables = [list(range(10)), list(range(10, 20))]
        parts = ((0, 90), (90, 149), (149, 150))  # a prompt, a later chunk, a decode step
        rows = [
            transformer.forward(
                [Chunk(small.tokens_of(i)[a:b], a, tables[i]) for i in range(2)], kv
            )
            for a, b in parts
        ]
        found.append(torch.cat(rows))
    reference, fast = found
    assert (fast - reference).abs().max() < TOLERANCE[config.dtype] * reference.abs().max()


@pytest.mark.parametrize("config", SEEDED, ids=lambda each: f"{each.name}-{each.dtype}")
def test_the_reference_path_is_batch_invariant_here(config: ModelConfig) -> None:
    check_batch_invariance(Reference(), config, random_weights(config, seed=0))


class CountsCompany(Reference):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight, bias) * (1 + len(x) / 2**20)


class KnowsPlaces(Reference):
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        places = torch.arange(len(gate))[:, None] / 2**20
        return super().swiglu(gate, up) * (1 + places)


class SeesChunks(Reference):
    def attention(
        self, query: Tensor, keys: Tensor, values: Tensor, *, start: int, scale: float
    ) -> Tensor:
        found = super().attention(query, keys, values, start=start, scale=scale)
        return found * (1 + len(query) / 2**20)


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (CountsCompany, "the product with embed_tokens.weight depends on company"),
        (KnowsPlaces, "SwiGLU depends on company"),
        (SeesChunks, "attention depends on chunking"),
    ],
)
def test_the_self_check_names_what_is_not_invariant(sabotage: type[Reference], said: str) -> None:
    with pytest.raises(NotBatchInvariantError, match=said) as raised:
        check_batch_invariance(sabotage(), TINY_GQA, random_weights(TINY_GQA, seed=0))
    assert "\n" not in str(raised.value)


def test_seeded_weights_are_equal_for_equal_seeds_alone() -> None:
    first, again, other = (random_weights(TINY_GQA, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in weight_shapes(TINY_GQA))
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (Chunk([258], 0, [0]), "outside the vocabulary of 258"),
        (Chunk([-1], 0, [0]), "outside the vocabulary of 258"),
        (Chunk([], 0, [0]), "has no tokens"),
        (Chunk([1] * 5, 0, [0]), "ends at position 5, its 1 pages of 4 before"),
        (Chunk([1], 4096, [0]), "no position beyond 4096"),
    ],
)
def test_a_chunk_that_cannot_be_computed_is_named(chunk: Chunk, said: str) -> None:
    transformer = small.transformer_of("tiny-gqa")
    with pytest.raises(ValueError, match=said):
        transformer.forward([chunk], KvView.zeros(TINY_GQA, slots=2, page_size=4))


def test_a_decoder_without_one_of_its_weights_is_not_built() -> None:
    weights = dict(random_weights(TINY_GQA, seed=0))
    del weights["norm.weight"]
    with pytest.raises(ValueError, match=r"needs norm\.weight"):
        Transformer(TINY_GQA, weights, Reference())

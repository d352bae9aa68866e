"""The cache may never change an answer: chunks, batches and copies leave every bit as it was."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refimpl.model.paged import Chunk, KvView
from scenarios.model import small_models as small

NAMES = list(small.CONFIGS)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[int], list[list[tuple[int, int, int]]]]:
    """A page size, a page table order, and batches of (sequence, start, end)."""
    page_size = draw(st.sampled_from((1, 2, 16, 64)))
    done = [0] * draw(st.integers(1, small.SEQUENCES))
    ends = [draw(st.integers(1, small.TOKENS)) for _ in done]
    batches = []
    while waiting := [each for each, end in enumerate(ends) if done[each] < end]:
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        batch = []
        for each in chosen:
            count = draw(st.one_of(st.just(1), st.integers(1, ends[each] - done[each])))
            count = count if len(batches) < 12 else ends[each] - done[each]
            batch.append((each, done[each], done[each] + count))
            done[each] += count
        batches.append(batch)
    pages = len(done) * -(-small.TOKENS // page_size)
    order = draw(st.randoms(use_true_random=False)).sample(range(pages), pages)
    return page_size, order, batches


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(schedule=schedules())
def test_no_chunking_and_no_company_changes_a_bit(
    name: str, schedule: tuple[int, list[int], list[list[tuple[int, int, int]]]]
) -> None:
    page_size, order, batches = schedule
    transformer = small.transformer_of(name)
    kv = small.empty(transformer.config, len(order), page_size)
    pages = -(-small.TOKENS // page_size)
    tables = [order[first : first + pages] for first in range(0, len(order), pages)]
    ends: dict[int, int] = {}
    for batch in batches:
        chunks = [
            Chunk(small.tokens_of(each)[start:end], start, tables[each])
            for each, start, end in batch
        ]
        logits = transformer.forward(chunks, kv)
        for row, (each, _, end) in zip(logits, batch, strict=True):
            assert torch.equal(row, small.alone(name, each).logits[end - 1])
            ends[each] = end
    for each, end in ends.items():
        assert_same_kv(name, each, kv, small.rows_of(tables[each], page_size, end))


def assert_same_kv(name: str, sequence: int, kv: KvView, rows: torch.Tensor) -> None:
    alone = small.alone(name, sequence)
    assert torch.equal(kv.keys[:, rows], alone.keys[:, : len(rows)])
    if kv.values is not None:
        assert alone.values is not None
        assert torch.equal(kv.values[:, rows], alone.values[:, : len(rows)])


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_that_was_copied_in_gives_the_bits_of_one_that_was_computed(name: str) -> None:
    transformer, tokens = small.transformer_of(name), small.tokens_of(0)
    alone = small.alone(name, 0)
    kv = small.empty(transformer.config, slots=10, page_size=16)
    table = [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    rows = small.rows_of(table, 16, 80)
    for layer in range(transformer.config.layers):
        values = None if alone.values is None else alone.values[layer, :80]
        kv.write(layer, rows, alone.keys[layer, :80], values)
    logits = transformer.forward([Chunk(tokens[80:], 80, table)], kv)
    assert torch.equal(logits[0], alone.logits[-1])
    assert_same_kv(name, 0, kv, small.rows_of(table, 16, small.TOKENS))


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_may_be_loaded_as_late_as_its_hook(name: str) -> None:
    transformer, tokens = small.transformer_of(name), small.tokens_of(1)
    alone = small.alone(name, 1)
    kv = small.empty(transformer.config, slots=10, page_size=16)
    table, called = list(range(10)), []

    def load(layer: int) -> None:
        called.append(layer)
        values = None if alone.values is None else alone.values[layer, :64]
        kv.write(layer, torch.arange(64), alone.keys[layer, :64], values)

    logits = transformer.forward([Chunk(tokens[64:], 64, table)], kv, load)
    assert called == list(range(transformer.config.layers))
    assert torch.equal(logits[0], alone.logits[-1])


def test_the_answer_depends_on_the_first_token_of_the_context() -> None:
    for name in NAMES:
        transformer, tokens = small.transformer_of(name), small.tokens_of(2)
        changed = [(tokens[0] + 1) % 258, *tokens[1:]]
        kv = small.empty(transformer.config, slots=10, page_size=16)
        logits = transformer.forward([Chunk(changed, 0, list(range(10)))], kv)
        assert not torch.equal(logits[0], small.alone(name, 2).logits[-1])

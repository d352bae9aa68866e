"""A decoder split over ranks computes the bits of one rank, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")

import torch
from torch import Tensor

from refimpl.cluster.ranks import RankError
from refimpl.config import ConfigError, kv_heads_of
from refimpl.model.catalog import ARITHMETICS, open_model
from refimpl.model.config import TINY_GQA, TINY_MLA, ModelConfig
from refimpl.model.paged import Chunk, KvView
from refimpl.model.reference import COLUMNS, Reference
from refimpl.model.self_check import NotBatchInvariantError, check_split
from refimpl.model.shard import Shard
from refimpl.model.transformer import Transformer
from refimpl.model.weights import Weights, random_weights
from refimpl.run.meeting import Meeting
from scenarios.model import small_models as small

LIMIT_S = 30
PAGE_SIZE = 16
TABLES = [[7, 2, 9, 0, 4, 1, 8, 3, 6, 5], [17, 12, 19, 10, 14, 11, 18, 13, 16, 15]]
# A prompt in chunks that end inside pages, beside another sequence; then steps of one token.
BATCHES = [
    [(0, 0, 70)],
    [(0, 70, 99), (1, 0, 33)],
    *([(0, n, n + 1), (1, n - 66, n - 65)] for n in range(99, 108)),
]

_QWEN = small.CONFIGS["tiny-qwen"]
_EIGHT = replace(TINY_GQA, name="eight-heads", heads=8, kv_heads=8, head_dim=6)
SPLITS = [
    (TINY_GQA, 2),
    (TINY_GQA, 4),  # two ranks repeat each KV head
    (small.CONFIGS["tiny-gqa-bfloat16"], 4),
    (replace(TINY_GQA, name="tiny-gqa-float16", dtype="float16"), 2),
    (_QWEN, 2),  # biases, norms of heads, tied embeddings
    (_QWEN, 4),
    (_EIGHT, 2),
    (_EIGHT, 8),  # six columns of each projection
    (replace(_EIGHT, name="eight-heads-two-kv", kv_heads=2), 8),
    (replace(TINY_GQA, name="narrow", heads=3, kv_heads=3, hidden=9, head_dim=4, intermediate=7), 3),
    (TINY_MLA, 2),
    (TINY_MLA, 4),
]  # fmt: skip


@dataclass(frozen=True)
class Computed:
    """Logits of all batches, and the pool they left."""

    logits: Tensor  # [row, vocab]
    kv: KvView


def run(transformer: Transformer, kv: KvView) -> Computed:
    rows = []
    for batch in BATCHES:
        chunks = [
            Chunk(small.tokens_of(each)[start:end], start, TABLES[each])
            for each, start, end in batch
        ]
        rows.append(transformer.forward(chunks, kv))
    return Computed(torch.cat(rows), kv)


def pool_of(config: ModelConfig, shard: Shard) -> KvView:
    """A pool with the heads of one rank, full of what nobody may read."""
    own = config if config.mla else replace(config, kv_heads=shard.cached_heads(config))
    return small.empty(own, slots=20, page_size=PAGE_SIZE)


def gather_at(meeting: Meeting, rank: int, size: int) -> Callable[[Tensor, int], Tensor]:
    def gather(part: Tensor, width: int) -> Tensor:
        parts = meeting.exchange(rank, part)
        assert [each.shape[-1] for each in parts] == Shard(rank, size).widths(width)
        return torch.cat(parts, dim=-1)

    return gather


def run_ranks(config: ModelConfig, weights: Weights, size: int) -> list[Computed]:
    meeting = Meeting(size, LIMIT_S)

    def rank_of(rank: int) -> Computed:
        shard = Shard(rank, size)
        gather = gather_at(meeting, rank, size)
        part = Transformer(config, weights, Reference(), shard, gather)
        return run(part, pool_of(config, shard))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


def used_rows() -> Tensor:
    ends = {each: end for batch in BATCHES for each, _, end in batch}
    return torch.cat([small.rows_of(TABLES[each], PAGE_SIZE, end) for each, end in ends.items()])


@pytest.mark.parametrize(
    ("config", "size"), SPLITS, ids=lambda each: getattr(each, "name", str(each))
)
def test_ranks_compute_the_bits_of_one(config: ModelConfig, size: int) -> None:
    weights = random_weights(config, seed=5)
    one = run(Transformer(config, weights, Reference()), pool_of(config, Shard()))
    rows = used_rows()
    for rank, found in enumerate(run_ranks(config, weights, size)):
        assert torch.equal(found.logits, one.logits)
        first = 0 if config.mla else kv_heads_of(config.kv_heads, rank, size)[0]
        heads = slice(first, first + found.kv.keys.shape[2])
        assert torch.equal(found.kv.keys[:, rows], one.kv.keys[:, rows, heads])
        if found.kv.values is not None:
            assert one.kv.values is not None
            assert torch.equal(found.kv.values[:, rows], one.kv.values[:, rows, heads])


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 2), (8, 8), (2, 4), (2, 8), (1, 4)])
def test_the_heads_of_all_ranks_are_those_of_the_model(kv_heads: int, size: int) -> None:
    config = replace(_EIGHT, kv_heads=kv_heads)
    held = []
    for rank in range(size):
        held.append(range(*kv_heads_of(kv_heads, rank, size)))
        assert len(held[-1]) == Shard(rank, size).cached_heads(config)
    repeats = max(size // kv_heads, 1)
    assert [head for heads in held for head in heads] == [
        head for head in range(kv_heads) for _ in range(repeats)
    ]


def test_ranks_of_one_process_share_the_weights() -> None:
    weights = random_weights(TINY_GQA, seed=5)
    for name, weight in weights.items():
        part = Shard(1, 2).part(name.split(".", 2)[-1], weight, TINY_GQA)
        assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_columns_of_a_product_have_the_bits_of_the_whole(dtype: str) -> None:
    config = replace(TINY_GQA, dtype=dtype)
    do, generator = Reference(), torch.Generator().manual_seed(2)
    weights = random_weights(config, seed=5)
    shapes = {weight.shape: weight for weight in weights.values() if weight.dim() == 2}
    for weight in shapes.values():
        rows = torch.randn(37, weight.shape[1], generator=generator).to(weight.dtype)
        whole = do.linear(rows, weight)
        for size in (1, 2, 4, 8):
            parts = [do.linear(rows, each) for each in torch.tensor_split(weight, size)]
            assert torch.equal(torch.cat(parts, dim=-1), whole)
        for width in range(1, COLUMNS + 2):
            part = do.linear(rows, weight[7 : 7 + width])
            assert torch.equal(part, whole[:, 7 : 7 + width]), width


# ---- the check at a start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "size"), SPLITS, ids=lambda each: getattr(each, "name", str(each))
)
def test_the_reference_path_can_be_split_here(config: ModelConfig, size: int) -> None:
    weights = random_weights(config, seed=0)
    for rank in range(size):
        check_split(Reference(), config, weights, Shard(rank, size))


class CountsColumns(Reference):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight, bias) * (1 + len(weight) / 2**20)


class CountsGates(Reference):
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().swiglu(gate, up) * (1 + gate.shape[-1] / 2**20)


class CountsHeads(Reference):
    def attention(
        self, query: Tensor, keys: Tensor, values: Tensor, *, start: int, scale: float
    ) -> Tensor:
        found = super().attention(query, keys, values, start=start, scale=scale)
        return found * (1 + query.shape[1] / 2**20)


SABOTAGES = [
    (CountsColumns, "the product with embed_tokens.weight on rank 1"),
    (CountsGates, "SwiGLU on rank 1"),
    (CountsHeads, "attention on rank 1"),
]


@pytest.mark.parametrize(("sabotage", "said"), SABOTAGES)
def test_an_arithmetic_that_cannot_be_split_is_named(sabotage: type[Reference], said: str) -> None:
    weights = random_weights(TINY_GQA, seed=0)
    with pytest.raises(NotBatchInvariantError, match=said) as raised:
        check_split(sabotage(), TINY_GQA, weights, Shard(1, 2))
    assert isinstance(raised.value, ConfigError), "a command says it in one line"
    message = str(raised.value)
    assert "over 2 ranks" in message
    assert "would depend on --tp-size" in message
    assert "\n" not in message


@pytest.mark.parametrize("sabotage", [each for each, _ in SABOTAGES])
def test_a_rank_is_checked_when_it_is_made(
    sabotage: type[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arithmetic that promises equal bits; the fast path promises none."""
    monkeypatch.setitem(ARITHMETICS, "reference", sabotage)
    with pytest.raises(NotBatchInvariantError, match="over 2 ranks"):
        open_model("tiny-gqa").of_rank(Shard(0, 2), lambda part: part)
    open_model("tiny-gqa", arithmetic="fast").of_rank(Shard(0, 2), lambda part: part)


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        (TINY_GQA, 3, "--tp-size 3 does not divide the 4 heads"),
        (TINY_GQA, 0, "--tp-size 0 must be at least 1"),
        (
            replace(TINY_GQA, heads=12, kv_heads=4),
            6,
            "--tp-size 6 can't split or repeat the 4 KV heads",
        ),
    ],
)
def test_a_model_that_cannot_be_split_so_says_why(
    config: ModelConfig, size: int, said: str
) -> None:
    weights = random_weights(config, seed=0)
    with pytest.raises(ConfigError, match=said):
        Transformer(config, weights, Reference(), Shard(0, size), lambda part: part)


# ---- ranks that do not come ----------------------------------------------------------------------


def test_a_rank_that_never_computes_is_named_to_all_that_wait() -> None:
    weights, size, limit_s = random_weights(TINY_GQA, seed=5), 4, 0.5
    meeting = Meeting(size, limit_s)

    def rank_of(rank: int) -> str:
        if rank == 2:
            return "never came"
        shard = Shard(rank, size)
        gather = gather_at(meeting, rank, size)
        part = Transformer(TINY_GQA, weights, Reference(), shard, gather)
        with pytest.raises(RankError) as raised:
            run(part, pool_of(TINY_GQA, shard))
        return str(raised.value)

    begun = monotonic()
    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(rank_of, range(size)))
    assert monotonic() - begun < 10
    assert said.pop(2) == "never came"
    assert set(said) == {"rank 2 did not answer within 0.5 s: restart the instance"}

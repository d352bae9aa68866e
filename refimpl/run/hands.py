"""The hands with bytes: a real model over real pools carries out what an engine orders.

They keep a page table and the tokens of each request, and do what they are told when they are told;
when that is, and what to do next, is for others to decide.
Must not know: clocks, lanes, the tree, why anything is ordered. Called by: virtual, live.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from refimpl.config import ConfigError
from refimpl.keys import PageKey, TokenPrompt
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Loading, LoadingOnGpu, Mover
from refimpl.messages import Load, PageTable, RunBatch, Submit
from refimpl.model.choice import GREEDY, Logprob, Sampling
from refimpl.model.config import ModelConfig
from refimpl.model.paged import Chunk, KvView
from refimpl.model.sampling import choose, logprob
from refimpl.model.transformer import Transformer


@dataclass(slots=True)
class Served:
    """One request as the hands see it: tokens with what was produced, and its page table."""

    tokens: list[int]
    prompt_length: int
    script: array[int] | None
    sampling: Sampling
    slots: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Produced:
    """What a batch produced: tokens by request, one a step, and who ended in the last step.

    ``logprobs``, one a token, are there for those requests that want them.
    """

    steps: int
    tokens: dict[int, list[int]]
    ended: tuple[int, ...]
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)


def geometry_of(model: ModelConfig, page_size: int) -> Geometry:
    """What pages of ``page_size`` tokens of the model look like on one rank."""
    return Geometry(
        layers=model.layers,
        kvs=1 if model.mla else 2,
        heads=model.cached_heads,
        dim=model.key_width,
        page_size=page_size,
        dtype=model.dtype,
    )


def kv_view(pool: Pool) -> KvView:
    """The device pool as the model wants it: rows of tokens, layer by layer."""
    assert pool.layout == "layer_first", "the model reads and writes L1 layer by layer"
    kv = pool.tensor.flatten(2, 3)  # [kv, layer, row, head, dim]
    return KvView(kv[0], kv[1] if len(kv) > 1 else None, pool.geometry.page_size)


class TorchHands:
    """One rank: a model, an L1 pool it computes in, an L2 pool, and the copies between them."""

    def __init__(
        self,
        model: Transformer,
        mover: Mover,
        stop_tokens: Iterable[int] = (),
    ) -> None:
        self.model = model
        self.mover = mover
        self._kv = kv_view(mover.device)
        self._stops = frozenset(stop_tokens)
        self._served: dict[int, Served] = {}
        self._running: dict[int, Served] = {}  # who decodes, in the order they joined

    # ---- requests -------------------------------------------------------------------------------

    def expect(self, submit: Submit, sampling: Sampling = GREEDY) -> None:
        """A request was sent to the engine: its tokens will be asked for by position."""
        prompt = submit.prompt
        if not isinstance(prompt, TokenPrompt):
            raise ConfigError("a model needs tokens: traces of block ids must be expanded first")
        tokens = list(prompt.tokens)
        self._served[submit.rid] = Served(tokens, len(tokens), prompt.script, sampling)

    def withdraw(self, rid: int) -> None:
        """It gave up its slots: its page table is void, its tokens stay."""
        self._running.pop(rid, None)
        self._served[rid].slots = []

    def finished(self, rid: int) -> list[int]:
        """It is over; returns what it produced."""
        self._running.pop(rid, None)
        served = self._served.pop(rid, None)
        return [] if served is None else served.tokens[served.prompt_length :]

    # ---- batches --------------------------------------------------------------------------------

    def prefill(self, batch: RunBatch, loads_failed: Iterable[int] = ()) -> Produced:
        """Run the items of a batch, loading layer by layer beside them; failed loads are left out."""
        self._apply(batch.tables)
        failed = frozenset(loads_failed)
        loads = [load for load in batch.loads if load.rid not in failed]
        chunks = [
            Chunk(
                self._served[item.rid].tokens[item.start : item.start + item.tokens],
                item.start,
                self._served[item.rid].slots,
            )
            for item in batch.items
        ]
        logits = self.model.forward(chunks, self._kv, self._loader(loads) if loads else None)
        produced = Produced(1, {}, ())
        lasts = [
            (item.rid, row)
            for item, row in zip(batch.items, logits, strict=True)
            if item.is_last and item.rid not in failed
        ]
        ended = [rid for rid, row in lasts if self._choose(rid, row, produced)]
        self.mover.finish()
        return replace(produced, ended=tuple(ended))

    def _loader(self, loads: list[Load]) -> Callable[[int], None]:
        """What to call before each layer: the loads of a batch as one, awaited layer by layer.

        They begin at the first layer, when the batch's own small inputs are on the device: behind a
        burst of loads in one copy engine, those would hold up everything (field report Y05).
        """
        l2_slots = [slot for load in loads for slot in load.l2_slots]
        l1_slots = [slot for load in loads for slot in load.l1_slots]
        loading: list[Loading | LoadingOnGpu] = []

        def before_layer(layer: int) -> None:
            if not loading:
                loading.append(self.mover.load(l2_slots, l1_slots))
            loading[0].wait(layer)

        return before_layer

    def decode(
        self, batch: RunBatch, after_step: Callable[[Produced], bool] | None = None
    ) -> Produced:
        """Up to ``steps_max`` steps of all who run; fewer when one of them ends or it is cut.

        ``after_step`` hears what there is so far and says whether to go on. Nothing is kept of it until
        ``commit``: the batch may be cut to fewer steps.
        """
        self._apply(batch.tables)
        produced = Produced(0, {rid: [] for rid in self._running}, ())
        while produced.steps < batch.steps_max and not produced.ended:
            chunks = [self._newest(rid, produced.tokens[rid]) for rid in self._running]
            logits = self.model.forward(chunks, self._kv)
            rows = zip(self._running, logits, strict=True)
            ended = tuple([rid for rid, row in rows if self._choose(rid, row, produced)])
            produced = replace(produced, steps=produced.steps + 1, ended=ended)
            if after_step is not None and not after_step(produced):
                break
        self.mover.finish()
        return produced

    def commit(self, produced: Produced, steps: int) -> Produced:
        """``steps`` steps of ``produced`` hold; those who got a token decode from now on."""
        kept = Produced(
            steps,
            {rid: tokens[:steps] for rid, tokens in produced.tokens.items()},
            produced.ended if steps == produced.steps else (),
        )
        for rid, tokens in kept.tokens.items():
            served = self._served.get(rid)
            if served is not None:
                served.tokens.extend(tokens)
                self._running.setdefault(rid, served)
        return kept

    def _newest(self, rid: int, fresh: list[int]) -> Chunk:
        """The chunk of one token that comes next: the last one that has no KV yet."""
        served = self._running[rid]
        at = len(served.tokens) + len(fresh) - 1
        token = fresh[-1] if fresh else served.tokens[-1]
        return Chunk([token], at, served.slots)

    def _choose(self, rid: int, logits: torch.Tensor, produced: Produced) -> bool:
        """Add the next token of ``rid`` to ``produced``; True when the request ends with it."""
        served, tokens = self._served[rid], produced.tokens.setdefault(rid, [])
        position = len(served.tokens) + len(tokens)
        if served.script is not None:
            tokens.append(served.script[position - served.prompt_length])
            return False
        sampling = served.sampling
        token = choose(logits, sampling, position)
        tokens.append(token)
        if sampling.logprobs:
            chosen = logprob(logits, sampling, token)
            produced.logprobs.setdefault(rid, []).append(chosen)
        is_eos = token in self._stops and not sampling.ignores_eos
        return is_eos or token in sampling.stop_ids

    def _apply(self, tables: Iterable[PageTable]) -> None:
        for table in tables:
            served = self._served.get(table.rid)
            if served is not None:
                served.slots[table.first : table.first + len(table.slots)] = table.slots

    # ---- copies ---------------------------------------------------------------------------------

    def back_up(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> None:
        """Copy pages L1 -> L2."""
        self.mover.back_up(l1_slots, l2_slots)

    def page_bytes(self, l2_slot: int) -> torch.Tensor:
        """A page of L2 as [kv, layer, token, head, dim], a copy of its own."""
        return self.mover.host.by_page()[l2_slot].clone()

    def put_page(self, l2_slot: int, page: torch.Tensor) -> None:
        """Write a page of L2."""
        self.mover.host.by_page()[l2_slot] = page


class PageStore:
    """The bytes of an L3 in memory, shared by instances."""

    def __init__(self) -> None:
        self._pages: dict[PageKey, torch.Tensor] = {}

    def put(self, key: PageKey, page: torch.Tensor) -> None:
        """Keep a page; what is there already is kept."""
        self._pages.setdefault(key, page)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def leading_run(self, keys: Iterable[PageKey]) -> int:
        """How many of ``keys`` are there up to the first that is not."""
        count = 0
        for key in keys:
            if key not in self._pages:
                break
            count += 1
        return count

    def get(self, key: PageKey) -> torch.Tensor:
        """The bytes of a page; KeyError when it was never put."""
        return self._pages[key]

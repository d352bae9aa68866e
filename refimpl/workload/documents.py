"""Scenario families of single requests over shared text: system prompts, long documents, retrieval.

Must not know: caches, how scenario text is parsed. Called by: scenario.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from refimpl.config import require
from refimpl.keys import TokenPrompt
from refimpl.units import Random, Zipf
from refimpl.workload.draws import Draws, Purpose
from refimpl.workload.family import ORDERS, Family, choice, count, flag, rate
from refimpl.workload.request import RequestSpec

_REDRAWS_MAX = 64  # draws for one chunk before the most popular free one is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix(Family):
    """Groups of prompts: one system prompt a group, a question of its own for each prompt."""

    name: ClassVar[str] = "shared_prefix"
    grows_with: ClassVar[tuple[str, ...]] = (
        "groups", "prompts_per_group", "system_length", "question_length",
    )  # fmt: skip

    groups: int = count(64, "system prompts")
    prompts_per_group: int = count(16, "prompts that share one")
    system_length: int = count(2048, "tokens of a system prompt")
    question_length: int = count(128, "tokens of a question")
    order: str = choice(
        ORDERS, "random, tile (each group once, then again) or grouped (a group at a time)"
    )
    rate: int = rate(16, "requests a second, Poisson; 0: all at once")

    def request_count(self) -> int:
        """One a prompt."""
        return self.groups * self.prompts_per_group

    def token_count(self) -> int:
        """All prompts have the same length."""
        length = self.system_length + self.question_length + self.output_length
        return self.request_count() * length

    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """Requests in the order they are sent."""
        del page_size
        shared = [
            draws.tokens(Purpose.SYSTEM, self.system_length, group) for group in range(self.groups)
        ]
        visits = _visits(self.groups, self.prompts_per_group, self.order, draws)
        return _asked(self, shared, visits, self.question_length, self.rate, draws)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongDocument(Family):
    """Questions about long documents, each asked about several times; tile is a cyclic scan."""

    name: ClassVar[str] = "long_document"
    grows_with: ClassVar[tuple[str, ...]] = (
        "documents", "questions", "document_length", "question_length",
    )  # fmt: skip

    documents: int = count(20, "documents")
    document_length: int = count(20_000, "tokens of a document")
    questions: int = count(5, "questions about each")
    question_length: int = count(100, "tokens of a question")
    order: str = choice(
        ORDERS, "random, tile (each document once, then again) or grouped (a document at a time)"
    )
    rate: int = rate(2, "requests a second, Poisson; 0: all at once")

    def request_count(self) -> int:
        """One a question."""
        return self.documents * self.questions

    def token_count(self) -> int:
        """All prompts have the same length."""
        length = self.document_length + self.question_length + self.output_length
        return self.request_count() * length

    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """Requests in the order they are sent."""
        del page_size
        shared = [
            draws.tokens(Purpose.DOCUMENT, self.document_length, document)
            for document in range(self.documents)
        ]
        visits = _visits(self.documents, self.questions, self.order, draws)
        return _asked(self, shared, visits, self.question_length, self.rate, draws)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rag(Family):
    """Retrieval: system prompt, then chunks of which some are popular (Zipf), then a question."""

    name: ClassVar[str] = "rag"
    grows_with: ClassVar[tuple[str, ...]] = ("requests", "chunks", "chunk_length", "system_length")

    requests: int = count(400, "requests")
    documents: int = count(1000, "chunks in the corpus", most=1_000_000)
    chunks: int = count(5, "chunks in a prompt", most=1000)
    chunk_length: int = count(512, "tokens of a chunk")
    system_length: int = count(256, "tokens of the system prompt; 0: none", least=0)
    question_length: int = count(64, "tokens of a question")
    sorted: bool = flag(
        default=True, meaning="chunks stand by popularity, so prompts share more; else as drawn"
    )
    rate: int = rate(8, "requests a second, Poisson; 0: all at once")

    def request_count(self) -> int:
        """As given."""
        return self.requests

    def token_count(self) -> int:
        """All prompts have the same length."""
        retrieved = self.chunks * self.chunk_length
        length = self.system_length + retrieved + self.question_length + self.output_length
        return self.requests * length

    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """Requests in the order they are sent."""
        del page_size
        require(
            self.chunks <= self.documents,
            f"rag: chunks={self.chunks} is above documents={self.documents};"
            " lower it or raise documents",
        )
        popularity = Zipf(self.documents)
        corpus: dict[int, array[int]] = {}  # filled as chunks are picked: most never are
        shared = []
        for index in range(self.requests):
            context = draws.tokens(Purpose.SYSTEM, self.system_length)
            picked = _distinct(popularity, self.chunks, draws.stream(Purpose.PICK, index))
            for rank in sorted(picked) if self.sorted else picked:
                if rank not in corpus:
                    corpus[rank] = draws.tokens(Purpose.DOCUMENT, self.chunk_length, rank)
                context += corpus[rank]
            shared.append(context)
        visits = [(index, 0) for index in range(self.requests)]
        return _asked(self, shared, visits, self.question_length, self.rate, draws)


def _distinct(popularity: Zipf, wanted: int, stream: Random) -> list[int]:
    """``wanted`` different ranks in the order drawn.

    A rank that keeps repeating gives way to the most popular free one, so the work is bounded even
    when a prompt takes the whole corpus.
    """
    picked: dict[int, None] = {}
    lowest_free = 0
    for _ in range(wanted):
        for _ in range(_REDRAWS_MAX):
            rank = popularity.draw(stream)
            if rank not in picked:
                break
        else:
            while lowest_free in picked:
                lowest_free += 1
            rank = lowest_free
        picked[rank] = None
    return list(picked)


def _visits(groups: int, times: int, order: str, draws: Draws) -> list[tuple[int, int]]:
    """(group, question) in the order they are sent."""
    if order == "grouped":
        return [(group, question) for group in range(groups) for question in range(times)]
    visits = [(group, question) for question in range(times) for group in range(groups)]
    if order == "random":
        draws.stream(Purpose.ORDER).shuffle(visits)
    return visits


def _asked(
    family: Family,
    shared: Sequence[array[int]],
    visits: Sequence[tuple[int, int]],
    question_length: int,
    rate_per_million: int,
    draws: Draws,
) -> list[RequestSpec]:
    """One request a visit: shared text, then a question; ``turn`` counts visits of that text."""
    arrivals = draws.arrivals(len(visits), rate_per_million)
    seen = [0] * len(shared)
    requests = []
    for rid, (group, question) in enumerate(visits, 1):
        asked = draws.tokens(Purpose.QUESTION, question_length, group, question)
        script = draws.tokens(Purpose.OUTPUT, family.output_length, group, question)
        requests.append(
            RequestSpec(
                rid=rid,
                prompt=TokenPrompt(shared[group] + asked, script),
                output_tokens=len(script),
                arrival_ns=arrivals[rid - 1],
                session=group,
                turn=seen[group],
            )
        )
        seen[group] += 1
    return requests

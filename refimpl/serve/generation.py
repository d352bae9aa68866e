"""One answer as it is produced: tokens become text, stop strings end it, a client that leaves aborts it.

Must not know: HTTP, which API asked. Called by: native, openai.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from refimpl.model.choice import Logprob
from refimpl.model.tokenizer import Detokenizer, Tokenizer
from refimpl.run.record import Row
from refimpl.serve.backlog import Backlog
from refimpl.serve.bridge import Asked, Ended, Tokens
from refimpl.serve.dispatch import Dispatch
from refimpl.serve.errors import RequestError

# How refusals begin that are not about the request.
OVERLOADED: Final = ("the queue is full", "the engine is draining", "the engine has stopped")


@dataclass(frozen=True, slots=True)
class Ending:
    """Which texts end an answer, and whether they stay in it."""

    stops: tuple[str, ...] = ()
    keeps_stop: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended: stop, length or abort; ``matched`` is the token or text that stopped it."""

    reason: str
    matched: int | str | None = None


@dataclass(slots=True)
class Piece:
    """More of an answer; the last piece has a ``finish``."""

    text: str
    tokens: list[int]
    row: Row
    finish: Finish | None = None
    logprobs: list[Logprob] = field(default_factory=list)  # of the tokens, where they are wanted


@dataclass(slots=True)
class Whole:
    """An answer so far, or a finished one: then it has a ``finish``."""

    row: Row
    finish: Finish | None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """Why it ended; None: it has not."""
        return self.finish.reason if self.finish else None

    def add(self, piece: Piece) -> None:
        """Take what came next."""
        self.row, self.finish = piece.row, piece.finish
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs


def refusal_of(detail: str) -> RequestError:
    """What the engine said against a request, with the status it has in HTTP."""
    return RequestError(detail, 503 if detail.startswith(OVERLOADED) else 400)


class Generation:
    """Asks one of the ranks for one answer."""

    def __init__(self, ranks: Dispatch, tokenizer: Tokenizer, asked: Asked, ending: Ending) -> None:
        self._ranks, self._tokenizer = ranks, tokenizer
        self.asked, self._ending = asked, ending
        self.rid = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece. Leaving early aborts it. Raises RequestError when it is refused."""
        backlog, is_over = Backlog(), False
        self.rid = self._ranks.submit(self.asked, backlog.put)
        text = _StopText(Detokenizer(self._tokenizer), self._ending)
        try:
            while not is_over:
                said = await backlog.get()
                is_over = isinstance(said, Ended)
                piece = self._piece(said, text)
                yield piece
                if piece.finish is not None:
                    break
        finally:
            if not is_over:
                self._ranks.abort(self.rid)

    def _piece(self, said: Tokens | Ended, text: _StopText) -> Piece:
        if isinstance(said, Ended):
            return self._last(said, text)
        taken: list[int] = []
        parts: list[str] = []
        for token in said.tokens:
            taken.append(token)
            parts.append(text.push(token))
            if text.matched is not None:
                break
        finish = None if text.matched is None else Finish("stop", text.matched)
        return Piece("".join(parts), taken, said.row, finish, said.logprobs[: len(taken)])

    def _last(self, said: Ended, text: _StopText) -> Piece:
        kind, _, detail = said.reason.partition(": ")
        if kind == "error":
            raise refusal_of(detail)
        matched = text.last_token if kind == "stop" else None
        return Piece(text.flush(), [], said.row, Finish(kind, matched))

    async def whole(self) -> Whole:
        """The answer in one."""
        async with aclosing(self.pieces()) as pieces:
            answer: Whole | None = None
            async for piece in pieces:
                if answer is None:
                    answer = Whole(piece.row, None)
                answer.add(piece)
        assert answer is not None and answer.finish is not None, "an answer without an end"
        return answer


async def all_whole(asked: Sequence[Generation]) -> list[Whole]:
    """The answers in their order. One that is refused ends the others."""
    tasks = [asyncio.ensure_future(each.whole()) for each in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _StopText:
    """Text of a stream that ends before the first stop string; what may become one is held back."""

    def __init__(self, detokenizer: Detokenizer, ending: Ending) -> None:
        self._detokenizer, self._ending = detokenizer, ending
        self._held = ""
        self.matched: str | None = None
        self.last_token: int | None = None

    def push(self, token: int) -> str:
        """Text that is certain after ``token``."""
        self.last_token = token
        self._held += self._detokenizer.push(token)
        first = [(at, stop) for stop in self._ending.stops if (at := self._held.find(stop)) >= 0]
        if first:
            at, self.matched = min(first)
            end = at + len(self.matched) if self._ending.keeps_stop else at
            return self._held[:end]
        return self._release(longest_overlap(self._held, self._ending.stops))

    def flush(self) -> str:
        """What was held back, at an end that no stop string made."""
        self._held += self._detokenizer.flush()
        return self._release(0)

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def longest_overlap(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``stops``."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if stop.startswith(text[-size:]):
                longest = size
                break
    return longest

"""What was said of an answer and has not been read: bounded, however slowly its client reads.

Must not know: HTTP, text. Called by: generation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from refimpl.serve.bridge import Ended, Tokens

WORDS_MAX: Final = 64  # that wait one by one; all tokens after them wait as one more


class Backlog:
    """Said on any thread, read on the event loop that it was made on, in order.

    A reader that keeps up gets every step by itself. For one that does not, tokens cost the place of their
    numbers, of which a request may have so many at most.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Tokens | Ended] = deque()
        self._rest: Tokens | None = None  # the last that waits, when it takes all that comes
        self._is_there = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, said: Tokens | Ended) -> None:
        """Called by the engine's thread, which goes on at once."""
        self._loop.call_soon_threadsafe(self._take, said)

    def _take(self, said: Tokens | Ended) -> None:
        if self._rest is not None and isinstance(said, Tokens):
            self._join(self._rest, said)
        elif len(self._waiting) >= WORDS_MAX and isinstance(said, Tokens):
            self._rest = Tokens([], said.row)
            self._join(self._rest, said)
            self._waiting.append(self._rest)
        else:
            self._waiting.append(said)
        self._is_there.set()

    @staticmethod
    def _join(rest: Tokens, said: Tokens) -> None:
        rest.tokens.extend(said.tokens)
        rest.logprobs.extend(said.logprobs)

    async def get(self) -> Tokens | Ended:
        """What was said first of what was not read; waits for it."""
        while not self._waiting:
            self._is_there.clear()
            await self._is_there.wait()
        said = self._waiting.popleft()
        if said is self._rest:
            self._rest = None
        return said

"""Server-sent events: pieces of several answers in one stream, errors as events.

Called by: the routes that stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Piece

DONE: Final = "data: [DONE]\n\n"
PIECES_MAX: Final = 16  # that wait for a client, of all its answers together


async def stream(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """Each chunk as an event, an error as the last one, and then that it is over."""
    try:
        async for chunk in chunks:
            yield f"data: {chunk}\n\n"
    except RequestError as error:
        yield f"data: {json.dumps(error.body())}\n\n"
    yield DONE


async def merged(
    sources: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all sources as they come, each with its number. Leaving early ends all of them.

    No source is asked for more while nobody takes what is there.
    """
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(PIECES_MAX)

    async def forward(number: int, source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    await queue.put((number, piece))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(forward(at, source)) for at, source in enumerate(sources)]
    try:
        open_sources = len(tasks)
        while open_sources:
            number, said = await queue.get()
            if isinstance(said, Exception):
                raise said
            if said is None:
                open_sources -= 1
            else:
                yield number, said
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

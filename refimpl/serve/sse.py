"""Server-sent events: pieces of several answers in one stream, errors as events.

Called by: the routes that stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Piece

DONE = "data: [DONE]\n\n"


async def stream(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """Each chunk as an event, an error as the last one, and then that it is over."""
    try:
        async for chunk in chunks:
            yield f"data: {chunk}\n\n"
    except RequestError as error:
        yield f"data: {json.dumps(error.body())}\n\n"
    yield DONE


async def merged(
    sources: Sequence[AsyncIterator[Piece]],
) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of all sources as they come, each with its number. Leaving early ends all of them."""
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()

    async def forward(number: int, source: AsyncIterator[Piece]) -> None:
        try:
            async for piece in source:
                queue.put_nowait((number, piece))
            queue.put_nowait((number, None))
        except BaseException as error:
            queue.put_nowait((number, error))
            raise

    tasks = [asyncio.create_task(forward(at, source)) for at, source in enumerate(sources)]
    try:
        open_sources = len(tasks)
        while open_sources:
            number, said = await queue.get()
            if isinstance(said, BaseException):
                raise said
            if said is None:
                open_sources -= 1
            else:
                yield number, said
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

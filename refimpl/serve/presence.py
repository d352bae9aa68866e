"""Who is still there: answers under way by name, and clients that leave before theirs.

Must not know: the shapes of any API. Called by: routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final, TypeVar
from uuid import uuid4

from fastapi import Request

from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Generation

T = TypeVar("T")

GONE: Final = 499  # nobody reads it: the client has closed the connection


class Running:
    """Answers under way, by the names that clients gave them and their requests."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Generation]] = {}

    @contextmanager
    def holding(
        self, named: Mapping[str, Generation], given: str | list[str] | None
    ) -> Iterator[None]:
        """They can be found while this lasts, by the name that was ``given`` to their request as well.

        Raises RequestError for a name that is taken.
        """
        found = {name: [answer] for name, answer in named.items()}
        if isinstance(given, str) and given:
            found.setdefault(given, list(named.values()))
        for name in found:
            if name in self._by_name:
                raise RequestError(f"rid {name!r} is under way already: choose another", 400, "rid")
        self._by_name.update(found)
        try:
            yield
        finally:
            for name in found:
                del self._by_name[name]

    def found(self, name: str) -> list[Generation]:
        """The one of that name, or all answers of the request of that name, as far as under way.

        A name that merely begins like it is another client's.
        """
        return self._by_name.get(name, [])


def names_of(given: str | list[str] | None, count: int) -> list[str]:
    """Names of ``count`` answers of a request. Raises RequestError for a list of another length."""
    if isinstance(given, list):
        if len(given) != count or len(set(given)) != count:
            raise RequestError(f"rid is a list of {len(given)}: give {count} different ones")
        return given
    name = given or uuid4().hex
    return [name] if count == 1 else [f"{name}_{at}" for at in range(count)]


async def unless_gone(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Wait for ``answer`` as long as the client does. Its body has been read.

    Raises RequestError when the client leaves; the answer is cancelled then.
    """
    task = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError("the client has left", GONE)
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def begun(request: Request, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """A stream whose first chunk is there. Raises RequestError when it is refused before."""

    async def first_of() -> str:
        return await anext(chunks)

    first = await unless_gone(request, first_of())

    async def from_first() -> AsyncGenerator[str, None]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return from_first()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

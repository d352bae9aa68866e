"""Pages of one rank as the parts that ranks of a larger TP have of them (``tp_lcm_size``, spec 5.5).

In the layout ``page_head`` a range of heads is contiguous in K and in V, so a part is a view of a page.
Each part is stored under the names of the rank that it would be on; a page is there when all its parts are.
Must not know: pools, ranks beyond their heads, what is stored. Called by: storage_setup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refimpl.config import kv_heads_of, require
from refimpl.storage.backend import Backend, HostPage
from refimpl.storage.names import Namespace


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a page's heads, ``first`` to before ``last``, and where it is stored."""

    backend: Backend
    namespace: Namespace
    first: int
    last: int


def heads_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """As ``kv_heads_of``; raises ConfigError where neither number divides the other."""
    require(
        total % size == 0 or size % total == 0,
        f"tp_lcm_size {size} can't split or repeat the {total} KV heads of the model",
    )
    return kv_heads_of(total, rank, size)


class SplitHeads:
    """A backend whose names are page keys; ``heads`` is how many a page of this rank has."""

    def __init__(self, parts: Sequence[Part], heads: int) -> None:
        self._parts, self._heads = parts, heads

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which pages are there with all their parts, [name]."""
        return self._all(lambda part: part.backend.exists(_named(part, names)))

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """Fill pages part by part, [name]: True where all of it came."""
        return self._all(lambda part: part.backend.get(_named(part, names), self._cut(part, pages)))

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """Store all parts of pages, [name]."""
        return self._all(lambda part: part.backend.set(_named(part, names), self._cut(part, pages)))

    def clear(self) -> int:
        """Delete this rank's parts; how many."""
        return sum(part.backend.clear() for part in self._parts)

    def close(self) -> None:
        """Let all backends go, also when one of them fails."""
        errors = []
        for part in self._parts:
            try:
                part.backend.close()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _all(self, ask: Callable[[Part], list[bool]]) -> list[bool]:
        answers = [ask(part) for part in self._parts]
        return [all(each) for each in zip(*answers, strict=True)]

    def _cut(self, part: Part, pages: Sequence[HostPage]) -> list[HostPage]:
        return [
            HostPage(tuple(self._range(piece, part) for piece in page.pieces)) for page in pages
        ]

    def _range(self, piece: memoryview, part: Part) -> memoryview:
        width = piece.nbytes // self._heads
        return piece[part.first * width : part.last * width]


def _named(part: Part, keys: Sequence[str]) -> list[str]:
    namespace = part.namespace
    return [f"{namespace.prefix}{key}{namespace.suffix}" for key in keys]

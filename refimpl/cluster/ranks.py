"""How the ranks of an instance agree on what is done: one brain decides, all carry out, the least counts.

The brain lives on rank 0. A step is one broadcast of orders, and, while ops are in flight, one
``all_reduce(MIN)`` over a vector with two entries an op. Which collectives a rank takes part in is said
by the orders alone, never by what that rank knows by itself, so all ranks issue the same sequence.
Must not know: what carries the messages, what carries out the orders. Called by: rank_group, virtual_ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from refimpl.messages import (
    AnyEvent,
    BackedUp,
    BackUp,
    Command,
    Fetch,
    Fetched,
    Landed,
    Probe,
    Probed,
    Store,
    Stored,
)

Vector: TypeAlias = list[int]  # of each op: whether it has ended (0 or 1), and its pages so far

End: TypeAlias = type[BackedUp] | type[Probed] | type[Fetched] | type[Stored]
_ENDS: Final[dict[type[Command], End]] = {
    BackUp: BackedUp,
    Probe: Probed,
    Fetch: Fetched,
    Store: Stored,
}
_ENTRIES: Final = 2  # an op


class RankError(Exception):
    """A rank died, or was silent for too long: the instance can't go on."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 tells all ranks in one step.

    ``ops`` are the ops in flight, in the order they were opened; the ranks agree on them after the step.
    None: there is nothing to agree on, and no rank takes part in anything. ``is_last``: the group ends.
    """

    commands: list[Command] = field(default_factory=list)
    ops: tuple[int, ...] = ()
    is_last: bool = False


class RankLedger:
    """What one rank knows of the ops in flight: its own pages, and whether it has ended.

    An op that fails on a rank has ended there with fewer pages, so that any rank that fails fails it.
    """

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._ended: dict[int, bool] = {}

    def note(self, event: BackedUp | Probed | Landed | Fetched | Stored) -> None:
        """Something happened to an op on this rank."""
        self._pages[event.op] = event.pages
        self._ended[event.op] = not isinstance(event, Landed)

    def vector(self, ops: Sequence[int]) -> Vector:
        """This rank's part of the agreement on ``ops``."""
        found: Vector = []
        for op in ops:
            found += [int(self._ended.get(op, False)), self._pages.get(op, 0)]
        return found

    def has_ended(self, op: int) -> bool:
        """It has ended on this rank, and not yet on all."""
        return self._ended.get(op, False)

    def settle(self, ops: Sequence[int], agreed: Vector) -> None:
        """Forget the ops that have ended everywhere."""
        for at, op in enumerate(ops):
            if agreed[_ENTRIES * at]:
                assert self._ended.get(op), f"op {op} has ended for all ranks, and not here"
                del self._pages[op], self._ended[op]

    def __len__(self) -> int:
        return len(self._pages)


class Agreement:
    """What all ranks have agreed on, on rank 0: orders in, completions out."""

    def __init__(self) -> None:
        self._open: dict[int, End] = {}
        self._landed: dict[int, int] = {}  # pages of reads, as the brain was told

    @property
    def ops(self) -> tuple[int, ...]:
        """The ops in flight, in the order they were opened."""
        return tuple(self._open)

    def opened(self, command: Command) -> None:
        """An order was given; it may open an op."""
        if isinstance(command, BackUp | Probe | Fetch | Store):
            assert command.op not in self._open, f"op {command.op} is already open"
            self._open[command.op] = _ENDS[type(command)]

    def take(self, ops: Sequence[int], agreed: Vector) -> list[AnyEvent]:
        """What the minimum over all ranks says of ``ops``: completions, and pages that landed."""
        events: list[AnyEvent] = []
        for at, op in enumerate(ops):
            has_ended, pages = agreed[_ENTRIES * at : _ENTRIES * (at + 1)]
            if has_ended:
                events.append(self._open.pop(op)(op, pages))
                self._landed.pop(op, None)
            elif self._open[op] is Fetched and pages > self._landed.get(op, 0):
                self._landed[op] = pages
                events.append(Landed(op, pages))
        return events


def minimum(vectors: Sequence[Vector]) -> Vector:
    """What ``all_reduce(MIN)`` gives every rank."""
    return [min(entries) for entries in zip(*vectors, strict=True)]

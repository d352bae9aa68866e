"""How the ranks of an instance agree on what is done: one brain decides, all carry out, the least counts.

The brain lives on rank 0. A step is one broadcast of orders, and, while ops are in flight, one
``all_reduce(MIN)`` over a vector with two entries an op. Which collectives a rank takes part in is said
by the orders alone, never by what that rank knows by itself, so all ranks issue the same sequence.
Must not know: what carries the messages, what carries out the orders. Called by: rank_group, rank_process,
meeting, virtual_ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from refimpl.messages import (
    AnyEvent,
    BackedUp,
    BackUp,
    CancelFetch,
    CloseStorage,
    Command,
    EmptyStorage,
    Fetch,
    Fetched,
    Landed,
    OpenStorage,
    Probe,
    Probed,
    StorageClosed,
    StorageEmptied,
    StorageOpened,
    Store,
    Stored,
)

Vector: TypeAlias = list[int]  # of each op: whether it has ended (0 or 1), and its pages so far

OfAChange: TypeAlias = StorageOpened | StorageClosed | StorageEmptied
OfAnOp: TypeAlias = BackedUp | Probed | Landed | Fetched | Stored | OfAChange
_Ending: TypeAlias = type[BackedUp] | type[Probed] | type[Fetched] | type[Stored]

CHANGE: Final = 0  # the op of an attach, a clear or a detach; those of the brain count from 1
_ENDS: Final[dict[type[Command], _Ending]] = {
    BackUp: BackedUp,
    Probe: Probed,
    Fetch: Fetched,
    Store: Stored,
}
_ENTRIES: Final = 2  # an op
LIMIT_S: Final = 5  # a rank that is silent for longer is taken for dead


class RankError(Exception):
    """A rank died, or was silent for too long: the instance can't go on."""


class RankLedger:
    """What one rank knows of the ops in flight: its own pages, and whether it has ended.

    An op that fails on a rank has ended there with fewer pages, so that any rank that fails fails it.
    A change of storage is an op as well: it has one page where it succeeded, and fewer than none where it
    failed.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_attached = False  # there is a store
        self._pages: dict[int, int] = {}
        self._ended: dict[int, bool] = {}

    def note(self, event: OfAnOp) -> None:
        """Something happened to an op on this rank."""
        if isinstance(event, OfAChange):
            if not isinstance(event, StorageEmptied):
                # One that failed to open is not there; one that failed to close still is.
                self.is_attached = isinstance(event, StorageOpened) != bool(event.error)
            self._pages[CHANGE] = -1 - self.rank if event.error else 1
            self._ended[CHANGE] = True
        else:
            self._pages[event.op] = event.pages
            self._ended[event.op] = not isinstance(event, Landed)

    def skips(self, command: Command) -> bool:
        """Is there nothing to do for ``command`` on this rank? Then it has ended here."""
        if isinstance(command, CancelFetch):
            return self._ended.get(command.op, False)
        if isinstance(command, CloseStorage) and not self.is_attached:
            self.note(StorageClosed())
            return True
        return False

    def vector(self, ops: Sequence[int]) -> Vector:
        """This rank's part of the agreement on ``ops``."""
        found: Vector = []
        for op in ops:
            found += [int(self._ended.get(op, False)), self._pages.get(op, 0)]
        return found

    def settle(self, ops: Sequence[int], agreed: Vector) -> None:
        """Forget the ops that have ended everywhere."""
        for at, op in enumerate(ops):
            if agreed[_ENTRIES * at]:
                assert self._ended.get(op), f"op {op} has ended for all ranks, and not here"
                del self._pages[op], self._ended[op]


class Agreement:
    """What all ranks have agreed on, on rank 0: orders in, completions out.

    A store that one rank could not open is closed again on the others before the brain hears of it.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Ending] = {}
        self._landed: dict[int, int] = {}  # pages of reads, as the brain was told
        self._change: Command | None = None  # the one in flight
        self._failed = ""  # why a store is being closed again
        self.orders: list[Command] = []  # what the ranks have to do beside what the brain wants

    @property
    def ops(self) -> tuple[int, ...]:
        """The ops in flight, in the order they were opened, a change of storage first."""
        return tuple(self._open) if self._change is None else (CHANGE, *self._open)

    def opened(self, command: Command) -> None:
        """An order was given; it may open an op."""
        ending = _ENDS.get(type(command))
        if ending is not None:
            assert isinstance(command, BackUp | Probe | Fetch | Store)
            assert command.op not in self._open, f"op {command.op} is already open"
            self._open[command.op] = ending
        elif isinstance(command, OpenStorage | CloseStorage | EmptyStorage):
            assert self._change is None, "storage is being changed"
            self._change = command

    def ending(self, op: int) -> type[AnyEvent]:
        """What completes ``op``, which is in flight."""
        return StorageOpened if op == CHANGE else self._open[op]

    def take(self, ops: Sequence[int], agreed: Vector) -> list[AnyEvent]:
        """What the minimum over all ranks says of ``ops``: completions, and pages that landed."""
        events: list[AnyEvent] = []
        for at, op in enumerate(ops):
            has_ended, pages = agreed[_ENTRIES * at : _ENTRIES * (at + 1)]
            if op == CHANGE:
                events += self._changed(pages) if has_ended else []
            elif has_ended:
                events.append(self._open.pop(op)(op, pages))
                self._landed.pop(op, None)
            elif self._open[op] is Fetched and pages > self._landed.get(op, 0):
                self._landed[op] = pages
                events.append(Landed(op, pages))
        return events

    def _changed(self, pages: int) -> list[AnyEvent]:
        change, self._change = self._change, None
        error = f"rank {-1 - pages} could not; its log says why" if pages < 0 else ""
        if isinstance(change, OpenStorage):
            if not error:
                return [StorageOpened()]
            self._failed, self._change = error, CloseStorage()
            self.orders.append(self._change)
            return []
        if isinstance(change, EmptyStorage):
            return [StorageEmptied(error)]
        failed, self._failed = self._failed, ""
        return [StorageOpened(failed) if failed else StorageClosed(error)]


def apart(ops: Sequence[int], vectors: Sequence[Vector]) -> Iterator[tuple[int, int]]:
    """Ops that have ended on all ranks, with more pages on some than on others; and how many more."""
    for at, op in enumerate(ops):
        entries = [vector[_ENTRIES * at : _ENTRIES * (at + 1)] for vector in vectors]
        counts = [pages for _, pages in entries]
        if all(has_ended for has_ended, _ in entries) and max(counts) > min(counts):
            yield op, max(counts) - min(counts)


def minimum(vectors: Sequence[Vector]) -> Vector:
    """What ``all_reduce(MIN)`` gives every rank."""
    return [min(entries) for entries in zip(*vectors, strict=True)]

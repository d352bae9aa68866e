"""A store that fails as told, around any backend: by seed, or call by call.

It imitates what stores do to their users: they are slow, refuse, hang, forget, lie about what they
read. Nothing here is random but by seed. Must not know: what a store is. Called by: tests, fault
drills.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Event, Lock
from typing import Final

from refimpl.storage.backend import Backend, HostPage, StorageError, delete_values
from refimpl.storage.tally import Tally
from refimpl.units import NS_PER_MS, NS_PER_S, PER_MILLION, Random

_LOG: Final = logging.getLogger(__name__)


class Fault(Enum):
    """What goes wrong with a call."""

    SLOW = "slow"  # takes ``slow_ns`` longer
    ERROR = "error"  # raises
    HANG = "hang"  # returns when ``released`` is set
    VANISHED = "vanished"  # exists() says yes to everything, get() finds nothing
    FULL = "full"  # set() stores nothing
    SHORT = "short"  # get() leaves the end of each page as it was, and says all is well
    CORRUPT = "corrupt"  # get() flips a bit of each page, and says all is well


# What can befall a call of each kind.
_FAULTS: Final[Mapping[str, tuple[Fault, ...]]] = {
    "exists": (Fault.SLOW, Fault.ERROR, Fault.HANG, Fault.VANISHED),
    "get": (Fault.SLOW, Fault.ERROR, Fault.HANG, Fault.VANISHED, Fault.SHORT, Fault.CORRUPT),
    "set": (Fault.SLOW, Fault.ERROR, Fault.HANG, Fault.FULL),
    "delete": (Fault.SLOW, Fault.ERROR, Fault.HANG),
}


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which calls fail. ``script`` is asked first: (kind of call, its number from 0) -> fault.

    ``per_million`` is the chance of each fault, for each call of a kind it can befall.
    """

    script: Mapping[tuple[str, int], Fault] = field(default_factory=dict)
    per_million: Mapping[Fault, int] = field(default_factory=dict)
    seed: int = 0
    slow_ns: int = 50 * NS_PER_MS
    refuses_to_open: bool = False

    def __post_init__(self) -> None:
        for (kind, number), fault in self.script.items():
            assert fault in _FAULTS[kind] and number >= 0, (kind, number, fault)
        assert sum(self.per_million.values()) <= PER_MILLION, "chances above 1"


def _wait(duration_ns: int) -> None:
    time.sleep(duration_ns / NS_PER_S)


class Faulty:
    """Any backend, failing as planned. ``wait`` is how a slow call spends its time."""

    def __init__(self, base: Backend, plan: FaultPlan, wait: Callable[[int], None] = _wait) -> None:
        if plan.refuses_to_open:
            raise StorageError("the store refuses to open, as planned")
        self._base = base
        self._plan = plan
        self.wait = wait
        self._random = Random(plan.seed)
        self._numbers: Counter[str] = Counter()
        self._lock = Lock()
        self.released = Event()  # lets hanging calls go, now and later
        self.hanging = Event()  # some call hangs, or did
        self.tally = Tally(_LOG)

    def calls(self, kind: str) -> int:
        """How many calls of a kind came this far."""
        return self._numbers[kind]

    def recover(self) -> None:
        """No fault from now on."""
        with self._lock:
            self._plan = FaultPlan()

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend."""
        if self._befalls("exists") is Fault.VANISHED:
            return [True] * len(names)
        return self._base.exists(names)

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        match self._befalls("get"):
            case Fault.VANISHED:
                return [False] * len(names)
            case Fault.SHORT:
                return self._get_short(names, pages)
            case Fault.CORRUPT:
                done = self._base.get(names, pages)
                self._flip([page for page, is_read in zip(pages, done, strict=True) if is_read])
                return done
            case _:
                return self._base.get(names, pages)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        if self._befalls("set") is Fault.FULL:
            return [False] * len(names)
        return self._base.set(names, pages)

    def delete(self, names: Sequence[str]) -> list[bool]:
        """See backend.delete_values."""
        self._befalls("delete")
        return delete_values(self._base, names)

    def clear(self) -> int:
        """See Backend."""
        return self._base.clear()

    def close(self) -> None:
        """See Backend. What hangs is let go, so that a thread can be joined."""
        self.released.set()
        self._base.close()

    # ---- the faults ---------------------------------------------------------------------------------

    def _befalls(self, kind: str) -> Fault | None:
        """Which fault befalls the call that comes now; waits and raises are done here."""
        with self._lock:
            fault = self._draw(kind, self._numbers[kind])
            self._numbers[kind] += 1
        if fault is None:
            return None
        self.tally.add(fault.value)
        match fault:
            case Fault.SLOW:
                self.wait(self._plan.slow_ns)
            case Fault.HANG:
                self.hanging.set()
                self.released.wait()
            case Fault.ERROR:
                raise StorageError(f"{kind} fails, as planned")
            case _:
                pass  # the method knows what it means
        return fault

    def _draw(self, kind: str, number: int) -> Fault | None:
        point = self._random.below(PER_MILLION)  # drawn for every call, so a script shifts no draw
        told = self._plan.script.get((kind, number))
        if told is not None:
            return told
        for fault in _FAULTS[kind]:
            point -= self._plan.per_million.get(fault, 0)
            if point < 0:
                return fault
        return None

    def _get_short(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """Read all of a page into memory of our own, and hand on all but its end."""
        copies = [bytearray(page.nbytes) for page in pages]
        done = self._base.get(names, [HostPage((memoryview(copy),)) for copy in copies])
        for page, copy, is_read in zip(pages, copies, done, strict=True):
            if is_read:
                _fill(page, memoryview(copy)[: max(len(copy) - 1 - self._below(len(copy)), 0)])
        return done

    def _flip(self, pages: Sequence[HostPage]) -> None:
        for page in pages:
            bit = self._below(8 * page.nbytes)
            for piece in page.pieces:
                if bit < 8 * piece.nbytes:
                    flat = piece.cast("B")
                    flat[bit // 8] ^= 1 << bit % 8
                    break
                bit -= 8 * piece.nbytes

    def _below(self, bound: int) -> int:
        with self._lock:
            return self._random.below(max(bound, 1))


def _fill(page: HostPage, value: memoryview) -> None:
    """Copy ``value`` into the beginning of the page."""
    at = 0
    for piece in page.pieces:
        part = value[at : at + piece.nbytes]
        piece.cast("B")[: len(part)] = part
        at += len(part)

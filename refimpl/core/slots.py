"""Page slots of one tier: which are free. A slot is a page's place in that tier's memory.

Must not know: pages, keys, who holds a slot. Called by: tiers, cache, scheduler.
"""

from __future__ import annotations

from typing import Final

ENDLESS: Final = 1 << 62  # free slots of a pool without a capacity: more than anyone can want


class SlotPool:
    """Slots 0 .. capacity-1, handed out and taken back in runs; without a capacity it never ends."""

    __slots__ = ("_freed", "_next", "capacity", "free")

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.free = ENDLESS if capacity is None else capacity  # slots that can be taken now
        self._freed: list[int] = []  # reused last in, first out
        self._next = 0  # slots from here on were never handed out

    @property
    def used(self) -> int:
        """Slots handed out and not given back."""
        return self._next - len(self._freed)

    def take(self, count: int) -> list[int]:
        """``count`` slots. Asserts that they are there: ask ``free`` first."""
        assert 0 <= count <= self.free, (count, self.free)
        freed = self._freed
        at = len(freed) - count if count < len(freed) else 0
        slots = freed[at:]
        del freed[at:]
        if len(slots) < count:
            fresh = self._next + count - len(slots)
            slots.extend(range(self._next, fresh))
            self._next = fresh
        self.free -= count
        return slots

    def give_back(self, slots: list[int]) -> None:
        """Free slots taken before."""
        self._freed.extend(slots)
        self.free += len(slots)
        assert len(self._freed) <= self._next, "a slot was given back twice"

    def freed(self) -> list[int]:
        """The slots that were given back, for the invariant checker."""
        return self._freed

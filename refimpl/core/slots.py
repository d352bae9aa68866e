"""Page slots of one tier: which are free. A slot is a page's place in that tier's memory.

Must not know: pages, keys, who holds a slot. Called by: tiers, cache, scheduler.
"""

from __future__ import annotations


class SlotPool:
    """Slots 0 .. capacity-1, handed out and taken back in runs; without a capacity it never ends."""

    __slots__ = ("_free", "_next", "capacity")

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._free: list[int] = []  # freed slots, reused last in, first out
        self._next = 0  # slots from here on were never handed out

    @property
    def free(self) -> int:
        """Slots that can be taken now; for a pool without a capacity, more than anyone can want."""
        if self.capacity is None:
            return 1 << 62
        return self.capacity - self._next + len(self._free)

    @property
    def used(self) -> int:
        """Slots handed out and not given back."""
        return self._next - len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` slots. Asserts that they are there: ask ``free`` first."""
        assert 0 <= count <= self.free, (count, self.free)
        free = self._free
        reused = min(count, len(free))
        slots = free[len(free) - reused :]
        del free[len(free) - reused :]
        if reused < count:
            fresh = self._next + count - reused
            slots.extend(range(self._next, fresh))
            self._next = fresh
        return slots

    def give_back(self, slots: list[int]) -> None:
        """Free slots taken before."""
        self._free.extend(slots)
        assert len(self._free) <= self._next, "a slot was given back twice"

    def free_slots(self) -> list[int]:
        """The freed slots, for the invariant checker."""
        return self._free

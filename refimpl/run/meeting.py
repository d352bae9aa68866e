"""Where the ranks that are threads of one process meet: each brings a value and gets those of all.

Must not know: what the values are. Called by: rank_setup, scenarios.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, BrokenBarrierError
from typing import Any

from refimpl.cluster.ranks import RankError, Vector, minimum


class Meeting:
    """A place for ``size`` ranks. One that is missing for ``limit_s`` seconds ends it for all."""

    def __init__(self, size: int, limit_s: float) -> None:
        self._size, self._limit_s = size, limit_s
        self._brought: list[Any] = [None] * size
        self._came = [0] * size  # how often each rank has been here
        self._barrier = Barrier(size)

    def exchange(self, rank: int, value: Any, patience: float = 1) -> list[Any]:
        """The values of all ranks, in their order.

        Raises RankError when one does not come within ``patience`` times the limit.
        """
        self._brought[rank] = value
        self._came[rank] += 1
        self._wait(patience)
        brought = list(self._brought)
        self._wait(patience)  # nobody brings the next value before all have read these
        return brought

    def end(self) -> None:
        """Nobody waits here any longer: whoever does, or comes, gets a RankError."""
        self._barrier.abort()

    def minimum_of(self, rank: int) -> Callable[..., Vector]:
        """``all_reduce(MIN)``, as ``rank`` calls it."""

        def of_all(vector: Vector, patience: float = 1) -> Vector:
            return minimum(self.exchange(rank, vector, patience))

        return of_all

    def _wait(self, patience: float) -> None:
        try:
            self._barrier.wait(self._limit_s * patience)
        except BrokenBarrierError:
            most = max(self._came)
            missing = [str(rank) for rank, times in enumerate(self._came) if times < most]
            who = f"rank {', '.join(missing)}" if missing else "a rank"
            raise RankError(
                f"{who} did not answer within {self._limit_s:g} s: restart the instance"
            ) from None

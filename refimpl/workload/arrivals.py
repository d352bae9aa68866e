"""When each request of a workload is sent: timestamps, finished predecessors, a cap in flight.

Must not know: engines, instances, tokens. Called by: run, perf.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from refimpl.workload.request import RequestSpec, Workload


class Arrivals:
    """The requests that have not been sent yet."""

    def __init__(self, workload: Workload) -> None:
        self._parallel_max = workload.parallel_max
        self._in_flight = 0
        self._timed: list[tuple[int, int]] = []  # heap of (time, rid)
        self._ready: deque[int] = deque()  # their time has come, the cap holds them back
        self._specs = {spec.rid: spec for spec in workload.requests}
        self._missing: dict[int, int] = {}  # rid -> predecessors still to finish
        self._waiting: dict[int, list[int]] = {}  # rid -> requests that wait for it
        for spec in workload.requests:
            if not spec.after:
                heappush(self._timed, (spec.arrival_ns + spec.think_ns, spec.rid))
                continue
            self._missing[spec.rid] = len(spec.after)
            for rid in spec.after:
                self._waiting.setdefault(rid, []).append(spec.rid)

    def next_time(self) -> int | None:
        """When something can be sent next, in ns; None when only an end can bring that about."""
        if self._is_full:
            return None
        if self._ready:
            return 0  # its time has come already
        return self._timed[0][0] if self._timed else None

    def due(self, now: int) -> list[RequestSpec]:
        """The requests to send now, in order."""
        while self._timed and self._timed[0][0] <= now:
            self._ready.append(heappop(self._timed)[1])
        due = []
        while self._ready and not self._is_full:
            due.append(self._specs.pop(self._ready.popleft()))
            self._in_flight += 1
        return due

    def finished(self, rid: int, now: int) -> None:
        """Request ``rid`` is over: those that waited for it may be next."""
        self._in_flight -= 1
        for waiting in self._waiting.pop(rid, ()):
            self._missing[waiting] -= 1
            if not self._missing[waiting]:
                spec = self._specs[waiting]
                heappush(self._timed, (max(spec.arrival_ns, now + spec.think_ns), waiting))

    @property
    def is_empty(self) -> bool:
        """Everything was sent."""
        return not self._specs

    @property
    def _is_full(self) -> bool:
        return self._parallel_max is not None and self._in_flight >= self._parallel_max

"""What all lanes have in common: one thing in progress at a time, and when it will be done.

Must not know: which commands exist, what an engine does with a completion.
Called by: device_lanes, storage_lanes, lanes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from refimpl.messages import AnyEvent, BackUp, Probe, Store
from refimpl.run.cost import Cost
from refimpl.run.faults import Faults
from refimpl.run.store import SharedStore

NEVER: Final = 1 << 64  # due time of an idle lane; later than any time a trace may name

Job = TypeVar("Job", BackUp, Probe, Store)
# How many pages a backend that is opened with that extra config holds; None: any number. Raises ConfigError.
Capacity: TypeAlias = Callable[[str, str], int | None]


@dataclass(slots=True)
class Site:
    """Where the lanes of one instance run. Opening a storage backend changes ``cost``.

    Without a ``capacity`` the store holds what it held before.
    """

    cost: Cost
    store: SharedStore
    faults: Faults
    capacity: Capacity | None = None


class Lane(ABC):
    """A serial resource. ``due`` is when what is in progress ends; NEVER when nothing is."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.due = NEVER
        self.pages = 0  # moved so far
        self.busy_ns = 0  # so far, what is in progress included

    @abstractmethod
    def finish(self) -> list[tuple[int, AnyEvent]]:
        """End what is due, start what comes next; completions with their op ids, ascending.

        Empty when a part of an op has ended that nobody is told of.
        """

    def occupy(self, now: int, duration_ns: int) -> None:
        """Be busy from ``now``. A lane takes time for everything, else order would be ambiguous."""
        assert duration_ns > 0, duration_ns
        self.due = now + duration_ns
        self.busy_ns += duration_ns


class FifoLane(Lane, Generic[Job]):
    """A lane that serves its commands one after another, in the order they came."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.queue: deque[Job] = deque()

    @abstractmethod
    def duration_ns(self, job: Job) -> int:
        """Time of the part of ``job`` that starts now."""

    @abstractmethod
    def complete(self, job: Job) -> AnyEvent | None:
        """End that part: the completion of ``job``, or None when another part follows."""

    def submit(self, job: Job, now: int) -> None:
        """Take a command."""
        self.queue.append(job)
        if self.due == NEVER:
            self._start(now)

    def finish(self) -> list[tuple[int, AnyEvent]]:
        """End the part in progress."""
        now, self.due = self.due, NEVER
        job = self.queue[0]
        event = self.complete(job)
        if event is not None:
            self.queue.popleft()
        if self.queue:
            self._start(now)
        return [] if event is None else [(job.op, event)]

    def _start(self, now: int) -> None:
        self.occupy(now, self.duration_ns(self.queue[0]) + self.site.faults.delay_ns())

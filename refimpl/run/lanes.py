"""Carries out an engine's commands in virtual time, without bytes: the null hands.

Each lane is a serial resource: the device (with the way up to it, which belongs to its batches), the
way down to the host, probes, L3 reads, L3 writes, and the opening of the backend. Lanes run beside
one another. Completions are totally ordered by (time, lane index, op id).
Must not know: what an engine decides, requests, the workload. Called by: loop, world.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from refimpl.messages import (
    AnyEvent,
    BackedUp,
    BackUp,
    CancelFetch,
    CloseStorage,
    Command,
    CutBatch,
    EmptyStorage,
    Fetch,
    Fetched,
    OpenStorage,
    Probe,
    Probed,
    Reply,
    RunBatch,
    Store,
    Stored,
    Submit,
    Withdraw,
)
from refimpl.run.cost import Cost
from refimpl.run.device_lanes import BackUpLane, DeviceLane
from refimpl.run.faults import Chances, Faults
from refimpl.run.lane import NEVER, Capacity, Lane, Site
from refimpl.run.storage_lanes import AdminLane, FetchLane, ProbeLane, StoreLane
from refimpl.run.store import SharedStore

LANES: Final = ("device", "host_down", "probe", "l3_read", "l3_write", "admin")  # by lane index

_OP_ENDS: Final = (BackedUp, Probed, Fetched, Stored)


@dataclass(frozen=True, slots=True)
class LaneUse:
    """What a lane has done: pages moved, and the time it was busy, in ns."""

    name: str
    pages: int
    busy_ns: int


class LaneExecutor:
    """The lanes of one instance. Several share a store when they are given the same one.

    The caller pops all that is due before it submits at a later time; that, an op id used twice at
    once, and a command that lanes don't serve are AssertionErrors.
    """

    def __init__(
        self,
        cost: Cost,
        store: SharedStore | None = None,
        faults: Faults | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        if store is None:  # not `or`: an empty store is false
            store = SharedStore()
        faults = Faults(Chances()) if faults is None else faults
        site = self._site = Site(cost, store, faults, capacity)
        self._device, self._down, self._probe = DeviceLane(site), BackUpLane(site), ProbeLane(site)
        self._read, self._write, self._admin = FetchLane(site), StoreLane(site), AdminLane(site)
        self._lanes: tuple[Lane, ...] = (
            self._device,
            self._down,
            self._probe,
            self._read,
            self._write,
            self._admin,
        )
        self._now = 0
        self._due = NEVER  # the earliest of the lanes, kept: it is asked several times a step
        self._open: set[int] = set()  # op ids without their completion; never iterated

    @property
    def cost(self) -> Cost:
        """The cost model in use; another one after a storage backend was opened."""
        return self._site.cost

    @property
    def faults(self) -> Faults:
        """What goes wrong here."""
        return self._site.faults

    @property
    def is_idle(self) -> bool:
        """True when nothing is in progress."""
        return self.next_due() is None

    def tell(self, message: Submit | Reply) -> None:
        """A request begins or ends, which takes lanes no time."""

    def submit(self, command: Command, now: int) -> None:
        """Start or queue ``command`` at ``now``, in ns."""
        assert now >= self._now, f"time went back from {self._now} to {now}"
        assert self._due >= now, "completions before now were not popped"
        self._now = now
        match command:
            case BackUp():
                self._enter(command.op)
                self._down.submit(command, now)
            case Store():
                self._enter(command.op)
                self._write.submit(command, now)
            case Probe():
                self._enter(command.op)
                self._probe.submit(command, now)
            case Fetch():
                self._enter(command.op)
                self._read.submit(command, now)
            case RunBatch():
                self._device.submit(command, now)
            case CutBatch():
                self._device.cut(now)
            case CancelFetch():
                self._read.cancel(command.op, now)
            case OpenStorage() | CloseStorage() | EmptyStorage():
                self._admin.submit(command, now)
            case Withdraw():
                pass  # page tables are the business of hands that have pages
            case _:
                raise AssertionError(f"lanes do not serve {command}")
        self._due = min([lane.due for lane in self._lanes])

    def _enter(self, op: int) -> None:
        assert op not in self._open, f"op {op} is already open"
        self._open.add(op)

    def next_due(self) -> int | None:
        """When the next thing ends, in ns; None when nothing is in progress."""
        return None if self._due == NEVER else self._due

    def pop_due(self, now: int) -> list[AnyEvent]:
        """All that ends at the earliest due time, if that is not after ``now``, in total order.

        Call it until ``next_due`` is later. An empty list at a due time says that a part of a store
        has ended, which others may read from now on: nothing for this engine to handle.
        """
        due = self._due
        if due > now:
            return []
        assert due >= self._now, f"time went back from {self._now} to {due}"
        self._now = due
        events: list[AnyEvent] = []
        soonest = NEVER
        for lane in self._lanes:
            if lane.due == due:
                events.extend([event for _, event in lane.finish()])
            if lane.due < soonest:
                soonest = lane.due
        self._due = soonest
        for event in events:
            if isinstance(event, _OP_ENDS):
                assert event.op in self._open, f"op {event.op} completes without being open"
                self._open.remove(event.op)
        return events

    def use(self) -> list[LaneUse]:
        """What each lane has done so far, and the way up as a lane of its own."""
        lanes = [
            LaneUse(name, lane.pages, lane.busy_ns)
            for name, lane in zip(LANES, self._lanes, strict=True)
        ]
        return [*lanes, LaneUse("host_up", self._device.up_pages, self._device.up_busy_ns)]

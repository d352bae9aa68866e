"""The lanes of one device: forward passes with the loads beside them, and copies to the host.

Must not know: L3, requests, slots beyond their number. Called by: lanes.
"""

from __future__ import annotations

from refimpl.messages import AnyEvent, BackedUp, BackUp, BatchDone, RunBatch
from refimpl.run.lane import NEVER, FifoLane, Lane, Site


class DeviceLane(Lane):
    """Runs one batch at a time. Its loads have the way up for themselves: there is one batch."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.up_pages = 0  # loaded so far
        self.up_busy_ns = 0
        self._batch: RunBatch | None = None
        self._started = 0
        self._steps = 0
        self._loads_failed: tuple[int, ...] = ()

    def submit(self, batch: RunBatch, now: int) -> None:
        """Start a batch."""
        assert self._batch is None, "a batch is in flight"
        self._batch, self._started, self._loads_failed = batch, now, ()
        if batch.is_decode:
            self._start_decode(batch, now)
        else:
            self._start_prefill(batch, now)

    def _start_decode(self, batch: RunBatch, now: int) -> None:
        assert batch.running >= 1, batch
        assert batch.steps_max >= 1, batch
        assert not batch.loads, "loads belong to a prefill"
        self._steps = batch.steps_max
        cost = self.site.cost
        self.occupy(now, cost.decode_ns(batch.running, batch.context_tokens, self._steps))

    def _start_prefill(self, batch: RunBatch, now: int) -> None:
        self._steps = 1
        cost, faults, pages, failed = self.site.cost, self.site.faults, 0, []
        for load in batch.loads:
            assert len(load.l1_slots) == len(load.l2_slots), load
            pages += len(load.l1_slots)
            if faults.strike("load_fail"):
                failed.append(load.rid)
        self._loads_failed = tuple(failed)
        if pages:
            self.up_pages += pages
            self.up_busy_ns += cost.load_ns(pages)
        items = [(item.start, item.tokens) for item in batch.items]
        self.occupy(now, cost.prefill_ns(items, pages))

    def cut(self, now: int) -> None:
        """End the decode at its first step boundary at or after ``now``; again is no later."""
        batch = self._batch
        assert batch is not None, "no decode is in flight to be cut"
        assert batch.is_decode, "a prefill can't be cut"
        cost, elapsed = self.site.cost, now - self._started
        running, context = batch.running, batch.context_tokens
        self._steps = cost.decode_steps_within(running, context, self._steps, elapsed)
        due = self._started + cost.decode_ns(running, context, self._steps)
        self.busy_ns -= self.due - due
        self.due = due

    def finish(self) -> list[tuple[int, AnyEvent]]:
        """End the batch."""
        self._batch, self.due = None, NEVER
        return [(0, BatchDone(self._steps, self._loads_failed))]


class BackUpLane(FifoLane[BackUp]):
    """The way down. Beside the device: a batch and a backup do not slow each other."""

    def duration_ns(self, job: BackUp) -> int:
        """Time of the whole copy."""
        assert len(job.l1_slots) == len(job.l2_slots) > 0, job
        return self.site.cost.backup_ns(len(job.l1_slots))

    def complete(self, job: BackUp) -> AnyEvent:
        """The copy has ended, with all pages or the first of them."""
        pages, faults = len(job.l1_slots), self.site.faults
        if faults.strike("backup_fail"):
            pages = faults.part_of(pages)
        elif faults.strike("slot_less"):
            pages -= 1
        self.pages += pages
        return BackedUp(job.op, pages)

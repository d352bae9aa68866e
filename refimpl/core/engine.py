"""The one brain of a serving instance: events and the time go in, commands and facts come out.

All events that are due are applied, then one scheduling pass runs. Same state, same events, same
``now``: same step, on every machine. There is no clock, thread, I/O or log in here.
Must not know: who carries commands out. Called by: run (loops), stories.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from refimpl.config import EngineConfig
from refimpl.core.attach import Attachment
from refimpl.core.cache import HiCache
from refimpl.core.outbox import Outbox
from refimpl.core.prefetch import Prefetcher
from refimpl.core.request import Request
from refimpl.core.residency import Watcher
from refimpl.core.scheduler import Scheduler
from refimpl.facts import Finished, Matched
from refimpl.messages import (
    Abort,
    Answer,
    AnyEvent,
    AttachStorage,
    BackedUp,
    BatchDone,
    ClearStorage,
    DetachStorage,
    Fetched,
    Flush,
    Landed,
    Probed,
    Reply,
    Step,
    StorageClosed,
    StorageEmptied,
    StorageOpened,
    Stored,
    Submit,
    Tick,
)
from refimpl.units import ceil_div


class Engine:
    """One instance: ``handle`` events, ask for the next ``deadline``, ask whether it is ``idle``."""

    __slots__ = (
        "_attachment",
        "_config",
        "_held",
        "_now",
        "_out",
        "_prefetcher",
        "_requests",
        "cache",
        "scheduler",
    )

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._out = Outbox()
        self._now = 0
        self.cache = HiCache(config.cache, self._out)
        self._prefetcher = Prefetcher(self.cache, config.cache.prefetch, self._out)
        self.scheduler = Scheduler(config, self.cache, self._prefetcher, self._out)
        self._attachment = Attachment(
            self.cache, self._prefetcher, self._out, config.storage_backend
        )
        self._requests: dict[int, Request] = {}  # not over
        self._held: list[Submit] = []  # came while a drain held new requests back

    def handle(self, events: Iterable[AnyEvent], now: int) -> Step:
        """Apply ``events``, in order, at ``now`` ns, then schedule."""
        assert now >= self._now, (now, self._now)
        self._now = now
        for event in events:
            self._apply(event, now)
        self._settle(now)
        return self._out.drain()

    def deadline(self) -> int | None:
        """When a ``Tick`` is wanted at the latest, in ns; always after the last ``now``."""
        if self.scheduler.awaits_batch:
            return None  # its end comes first, and looks at every deadline
        return self._prefetcher.deadline(self._now)

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` from now on which pages come to and leave L1 and L2."""
        self.cache.tree.residency.watcher = watcher

    def requests(self) -> list[Request]:
        """Requests that are not over, in the order they came."""
        return list(self._requests.values())

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight, a change of L3 included."""
        return not self.busy and not self._attachment.holds_back

    @property
    def refuses(self) -> bool:
        """A change of L3 drains the engine, and new requests are refused meanwhile."""
        return self._attachment.refuses

    @property
    def busy(self) -> str:
        """What is going on, in words; empty when idle."""
        if self.scheduler.is_empty and not len(self.cache.ops) and not self._held:
            return ""
        return (
            f"#queue-req={self.waiting} #running-req={self.running}"
            f" #in-flight={len(self.cache.ops)}"
        )

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted, or were retracted."""
        return len(self.scheduler.queue) + len(self._held)

    @property
    def running(self) -> int:
        """Requests that hold a place in a batch."""
        return len(self._requests) - len(self.scheduler.queue)

    def _apply(self, event: AnyEvent, now: int) -> None:
        match event:
            case Submit():
                self._submit(event, now)
            case BatchDone():
                self.scheduler.batch_done(event)
                self._forget_over()
            case BackedUp():
                self.cache.writer.backed_up(event.op, event.pages)
                self.scheduler.room_came()
            case Probed():
                self._prefetcher.probed(event.op, event.pages)
                self._cut_for_queue()
            case Landed():
                self._prefetcher.landed(event.op, event.pages)
                self._cut_for_queue()
            case Fetched():
                self._prefetcher.fetched(event.op, event.pages, now)
                self._cut_for_queue()
            case Stored():
                keys = self.cache.writer.stored(event.op, event.pages)
                self._prefetcher.stored(keys)
            case Abort():
                self._abort(event.rid)
            case Tick():
                self._cut_for_queue()
            case AttachStorage() | DetachStorage() | ClearStorage():
                self._attachment.ask(event, busy=self.busy)
            case StorageOpened():
                self._attachment.opened(event.error)
            case StorageClosed():
                self._attachment.closed(event.error)
            case StorageEmptied():
                self._attachment.emptied(event.error)
            case Flush():
                self._flush()
            case _:
                assert_never(event)

    def _settle(self, now: int) -> None:
        """The pass after the events: held requests, the next batch, a waiting change if idle."""
        if self._held and not self._attachment.holds_back:
            held, self._held = self._held, []
            for submit in held:
                self._enqueue(submit, now)
        self.scheduler.schedule(now)
        self._forget_over()
        if self._attachment.holds_back and self.scheduler.is_empty and not len(self.cache.ops):
            self._attachment.start()

    def _cut_for_queue(self) -> None:
        if self.scheduler.queue:
            self.scheduler.cut()

    # ---- requests -------------------------------------------------------------------------------

    def _submit(self, submit: Submit, now: int) -> None:
        assert submit.rid not in self._requests, submit.rid
        error = self._objection(submit)
        if error:
            self._refuse(submit.rid, f"error: {error}")
        elif self._attachment.holds_back:
            self._held.append(submit)
        else:
            self._enqueue(submit, now)

    def _objection(self, submit: Submit) -> str:
        length, page_size = submit.prompt.length, self._config.cache.page_size
        capacity = self._config.cache.l1_pages
        if length < 1:
            return "the prompt is empty"
        if submit.output_tokens < 0:
            return "the number of output tokens is negative"
        if capacity is not None and ceil_div(length, page_size) > capacity:
            return (
                f"the prompt of {length} tokens is longer than L1,"
                f" which holds {capacity * page_size}; raise --max-total-tokens"
            )
        if self._attachment.refuses:
            return "the engine is draining for a storage change; try again later"
        if len(self.scheduler.queue) + len(self._held) >= self._config.queued_max:
            return f"the queue is full at {self._config.queued_max} requests; try again later"
        return ""

    def _refuse(self, rid: int, reason: str) -> None:
        self._out.commands.append(Reply(rid, False, reason))
        self._out.facts.append(Finished(rid, 0, reason))

    def _enqueue(self, submit: Submit, now: int) -> None:
        page_size = self._config.cache.page_size
        request = Request(submit, page_size)
        self._requests[request.rid] = request
        self.scheduler.queue.append(request)
        if self._config.reuse:
            match = self.cache.tree.find(request.keys)
            self._out.facts.append(Matched(request.rid, len(request.keys), match.l1, match.l2))
            if self.cache.host.generation:
                self._prefetcher.begin(request, match.pages, now)
        self.scheduler.cut()

    def _abort(self, rid: int) -> None:
        """A request that is over, or was never there, is aborted in vain."""
        request = self._requests.get(rid)
        if request is not None:
            self.scheduler.abort(request)
            self._forget_over()
            return
        for submit in self._held:
            if submit.rid == rid:
                self._held.remove(submit)
                self._refuse(rid, "abort")
                return

    def _forget_over(self) -> None:
        for rid in self.scheduler.take_over():
            del self._requests[rid]

    def _flush(self) -> None:
        busy = self.busy
        if busy:
            self._out.commands.append(Answer("flush", False, f"Reject flush: not idle. {busy}"))
            return
        self.cache.flush()
        self._out.commands.append(Answer("flush", True, "flushed"))

"""The wall clock: pumps carry out commands on threads of their own, one a lane.

The engine is called by one thread, the loop's. A pump takes commands from its queue, has the hands do
them, and puts the completion into the loop's inbox; queues are all that threads share. What concerns
requests goes through the device pump too, so that page tables change between batches alone.
Must not know: what an engine decides, HTTP. Called by: the command line, bench, the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Thread
from time import perf_counter_ns
from typing import Final

from refimpl.core.check import check_quiescent
from refimpl.core.engine import Engine
from refimpl.keys import PageKey
from refimpl.messages import (
    Answer,
    AnyEvent,
    BackedUp,
    BackUp,
    BatchDone,
    CancelFetch,
    CloseStorage,
    Command,
    CutBatch,
    Fetch,
    Fetched,
    Landed,
    OpenStorage,
    Probe,
    Probed,
    Reply,
    RunBatch,
    StorageClosed,
    StorageOpened,
    Store,
    Stored,
    Submit,
    Tick,
    Withdraw,
)
from refimpl.run.arrivals import Arrivals
from refimpl.run.cost import STORAGE_BATCH_PAGES
from refimpl.run.hands import PageStore, TorchHands
from refimpl.run.record import Record
from refimpl.units import NS_PER_S
from refimpl.workload.request import RequestSpec, Workload

JOIN_S: Final = 30  # how long a pump may take to finish what it is doing when all is over


class Pump:
    """A thread that does what it is given, in order; an exception in it comes out of ``close``."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self.busy_ns = 0
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Have ``job`` done after all that was put before."""
        self._jobs.put(job)

    @property
    def error(self) -> BaseException | None:
        """What stopped it, if something did."""
        return self._error

    def close(self) -> None:
        """Finish what was put and end the thread; raises what stopped it."""
        self._jobs.put(None)
        self._thread.join(JOIN_S)
        if self._error is not None:
            raise self._error
        assert not self._thread.is_alive(), f"pump {self._thread.name} does not end"

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            begun = perf_counter_ns()
            try:
                job()
            except BaseException as error:  # it is raised again where it can be seen
                self._error = error
                return
            self.busy_ns += perf_counter_ns() - begun


class LiveExecutor:
    """Carries out commands at once, on four pumps; completions come out of ``inbox``."""

    def __init__(self, hands: TorchHands, pages: PageStore) -> None:
        self.hands = hands
        self.inbox: SimpleQueue[AnyEvent] = SimpleQueue()
        self.outputs: dict[int, list[int]] = {}
        self._pages = pages
        self._cut = Flag()
        self._backups: deque[BackUp] = deque()
        self._cancelled: set[int] = set()  # fetches to stop; asked, never iterated
        self._device, self._down = Pump("device"), Pump("host_down")
        self._read, self._write = Pump("l3_read"), Pump("l3_write")

    def tell(self, message: Submit | Reply) -> None:
        """A request begins or ends."""
        if isinstance(message, Submit):
            self._device.put(lambda: self.hands.expect(message))
        elif message.finish:
            self._device.put(lambda: self._finish(message.rid))

    def submit(self, command: Command) -> None:
        """Start a command."""
        match command:
            case RunBatch():
                self._cut.clear()
                self._device.put(lambda: self._run_batch(command))
            case CutBatch():
                self._cut.set()
            case Withdraw():
                self._device.put(lambda: self.hands.withdraw(command.rid))
            case BackUp():
                self._backups.append(command)
                self._down.put(self._back_up)
            case Probe():
                self._read.put(lambda: self._probe(command))
            case Fetch():
                self._read.put(lambda: self._fetch(command))
            case CancelFetch():
                self._cancelled.add(command.op)
            case Store():
                self._write.put(lambda: self._store(command))
            case OpenStorage():
                self.inbox.put(StorageOpened())
            case CloseStorage():
                self.inbox.put(StorageClosed())
            case _:
                raise AssertionError(f"nobody carries out {command}")

    def check(self) -> None:
        """Raise what stopped a pump, if one has stopped."""
        for pump in self._pumps:
            if pump.error is not None:
                raise pump.error

    def close(self) -> None:
        """End all pumps."""
        for pump in self._pumps:
            pump.close()

    @property
    def _pumps(self) -> tuple[Pump, ...]:
        return (self._device, self._down, self._read, self._write)

    def _finish(self, rid: int) -> None:
        self.outputs[rid] = self.hands.finished(rid)

    def _run_batch(self, batch: RunBatch) -> None:
        if batch.is_decode:
            produced = self.hands.decode(batch, self._cut.is_set)
        else:
            produced = self.hands.prefill(batch)
        self.hands.commit(produced, produced.steps)
        self.inbox.put(BatchDone(produced.steps, (), produced.tokens, produced.ended))

    def _back_up(self) -> None:
        """All backups that wait, as one copy; those that come meanwhile are the next one."""
        waiting = [self._backups.popleft() for _ in range(len(self._backups))]
        if not waiting:  # an earlier call took them along
            return
        self.hands.back_up(
            [slot for command in waiting for slot in command.l1_slots],
            [slot for command in waiting for slot in command.l2_slots],
        )
        for command in waiting:
            self.inbox.put(BackedUp(command.op, len(command.l1_slots)))

    def _probe(self, command: Probe) -> None:
        self.inbox.put(Probed(command.op, self._pages.leading_run(command.keys)))

    def _fetch(self, command: Fetch) -> None:
        landed, total = 0, len(command.keys)
        while landed < total and command.op not in self._cancelled:
            batch = range(landed, min(landed + STORAGE_BATCH_PAGES, total))
            for at in batch:
                self.hands.put_page(command.l2_slots[at], self._pages.get(command.keys[at]))
            landed = batch.stop
            if landed < total:
                self.inbox.put(Landed(command.op, landed))
        self._cancelled.discard(command.op)
        self.inbox.put(Fetched(command.op, landed))

    def _store(self, command: Store) -> None:
        for key, slot in zip(command.keys, command.l2_slots, strict=True):
            self._put(key, slot)
        self.inbox.put(Stored(command.op, len(command.keys)))

    def _put(self, key: PageKey, slot: int) -> None:
        if key not in self._pages:
            self._pages.put(key, self.hands.page_bytes(slot))


def run_live(
    engine: Engine,
    executor: LiveExecutor,
    workload: Workload,
    progress: Callable[[int], None] | None = None,
) -> Record:
    """Send ``workload`` in real time and run until nothing is left to do.

    Every wait is for the inbox, with the next arrival or deadline as its limit. Ends the pumps, also
    when something goes wrong, and checks that the engine is at rest.
    """
    loop = _Loop(engine, executor, workload, progress)
    try:
        loop.run()
    finally:
        executor.close()
    check_quiescent(engine)
    return loop.record


class _Loop:
    def __init__(
        self,
        engine: Engine,
        executor: LiveExecutor,
        workload: Workload,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.record = Record()
        self._engine, self._executor = engine, executor
        self._arrivals = Arrivals(workload)
        self._progress = progress
        self._open = 0  # requests sent and not over
        self._begun = perf_counter_ns()

    def run(self) -> None:
        while not (self._arrivals.is_empty and not self._open and self._engine.idle):
            events = self._wait()
            now = perf_counter_ns() - self._begun
            for spec in self._arrivals.due(now):
                events.append(self._send(spec, now))
            step = self._engine.handle(events or (Tick(),), now)
            self.record.take(step, 0, now)
            for command in step.commands:
                if isinstance(command, Reply):
                    self._reply(command, now)
                elif not isinstance(command, Answer):
                    self._executor.submit(command)

    def _wait(self) -> list[AnyEvent]:
        """What is in the inbox; when that is nothing, what comes first."""
        events: list[AnyEvent] = []
        inbox = self._executor.inbox
        while True:
            try:
                events.append(inbox.get_nowait() if events else inbox.get(timeout=self._patience()))
            except Empty:
                self._executor.check()
                return events

    def _patience(self) -> float:
        """Seconds until something is due by itself; a second at most, to look after the pumps."""
        now = perf_counter_ns() - self._begun
        times = [
            at for at in (self._arrivals.next_time(), self._engine.deadline()) if at is not None
        ]
        return max(min([*times, now + NS_PER_S]) - now, 0) / NS_PER_S

    def _send(self, spec: RequestSpec, now: int) -> Submit:
        submit = Submit(
            spec.rid,
            spec.prompt,
            spec.output_tokens,
            spec.extra_key,
            spec.cache_salt,
            spec.lora_id,
            spec.priority,
        )
        self.record.submitted(spec, 0, now)
        self._executor.tell(submit)
        self._open += 1
        return submit

    def _reply(self, reply: Reply, now: int) -> None:
        self._executor.tell(reply)
        if reply.finish:
            self._open -= 1
            self._arrivals.finished(reply.rid, now)
            if self._progress is not None:
                self._progress(1)

"""The wall clock: pumps carry out commands on threads of their own, one a lane.

The engine is called by one thread, the loop's. A pump takes commands from its queue, has the hands do
them, and puts the completion into the loop's inbox; queues are all that threads share. What concerns
requests goes through the device pump too, so that page tables change between batches alone.
Must not know: what an engine decides, HTTP. Called by: the command line, bench, the server.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event as Flag
from time import perf_counter_ns
from typing import Final

from refimpl.core.check import check_quiescent
from refimpl.core.engine import Engine
from refimpl.messages import (
    Abort,
    Answer,
    AnyEvent,
    AttachStorage,
    BackedUp,
    BackUp,
    BatchDone,
    CancelFetch,
    CloseStorage,
    Command,
    CutBatch,
    DetachStorage,
    Fetch,
    Flush,
    OpenStorage,
    Probe,
    Reply,
    RunBatch,
    Store,
    Submit,
    Tick,
    Withdraw,
)
from refimpl.model.sampling import GREEDY, Sampling
from refimpl.run.hands import TorchHands
from refimpl.run.live_storage import LiveStorage, Opener
from refimpl.run.pump import Pump
from refimpl.run.record import Record
from refimpl.units import NS_PER_S
from refimpl.workload.arrivals import Arrivals
from refimpl.workload.request import RequestSpec, Workload

ASKED: Final = (Submit, Abort, AttachStorage, DetachStorage, Flush)  # by clients
DRAIN_S: Final = 30  # for what is in flight when all requests are over
_log = logging.getLogger(__name__)


class LiveExecutor:
    """Carries out commands at once, on pumps; completions come out of ``inbox``.

    ``opener`` builds and connects storage backends. ``outputs`` is what each request produced, unless
    ``keeps_outputs`` says that nobody will ask.
    """

    def __init__(self, hands: TorchHands, opener: Opener) -> None:
        self.hands = hands
        self.inbox: SimpleQueue[AnyEvent] = SimpleQueue()
        self.outputs: dict[int, list[int]] = {}
        self.keeps_outputs = True
        self.storage = LiveStorage(hands.mover.host, opener, self.inbox)
        self._cut = Flag()
        self._backups: deque[BackUp] = deque()
        self._device, self._down = Pump("device"), Pump("host_down")

    def tell(self, message: Submit | Reply, sampling: Sampling = GREEDY) -> None:
        """A request begins or ends."""
        if isinstance(message, Submit):
            self._device.put(lambda: self.hands.expect(message, sampling))
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
            case Probe() | Fetch() | CancelFetch() | Store():
                self.storage.submit(command)
            case OpenStorage():
                self.storage.open(command)
            case CloseStorage():
                self.storage.close()
            case _:
                raise AssertionError(f"nobody carries out {command}")

    def check(self) -> None:
        """Raise what stopped a pump, if one has stopped."""
        self._device.check()
        self._down.check()
        self.storage.check()

    def close(self, *, is_idle: bool = True) -> None:
        """End all threads; what is stored stays. Not ``is_idle``: a store that hangs is left behind."""
        has_ended = [pump.close() for pump in (self._device, self._down)]
        self.storage.shut(is_idle=is_idle)
        self.check()
        assert all(has_ended), "a batch or a copy does not end"

    def _finish(self, rid: int) -> None:
        output = self.hands.finished(rid)
        if self.keeps_outputs:
            self.outputs[rid] = output

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


def run_live(
    engine: Engine,
    executor: LiveExecutor,
    workload: Workload,
    progress: Callable[[int], None] | None = None,
    answered: Callable[[Answer], None] | None = None,
) -> Record:
    """Send ``workload`` in real time and run until nothing is left to do.

    Others may put events into the executor's inbox meanwhile; ``answered`` hears the answers to them.
    Every wait is for the inbox, with the next arrival or deadline as its limit. Ends the pumps, also
    when something goes wrong, and checks that the engine is at rest. When all requests are over, what is
    still in flight has ``DRAIN_S``; a store that hangs is left behind with a warning.
    """
    served = _Served(engine, executor, workload, progress, answered)
    try:
        served.run()
    finally:
        executor.close(is_idle=engine.idle)
    if engine.idle:
        check_quiescent(engine)
    else:
        _log.warning("left behind after %d s: %s", DRAIN_S, engine.busy)
    return served.record


class LiveLoop:
    """One engine in real time: waits for events, has them handled, passes the commands on.

    Called by one thread. ``replied`` and ``answered`` hear what the engine says to clients.
    """

    def __init__(
        self,
        engine: Engine,
        executor: LiveExecutor,
        replied: Callable[[Reply, int], None],
        answered: Callable[[Answer], None] | None = None,
    ) -> None:
        self.record = Record()
        self._engine, self._executor = engine, executor
        self._replied, self._answered = replied, answered
        self._begun = perf_counter_ns()

    def now(self) -> int:
        """Nanoseconds since the loop was made."""
        return perf_counter_ns() - self._begun

    def wait(self, next_due: int | None = None) -> list[AnyEvent]:
        """What is in the inbox; when that is nothing, what comes first, ``next_due`` at the latest."""
        events: list[AnyEvent] = []
        inbox = self._executor.inbox
        while True:
            try:
                events.append(
                    inbox.get_nowait() if events else inbox.get(timeout=self._patience(next_due))
                )
            except Empty:
                self._executor.check()
                return events

    def _patience(self, next_due: int | None) -> float:
        """Seconds until something is due by itself; a second at most, to look after the pumps."""
        now = self.now()
        times = [at for at in (next_due, self._engine.deadline()) if at is not None]
        return max(min([*times, now + NS_PER_S]) - now, 0) / NS_PER_S

    def turn(self, events: list[AnyEvent], now: int) -> None:
        """Have ``events`` handled, completions before what clients ask for (contract 7)."""
        events.sort(key=lambda event: isinstance(event, ASKED))
        step = self._engine.handle(events or (Tick(),), now)
        self.record.take(step, 0, now)
        for command in step.commands:
            if isinstance(command, Reply):
                self._executor.tell(command)
                self._replied(command, now)
            elif not isinstance(command, Answer):
                self._executor.submit(command)
            elif self._answered is not None:
                self._answered(command)


class _Served:
    """A workload on its way through a loop."""

    def __init__(
        self,
        engine: Engine,
        executor: LiveExecutor,
        workload: Workload,
        progress: Callable[[int], None] | None,
        answered: Callable[[Answer], None] | None,
    ) -> None:
        self._loop = LiveLoop(engine, executor, self._reply, answered)
        self._engine, self._executor = engine, executor
        self._arrivals = Arrivals(workload)
        self._progress = progress
        self._open = 0  # requests sent and not over
        self._served_ns: int | None = None  # when the last of them was

    @property
    def record(self) -> Record:
        """Of all that was decided."""
        return self._loop.record

    def run(self) -> None:
        """To the end."""
        while not self._is_over():
            events = self._loop.wait(self._arrivals.next_time())
            now = self._loop.now()
            events += [self._send(spec, now) for spec in self._arrivals.due(now)]
            self._loop.turn(events, now)

    def _is_over(self) -> bool:
        if self._open or not self._arrivals.is_empty:
            return False
        now = self._loop.now()
        if self._served_ns is None:
            self._served_ns = now
        return self._engine.idle or now - self._served_ns > DRAIN_S * NS_PER_S

    def _send(self, spec: RequestSpec, now: int) -> Submit:
        submit = spec.submit()
        self.record.submitted(spec, 0, now)
        self._executor.tell(submit)
        self._open += 1
        return submit

    def _reply(self, reply: Reply, now: int) -> None:
        if reply.finish:
            self._open -= 1
            self._arrivals.finished(reply.rid, now)
            if self._progress is not None:
                self._progress(1)

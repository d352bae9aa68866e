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
from queue import SimpleQueue
from threading import Event as Flag
from typing import Final

from refimpl.core.check import check_quiescent
from refimpl.core.engine import Engine
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
    EmptyStorage,
    Fetch,
    OpenStorage,
    Probe,
    Reply,
    RunBatch,
    Store,
    Submit,
    Withdraw,
)
from refimpl.model.choice import GREEDY, Sampling
from refimpl.run.hands import Produced, TorchHands
from refimpl.run.live_loop import Inbox, LiveLoop, Stepped, WallExecutor
from refimpl.run.live_storage import LiveStorage, Opener
from refimpl.run.pump import Pump
from refimpl.run.record import Record
from refimpl.storage.names import Namespace
from refimpl.units import NS_PER_S
from refimpl.workload.arrivals import Arrivals
from refimpl.workload.request import RequestSpec, Workload

DRAIN_S: Final = 30  # for what is in flight when all requests are over
_log = logging.getLogger(__name__)


class LiveExecutor:
    """Carries out commands at once, on pumps; completions come out of ``inbox``.

    ``opener`` builds and connects storage backends. ``outputs`` is what each request produced, unless
    ``keeps_outputs`` says that nobody will ask.
    """

    def __init__(self, hands: TorchHands, opener: Opener, inbox: Inbox | None = None) -> None:
        self.hands = hands
        self.inbox: Inbox = SimpleQueue() if inbox is None else inbox
        self.outputs: dict[int, list[int]] = {}
        self.keeps_outputs = True
        self.storage = LiveStorage(hands.mover.host, opener, self.inbox)
        self._cut = Flag()
        self._followed: set[int] = set()  # rids; asked for membership alone
        self._backups: deque[BackUp] = deque()
        self._device, self._down = Pump("device"), Pump("host_down")

    def tell(
        self, message: Submit | Reply, sampling: Sampling = GREEDY, *, is_followed: bool = False
    ) -> None:
        """A request begins or ends."""
        if isinstance(message, Submit):
            self._device.put(lambda: self._expect(message, sampling, is_followed=is_followed))
        elif message.finish:
            self._device.put(lambda: self._finish(message.rid))

    def next_due(self) -> int | None:
        """Nothing: pumps tell the inbox when they are done."""
        return None

    def pop_due(self, now: int) -> list[AnyEvent | Stepped]:
        """Nothing, as in ``next_due``."""
        del now
        return []

    def submit(self, command: Command, now: int = 0) -> None:
        """Start a command."""
        del now  # the work takes as long as it takes
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
            case EmptyStorage():
                self.storage.empty()
            case _:
                raise AssertionError(f"nobody carries out {command}")

    @property
    def store_failures(self) -> int:
        """Calls of L3 that raised or answered nonsense."""
        return self.storage.failures

    def moved(self) -> dict[str, tuple[int, int]]:
        """(bytes, ns) of the copies so far, by way."""
        ways = self.hands.mover.moved | self.storage.moved
        return {way: (done.bytes, done.ns) for way, done in ways.items()}

    def names(self) -> Namespace | None:
        """What pages are called in L3; None without one."""
        return self.storage.namespace

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

    # ---- the device's thread --------------------------------------------------------------------

    def _expect(self, submit: Submit, sampling: Sampling, *, is_followed: bool) -> None:
        self.hands.expect(submit, sampling)
        if is_followed:
            self._followed.add(submit.rid)

    def _finish(self, rid: int) -> None:
        self._followed.discard(rid)
        output = self.hands.finished(rid)
        if self.keeps_outputs:
            self.outputs[rid] = output

    def _run_batch(self, batch: RunBatch) -> None:
        if batch.is_decode:
            produced = self.hands.decode(batch, self._after_step)
        else:
            produced = self.hands.prefill(batch)
            self._tell_followed(produced)
        self.hands.commit(produced, produced.steps)
        self.inbox.put(BatchDone(produced.steps, (), produced.tokens, produced.ended))

    def _after_step(self, produced: Produced) -> bool:
        self._tell_followed(produced)
        return not self._cut.is_set()

    def _tell_followed(self, produced: Produced) -> None:
        """The newest token of each answer that is followed."""
        rids = [rid for rid, tokens in produced.tokens.items() if tokens and rid in self._followed]
        if rids:
            tokens = {rid: produced.tokens[rid][-1:] for rid in rids}
            logprobs = {
                rid: produced.logprobs[rid][-1:] for rid in rids if rid in produced.logprobs
            }
            self.inbox.put(Stepped(tokens, logprobs))

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
    executor: WallExecutor,
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


class _Served:
    """A workload on its way through a loop."""

    def __init__(
        self,
        engine: Engine,
        executor: WallExecutor,
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
            events, now = self._loop.wait(self._arrivals.next_time())
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

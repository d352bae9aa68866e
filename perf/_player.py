"""Plays chains in one process: sends each request when it is due and notes what came back.

In an open loop a chain begins at its time whatever became of the others, in a greenlet of its own,
so that a slow server is asked as often as a fast one. In a closed loop a user plays one after another.
Within a chain turns wait for their predecessors either way.
Must not know: how traffic is divided, what results are for. Called by: _node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Final, Protocol

import gevent
from gevent.event import Event
from gevent.pool import Group
from gevent.queue import Empty, SimpleQueue

from perf._answer import UNFINISHED, Answer, RequestError
from perf._monitor import Health, Monitor
from perf._questions import Dialogue, Question
from perf._rows import Row, row_of
from perf._traffic import Traffic, beginning, begins_ns
from refimpl.units import NS_PER_MS, NS_PER_S
from refimpl.workload.arrivals import Arrivals
from refimpl.workload.request import RequestSpec, Workload

Fire = Callable[..., None]
Done = Callable[[list[Row]], None]


class Client(Protocol):
    """A way to ask a server."""

    transport: str

    def ask(self, question: Question, answer: Answer, clock: Callable[[], int]) -> None:
        """Send ``question`` and note in ``answer`` what comes back. Raises RequestError, with the reason."""

    def close(self) -> None:
        """Give up all connections."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one class of users sends, and through what."""

    title: str
    traffic: Traffic
    client: Client


class Player:
    """All that one process sends in one run. ``fire`` is Locust's event for a sample."""

    def __init__(self, *, is_open: bool, lag_limit_ns: int, fire: Fire) -> None:
        self._is_open, self._fire = is_open, fire
        self._monitor = Monitor(lag_limit_ns)
        self._playing = Group()
        self._over = Event()
        self._began_ns = 0

    def begin(self) -> None:
        """The run begins now: times count from here."""
        self._began_ns = monotonic_ns()
        self._monitor.start()

    def clock(self) -> int:
        """ns since the run began."""
        return monotonic_ns() - self._began_ns

    @property
    def is_over(self) -> bool:
        """Has the run ended?"""
        return bool(self._over.is_set())

    def play(self, part: Part, number: int, done: Done) -> None:
        """Play a chain: begin it when it is due, or play all of it now. ``done`` gets its rows."""
        chain = part.traffic.chains[number]
        if self._is_open:
            self._over.wait(max(begins_ns(chain) - self.clock(), 0) / NS_PER_S)
        else:
            chain = beginning(chain, self.clock())
        if self.is_over:
            return
        course = _Course(self, part, chain)
        playing = self._playing.spawn(course.run, done)
        if not self._is_open:
            playing.join()

    def end(self) -> Health:
        """Cut off what is under way, which notes it, and say how well this process kept up."""
        self._over.set()
        self._playing.kill()
        return self._monitor.stop()

    def ask(self, part: Part, question: Question, due: tuple[int, int]) -> tuple[Row, Answer]:
        """Send one request. ``due`` is when it was intended, and the earliest that it could be sent."""
        answer = Answer()
        intended_ns, possible_ns = due
        try:
            part.client.ask(question, answer, self.clock)
        except RequestError as refused:
            answer.failed(str(refused))
        except gevent.GreenletExit:
            answer.failed(UNFINISHED)
        else:
            answer.ended(self.clock())
        if answer.sent_ns is not None:
            self._monitor.sent(answer.sent_ns - possible_ns)
        answer.end_ns = self.clock() if answer.end_ns is None else answer.end_ns
        row = row_of((part.traffic.name, part.client.transport), question.spec, intended_ns, answer)
        if answer.error != UNFINISHED:
            _report(self._fire, part, row, answer)
        return row, answer


@dataclass(slots=True)
class _Course:
    """One chain while it is played."""

    player: Player
    part: Part
    chain: Workload
    rows: list[Row] = field(default_factory=list)
    _ended: SimpleQueue = field(default_factory=SimpleQueue)
    _ended_ns: dict[int, int] = field(default_factory=dict)
    _asking: Group = field(default_factory=Group)
    _freed_ns: int = 0  # when a cap last let somebody go

    def run(self, done: Done) -> None:
        """Until all has ended, or the run is over."""
        traffic = self.part.traffic
        dialogue = Dialogue(traffic.seed, traffic.vocabulary)
        arrivals = Arrivals(self.chain)
        try:
            while not arrivals.is_empty or len(self._ended_ns) < len(self.chain.requests):
                for spec in arrivals.due(self.player.clock()):
                    self._asking.spawn(self._ask, dialogue, spec)
                self._wait(arrivals)
        finally:
            self._asking.kill()
            done(self.rows)

    def _wait(self, arrivals: Arrivals) -> None:
        """For an end, or for the time at which something is due."""
        due = arrivals.next_time()
        left_s = None if due is None else max(due - self.player.clock(), 0) / NS_PER_S
        try:
            rid, ended_ns = self._ended.get(timeout=left_s)
        except Empty:
            return
        self._ended_ns[rid] = self._freed_ns = ended_ns
        arrivals.finished(rid, ended_ns)

    def _ask(self, dialogue: Dialogue, spec: RequestSpec) -> None:
        intended_ns = self._intended_ns(spec)
        # A request that a cap holds back is not the generator's lateness.
        capped = self.chain.parallel_max is not None
        possible_ns = max(intended_ns, self._freed_ns if capped else 0)
        question = dialogue.question(spec)
        row, answer = self.player.ask(self.part, question, (intended_ns, possible_ns))
        self.rows.append(row)
        dialogue.answered(spec, answer)
        assert answer.end_ns is not None
        self._ended.put((spec.rid, answer.end_ns))

    def _intended_ns(self, spec: RequestSpec) -> int:
        """When it was due: at its time, and after its predecessors and a pause for thought."""
        if not spec.after:
            return spec.arrival_ns + spec.think_ns
        return max(spec.arrival_ns, max(self._ended_ns[rid] for rid in spec.after) + spec.think_ns)


_NS_A_MS: Final = float(NS_PER_MS)


def _report(fire: Fire, part: Part, row: Row, answer: Answer) -> None:
    """Samples for Locust's own statistics, each quantity under its own type."""
    name = part.title
    context: dict[str, Any] = {
        tier: getattr(row, tier)
        for tier in ("hit_tokens", "device_tokens", "host_tokens", "storage_tokens")
    }
    samples = [
        ("TTFT", row.ttft_ns),
        ("TTFT from due", row.ttft_intended_ns),
        ("TPOT", row.tpot_ns),
        *(("ITL", gap) for gap in answer.gaps_ns),
    ]
    fire(
        request_type=part.client.transport.upper(),
        name=name,
        response_time=(row.end_to_end_ns or 0) / _NS_A_MS,
        response_length=len(answer.text),
        exception=RequestError(row.error) if row.error else None,
        context=context,
    )
    for kind, took_ns in samples if not row.error else ():
        if took_ns is not None:
            fire(
                request_type=kind,
                name=name,
                response_time=took_ns / _NS_A_MS,
                response_length=0,
                exception=None,
                context=context,
            )

"""Several instances behind a router on one virtual clock, sharing one L3: the simulator.

The clock leaps to whatever is due next: an arrival, a completion, a deadline. What is due at one
time reaches an instance as one batch of events, completions first, then arrivals.
Must not know: flags, files, the terminal. Called by: the command line, golden, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Final, Protocol

from refimpl.cluster.dispatch import RankRouter
from refimpl.cluster.ranks import RankError
from refimpl.cluster.router import Router
from refimpl.core.engine import Engine
from refimpl.facts import Finished
from refimpl.keys import PageKey, namespace_seed
from refimpl.messages import Answer, AnyEvent, Command, Reply, Step, Submit, Tick
from refimpl.run.record import Record
from refimpl.workload.arrivals import Arrivals
from refimpl.workload.request import RequestSpec, Workload

_NOBODY: Final = "no instance is left that could answer"


class Executor(Protocol):
    """Whoever carries out commands on the virtual clock; see ``LaneExecutor`` for the contract."""

    def tell(self, message: Submit | Reply) -> None:
        """A request begins or ends."""

    def submit(self, command: Command, now: int) -> None:
        """Start a command."""

    def next_due(self) -> int | None:
        """When the next thing ends, in ns."""

    def pop_due(self, now: int) -> list[AnyEvent]:
        """All that ends at the earliest due time. Raises RankError for an instance at its end."""


class Instance:
    """An engine and the lanes that carry out what it orders, with bytes or without."""

    def __init__(self, engine: Engine, lanes: Executor) -> None:
        self.engine = engine
        self.lanes = lanes
        self.inbox: list[AnyEvent] = []
        self.error = ""  # why nobody answers here any more

    def next_time(self) -> int | None:
        """When something happens here by itself, in ns; nothing does once it has stopped."""
        if self.error:
            return None
        due, deadline = self.lanes.next_due(), self.engine.deadline()
        if due is None or deadline is None:
            return deadline if due is None else due
        return min(due, deadline)

    def turn(self, now: int) -> Step:
        """Hand the engine what is due and have its orders carried out. RankError: it is at its end."""
        events: list[AnyEvent] = []
        while (due := self.lanes.next_due()) is not None and due <= now:
            events.extend(self.lanes.pop_due(now))
        for event in self.inbox:
            if isinstance(event, Submit):
                self.lanes.tell(event)
        events.extend(self.inbox)
        self.inbox.clear()
        step = self.engine.handle(events or (Tick(),), now)
        for command in step.commands:
            if isinstance(command, Reply):
                self.lanes.tell(command)
            elif not isinstance(command, Answer):
                self.lanes.submit(command, now)
        return step


class World:
    """The instances, their clock, and the record of what they decide."""

    def __init__(
        self, instances: Sequence[Instance], router: Router | RankRouter, page_size: int
    ) -> None:
        self.instances = instances
        self.record = Record()
        self._router = router
        self._page_size = page_size
        self.now = 0
        self._placed: dict[int, int] = {}  # rid -> instance, while it is not over
        self._injected: list[tuple[int, int, int, AnyEvent]] = []  # heap: time, order, instance
        self._injections = 0
        self.after_turn: Callable[[Instance, Step], None] | None = None  # tests look in here
        self._arrivals = Arrivals(Workload("nothing", []))  # of the workload that runs
        self._progress: Callable[[int], None] | None = None

    def inject(self, at_ns: int, instance: int, event: AnyEvent) -> None:
        """Have ``event`` reach an instance at that time, or next if it has passed: an abort, a flush."""
        self._injections += 1
        heappush(self._injected, (at_ns, self._injections, instance, event))

    def run(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Record:
        """Send the workload and run until nothing is left to do; ``progress`` hears of each end."""
        arrivals = self._arrivals = Arrivals(workload)
        self._progress = progress
        dues = [instance.next_time() for instance in self.instances]
        while (at := self._earliest(arrivals, dues)) is not None:
            self.now = max(self.now, at)
            for spec in arrivals.due(self.now):
                self._send(spec)
            while self._injected and self._injected[0][0] <= self.now:
                _, _, index, event = heappop(self._injected)
                self.instances[index].inbox.append(event)
            for index, instance in enumerate(self.instances):
                due = dues[index]
                if instance.inbox or (due is not None and due <= self.now):
                    self._turn(index, instance)
                    dues[index] = instance.next_time()
        assert arrivals.is_empty and not self._placed, "the world stands still with work left"
        return self.record

    def _earliest(self, arrivals: Arrivals, dues: Sequence[int | None]) -> int | None:
        """When something happens next, anywhere."""
        first = arrivals.next_time()
        if self._injected and (first is None or self._injected[0][0] < first):
            first = self._injected[0][0]
        for at in dues:
            if at is not None and (first is None or at < first):
                first = at
        return first

    def _turn(self, index: int, instance: Instance) -> None:
        if instance.error:
            instance.inbox.clear()  # nobody reads it any more
            return
        try:
            step = instance.turn(self.now)
        except RankError as error:
            step = self._stopped(index, str(error))
        self.record.take(step, index, self.now)
        for command in step.commands:
            if isinstance(command, Reply) and command.finish:
                self._router.finished(self._placed.pop(command.rid))
                self._over(command.rid)
        if self.after_turn is not None:
            self.after_turn(instance, step)

    def _stopped(self, index: int, why: str) -> Step:
        """The end of an instance: its requests fail, and it gets no others. Its slots stay as they are."""
        instance = self.instances[index]
        instance.error = why
        instance.inbox.clear()
        self._router.left(index)
        tokens = {request.rid: request.generated for request in instance.engine.requests()}
        rids = [rid for rid, worker in self._placed.items() if worker == index]
        return _failed({rid: tokens.get(rid, 0) for rid in rids}, why)

    def _over(self, rid: int) -> None:
        self._arrivals.finished(rid, self.now)
        if self._progress is not None:
            self._progress(1)

    def _send(self, spec: RequestSpec) -> None:
        if not self._router.has_workers:
            self._refuse(spec)
            return
        worker = self._router.choose(self._keys(spec), spec.session)
        self._router.started(worker)
        self._placed[spec.rid] = worker
        self.record.submitted(spec, worker, self.now)
        self.instances[worker].inbox.append(spec.submit())

    def _refuse(self, spec: RequestSpec) -> None:
        """There is nobody left to ask."""
        self.record.submitted(spec, 0, self.now)
        self.record.take(_failed({spec.rid: 0}, _NOBODY), 0, self.now)
        self._over(spec.rid)

    def _keys(self, spec: RequestSpec) -> list[PageKey]:
        """What the router is asked with; with one instance there is nothing to choose by."""
        if len(self.instances) == 1:
            return []
        seed = namespace_seed(spec.extra_key, spec.cache_salt, spec.lora_id)
        return spec.prompt.page_keys(self._page_size, seed)


def _failed(tokens: dict[int, int], why: str) -> Step:
    """Requests, with the tokens they have produced, that end with an error."""
    finish = f"error: {why}"
    replies = [Reply(rid, False, finish) for rid in tokens]
    return Step([*replies], [Finished(rid, count, finish) for rid, count in tokens.items()])

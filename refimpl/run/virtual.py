"""Real bytes under the virtual clock: lanes say when a thing ends, torch hands do it then.

A copy is made when its lane says that it has arrived, so whatever was reused too early shows. A
decode is computed when it starts, since only the model knows where it ends, and committed as far as
the lanes let it run. Must not know: what an engine decides. Called by: world.
"""

from __future__ import annotations

from msgspec.structs import replace

from refimpl.messages import (
    AnyEvent,
    BackedUp,
    BackUp,
    BatchDone,
    Command,
    Fetch,
    Fetched,
    Landed,
    Reply,
    RunBatch,
    Store,
    Stored,
    Submit,
    Withdraw,
)
from refimpl.run.hands import PageStore, Produced, TorchHands
from refimpl.run.lanes import LaneExecutor


class VirtualHands:
    """Lanes and torch hands as one executor, with the interface of the lanes."""

    def __init__(self, lanes: LaneExecutor, hands: TorchHands, pages: PageStore) -> None:
        self.lanes = lanes
        self.hands = hands
        self.outputs: dict[int, list[int]] = {}  # what each finished request produced
        self._pages = pages
        self._copies: dict[int, BackUp | Store | Fetch] = {}
        self._landed: dict[int, int] = {}  # of each fetch, pages in L2 so far
        self._prefill: RunBatch | None = None
        self._decoded: Produced | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is in progress."""
        return self.lanes.is_idle

    def next_due(self) -> int | None:
        """When the next thing ends, in ns."""
        return self.lanes.next_due()

    def tell(self, message: Submit | Reply) -> None:
        """A request begins or ends."""
        if isinstance(message, Submit):
            self.hands.expect(message)
        elif message.finish:
            self.outputs[message.rid] = self.hands.finished(message.rid)

    def submit(self, command: Command, now: int) -> None:
        """Start a command."""
        match command:
            case BackUp() | Store() | Fetch():
                self._copies[command.op] = command
            case Withdraw():
                self.hands.withdraw(command.rid)
            case RunBatch() if command.is_decode:
                self._decoded = self.hands.decode(command)
                command = replace(command, steps_max=self._decoded.steps)
            case RunBatch():
                self._prefill = command
            case _:
                pass
        self.lanes.submit(command, now)

    def pop_due(self, now: int) -> list[AnyEvent]:
        """What ends at the earliest due time, done and told."""
        return [self._finish(event) for event in self.lanes.pop_due(now)]

    def _finish(self, event: AnyEvent) -> AnyEvent:
        match event:
            case BatchDone():
                return self._finish_batch(event)
            case BackedUp():
                command = self._copies.pop(event.op)
                assert isinstance(command, BackUp)
                self.hands.back_up(command.l1_slots[: event.pages], command.l2_slots[: event.pages])
            case Stored():
                command = self._copies.pop(event.op)
                assert isinstance(command, Store)
                for key, slot in zip(command.keys[: event.pages], command.l2_slots, strict=False):
                    self._pages.put(key, self.hands.page_bytes(slot))
            case Landed() | Fetched():
                self._land(event)
            case _:
                pass
        return event

    def _land(self, event: Landed | Fetched) -> None:
        command = self._copies[event.op]
        assert isinstance(command, Fetch)
        for at in range(self._landed.get(event.op, 0), event.pages):
            self.hands.put_page(command.l2_slots[at], self._pages.get(command.keys[at]))
        self._landed[event.op] = event.pages
        if isinstance(event, Fetched):
            del self._copies[event.op], self._landed[event.op]

    def _finish_batch(self, event: BatchDone) -> BatchDone:
        if self._prefill is not None:
            produced = self.hands.prefill(self._prefill, event.loads_failed)
            self._prefill = None
        else:
            assert self._decoded is not None
            produced, self._decoded = self._decoded, None
        kept = self.hands.commit(produced, event.steps)
        return replace(event, tokens=kept.tokens, ended=kept.ended)

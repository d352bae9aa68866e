"""A server without a model: the lanes of the simulator on the wall clock, and made-up answers.

Every decision is the one a real instance would take; a batch ends when the cost model says so. Tokens
depend on prompt, sampling and position alone, so that the cache can change none.
Must not know: tensors, what an engine decides, HTTP. Called by: the server.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final
from zlib import crc32

from msgspec.structs import replace

from refimpl.config import ConfigError
from refimpl.keys import TokenPrompt
from refimpl.messages import (
    AnyEvent,
    BatchDone,
    Command,
    CutBatch,
    Reply,
    RunBatch,
    Submit,
    Withdraw,
)
from refimpl.model.choice import GREEDY, Sampling
from refimpl.run.live_loop import Inbox, Stepped
from refimpl.run.virtual_ranks import Lanes
from refimpl.storage.names import Namespace
from refimpl.units import Random

_LETTERS: Final = b"etaoinshrdlu cmfwypvbgkqjxz ETAOIN,."
_LANES: Final = {
    "load_back": "host_up",
    "backup": "host_down",
    "l3_read": "l3_read",
    "l3_write": "l3_write",
}  # by way
_PERIOD: Final = 997  # a prime, so that answers of one prompt and seed repeat late


def _text(length: int) -> array[int]:
    """``length`` bytes of what could be read aloud, as tokens of the byte tokenizer."""
    chance = Random(0)
    return array("I", [_LETTERS[chance.bits64() % len(_LETTERS)] for _ in range(length)])


_TEXT: Final = _text(_PERIOD)


@dataclass(slots=True)
class _Served:
    """One request: where in the text its answer begins, and what it has produced."""

    offset: int
    stops: frozenset[int]
    is_followed: bool
    produced: int = 0

    def next_tokens(self, ahead: int, count: int) -> list[int]:
        """``count`` tokens behind ``ahead`` that are not counted as produced yet."""
        start = (self.offset + self.produced + ahead) % _PERIOD
        tokens = _TEXT[start : start + count].tolist()
        while len(tokens) < count:
            tokens += _TEXT[: count - len(tokens)].tolist()
        return tokens

    def steps_to_stop(self, steps_max: int) -> int | None:
        """In how many steps a stop token comes; None: not within ``steps_max``."""
        if not self.stops:
            return None
        tokens = self.next_tokens(0, steps_max)
        return next((at + 1 for at, token in enumerate(tokens) if token in self.stops), None)


class NullExecutor:
    """Lanes in real time, with the interface of executors on the wall clock."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.inbox: Inbox = SimpleQueue()
        self._served: dict[int, _Served] = {}
        self._running: dict[int, _Served] = {}  # who decodes
        self._batch: RunBatch | None = None
        self._begun = 0
        self._told = 0  # steps of the batch in flight that were told to those who follow
        self._has_followers = False

    def tell(
        self, message: Submit | Reply, sampling: Sampling = GREEDY, *, is_followed: bool = False
    ) -> None:
        """A request begins or ends. Raises ConfigError for what only a model can do."""
        if isinstance(message, Reply):
            if message.finish:
                self._served.pop(message.rid, None)
                self._running.pop(message.rid, None)
            return
        if not isinstance(message.prompt, TokenPrompt):
            raise ConfigError("traces of block ids must be expanded to tokens first")
        seed = sampling.seed if sampling.temperature else 0
        offset = (crc32(message.prompt.tokens.tobytes()) + seed) % _PERIOD
        self._served[message.rid] = _Served(offset, sampling.stop_ids, is_followed)

    def submit(self, command: Command, now: int) -> None:
        """Start a command at ``now`` ns."""
        match command:
            case RunBatch():
                command = self._begin(command, now)
            case Withdraw():
                self._running.pop(command.rid, None)
            case CutBatch():
                pass  # what was told so far ended before now, where the lanes will cut
            case _:
                pass
        self.lanes.submit(command, now)

    def _begin(self, batch: RunBatch, now: int) -> RunBatch:
        if batch.is_decode:
            stops = [served.steps_to_stop(batch.steps_max) for served in self._running.values()]
            steps_max = min([batch.steps_max, *(steps for steps in stops if steps is not None)])
            batch = replace(batch, steps_max=steps_max)
        self._batch, self._begun, self._told = batch, now, 0
        self._has_followers = batch.is_decode and any(
            served.is_followed for served in self._running.values()
        )
        return batch

    def next_due(self) -> int | None:
        """When something ends, or a token is there for somebody who follows."""
        due = self.lanes.next_due()
        step = self._next_step_due()
        return due if step is None or (due is not None and due < step) else step

    def _next_step_due(self) -> int | None:
        batch = self._batch
        if batch is None or not self._has_followers or self._told + 1 >= batch.steps_max:
            return None  # the last step is the end of the batch
        steps = self._told + 1
        cost = self.lanes.cost
        return self._begun + cost.decode_ns(batch.running, batch.context_tokens, steps)

    def pop_due(self, now: int) -> list[AnyEvent | Stepped]:
        """All that has ended by ``now``."""
        ended: list[AnyEvent | Stepped] = []
        while (due := self.lanes.next_due()) is not None and due <= now:
            for event in self.lanes.pop_due(now):
                ended += self._finish(event) if isinstance(event, BatchDone) else [event]
        ahead = self._told
        while (due := self._next_step_due()) is not None and due <= now:
            self._told += 1
        if self._told > ahead:
            ended.append(self._stepped(ahead, self._told))
        return ended

    def _stepped(self, first: int, last: int) -> Stepped:
        """Tokens of those who follow, of the steps from ``first`` to before ``last``."""
        return Stepped(
            {
                rid: served.next_tokens(first, last - first)
                for rid, served in self._running.items()
                if served.is_followed
            }
        )

    def _finish(self, done: BatchDone) -> list[AnyEvent | Stepped]:
        """The end of the batch in flight: what was not told yet, then the completion with all tokens."""
        batch, self._batch = self._batch, None
        assert batch is not None, "a batch ends that was not begun"
        first, producing = 0, self._running
        if batch.is_decode:
            first = self._told
        else:
            producing = {
                item.rid: self._served[item.rid]
                for item in batch.items
                if item.is_last and item.rid in self._served and item.rid not in done.loads_failed
            }
            self._running |= producing
        fresh = {
            rid: served.next_tokens(first, done.steps - first)
            for rid, served in producing.items()
            if served.is_followed and done.steps > first
        }
        tokens = {rid: served.next_tokens(0, done.steps) for rid, served in producing.items()}
        for served in producing.values():
            served.produced += done.steps
        ended = tuple(rid for rid, said in tokens.items() if said[-1] in self._served[rid].stops)
        told: list[AnyEvent | Stepped] = [Stepped(fresh)] if fresh else []
        return [*told, replace(done, tokens=tokens, ended=ended)]

    def moved(self) -> dict[str, tuple[int, int]]:
        """(bytes, ns) of the copies so far, by way; of all ranks together."""
        cost, lanes = self.lanes.cost, {use.name: use for use in self.lanes.use()}
        page_bytes = cost.page_bytes * cost.tp_size
        return {
            way: (lanes[lane].pages * page_bytes, lanes[lane].busy_ns)
            for way, lane in _LANES.items()
        }

    def names(self) -> Namespace | None:
        """None: pages without bytes need no names."""
        return None

    def check(self) -> None:
        """There is no thread that could have stopped."""

    def close(self, *, is_idle: bool = True) -> None:
        """There is nothing to end."""

"""A circuit breaker: a store that fails, or hangs, is left alone for a while instead of waited for.

Closed, every call goes through. After ``failures`` calls in a row that raised or took longer than
``slow_ns``, or once one call has been under way for that long, it opens: every question is answered
with False at once, so a request costs what it costs without L3. After a pause one call is let through
as a trial: success closes the breaker, failure opens it again for twice as long, up to a maximum. A
trial that hangs counts as failed when it has hung for ``slow_ns``, so that a store which swallows
calls can't keep the breaker from ever trying again.
Must not know: what a store is, which clock this is. Called by: stack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Final

from refimpl.config import require
from refimpl.storage.backend import Backend, HostPage, delete_values
from refimpl.storage.tally import Tally
from refimpl.units import NS_PER_S

_LOG: Final = logging.getLogger(__name__)


class State(Enum):
    """What becomes of a call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When it opens, and for how long."""

    failures: int = 5
    slow_ns: int = 10 * NS_PER_S
    pause_ns: int = NS_PER_S
    pause_max_ns: int = 60 * NS_PER_S

    def __post_init__(self) -> None:
        require(self.failures >= 1, "breaker_failures must be at least 1")
        require(self.slow_ns > 0, "breaker_slow must be above 0 seconds")
        require(
            0 < self.pause_ns <= self.pause_max_ns,
            "breaker_pause must be above 0 seconds and at most breaker_pause_max",
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """A call under way. What it says of the store is void once the state has changed."""

    began_ns: int
    change: int


class Breaker:
    """Any backend behind a circuit breaker; ``clock`` tells monotonic nanoseconds."""

    def __init__(self, base: Backend, options: BreakerOptions, clock: Callable[[], int]) -> None:
        self._base = base
        self._options = options
        self._clock = clock
        self.tally = Tally(_LOG)
        self._lock = Lock()  # all below; never held over a call of the store
        self._state = State.CLOSED
        self._changes = 0
        self._calls: dict[int, _Call] = {}  # by the number of the call, in the order they began
        self._number = 0
        self._failed = 0  # calls in a row
        self._pause_ns = options.pause_ns
        self._until_ns = 0  # when OPEN ends

    @property
    def state(self) -> State:
        """What becomes of a call that comes now."""
        with self._lock:
            self._look(self._clock())
            return self._state

    # ---- the store ----------------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend; all False while the store is left alone."""
        return self._ask(lambda: self._base.exists(names), len(names))

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend; all False while the store is left alone."""
        return self._ask(lambda: self._base.get(names, pages), len(names))

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend; all False while the store is left alone."""
        return self._ask(lambda: self._base.set(names, pages), len(names))

    def delete(self, names: Sequence[str]) -> list[bool]:
        """See backend.delete_values; all False while the store is left alone."""
        return self._ask(lambda: delete_values(self._base, names), len(names))

    def clear(self) -> int:
        """See Backend. Whoever clears wants to know, so this is tried in any state."""
        return self._base.clear()

    def close(self) -> None:
        """See Backend."""
        self._base.close()

    # ---- the circuit --------------------------------------------------------------------------------

    def _ask(self, call: Callable[[], list[bool]], count: int) -> list[bool]:
        number = self._begin()
        if number is None:
            self.tally.add("skipped")
            return [False] * count
        try:
            answer = call()
        except BaseException:
            self._end(number, is_failed=True)
            raise
        self._end(number, is_failed=False)
        return answer

    def _begin(self) -> int | None:
        """The number of a call that may go through; None for one that may not."""
        with self._lock:
            now_ns = self._clock()
            self._look(now_ns)
            if self._state is State.OPEN and now_ns >= self._until_ns:
                self._change(State.HALF_OPEN, "one call is let through to try it")
            elif self._state is not State.CLOSED:
                return None
            self._number += 1
            self._calls[self._number] = _Call(now_ns, self._changes)
            return self._number

    def _look(self, now_ns: int) -> None:
        """Notice a call that hangs. Calls begin in order, so the first one decides."""
        for number, call in list(self._calls.items()):
            if now_ns - call.began_ns <= self._options.slow_ns:
                return
            del self._calls[number]  # its end is heard of no more
            self.tally.add("hanging")
            if call.change == self._changes:
                self._open(now_ns, "a call hangs")

    def _end(self, number: int, *, is_failed: bool) -> None:
        with self._lock:
            now_ns = self._clock()
            call = self._calls.pop(number, None)
            if call is None:
                return
            is_slow = now_ns - call.began_ns > self._options.slow_ns
            if is_failed or is_slow:
                self.tally.add("failed" if is_failed else "slow")
            if call.change == self._changes:
                self._judge(now_ns, is_bad=is_failed or is_slow)

    def _judge(self, now_ns: int, *, is_bad: bool) -> None:
        self._failed = self._failed + 1 if is_bad else 0
        if self._state is State.HALF_OPEN:
            if is_bad:
                self._open(now_ns, "the trial failed")
            else:
                self._pause_ns = self._options.pause_ns
                self._change(State.CLOSED, "the trial went well")
        elif self._failed >= self._options.failures:
            self._open(now_ns, f"{self._failed} calls in a row failed or were slow")

    def _open(self, now_ns: int, why: str) -> None:
        if self._state is State.HALF_OPEN:
            self._pause_ns = min(2 * self._pause_ns, self._options.pause_max_ns)
        self._until_ns = now_ns + self._pause_ns
        self._failed = 0
        self.tally.add("opened")
        self._change(State.OPEN, f"{why}; L3 is left alone for {self._pause_ns // 1_000_000} ms")

    def _change(self, state: State, why: str) -> None:
        self._state = state
        self._changes += 1
        _LOG.warning("storage breaker is %s: %s", state.value, why)

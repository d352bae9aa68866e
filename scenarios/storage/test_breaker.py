"""The circuit breaker: what fails is left alone, what works again is used again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.config import ConfigError
from refimpl.storage.backend import StorageError
from refimpl.storage.breaker import Breaker, BreakerOptions, State
from refimpl.storage.factory import open_backend
from refimpl.storage.faulty import Fault, FaultPlan, Faulty
from refimpl.storage.integrity import Integrity
from refimpl.units import NS_PER_S
from scenarios.storage.pages import (
    Clock,
    names,
    open_file,
    pages,
    payload,
    read_pages,
    setting,
)

OPTIONS = BreakerOptions(
    failures=3, slow_ns=10 * NS_PER_S, pause_ns=4 * NS_PER_S, pause_max_ns=10 * NS_PER_S
)
PATIENCE_S = 60  # for another thread to get somewhere; reached only when a test fails
_shelves = count()


class Built:
    """A store in memory that fails as planned, a breaker in front, a clock in hand."""

    def __init__(self, told: Any = None) -> None:
        base = open_backend("memory", setting(Path(), store=f"breaker {next(_shelves)}"))
        base.set(names(1), pages(1))
        self.clock = Clock()
        plan = told if isinstance(told, FaultPlan) else FaultPlan(told or {})
        self.faulty = Faulty(base, plan, wait=self.wait)
        self.breaker = Breaker(self.faulty, OPTIONS, self.clock)

    def wait(self, duration_ns: int) -> None:
        self.clock.now_ns += duration_ns

    def fail(self, times: int) -> None:
        for _ in range(times):
            with pytest.raises(StorageError):
                self.breaker.exists(names(1))

    @property
    def calls(self) -> int:
        """Calls that reached the store."""
        return self.faulty.calls("exists")


def errors(*numbers: int) -> dict[tuple[str, int], Fault]:
    return {("exists", number): Fault.ERROR for number in numbers}


def test_failures_in_a_row_open_it_and_then_nothing_reaches_the_store() -> None:
    built = Built(errors(0, 1, 2))
    built.fail(3)
    assert built.breaker.state is State.OPEN
    assert built.breaker.exists(names(1, 2)) == [False, False]
    assert read_pages(built.breaker, 1) == [None]
    assert built.breaker.set(names(2), pages(2)) == [False]
    assert built.breaker.delete(names(1)) == [False]
    assert built.calls == 3
    assert built.faulty.calls("get") == built.faulty.calls("set") == 0
    assert built.breaker.tally["skipped"] == 4


def test_failures_that_are_not_in_a_row_do_not_open_it() -> None:
    built = Built(errors(0, 1, 3, 4, 6, 7))
    for _ in range(3):
        built.fail(2)
        assert built.breaker.exists(names(1)) == [True]
    assert built.breaker.state is State.CLOSED


def test_an_outage_ends_with_the_first_trial_after_it() -> None:
    """A minute of failures: few calls are tried, none is waited for, and then all is as before."""
    built = Built(errors(*range(50)))
    seconds = 0
    while built.clock.now_ns < Clock().now_ns + 60 * NS_PER_S:
        built.clock.pass_seconds(1)
        seconds += 1
        with contextlib.suppress(StorageError):
            assert built.breaker.exists(names(1)) == [False]
    assert seconds == 60
    assert built.calls <= 3 + 60 // 4
    built.faulty.recover()
    built.clock.pass_seconds(OPTIONS.pause_max_ns // NS_PER_S)
    assert built.breaker.exists(names(1)) == [True]
    assert built.breaker.state is State.CLOSED
    assert read_pages(built.breaker, 1) == [payload(1)]


def test_the_pause_grows_to_its_maximum_and_is_short_again_after_success() -> None:
    built = Built(errors(0, 1, 2, 3, 4, 5, 7, 8, 9))
    built.fail(3)
    for pause in (4, 8, 10):
        built.clock.pass_seconds(pause - 1)
        assert built.breaker.exists(names(1)) == [False]
        built.clock.pass_seconds(1)
        built.fail(1)
    built.clock.pass_seconds(10)
    assert built.breaker.exists(names(1)) == [True]
    built.fail(3)
    built.clock.pass_seconds(4)
    assert built.breaker.exists(names(1)) == [True]
    assert built.breaker.tally["opened"] == 5


def test_slow_calls_count_as_failures_and_their_answers_are_used() -> None:
    slow = FaultPlan({("get", n): Fault.SLOW for n in range(3)}, slow_ns=10 * NS_PER_S + 1)
    built = Built(slow)
    for _ in range(3):
        assert built.breaker.state is State.CLOSED
        assert read_pages(built.breaker, 1) == [payload(1)]
    assert built.breaker.state is State.OPEN
    assert built.breaker.tally["slow"] == 3


def test_calls_that_take_as_long_as_they_may_are_not_slow() -> None:
    built = Built(FaultPlan({("get", n): Fault.SLOW for n in range(9)}, slow_ns=10 * NS_PER_S))
    for _ in range(9):
        assert read_pages(built.breaker, 1) == [payload(1)]
    assert built.breaker.state is State.CLOSED


def hanging(built: Built, call: Callable[[], object]) -> Thread:
    """A thread whose call hangs in the store now."""
    built.faulty.hanging.clear()
    thread = Thread(target=call, daemon=True)  # a test that fails here leaves it hanging
    thread.start()
    assert built.faulty.hanging.wait(PATIENCE_S)
    return thread


def test_while_a_call_hangs_others_are_answered_at_once() -> None:
    built = Built({("get", 0): Fault.HANG})
    found: list[bytes | None] = []
    thread = hanging(built, lambda: found.extend(read_pages(built.breaker, 1)))
    assert built.breaker.exists(names(1)) == [True]  # it is not late yet
    built.clock.pass_seconds(11)
    assert built.breaker.exists(names(1)) == [False]
    assert built.breaker.state is State.OPEN
    assert built.breaker.tally["hanging"] == 1
    built.clock.pass_seconds(4)
    assert built.breaker.exists(names(1)) == [True]  # the trial: one stuck call is not the store
    assert built.breaker.state is State.CLOSED
    assert found == []
    built.faulty.released.set()
    thread.join()
    assert found == [payload(1)]
    assert built.breaker.state is State.CLOSED


def test_a_trial_that_hangs_counts_as_failed_and_another_follows() -> None:
    built = Built({**errors(0, 1, 2), ("get", 0): Fault.HANG})
    built.fail(3)
    built.clock.pass_seconds(4)
    thread = hanging(built, lambda: read_pages(built.breaker, 1))
    assert built.breaker.state is State.HALF_OPEN
    assert built.breaker.exists(names(1)) == [False]
    built.clock.pass_seconds(11)
    assert built.breaker.state is State.OPEN
    built.clock.pass_seconds(7)
    assert built.breaker.exists(names(1)) == [False]  # the pause has doubled
    built.clock.pass_seconds(1)
    assert built.breaker.exists(names(1)) == [True]
    built.faulty.released.set()
    thread.join()
    assert built.breaker.state is State.CLOSED


def test_one_call_alone_is_the_trial() -> None:
    built = Built({**errors(0, 1, 2), ("get", 0): Fault.HANG})
    built.fail(3)
    built.clock.pass_seconds(4)
    found: list[bytes | None] = []
    thread = hanging(built, lambda: found.extend(read_pages(built.breaker, 1)))
    for _ in range(5):
        assert read_pages(built.breaker, 1) == [None]
    assert built.faulty.calls("get") == 1
    built.faulty.released.set()
    thread.join()
    assert found == [payload(1)]
    assert built.breaker.state is State.CLOSED


def test_a_call_from_before_says_nothing_of_the_store_as_it_is_now() -> None:
    """It began before the breaker opened and closed again, and ends well amid new failures."""
    built = Built({**errors(0, 1, 2, 4, 5, 6), ("get", 0): Fault.SLOW})

    def meanwhile(_: int) -> None:
        built.fail(3)
        built.clock.pass_seconds(4)
        assert built.breaker.exists(names(1)) == [True]
        built.fail(2)

    built.faulty.wait = meanwhile
    assert read_pages(built.breaker, 1) == [payload(1)]
    assert built.breaker.state is State.CLOSED
    built.fail(1)
    assert built.breaker.state is State.OPEN


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    built = Built(errors(0, 1, 2))
    built.fail(3)
    for _ in range(50):
        built.breaker.exists(names(1))
    built.clock.pass_seconds(4)
    for _ in range(50):
        built.breaker.exists(names(1))
    lines = [record.message for record in caplog.records]
    assert [line.split(":")[0].rpartition(" ")[2] for line in lines] == [
        "open",
        "half_open",
        "closed",
    ]
    assert "left alone for 4000 ms" in lines[0]


def test_clear_is_tried_in_any_state() -> None:
    built = Built(errors(0, 1, 2))
    built.fail(3)
    assert built.breaker.clear() == 1


def test_a_file_store_that_fails_is_skipped_and_its_pages_are_there_afterwards(
    tmp_path: Path,
) -> None:
    clock = Clock()
    plan = FaultPlan({("get", number): Fault.ERROR for number in range(3)})
    store = Breaker(Integrity(Faulty(open_file(tmp_path), plan), is_required=True), OPTIONS, clock)
    store.set(names(1, 2), pages(1, 2))
    for _ in range(3):
        with pytest.raises(StorageError):
            read_pages(store, 1)
    assert read_pages(store, 1, 2) == [None, None]
    clock.pass_seconds(4)
    assert read_pages(store, 1, 2) == [payload(1), payload(2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failures": 0}, "breaker_failures"),
        ({"slow_ns": 0}, "breaker_slow"),
        ({"pause_ns": 0}, "breaker_pause"),
        ({"pause_ns": 9, "pause_max_ns": 8}, "at most breaker_pause_max"),
    ],
)
def test_options_that_cant_be_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BreakerOptions(**options)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_any_history_ends_closed_once_the_store_is_well(history: list[tuple[bool, int]]) -> None:
    """No history keeps it open for longer than the longest pause, and it counts what it does."""
    failing = {number for number, (is_failing, _) in enumerate(history) if is_failing}
    built = Built(errors(*failing))
    asked = 0
    for _, seconds in history:
        built.clock.pass_seconds(seconds)
        asked += 1
        with contextlib.suppress(StorageError):
            built.breaker.exists(names(1))
    assert built.breaker.tally["skipped"] + built.calls == asked
    built.faulty.recover()
    built.clock.pass_seconds(10)
    assert built.breaker.exists(names(1)) == [True]
    assert built.breaker.state is State.CLOSED

"""The file backend among processes: killed writers, readers beside writers, many in one directory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from refimpl.units import Random
from scenarios.storage.file_process import SLOW_NBYTES, STEP
from scenarios.storage.pages import (
    NBYTES,
    bytes_on_disk,
    names,
    open_file,
    pages,
    payload,
    read_pages,
)
from scenarios.tidy import ROOT

COUNT = 1000


@contextmanager
def process(*told: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the directory; it has said "ready" and is ended here."""
    running = subprocess.Popen(
        [sys.executable, "-m", "scenarios.storage.file_process", *map(str, told)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with running:
            try:
                assert heard(running) == "ready"
                yield running
            finally:
                running.kill()
    finally:
        assert running.poll() is not None


def heard(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def send(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".*.tmp"))


@pytest.mark.live
@pytest.mark.parametrize("cap", [10 * COUNT * NBYTES, 300 * NBYTES], ids=["roomy", "tight"])
def test_after_a_writer_was_killed_every_page_is_whole_and_the_index_right(
    tmp_path: Path, cap: int
) -> None:
    random = Random(7)
    for _ in range(3):
        with process("fill", tmp_path, cap, 0, COUNT) as writer:
            written = 0
            last = random.between(40, 600)
            while written < last:
                written = int(heard(writer))
            writer.send_signal(signal.SIGKILL)
            assert writer.wait() == -signal.SIGKILL
        assert bytes_on_disk(tmp_path) <= cap
        store = open_file(tmp_path, max_size=cap)
        assert leftovers(tmp_path) == []
        assert store.used_bytes == bytes_on_disk(tmp_path)
        assert store.pages == len(list(tmp_path.glob("*.bin"))) > 0
        found = [read_pages(store, number)[0] for number in range(COUNT)]
        assert all(value in (None, payload(number)) for number, value in enumerate(found))
        assert len(found) - found.count(None) == store.pages
        assert all(store.set(names(*range(8)), pages(*range(8))))
        store.clear()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.live
def test_a_page_is_not_there_before_it_is_complete_and_a_killed_writer_leaves_nothing(
    tmp_path: Path,
) -> None:
    readers = [open_file(tmp_path) for _ in range(4)]

    def nobody_sees(number: int) -> None:
        for reader in readers:
            assert reader.exists(names(number)) == [False]
            assert read_pages(reader, number, nbytes=SLOW_NBYTES) == [None]

    for ends, number in ((True, 1), (False, 2)):
        with process("slowly", tmp_path, number) as writer:
            nobody_sees(number)
            for done in range(STEP, SLOW_NBYTES + 1 if ends else SLOW_NBYTES // 2, STEP):
                send(writer)
                assert int(heard(writer)) == done
                if done < SLOW_NBYTES:  # with the last step it may have its name at any moment
                    nobody_sees(number)
            if ends:
                assert heard(writer) == "stored"
    assert len(leftovers(tmp_path)) == 1
    for reader in readers:
        assert read_pages(reader, 1, 2, nbytes=SLOW_NBYTES) == [payload(1, SLOW_NBYTES), None]
    store = open_file(tmp_path)
    assert leftovers(tmp_path) == []
    assert store.set(names(2), pages(2, nbytes=SLOW_NBYTES)) == [True]
    assert read_pages(store, 2, nbytes=SLOW_NBYTES) == [payload(2, SLOW_NBYTES)]


@pytest.mark.live
def test_four_processes_evict_and_clear_one_directory_at_once(tmp_path: Path) -> None:
    told = [("churn", tmp_path, 20 * NBYTES, seed) for seed in range(4)]
    with (
        process(*told[0]) as a,
        process(*told[1]) as b,
        process(*told[2]) as c,
        process(*told[3]) as d,
    ):
        running = (a, b, c, d)
        for each in running:
            send(each)
        assert [heard(each) for each in running] == ["done"] * 4
        assert [each.wait() for each in running] == [0] * 4
    store = open_file(tmp_path, max_size=20 * NBYTES)
    assert leftovers(tmp_path) == []
    assert store.used_bytes == bytes_on_disk(tmp_path)


def test_long_sessions_never_get_pages_of_others(tmp_path: Path) -> None:
    """50 sessions of 20 pages through a store that can't hold them all, in four threads."""
    store = open_file(tmp_path, max_size=900 * NBYTES)
    wrong: list[int] = []
    loaded = [0] * 4

    def work(thread: int) -> None:
        random = Random(thread)
        while loaded[thread] < 2500:
            session = random.below(50)
            numbers = range(100 * session, 100 * session + 20)
            for number, found in zip(numbers, read_pages(store, *numbers), strict=True):
                loaded[thread] += found is not None
                if found not in (None, payload(number)):
                    wrong.append(number)
            store.set(names(*numbers), pages(*numbers))

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(loaded) >= 10_000
    assert store.tally["evicted"] > 0
    assert bytes_on_disk(tmp_path) <= 900 * NBYTES


class AnyOrder(RuleBasedStateMachine):
    """Two instances in one directory, any order of calls: no wrong page, and the sums are right."""

    folder: Path
    numbers = st.lists(st.integers(0, 29), min_size=1, max_size=4, unique=True)
    which = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.stores = [open_file(self.folder, max_size=10 * NBYTES) for _ in range(2)]
        self.stores[0].clear()

    @rule(which=which, numbers=numbers)
    def store_pages(self, which: int, numbers: list[int]) -> None:
        done = self.stores[which].set(names(*numbers), pages(*numbers))
        assert done == [True] * len(numbers)

    @rule(which=which, numbers=numbers)
    def read(self, which: int, numbers: list[int]) -> None:
        found = read_pages(self.stores[which], *numbers)
        assert [value in (None, payload(n)) for value, n in zip(found, numbers, strict=True)] == [
            True
        ] * len(numbers)
        there = self.stores[which].exists(names(*numbers))
        assert there == [value is not None for value in found]

    @rule(which=which, numbers=numbers)
    def delete(self, which: int, numbers: list[int]) -> None:
        self.stores[which].delete(names(*numbers))
        assert not any(self.stores[1 - which].exists(names(*numbers)))

    @rule(which=which)
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = open_file(self.folder, max_size=10 * NBYTES)
        assert self.stores[which].used_bytes == bytes_on_disk(self.folder)

    @precondition(lambda self: bytes_on_disk(self.folder) > 0)
    @rule(which=which)
    def clear(self, which: int) -> None:
        assert self.stores[which].clear() > 0
        assert bytes_on_disk(self.folder) == 0

    @invariant()
    def the_directory_is_about_as_large_as_it_may_be(self) -> None:
        # Each reads the directory again before the write that follows one of its own, so what one
        # can miss is what the other wrote since, and what it adds to that is one call of four pages.
        assert bytes_on_disk(self.folder) <= (10 + 4) * NBYTES
        assert leftovers(self.folder) == []

    def teardown(self) -> None:
        for store in self.stores:
            store.close()


def test_any_order_of_calls_of_two_instances_keeps_pages_and_sums_right(tmp_path: Path) -> None:
    machine = type("InThisFolder", (AnyOrder,), {"folder": tmp_path})
    test = machine.TestCase()
    test.settings = settings(max_examples=30, stateful_step_count=30)
    test.runTest()

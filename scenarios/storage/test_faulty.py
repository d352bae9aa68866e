"""The store that fails as told: tests lean on it, so it is tested itself."""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path
from threading import Thread

import pytest

from refimpl.storage.backend import StorageError
from refimpl.storage.factory import open_backend
from refimpl.storage.faulty import Fault, FaultPlan, Faulty
from scenarios.storage.pages import names, pages, payload, read_pages, setting

PATIENCE_S = 60  # for another thread to get somewhere; reached only when a test fails
_shelves = count()


def faulty(plan: FaultPlan, waited: list[int] | None = None) -> Faulty:
    base = open_backend("memory", setting(Path(), store=f"faulty {next(_shelves)}"))
    base.set(names(1, 2), pages(1, 2))
    return Faulty(base, plan, (waited if waited is not None else []).append)


def test_a_store_without_faults_is_the_store() -> None:
    store = faulty(FaultPlan())
    assert store.exists(names(1, 3)) == [True, False]
    assert store.set(names(3), pages(3)) == [True]
    assert read_pages(store, 3, 2) == [payload(3), payload(2)]
    assert store.delete(names(1)) == [True]
    assert store.clear() == 2
    assert store.tally.snapshot() == {}


def test_a_script_names_the_calls_that_fail() -> None:
    script = {
        ("exists", 1): Fault.ERROR,
        ("get", 0): Fault.VANISHED,
        ("set", 0): Fault.FULL,
        ("get", 2): Fault.SLOW,
    }
    waited: list[int] = []
    store = faulty(FaultPlan(script, slow_ns=7), waited)
    assert store.exists(names(1)) == [True]
    with pytest.raises(StorageError, match="as planned"):
        store.exists(names(1))
    assert store.exists(names(1)) == [True]
    assert store.set(names(3), pages(3)) == [False]
    assert [read_pages(store, 1) for _ in range(3)] == [[None], [payload(1)], [payload(1)]]
    assert waited == [7]
    assert store.tally.snapshot() == {"error": 1, "full": 1, "slow": 1, "vanished": 1}


def test_what_vanished_is_said_to_be_there_and_is_not_read() -> None:
    store = faulty(FaultPlan({("exists", 0): Fault.VANISHED}))
    assert store.exists(names(7)) == [True]
    assert read_pages(store, 7) == [None]


def test_a_corrupt_read_differs_in_one_bit() -> None:
    (found,) = read_pages(faulty(FaultPlan({("get", 0): Fault.CORRUPT})), 1)
    assert found is not None
    differing = [a ^ b for a, b in zip(found, payload(1), strict=True)]
    assert sum(byte.bit_count() for byte in differing) == 1


def test_a_short_read_leaves_the_end_as_it_was_and_says_all_is_well() -> None:
    (found,) = read_pages(faulty(FaultPlan({("get", 0): Fault.SHORT})), 1)
    assert found is not None
    same = next(at for at in range(1001) if found[: at + 1] != payload(1)[: at + 1])
    assert set(found[same:]) <= {0xEE, *payload(1)}
    assert found.endswith(b"\xee")


def test_a_call_hangs_until_it_is_released() -> None:
    store = faulty(FaultPlan({("exists", 0): Fault.HANG}))
    found: list[bool] = []
    thread = Thread(target=lambda: found.extend(store.exists(names(1))), daemon=True)
    thread.start()
    assert store.hanging.wait(PATIENCE_S)
    assert found == []
    store.released.set()
    thread.join()
    assert found == [True]
    store.close()


def test_a_store_may_refuse_to_open() -> None:
    with pytest.raises(StorageError, match="refuses to open"):
        faulty(FaultPlan(refuses_to_open=True))


def outcomes(plan: FaultPlan) -> list[str]:
    store = faulty(plan)
    seen = []
    for _ in range(200):
        before = store.tally.snapshot()
        with contextlib.suppress(StorageError):
            store.exists(names(1))
        after = store.tally.snapshot()
        seen.append("".join(kind for kind in after if after[kind] != before.get(kind)))
    return seen


def test_a_seed_decides_and_chances_are_what_they_say() -> None:
    chances = {Fault.ERROR: 250_000, Fault.VANISHED: 100_000}
    first = outcomes(FaultPlan(per_million=chances, seed=3))
    assert outcomes(FaultPlan(per_million=chances, seed=3)) == first
    assert outcomes(FaultPlan(per_million=chances, seed=4)) != first
    assert 30 <= first.count("error") <= 70
    assert 8 <= first.count("vanished") <= 34


def test_a_scripted_fault_shifts_no_draw() -> None:
    chances = {Fault.ERROR: 250_000}
    free = outcomes(FaultPlan(per_million=chances, seed=3))
    told = outcomes(FaultPlan({("exists", 0): Fault.SLOW}, per_million=chances, seed=3))
    assert told[0] == "slow"
    assert told[1:] == free[1:]


def test_a_fault_that_cant_befall_a_call_is_refused() -> None:
    with pytest.raises(AssertionError):
        FaultPlan({("exists", 0): Fault.FULL})

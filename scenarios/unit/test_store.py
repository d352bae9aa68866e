"""Facts of the L3 model without bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.config import ConfigError
from refimpl.run.store import SharedStore


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def store_of(*numbers: int, capacity: int | None = None) -> SharedStore:
    store = SharedStore(capacity)
    for key in keys(*numbers):
        store.put([key])
    return store


def test_a_leading_run_ends_at_the_first_gap() -> None:
    store = store_of(1, 2, 4)
    assert store.leading_run(keys(1, 2, 3, 4)) == 2
    assert store.leading_run(keys(3, 1)) == 0
    assert store.leading_run(keys(1, 2)) == 2
    assert store.leading_run([]) == 0


def test_a_second_put_keeps_the_page_and_is_counted() -> None:
    store = store_of(1)
    store.put(keys(1))
    assert (store.puts, store.puts_existing, len(store)) == (2, 1, 1)


def test_a_full_store_drops_the_page_that_was_used_least_recently() -> None:
    store = store_of(1, 2, 3, capacity=3)
    assert store.get(keys(1)[0])
    store.put(keys(4))
    assert [key in store for key in keys(1, 2, 3, 4)] == [True, False, True, True]
    assert store.evicted == 1


def test_a_page_found_before_a_write_counts_as_used() -> None:
    store = store_of(1, 2, capacity=2)
    assert store.missing(keys(1, 3)) == keys(3)
    store.put(keys(3))
    assert keys(1)[0] in store
    assert keys(2)[0] not in store
    assert store.puts_skipped == 1


def test_asking_for_a_page_keeps_it_no_longer() -> None:
    store = store_of(1, 2, capacity=2)
    store.leading_run(keys(1))
    store.put(keys(3))
    assert keys(1)[0] not in store


def test_a_page_that_is_not_there_is_a_miss() -> None:
    store = store_of(1)
    assert not store.get(keys(2)[0])
    assert (store.gets, store.gets_missed) == (1, 1)


def test_clearing_forgets_pages_and_keeps_counts() -> None:
    store = store_of(1, 2)
    store.clear()
    assert (len(store), store.puts) == (0, 2)


def test_a_store_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        SharedStore(0)


@given(st.lists(st.tuples(st.sampled_from("pg"), st.integers(0, 9))), st.integers(1, 5))
def test_the_store_equals_a_list_ordered_by_last_use(
    calls: list[tuple[str, int]], capacity: int
) -> None:
    store, model = SharedStore(capacity), list[bytes]()
    for call, number in calls:
        [key] = keys(number)
        if call == "g":
            assert store.get(key) == (key in model)
        if key in model:
            model.remove(key)
            model.append(key)
        elif call == "p":
            model = [*model, key][-capacity:]
        if call == "p":
            store.put([key])
        assert [name for name in keys(*range(10)) if name in store] == sorted(model)

"""Checked pages: what was not written is never an answer, and its place can be written again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.storage.backend import Backend, HostPage
from refimpl.storage.factory import open_backend
from refimpl.storage.faulty import Fault, FaultPlan, Faulty
from refimpl.storage.integrity import CHECKSUM_BYTES, Integrity, checksum
from refimpl.storage.names import sidecar
from scenarios.storage.pages import (
    NBYTES,
    empty,
    file_of,
    name,
    names,
    open_file,
    page,
    pages,
    payload,
    read_pages,
    setting,
    value,
)

_shelves = count()


def memory(tmp_path: Path) -> Backend:
    """A store of its own in memory."""
    told = setting(tmp_path, store=f"integrity {next(_shelves)}")
    return open_backend("memory", told)


def sum_file(folder: Path, number: int) -> Path:
    return folder / f"{sidecar(name(number))}.bin"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << 3
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def drop(path: Path) -> None:
    path.unlink()


def test_a_page_and_its_checksum_are_values_of_their_own(tmp_path: Path) -> None:
    store = Integrity(open_file(tmp_path), is_required=False)
    store.set(names(1), pages(1))
    assert file_of(tmp_path, 1).read_bytes() == payload(1)
    assert sum_file(tmp_path, 1).read_bytes() == checksum(name(1), page(payload(1)))
    assert sum_file(tmp_path, 1).stat().st_size == CHECKSUM_BYTES
    assert read_pages(store, 1, 2) == [payload(1), None]
    assert store.tally["verified"] == 1


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4), st.integers(0, 2399))
def test_a_checksum_depends_on_every_bit_and_not_on_pieces(
    content: bytes, cuts: list[int], bit: int
) -> None:
    whole = checksum("a", page(content))
    assert checksum("a", page(content, *sorted(min(at, len(content)) for at in cuts))) == whole
    assert checksum("b", page(content)) != whole
    assert checksum("a", page(content + b"\0")) != whole
    if content:
        other = bytearray(content)
        other[bit // 8 % len(content)] ^= 1 << bit % 8
        assert checksum("a", page(other)) != whole


@pytest.mark.parametrize("is_required", [False, True], ids=["verify", "require"])
@pytest.mark.parametrize("harm", [flip, cut, zero])
@pytest.mark.parametrize("where", [file_of, sum_file], ids=["page", "checksum"])
def test_a_harmed_page_or_checksum_is_a_miss_and_can_be_written_again(
    tmp_path: Path,
    is_required: bool,
    harm: Callable[[Path], None],
    where: Callable[[Path, int], Path],
) -> None:
    store = Integrity(open_file(tmp_path), is_required=is_required)
    store.set(names(1, 2, 3), pages(1, 2, 3))
    harm(where(tmp_path, 2))
    assert read_pages(store, 1, 2, 3) == [payload(1), None, payload(3)]
    assert store.set(names(1, 2, 3), pages(1, 2, 3)) == [True] * 3
    assert read_pages(store, 1, 2, 3) == [payload(1), payload(2), payload(3)]


def test_two_pages_that_changed_places_are_misses_even_with_their_checksums(
    tmp_path: Path,
) -> None:
    store = Integrity(open_file(tmp_path), is_required=False)
    for is_with_checksums in (False, True):
        store.set(names(1, 2), pages(1, 2))
        for where in (file_of, sum_file) if is_with_checksums else (file_of,):
            first, second = where(tmp_path, 1), where(tmp_path, 2)
            shutil.move(first, tmp_path / "aside")
            shutil.move(second, first)
            shutil.move(tmp_path / "aside", second)
        assert read_pages(store, 1, 2) == [None, None]
    assert store.tally["mismatches"] == 4


def test_a_mismatch_is_logged_once_and_counted_always(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Integrity(open_file(tmp_path), is_required=False)
    store.set(names(*range(5)), pages(*range(5)))
    for number in range(5):
        flip(file_of(tmp_path, number))
        assert read_pages(store, number) == [None]
    assert store.tally["mismatches"] == 5
    assert len(caplog.records) == 1


def test_a_page_without_checksum_is_taken_unless_one_is_required(tmp_path: Path) -> None:
    base = open_file(tmp_path)
    base.set(names(1), pages(1))
    lenient, strict = Integrity(base, is_required=False), Integrity(base, is_required=True)
    assert lenient.exists(names(1)) == [True]
    assert read_pages(lenient, 1) == [payload(1)]
    assert lenient.tally["accepted_unchecked"] == 1
    assert strict.exists(names(1)) == [False]


def test_a_page_whose_checksum_was_lost_in_a_crash_is_repaired_by_writing_it(
    tmp_path: Path,
) -> None:
    store = Integrity(open_file(tmp_path), is_required=True)
    store.set(names(1, 2), pages(1, 2))
    drop(sum_file(tmp_path, 1))
    assert store.exists(names(1, 2)) == [False, True]
    assert store.set(names(1), pages(1)) == [True]
    assert store.exists(names(1)) == [True]
    assert read_pages(store, 1) == [payload(1)]


def test_a_required_checksum_that_is_missing_makes_a_read_a_miss(tmp_path: Path) -> None:
    store = Integrity(open_file(tmp_path), is_required=True)
    store.set(names(1), pages(1))
    drop(sum_file(tmp_path, 1))
    assert read_pages(store, 1) == [None]
    assert store.tally["unchecked"] == 1


@pytest.mark.parametrize("is_required", [False, True], ids=["verify", "require"])
def test_a_checksum_that_outlived_its_page_does_not_judge_the_next_one(
    tmp_path: Path, is_required: bool
) -> None:
    store = Integrity(open_file(tmp_path), is_required=is_required)
    store.set(names(1), pages(1))
    drop(file_of(tmp_path, 1))
    assert store.set(names(1), pages(2)) == [True]  # equal tokens, other bits
    assert read_pages(store, 1) == [payload(2)]


def test_a_page_whose_checksum_is_refused_counts_as_stored_only_where_none_is_required(
    tmp_path: Path,
) -> None:
    for is_required in (False, True):
        plan = FaultPlan({("set", 1): Fault.FULL})
        store = Integrity(Faulty(memory(tmp_path), plan), is_required=is_required)
        assert store.set(names(1), pages(1)) == [not is_required]
        assert store.exists(names(1)) == [not is_required]
        assert store.set(names(1), pages(1)) == [True]


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.SHORT])
def test_what_a_store_reads_wrongly_is_never_an_answer(tmp_path: Path, fault: Fault) -> None:
    plan = FaultPlan({("get", number): fault for number in range(0, 40, 2)}, seed=5)
    store = Integrity(Faulty(open_file(tmp_path), plan), is_required=False)
    for number in range(20):
        store.set(names(number), pages(number))
        assert read_pages(store, number) == [None]
    assert store.tally["mismatches"] == 20


class NoDelete:
    """A store that can't delete, and nothing else of a store changed."""

    def __init__(self, base: Backend) -> None:
        self._base = base

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self._base.exists(names)

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return self._base.get(names, pages)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return self._base.set(names, pages)

    def clear(self) -> int:
        return self._base.clear()

    def close(self) -> None:
        self._base.close()


def test_in_a_store_that_cant_delete_a_bad_page_stays_a_miss_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Integrity(NoDelete(open_file(tmp_path)), is_required=False)
    store.set(names(1, 2), pages(1, 2))
    flip(file_of(tmp_path, 1))
    flip(file_of(tmp_path, 2))
    assert read_pages(store, 1, 2) == [None, None]
    assert store.set(names(1), pages(1)) == [True]
    assert read_pages(store, 1) == [None]
    assert store.tally["undeletable"] == 3
    assert [record.message for record in caplog.records if "can't be deleted" in record.message]


def test_no_call_of_the_store_has_more_names_than_a_batch(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Counting(NoDelete):
        def exists(self, names: Sequence[str]) -> list[bool]:
            sizes.append(len(names))
            return super().exists(names)

        def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
            sizes.append(len(names))
            return super().get(names, pages)

    store = Integrity(Counting(memory(tmp_path)), is_required=True)
    numbers = range(128)
    assert all(store.set(names(*numbers), pages(*numbers)))
    assert all(store.exists(names(*numbers)))
    assert read_pages(store, *numbers) == [payload(number) for number in numbers]
    assert max(sizes) <= 128


def test_checksums_share_the_cap_and_the_end_of_their_pages(tmp_path: Path) -> None:
    base = open_file(tmp_path, max_size=10 * NBYTES)
    store = Integrity(base, is_required=True)
    for number in range(100):
        store.set(names(number), pages(number))
    assert base.used_bytes <= 10 * NBYTES
    held = [number for number in range(100) if store.exists(names(number))[0]]
    assert len(held) >= 8
    assert read_pages(store, *held) == [payload(number) for number in held]
    assert store.clear() > 0
    assert list(tmp_path.iterdir()) == []


def test_an_object_of_another_geometry_under_the_same_name_is_a_miss_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Integrity(open_file(tmp_path), is_required=False).set(names(1), pages(1, nbytes=4000))
    store = Integrity(open_file(tmp_path), is_required=False)
    target = empty(NBYTES)
    assert store.get(names(1), [target]) == [False]
    assert store.get(names(1), [target]) == [False]
    assert store.exists(names(1)) == [False]  # so that whoever asks before writing replaces it
    assert len([record for record in caplog.records if "4000 bytes" in record.message]) == 1
    assert store.set(names(1), pages(1)) == [True]
    assert store.get(names(1), [target]) == [True]
    assert value(target) == payload(1)


class Flaky:
    """A store of which the next reads of ``names`` fail, though they are there."""

    def __init__(self, base: Backend, *failing: str) -> None:
        self._base = base
        self.failing = set(failing)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._base, method)

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        done = self._base.get(names, pages)
        return [
            is_read and name not in self.failing for name, is_read in zip(names, done, strict=True)
        ]


@pytest.mark.parametrize("is_required", [False, True], ids=["verify", "require"])
@pytest.mark.parametrize("failing", [name(2), sidecar(name(2))], ids=["page", "checksum"])
def test_a_read_that_fails_once_is_a_miss_and_deletes_nothing(
    tmp_path: Path, is_required: bool, failing: str
) -> None:
    flaky = Flaky(open_file(tmp_path), failing)
    store = Integrity(flaky, is_required=is_required)
    store.set(names(1, 2), pages(1, 2))
    assert read_pages(store, 1, 2) == [payload(1), None]
    flaky.failing.clear()
    assert read_pages(store, 1, 2) == [payload(1), payload(2)]
    assert store.tally["verified"] == 3


def test_running_out_of_descriptors_in_a_read_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Integrity(open_file(tmp_path), is_required=False)
    store.set(names(1, 2), pages(1, 2))
    real = os.open

    def exhausted(path: str, *rest: int) -> int:
        if path == str(file_of(tmp_path, 2)):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", exhausted)
        assert read_pages(store, 1, 2) == [payload(1), None]
    assert read_pages(store, 1, 2) == [payload(1), payload(2)]


def test_a_page_another_process_writes_between_two_calls_of_a_read_stays(tmp_path: Path) -> None:
    base = open_file(tmp_path)

    class Raced(Flaky):
        def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
            done = super().get(names, pages)
            Integrity(open_file(tmp_path), is_required=False).set([name(1)], [page(payload(1))])
            return done

    assert read_pages(Integrity(Raced(base), is_required=False), 1) == [None]
    assert read_pages(Integrity(base, is_required=True), 1) == [payload(1)]

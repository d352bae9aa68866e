"""The file backend's bounds: what goes, in which order, and what is never touched."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from refimpl.storage.file import FileBackend
from refimpl.storage.file_page import host_token
from refimpl.storage.integrity import CHECKSUM_BYTES, Integrity
from refimpl.units import NS_PER_S
from scenarios.storage.pages import (
    NBYTES,
    Clock,
    bytes_on_disk,
    file_of,
    name,
    names,
    open_file,
    page,
    pages,
    payload,
    read_pages,
)

Disk = namedtuple("Disk", ["f_bavail", "f_frsize"])


def put(store: FileBackend, clock: Clock, *numbers: int) -> list[bool]:
    """Store pages one after another, a second apart."""
    done = []
    for number in numbers:
        clock.pass_seconds(1)
        done += store.set(names(number), pages(number))
    return done


def there(store: FileBackend, *numbers: int) -> list[int]:
    """Which of the pages have a file, asked without using them."""
    return [number for number in numbers if file_of(Path(store._directory), number).exists()]


def failing_unlink(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[str]:
    """Deleting these pages fails from now on; which deletions were tried."""
    unlink, tried = os.unlink, []

    def refuse(path: Any) -> None:
        tried.append(Path(path).name)
        if Path(path).name.removesuffix(".bin") in names(*numbers):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    return tried


def full_disk(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The next ``times`` writes find the disk full; the writes that were tried."""
    write, tried = os.pwritev, []

    def refuse(handle: int, *given: Any) -> int:
        tried.append(handle)
        if len(tried) <= times:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, *given)

    monkeypatch.setattr(os, "pwritev", refuse)
    return tried


# ---- the cap ----------------------------------------------------------------------------------------


def test_the_least_recently_used_page_goes_first(tmp_path: Path) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, max_size=4 * NBYTES, eviction_ratio=1)
    put(store, clock, 0, 1, 2, 3)
    clock.pass_seconds(1)
    assert store.exists(names(0)) == [True]
    assert read_pages(store, 1) == [payload(1)]
    put(store, clock, 4, 5)
    assert there(store, *range(6)) == [0, 1, 4, 5]
    assert store.tally["evicted"] == 2


def test_eviction_goes_down_to_the_low_watermark_and_no_further(tmp_path: Path) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, max_size=10 * NBYTES, eviction_ratio=0.5)
    put(store, clock, *range(10))
    assert store.used_bytes == 10 * NBYTES
    put(store, clock, 10)
    assert there(store, *range(11)) == [6, 7, 8, 9, 10]
    assert store.used_bytes == bytes_on_disk(tmp_path) == 5 * NBYTES


def test_what_does_not_fit_is_refused_from_the_end_and_offered_again_it_is_stored(
    tmp_path: Path,
) -> None:
    store = open_file(tmp_path, max_size=8 * NBYTES)
    done = store.set(names(*range(16)), pages(*range(16)))
    assert done == [True] * 8 + [False] * 8
    assert store.tally["refused"] == 8
    store.delete(names(*range(4)))
    assert store.set(names(*range(4, 12)), pages(*range(4, 12))) == [True] * 8


def test_pages_of_a_call_do_not_push_each_other_out(tmp_path: Path) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, max_size=4 * NBYTES)
    put(store, clock, 0, 1, 2, 3)
    clock.pass_seconds(1)
    assert store.set(names(*range(10, 20)), pages(*range(10, 20)))[:4] == [True] * 4
    assert there(store, *range(10, 20)) == [10, 11, 12, 13]


def test_a_page_larger_than_the_cap_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    store = open_file(tmp_path, max_size=2 * NBYTES)
    store.set(names(1, 2), pages(1, 2))
    assert store.set(names(3), pages(3, nbytes=2 * NBYTES + 1)) == [False]
    assert there(store, 1, 2) == [1, 2]
    assert store.tally["refused"] == 1


def test_accounted_bytes_are_the_sizes_of_the_files_whatever_lies_beside_a_page(
    tmp_path: Path,
) -> None:
    base = open_file(tmp_path, max_size=100 * NBYTES)
    store = Integrity(base, is_required=True)
    sizes = [1, 10, 4096, 5000]
    for number, nbytes in enumerate(sizes):
        store.set(names(number), pages(number, nbytes=nbytes))
    assert base.used_bytes == sum(sizes) + len(sizes) * CHECKSUM_BYTES == bytes_on_disk(tmp_path)
    store.delete(names(1, 2))
    assert base.used_bytes == bytes_on_disk(tmp_path) == 5001 + 2 * CHECKSUM_BYTES


def test_a_restart_finds_what_is_on_disk_and_keeps_the_cap(tmp_path: Path) -> None:
    clock = Clock()
    put(open_file(tmp_path, clock, max_size=100 * NBYTES), clock, *range(80))
    store = open_file(tmp_path, clock, max_size=100 * NBYTES, eviction_ratio=1)
    assert store.used_bytes == 80 * NBYTES
    clock.pass_seconds(1)
    assert read_pages(store, *range(80)) == [payload(number) for number in range(80)]
    for number in range(80, 130):
        put(store, clock, number)
        assert store.used_bytes == bytes_on_disk(tmp_path) <= 100 * NBYTES
    assert there(store, *range(130)) == list(range(30, 130))


def test_a_restart_remembers_which_pages_were_used_last(tmp_path: Path) -> None:
    clock = Clock()
    first = open_file(tmp_path, clock)
    put(first, clock, 0, 1, 2, 3)
    clock.pass_seconds(1)
    first.exists(names(0))
    read_pages(first, 2)
    store = open_file(tmp_path, clock, max_size=4 * NBYTES, eviction_ratio=1)
    put(store, clock, 4, 5)
    assert there(store, *range(6)) == [0, 2, 4, 5]


def test_a_restart_with_a_smaller_cap_shrinks_the_directory_at_the_next_write(
    tmp_path: Path,
) -> None:
    clock = Clock()
    put(open_file(tmp_path, clock), clock, *range(20))
    put(open_file(tmp_path, clock, max_size=5 * NBYTES, eviction_ratio=1), clock, 20)
    assert bytes_on_disk(tmp_path) == 5 * NBYTES


# ---- what can't be deleted --------------------------------------------------------------------------


def test_a_page_that_cant_be_deleted_does_not_stop_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, max_size=4 * NBYTES, eviction_ratio=1)
    put(store, clock, 0, 1, 2, 3)
    failing_unlink(monkeypatch, 0)
    assert put(store, clock, 4, 5, 6, 7) == [True] * 4
    assert there(store, *range(8)) == [0, 5, 6, 7]
    assert store.used_bytes == bytes_on_disk(tmp_path) == 4 * NBYTES
    assert store.tally["undeletable"] == 1


def test_when_no_page_can_be_deleted_writes_are_refused_and_each_page_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, max_size=4 * NBYTES)
    put(store, clock, 0, 1, 2, 3)
    with monkeypatch.context() as patch:
        tried = failing_unlink(patch, 0, 1, 2, 3)
        assert put(store, clock, *range(4, 14)) == [False] * 10
        assert len(tried) == 4
    assert put(store, clock, 4) == [False]
    clock.pass_seconds(60)
    assert put(store, clock, 4) == [True]
    assert read_pages(store, 3, 4) == [payload(3), payload(4)]


# ---- a full disk ------------------------------------------------------------------------------------


def test_a_disk_that_is_full_once_costs_an_eviction_and_the_page_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock)
    put(store, clock, 0, 1, 2, 3)
    full_disk(monkeypatch, 1)
    assert put(store, clock, 4) == [True]
    assert there(store, *range(5)) == [1, 2, 3, 4]
    assert (store.tally["no_space"], store.tally["evicted"]) == (1, 1)


def test_a_disk_that_stays_full_refuses_pages_without_trying_each_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock)
    put(store, clock, 0, 1, 2, 3)
    tried = full_disk(monkeypatch, 1000)
    numbers = range(10, 110)
    assert store.set(names(*numbers), pages(*numbers)) == [False] * 100
    assert len(tried) == 2  # one page, and the same again after eviction
    assert store.tally["refused"] == 100
    assert len(caplog.records) == 1
    assert read_pages(store, 1, 2, 3) == [payload(1), payload(2), payload(3)]
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    assert store.used_bytes == bytes_on_disk(tmp_path)


def test_the_free_space_of_the_disk_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 10_000

    def disk(_: object) -> Disk:
        return Disk(size - bytes_on_disk(tmp_path), 1)

    monkeypatch.setattr(os, "statvfs", disk)
    clock = Clock()
    store = open_file(tmp_path, clock, min_free_space=6 * NBYTES)
    put(store, clock, *range(7))
    assert there(store, *range(7)) == [3, 4, 5, 6]
    size = 6_500  # somebody else takes the rest
    assert store.set(names(7), pages(7)) == [False]


# ---- time -------------------------------------------------------------------------------------------


def test_a_page_expires_when_it_was_not_used_for_its_time(tmp_path: Path) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, ttl=10)
    put(store, clock, 0, 1, 2)
    clock.pass_seconds(7)
    store.exists(names(0))
    clock.pass_seconds(4)
    assert store.exists(names(0, 1)) == [True, False]
    assert read_pages(store, 0, 2) == [payload(0), None]
    assert there(store, 0, 1, 2) == [0]
    assert store.tally["expired"] == 2


def test_expired_pages_nobody_asks_for_go_with_the_next_write(tmp_path: Path) -> None:
    clock = Clock()
    put(open_file(tmp_path, clock), clock, *range(5))
    store = open_file(tmp_path, clock, ttl=10)
    clock.pass_seconds(11)
    put(store, clock, 5)
    assert there(store, *range(6)) == [5]
    assert store.used_bytes == NBYTES


# ---- a shared directory -----------------------------------------------------------------------------


def test_a_page_that_is_gone_already_counts_as_evicted(tmp_path: Path) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, max_size=4 * NBYTES, eviction_ratio=1)
    put(store, clock, 0, 1, 2, 3)
    store = open_file(tmp_path, clock, max_size=4 * NBYTES, eviction_ratio=1)
    file_of(tmp_path, 0).unlink()
    assert put(store, clock, 4) == [True]
    assert there(store, *range(5)) == [1, 2, 3, 4]
    assert store.tally["gone_already"] == 1


def test_a_page_that_another_process_used_is_spared(tmp_path: Path) -> None:
    clock = Clock()
    other = open_file(tmp_path, clock)
    put(other, clock, 0, 1, 2, 3)
    store = open_file(tmp_path, clock, max_size=4 * NBYTES, eviction_ratio=1)
    clock.pass_seconds(1)
    other.exists(names(0))
    put(store, clock, 4)
    assert there(store, *range(5)) == [0, 2, 3, 4]


def test_what_another_process_writes_is_counted_before_the_cap_is_passed_by_far(
    tmp_path: Path,
) -> None:
    clock = Clock()
    one = open_file(tmp_path, clock, max_size=64 * NBYTES)
    other = open_file(tmp_path, clock, max_size=64 * NBYTES)
    for number in range(300):
        put(one, clock, number)
        put(other, clock, 1000 + number)
        assert bytes_on_disk(tmp_path) <= (64 + 2 * 3) * NBYTES


def test_clear_deletes_what_is_its_own_and_nothing_else(tmp_path: Path) -> None:
    ours = Integrity(open_file(tmp_path, model="a"), is_required=False)
    theirs = Integrity(open_file(tmp_path, model="b"), is_required=False)
    ours.set([name(1, "a"), name(2, "a")], pages(1, 2))
    theirs.set([name(1, "b")], pages(1))
    foreign = ["notes.txt", "model.bin", f"{'0' * 64}_b.bin", f"{name(3, 'a')}.bin.bak", ".x.tmp"]
    for each in foreign:
        (tmp_path / each).write_text("not ours")
    (tmp_path / "folder").mkdir()
    assert ours.clear() == 4  # two pages with their checksums
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*foreign, "folder", f"{name(1, 'b')}.bin", f"{name(1, 'b')}.xxh3.bin"}
    assert ours.clear() == 0


def test_eviction_never_touches_files_that_are_no_pages(tmp_path: Path) -> None:
    for each in ("notes.txt", "model.bin", "0123456789abcdef.bin"):
        (tmp_path / each).write_bytes(b"x" * 10_000)
        os.utime(tmp_path / each, ns=(1, 1))
    clock = Clock()
    store = open_file(tmp_path, clock, max_size=2 * NBYTES, eviction_ratio=1)
    assert store.used_bytes == 0
    put(store, clock, *range(10))
    assert len(list(tmp_path.iterdir())) == 3 + 2
    assert store.pages == 2


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing: list[set[str]] = []
    write = os.pwritev

    def look(handle: int, *given: Any) -> int:
        open_file(tmp_path)  # another instance starts while this one writes
        writing.append({path.suffix for path in tmp_path.iterdir()})
        return write(handle, *given)

    monkeypatch.setattr(os, "pwritev", look)
    store = open_file(tmp_path)
    assert store.set([name(1)], [page(b"abc")]) == [True]
    assert writing == [{".tmp"}]
    once = "0" * 8  # of a process that had our id before us
    ours = next(iter(_temporaries(tmp_path, monkeypatch))).split("-")
    dead = "-".join([*ours[:3], once, ours[4]])
    other_host = "-".join([ours[0], "f" * 8, ours[2], once, ours[4]])
    foreign = f".{'0' * 32}.tmp"
    for each in (dead, other_host, foreign):
        (tmp_path / each).write_bytes(b"half a page")
    again = open_file(tmp_path)
    assert {path.name for path in tmp_path.glob(".*")} == {other_host, foreign}
    assert again.tally["leftovers"] == 1
    late = Clock((tmp_path / foreign).stat().st_mtime_ns + 3601 * NS_PER_S)
    assert open_file(tmp_path, late).tally["leftovers"] == 1
    assert {path.name for path in tmp_path.glob(".*")} == {foreign}


def test_a_twin_with_our_host_name_and_process_id_in_another_container_is_not_dead(
    tmp_path: Path,
) -> None:
    twin = host_token(processes=tmp_path)  # another namespace of processes
    assert twin != host_token() == host_token()
    leftover = tmp_path / f".hicache-{twin}-{os.getpid()}-{'0' * 8}-1.tmp"
    leftover.write_bytes(b"half a page")
    assert open_file(tmp_path).tally["leftovers"] == 0
    assert leftover.exists()


def test_hosts_with_one_name_are_told_apart_by_their_boot(tmp_path: Path) -> None:
    other = tmp_path / "boot_id"
    other.write_text("11111111-2222-3333-4444-555555555555\n")
    assert host_token(boot=other) != host_token()


def _temporaries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of temporary files this process uses."""
    seen: set[str] = set()
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda a, b: (seen.add(Path(a).name), rename(a, b))[1])
        open_file(folder).set([name(99)], [page(b"abc")])
    return seen


@pytest.mark.parametrize("bound", ["max_size", "min_free_space"])
def test_a_bounded_directory_that_was_deleted_is_made_again(tmp_path: Path, bound: str) -> None:
    folder, clock = tmp_path / "pages", Clock()
    store = open_file(folder, clock, **{bound: 8 * NBYTES})
    assert put(store, clock, *range(8)) == [True] * 8
    for _ in range(2):
        shutil.rmtree(folder)
        assert store.clear() == 0
        assert put(store, clock, *range(20, 28)) == [True] * 8
        assert read_pages(store, 27) == [payload(27)]

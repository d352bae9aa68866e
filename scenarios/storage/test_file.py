"""The file backend: what a file holds, and when a page is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refimpl.config import ConfigError
from refimpl.storage.backend import StorageError
from refimpl.storage.factory import open_backend
from refimpl.storage.file import FileBackend
from refimpl.storage.names import namespace_of
from scenarios.storage.pages import (
    NBYTES,
    Clock,
    empty,
    file_of,
    identity,
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

DIRECTORY = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


def test_pages_come_back_as_they_went(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    assert store.set(names(1, 2), pages(1, 2)) == [True, True]
    assert store.exists(names(1, 2, 3)) == [True, True, False]
    assert read_pages(store, 2, 3, 1) == [payload(2), None, payload(1)]


def test_a_file_is_named_as_upstream_names_it_and_holds_the_page_alone(tmp_path: Path) -> None:
    space = namespace_of("file", identity(), compat="sglang")
    key = bytes(range(32))
    store = FileBackend(setting(tmp_path))
    store.set([space.name(key)], [page(payload(1), 1, 500)])
    assert [path.name for path in tmp_path.iterdir()] == [f"{key.hex()}_org-model_0_1.bin"]
    assert (tmp_path / f"{key.hex()}_org-model_0_1.bin").read_bytes() == payload(1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    content=st.binary(max_size=3000),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    others=st.lists(st.integers(0, 3000), max_size=6),
    step=st.integers(1, 900),
)
def test_pieces_and_short_system_calls_change_no_byte(
    tmp_path: Path, content: bytes, cuts: list[int], others: list[int], step: int
) -> None:
    """A system call may stop anywhere; here none moves more than ``step`` bytes."""
    size = len(content)

    def part(pieces: Sequence[memoryview]) -> list[memoryview]:
        taken: list[memoryview] = []
        for piece in pieces:
            room = step - sum(each.nbytes for each in taken)
            taken.append(piece[:room])
        return taken

    read, write = os.preadv, os.pwritev
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, given, at: write(fd, part(given), at))
        patch.setattr(os, "preadv", lambda fd, given, at: read(fd, part(given), at))
        store = open_file(tmp_path)
        store.clear()
        assert store.set(names(1), [page(content, *sorted(min(cut, size) for cut in cuts))]) == [
            True
        ]
        target = empty(size, *sorted(min(cut, size) for cut in others))
        assert store.get(names(1), [target]) == [True]
        store.close()
    assert value(target) == content
    assert file_of(tmp_path, 1).read_bytes() == content


def test_more_pieces_than_one_system_call_takes(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    content = payload(1, 5000)
    store.set(names(1), [page(content, *range(1, 5000))])
    target = empty(5000, *range(1, 5000))
    assert store.get(names(1), [target]) == [True]
    assert value(target) == content


def test_large_pages_are_spread_over_threads_and_come_back(tmp_path: Path) -> None:
    store = open_file(tmp_path, io_threads=3)
    nbytes = 1_100_000
    numbers = tuple(range(11))
    assert all(store.set(names(*numbers), pages(*numbers, nbytes=nbytes)))
    expected = [payload(number, nbytes) for number in numbers]
    assert read_pages(store, *numbers, nbytes=nbytes) == expected
    assert read_pages(store, 3, 99, 4, nbytes=nbytes) == [expected[3], None, expected[4]]
    store.close()


def test_a_page_that_is_there_is_kept(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    store.set(names(1), pages(1))
    assert store.set(names(1), pages(2)) == [True]
    assert read_pages(store, 1) == [payload(1)]


def test_a_file_of_another_size_is_a_miss_with_one_warning_until_it_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_file(tmp_path)
    store.set(names(1), pages(1, nbytes=NBYTES // 2))
    assert read_pages(store, 1, 1) == [None, None]
    assert store.tally["wrong_size"] == 2
    assert len(caplog.records) == 1
    assert "500 bytes, not 1000" in caplog.text
    assert store.set(names(1), pages(1)) == [True]
    assert read_pages(store, 1) == [payload(1)]
    assert store.used_bytes == NBYTES


def test_a_page_that_was_read_in_vain_for_its_size_is_not_there_until_it_is_replaced(
    tmp_path: Path,
) -> None:
    store = open_file(tmp_path, enable_metadata_cache=True)
    store.set(names(1), pages(1, nbytes=NBYTES // 2))
    assert store.exists(names(1)) == [True]
    assert read_pages(store, 1) == [None]
    assert store.exists(names(1)) == [False]
    open_file(tmp_path).set(names(1), pages(1))  # by another process
    assert store.exists(names(1)) == [True]
    assert read_pages(store, 1) == [payload(1)]


@pytest.mark.timeout(20)
def test_a_pipe_under_the_name_of_a_page_holds_nobody_up_and_is_replaced(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    store.set(names(1), pages(1))
    os.mkfifo(file_of(tmp_path, 2))
    assert store.exists(names(1, 2)) == [True, False]
    assert read_pages(store, 1, 2) == [payload(1), None]
    assert store.set(names(2), pages(2)) == [True]
    assert read_pages(store, 2) == [payload(2)]


def test_a_page_written_by_another_process_is_found_and_counted(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    open_file(tmp_path).set(names(1), pages(1))
    assert store.used_bytes == 0
    assert store.exists(names(1)) == [True]
    assert store.used_bytes == NBYTES


def test_a_deleted_page_can_be_written_again(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    store.set(names(1), pages(1))
    assert store.delete(names(1, 2)) == [True, True]
    assert store.exists(names(1)) == [False]
    store.set(names(1), pages(2))
    assert read_pages(store, 1) == [payload(2)]


def test_a_directory_that_was_deleted_under_the_store_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    store = open_file(folder)
    store.set(names(1), pages(1))
    file_of(folder, 1).unlink()
    folder.rmdir()
    assert store.exists(names(1)) == [False]
    assert store.set(names(1), pages(1)) == [True]
    assert read_pages(store, 1) == [payload(1)]


def test_one_file_that_cant_be_read_is_a_miss_and_all_of_them_are_an_error(
    tmp_path: Path,
) -> None:
    store = open_file(tmp_path)
    store.set(names(2), pages(2))
    file_of(tmp_path, 1).mkdir()
    assert read_pages(store, 1, 2) == [None, payload(2)]
    with pytest.raises(StorageError, match="can be read"):
        read_pages(store, 1, 1)
    assert store.tally["read_errors"] == 3


def test_after_failing_writes_the_room_they_had_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_file(tmp_path, max_size=8 * NBYTES)

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        for number in range(100):
            with pytest.raises(StorageError, match="can be written"):
                store.set(names(number), pages(number))
    assert list(tmp_path.iterdir()) == []
    assert all(store.set(names(*range(8)), pages(*range(8))))
    assert store.tally["evicted"] == 0


def test_one_page_that_cant_be_written_leaves_the_others_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_file(tmp_path)
    write, calls = os.pwritev, []

    def fail_third(*given: Any) -> int:
        calls.append(given)
        if len(calls) == 3:
            raise OSError(5, "Input/output error")
        return write(*given)

    monkeypatch.setattr(os, "pwritev", fail_third)
    done = store.set(names(*range(10)), pages(*range(10)))
    assert done == [number != 2 for number in range(10)]
    assert store.set(names(*range(10)), pages(*range(10))) == [True] * 10
    assert store.tally["write_errors"] == 1


def test_presence_is_remembered_no_longer_than_asked_for(tmp_path: Path) -> None:
    clock = Clock()
    store = open_file(tmp_path, clock, enable_metadata_cache=True, metadata_ttl=5)
    store.set(names(1), pages(1))
    file_of(tmp_path, 1).unlink()
    clock.pass_seconds(4)
    assert store.exists(names(1)) == [True]
    clock.pass_seconds(1)
    assert store.exists(names(1)) == [False]


def test_a_read_that_finds_nothing_ends_what_is_remembered(tmp_path: Path) -> None:
    store = open_file(tmp_path, enable_metadata_cache=True, metadata_ttl=-1)
    store.set(names(1), pages(1))
    file_of(tmp_path, 1).unlink()
    assert store.exists(names(1)) == [True]
    assert read_pages(store, 1) == [None]
    assert store.exists(names(1)) == [False]


def test_the_environment_names_the_directory_before_the_extra_config_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "told"))
    open_file(tmp_path / "other").set(names(1), pages(1))
    assert file_of(tmp_path / "told", 1).exists()
    assert not (tmp_path / "other").exists()


def test_bounds_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", "3KB")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO", "1.0")
    store = open_file(tmp_path)
    store.set(names(*range(9)), pages(*range(9)))
    assert store.used_bytes == 3000


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_size": "much"}, "max_size 'much' is no size"),
        ({"max_size": 0}, "max_size must be above 0"),
        ({"eviction_ratio": 2}, "eviction_ratio must be a number above 0 and up to 1"),
        ({"ttl": 0}, "ttl must be above 0"),
        ({"ttl": "soon"}, "ttl must be a number of seconds"),
        ({"fsync": "perhaps"}, "fsync must be true or false"),
        ({"io_threads": 0}, "io_threads must be a whole number"),
        ({"file_storage_path": 3}, "file_storage_path must be a path"),
        ({"file_storage_path": 0}, "file_storage_path must be a path"),
        ({"file_storage_path": False}, "file_storage_path must be a path"),
        ({"file_storage_path": []}, "file_storage_path must be a path"),
    ],
)
def test_a_key_that_cant_be_is_one_clear_error(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_backend("file", setting(tmp_path, **extra))


def test_a_directory_that_cant_be_used_says_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="set file_storage_path or SGLANG"):
        open_backend("file", setting(tmp_path / "file"))


@pytest.mark.parametrize(
    ("model", "message"), [("m" * 300, "shorten"), ("a\0b", "can't be a file")]
)
def test_a_model_name_that_is_no_file_name_is_refused(
    tmp_path: Path, model: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_file(tmp_path, model=model)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.exists([name(1)])


def test_synced_pages_are_on_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), sync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append("rename"), rename(a, b))[1])
    open_file(tmp_path).set(names(1), pages(1))
    assert order == ["rename"]
    open_file(tmp_path, fsync=True).set(names(2, 3), pages(2, 3))
    assert order[1:] == ["sync", "rename", "sync", "rename", "sync"]  # the last: their directory

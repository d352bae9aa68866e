"""NIXL's POSIX plugin over real files: pages bit for bit, files that are complete or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refimpl.config import ConfigError
from refimpl.memory.layout import Geometry
from refimpl.storage.backend import Backend, HostPage, Setting, StorageError
from refimpl.storage.factory import open_backend
from refimpl.storage.file_page import temporary_in
from refimpl.storage.names import namespace_of
from scenarios.storage.client_checks import (
    check_deleted_pages_can_be_written_again,
    check_the_first_value_is_kept,
    check_threads_mix_no_pages,
    check_what_is_missing_leaves_the_rest_alone,
)
from scenarios.storage.host_pages import GQA, KEYS, MLA, PAGES, HostPages, loose, payload
from scenarios.tidy import ROOT

nixl = pytest.importorskip("refimpl.storage.nixl", reason="the extra nixl is absent")

LAYOUTS = ["page_first", "page_first_direct", "page_head", "layer_first"]


@pytest.fixture
def host() -> HostPages:
    return HostPages.of("nixl", GQA, "page_first")


@pytest.fixture
def store(host: HostPages, tmp_path: Path) -> Iterator[Backend]:
    backend = opened(host, tmp_path)
    yield backend
    backend.close()


def opened(host: HostPages, folder: Path, **extra: Any) -> Backend:
    keys = {"storage_dir": str(folder), "plugin": "POSIX"} | extra
    return open_backend("nixl", host.setting(keys))


def files_below(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("geometry", "layout"),
    [(GQA, layout) for layout in LAYOUTS]
    + [(MLA, layout) for layout in LAYOUTS if layout != "page_head"],
    ids=lambda value: value if isinstance(value, str) else "mla" if value.is_mla else "gqa",
)
def test_pages_come_back_bit_for_bit(tmp_path: Path, geometry: Geometry, layout: str) -> None:
    host = HostPages.of("nixl", geometry, layout)
    store = opened(host, tmp_path)
    assert store.exists(host.names()) == [False] * PAGES
    assert store.get(host.names(), host.targets()) == [False] * PAGES
    assert store.set(host.names(), host.sources()) == [True] * PAGES
    assert store.exists(host.names()) == [True] * PAGES
    assert store.get(host.names(), host.targets()) == [True] * PAGES
    for source, target in zip(host.sources(), host.targets(), strict=True):
        assert payload(source) == payload(target)
    assert store.clear() == PAGES
    assert files_below(tmp_path) == []
    store.close()


@pytest.mark.parametrize(
    ("geometry", "layout", "suffixes"),
    [
        (GQA, "page_first", ["_org-Model_0_1_k", "_org-Model_0_1_v"]),
        (MLA, "page_first_direct", ["_org-Model_k"]),
        (GQA, "layer_first", ["_org-Model_0_1"]),
    ],
)
def test_files_have_the_names_and_bytes_that_sglang_gives_them(
    tmp_path: Path, geometry: Geometry, layout: str, suffixes: list[str]
) -> None:
    host = HostPages.of("nixl", geometry, layout, compat="sglang")
    store = opened(host, tmp_path)
    store.set(host.names(KEYS[:1]), host.sources(1))
    files = files_below(tmp_path)
    assert sorted(name.partition("/")[2] for name in files) == [
        KEYS[0].hex() + suffix for suffix in suffixes
    ]
    in_order = sorted(files, key=lambda name: name.partition("/")[2])
    assert b"".join((tmp_path / name).read_bytes() for name in in_order) == payload(host.page(0))
    store.close()


def test_the_bucket_of_a_file_follows_from_its_name(tmp_path: Path, host: HostPages) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    store = opened(host, tmp_path, storage_dir=",".join(map(str, folders)))
    store.set(host.names(), host.sources())
    # b2sum -l 64 of the names: the lowest byte is the bucket, a bit above the lowest 16 the folder.
    for name in files_below(tmp_path):
        folder, bucket, file = name.split("/")
        line = subprocess.run(
            ["b2sum", "-l", "64"], input=file.encode(), capture_output=True, check=True
        ).stdout.decode()
        number = int(line.split()[0], 16)
        assert (folder, bucket) == ("ab"[number >> 16 & 1], f"{number & 0xFF:02x}")
    assert all(files_below(folder) for folder in folders)
    store.close()


@pytest.mark.live
def test_a_second_process_reads_what_the_first_wrote(
    tmp_path: Path, host: HostPages, store: Backend
) -> None:
    store.set(host.names(), host.sources())
    done = subprocess.run(
        [sys.executable, "-m", "scenarios.storage.test_nixl", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    # Nothing else either: the library must not speak on standard output.
    assert (done.stdout, done.returncode) == (f"{PAGES} equal\n", 0), done.stderr[-2000:]
    assert done.stderr == ""


def read_in_another_process(folder: Path) -> None:
    """Print how many pages are there with the bytes that the first process must have written."""
    host = HostPages.of("nixl", GQA, "page_first")
    store = opened(host, folder)
    store.get(host.names(), host.targets())
    pairs = zip(host.sources(), host.targets(), strict=True)
    print(sum(payload(source) == payload(target) for source, target in pairs), "equal")
    store.close()


def test_what_is_missing_of_a_batch_leaves_the_rest_alone(host: HostPages, store: Backend) -> None:
    check_what_is_missing_leaves_the_rest_alone(host, store)


def test_setting_a_name_again_keeps_the_first_value(host: HostPages, store: Backend) -> None:
    check_the_first_value_is_kept(host, store)


@pytest.mark.parametrize("half", ["_k", "_v"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_a_miss(
    tmp_path: Path, host: HostPages, store: Backend, half: str, change: int
) -> None:
    store.set(host.names(), host.sources())
    (path,) = tmp_path.rglob(f"{host.names()[3]}{half}")
    os.truncate(path, path.stat().st_size + change)
    assert store.get(host.names(), host.targets()) == [at != 3 for at in range(PAGES)]


def test_a_page_without_its_second_half_is_a_miss(
    tmp_path: Path, host: HostPages, store: Backend
) -> None:
    store.set(host.names(), host.sources())
    (path,) = tmp_path.rglob(f"{host.names()[3]}_v")
    path.unlink()
    expected = [at != 3 for at in range(PAGES)]
    assert store.exists(host.names()) == expected
    assert store.get(host.names(), host.targets()) == expected
    assert store.set(host.names(), host.sources()) == [True] * PAGES
    assert store.get(host.names(), host.targets()) == [True] * PAGES


def test_values_outside_of_the_pool_can_be_stored(host: HostPages, store: Backend) -> None:
    names = [f"{name}.sum" for name in host.names()]
    values = [HostPage((memoryview(bytes([at] * 32)),)) for at in range(PAGES)]
    assert store.set(names, values) == [True] * PAGES
    targets = [loose(bytes(32)) for _ in names]
    assert store.get(names, targets) == [True] * PAGES
    assert list(map(payload, targets)) == list(map(payload, values))


class _InterruptedError(Exception):
    pass


def test_a_half_written_page_is_never_seen_and_clear_removes_it(
    tmp_path: Path, host: HostPages, store: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        assert files_below(tmp_path)  # something is there, under another name
        assert store.exists(host.names()) == [False] * PAGES
        assert store.get(host.names(), host.targets()) == [False] * PAGES
        raise _InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(nixl, "_remove", lambda _: None)  # as if the process ended there and then
        patch.setattr("refimpl.storage.file_page._ONCE", "0" * 8)  # one that had our process id
        patch.setattr(os, "rename", die)
        with pytest.raises(_InterruptedError):
            store.set(host.names(), host.sources())
    assert len(files_below(tmp_path)) == 2 * PAGES
    assert store.set(host.names(), host.sources()) == [True] * PAGES
    store.clear()
    assert files_below(tmp_path) == []


def test_what_a_killed_process_with_our_id_left_is_removed_at_opening(
    tmp_path: Path, host: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("refimpl.storage.file_page._ONCE", "0" * 8)
        left = Path(temporary_in(str(tmp_path / "00")))
    left.parent.mkdir()
    left.write_bytes(b"half a page")
    store = opened(host, tmp_path)
    assert files_below(tmp_path) == []
    store.close()


def test_a_file_read_in_vain_for_its_size_is_not_there_and_is_replaced(
    tmp_path: Path, host: HostPages, store: Backend
) -> None:
    name = host.names()[:1]
    store.set(name, host.sources(1))
    for path in files_below(tmp_path):
        (tmp_path / path).write_bytes(b"short")
    assert store.exists(name) == [True]
    assert store.get(name, host.targets(1)) == [False]
    assert store.exists(name) == [False]
    assert store.set(name, host.sources(1)) == [True]
    assert store.exists(name) == [True]
    assert store.get(name, host.targets(1)) == [True]
    assert payload(host.targets(1)[0]) == payload(host.sources(1)[0])


def test_set_replaces_a_file_of_another_size_that_nobody_read(
    tmp_path: Path, host: HostPages, store: Backend
) -> None:
    name = host.names()[:1]
    store.set(name, host.sources(1))
    (tmp_path / files_below(tmp_path)[0]).write_bytes(b"short")
    assert store.set(name, host.sources(1)) == [True]
    assert store.get(name, host.targets(1)) == [True]


def loop(path: Path) -> None:
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [loop, folder, os.mkfifo])
def test_what_stands_in_place_of_a_page_harms_no_other_page(
    host: HostPages, store: Backend, kind: Callable[[Path], None]
) -> None:
    names = host.names()
    store.set(names, host.sources())
    for path in map(Path, store._files.expected(names[1])):  # type: ignore[attr-defined]
        path.unlink()
        kind(path)
    assert store.exists(names[:3]) == [True, False, True]
    assert store.get(names[:3], host.targets(3)) == [True, False, True]
    is_replaced = kind is not folder
    store.delete(names[2:3])  # type: ignore[attr-defined]
    assert store.set(names[:3], host.sources(3)) == [True, is_replaced, True]
    assert store.exists(names[:3]) == [True, is_replaced, True]
    assert store.delete(names[:3]) == [True, is_replaced, True]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "message"),
    [("m" * 300, "shorten the served model name"), ("a\0b", "can't be a file named")],
)
def test_a_model_name_that_is_no_file_name_is_refused_at_opening(
    tmp_path: Path, model: str, message: str
) -> None:
    host = HostPages.of("nixl", GQA, "page_first")
    setting = host.setting({"storage_dir": str(tmp_path), "plugin": "POSIX"})
    identity = msgspec.structs.replace(setting.identity, model=model)
    told = replace(setting, identity=identity, namespace=namespace_of("nixl", identity))
    with pytest.raises(ConfigError, match=message):
        open_backend("nixl", told)


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, host: HostPages, store: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_before, real = [], nixl.open_new

    def full(path: str, **keys: bool) -> int:
        if len(opened_before) == 4:
            raise OSError(28, "No space left on device", path)
        opened_before.append(path)
        descriptor: int = real(path, **keys)
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(nixl, "open_new", full)
        with pytest.raises(StorageError, match="No space left on device"):
            store.set(host.names(), host.sources())
    assert files_below(tmp_path) == []
    assert store.set(host.names(), host.sources()) == [True] * PAGES


def test_clear_leaves_other_namespaces_and_foreign_files_alone(
    tmp_path: Path, host: HostPages, store: Backend
) -> None:
    other = HostPages.of("nixl", GQA, "page_first", weights="2")
    theirs = opened(other, tmp_path)
    store.set(host.names(), host.sources())
    theirs.set(other.names(), other.sources())
    foreign = tmp_path / "00" / "notes.txt"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    assert store.clear() == PAGES
    assert store.exists(host.names()) == [False] * PAGES
    assert theirs.exists(other.names()) == [True] * PAGES
    assert foreign.read_text() == "mine"
    theirs.close()


def test_deleted_pages_can_be_written_again(host: HostPages, store: Backend) -> None:
    check_deleted_pages_can_be_written_again(host, store)


def test_threads_share_one_agent_without_mixing_pages(host: HostPages, store: Backend) -> None:
    check_threads_mix_no_pages(host, store, turns=10)


# ---- direct I/O ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, 5000, 656, 8192])
@pytest.mark.parametrize("use_direct_io", [True, False])
def test_payloads_of_every_size_come_back_with_direct_io(
    tmp_path: Path, host: HostPages, size: int, use_direct_io: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_as: list[bool] = []
    real = nixl.open_new

    def noticing(path: str, *, is_direct: bool) -> int:
        opened_as.append(is_direct)
        descriptor: int = real(path, is_direct=is_direct)
        return descriptor

    monkeypatch.setattr(nixl, "open_new", noticing)
    memory = mmap(-1, 4 * 8192)  # aligned to pages of the system
    view = memoryview(memory)
    view[:8192] = os.urandom(8192)
    extra = {"storage_dir": str(tmp_path), "plugin": "POSIX", "use_direct_io": use_direct_io}
    store = open_backend("nixl", Setting(host.identity, host.namespace, extra, (view,)))
    source, target = HostPage((view[:size],), 0), HostPage((view[8192 : 8192 + size],), 1)
    assert store.set(["value"], [source]) == [True]
    assert store.get(["value"], [target]) == [True]
    assert payload(source) == payload(target)
    assert opened_as == [use_direct_io and size % 4096 == 0]
    store.close()


# ---- settings -----------------------------------------------------------------------------------


def test_the_folder_of_the_variable_wins(
    tmp_path: Path, host: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path / "env"))
    store = opened(host, tmp_path / "extra")
    store.set(host.names(), host.sources())
    assert len(files_below(tmp_path / "env")) == 2 * PAGES
    store.close()


def test_the_first_active_plugin_of_an_object_is_taken(tmp_path: Path, host: HostPages) -> None:
    plugins = {"gds": {"active": False}, "posix": {"active": True, "use_aio": "true"}}
    store = opened(host, tmp_path, plugin=plugins)
    assert store.plugin == "POSIX"  # type: ignore[attr-defined]
    assert store.set(host.names(), host.sources()) == [True] * PAGES
    store.close()


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"plugin": "gds"}, StorageError, "created here .GDS: .*driver of its own"),
        ({"plugin": "gds_mt"}, StorageError, "created here .GDS_MT: .*driver of its own"),
        ({"plugin": "3fs"}, StorageError, "3FS: .*not part of this installation of nixl"),
        ({"plugin": "obj"}, ConfigError, "plugin OBJ is unknown or stores no files"),
        ({"plugin": "tape"}, ConfigError, "plugin TAPE is unknown"),
        ({"plugin": {"posix": {"active": False}}}, ConfigError, 'give one of them "active": true'),
        ({"plugin": ["posix"]}, ConfigError, "plugin must be a name or an object"),
        ({"use_direct_io": "perhaps"}, ConfigError, "use_direct_io must be true or false"),
        ({"storage_dir": "{0},{0}"}, ConfigError, "each once"),
        ({"storage_dir": ["/x"]}, ConfigError, "storage_dir must be a string"),
    ],
)
def test_a_setting_that_can_not_be_is_refused_in_one_sentence(
    tmp_path: Path, host: HostPages, extra: dict[str, Any], error: type[Exception], message: str
) -> None:
    if isinstance(extra.get("storage_dir"), str):
        extra = {"storage_dir": extra["storage_dir"].format(tmp_path)}
    with pytest.raises(error, match=message):
        opened(host, tmp_path, **extra)


def test_a_closed_backend_says_so(host: HostPages, store: Backend) -> None:
    store.close()
    store.close()
    calls: Sequence[Any] = (
        lambda: store.exists(host.names()),
        lambda: store.get(host.names(), host.targets()),
        lambda: store.set(host.names(), host.sources()),
        store.clear,
    )
    for call in calls:
        with pytest.raises(StorageError, match="closed"):
            call()


class _StuckAgent:
    """The real agent, but for transfers that never end until they are taken back."""

    def __init__(self, agent: Any, releases: list[bool]) -> None:
        self._agent = agent
        self._releases = releases  # whether each try to take back works

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def transfer(self, _: Any) -> str:
        return "PROC"

    def check_xfer_state(self, _: Any) -> str:
        return "PROC" if self._releases else "ERR"

    def release_xfer_handle(self, handle: Any) -> None:
        if self._releases and not self._releases.pop(0):
            raise RuntimeError("in progress")
        self._agent.release_xfer_handle(handle)


@pytest.mark.parametrize(
    ("releases", "message"),
    [([True], "no end after"), ([False, False, True], "no end after"), ([False], "ended as ERR")],
)
def test_a_transfer_past_its_deadline_is_taken_back_or_waited_for(
    host: HostPages,
    store: Backend,
    monkeypatch: pytest.MonkeyPatch,
    releases: list[bool],
    message: str,
) -> None:
    store.set(host.names(), host.sources())
    with monkeypatch.context() as patch:
        patch.setattr(nixl, "_DEADLINE_S", 0.0)
        patch.setattr(store, "_agent", _StuckAgent(store._agent, releases))  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match=message):
            store.get(host.names(), host.targets())
    assert releases == []
    assert store.get(host.names(), host.targets()) == [True] * PAGES


if __name__ == "__main__":
    read_in_another_process(Path(sys.argv[1]))

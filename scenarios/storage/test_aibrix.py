"""AIBrix's cache over its own local stores: files (SHFS) and RocksDB."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from refimpl.config import ConfigError
from refimpl.memory.layout import Geometry
from refimpl.storage.backend import Backend, HostPage, StorageError
from refimpl.storage.factory import open_backend
from scenarios.storage.aibrix_patience import PATIENCE
from scenarios.storage.client_checks import (
    check_deleted_pages_can_be_written_again,
    check_threads_mix_no_pages,
)
from scenarios.storage.host_pages import GQA, MLA, PAGES, HostPages, loose, payload
from scenarios.tidy import ROOT

pytest.importorskip("refimpl.storage.aibrix", reason="the extra aibrix is absent")
pytestmark = pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable"
)  # the client's own

STORES = ["SHFS", "ROCKSDB"]
FOLDER = "AIBRIX_KV_CACHE_OL_{}_ROOT"


@pytest.fixture(params=STORES)
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a store that AIBrix has been told to use."""
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND", request.param)
    monkeypatch.setenv(*PATIENCE)
    monkeypatch.setenv(FOLDER.format(request.param), str(tmp_path))
    return tmp_path


@pytest.fixture
def host() -> HostPages:
    return HostPages.of("aibrix", GQA, "page_first")


@pytest.fixture
def store(host: HostPages, root: Path) -> Iterator[Backend]:
    assert root.is_dir()
    backend = open_backend("aibrix", host.setting({}))
    yield backend
    backend.close()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
def test_pages_come_back_bit_for_bit(root: Path, layout: str) -> None:
    host = HostPages.of("aibrix", GQA, layout)
    store = open_backend("aibrix", host.setting({}))
    assert store.exists(host.names()) == [False] * PAGES
    assert store.get(host.names(), host.targets()) == [False] * PAGES
    assert store.set(host.names(), host.sources()) == [True] * PAGES
    assert store.exists(host.names()) == [True] * PAGES
    assert store.get(host.names(), host.targets()) == [True] * PAGES
    for source, target in zip(host.sources(), host.targets(), strict=True):
        assert payload(source) == payload(target)
    store.close()
    assert any(root.iterdir())


def test_what_was_stored_is_there_after_a_restart(host: HostPages, root: Path) -> None:
    assert root.is_dir()
    first = open_backend("aibrix", host.setting({}))
    first.set(host.names(), host.sources())
    first.close()
    second = open_backend("aibrix", host.setting({}))
    assert second.get(host.names(), host.targets()) == [True] * PAGES
    assert [*map(payload, host.targets())] == [*map(payload, host.sources())]
    second.close()


@pytest.mark.live
@pytest.mark.parametrize("root", ["SHFS"], indirect=True)  # RocksDB has one process at a time
def test_a_second_process_reads_what_the_first_wrote(
    host: HostPages, root: Path, store: Backend
) -> None:
    assert root.is_dir()
    store.set(host.names(), host.sources())
    done = subprocess.run(
        [sys.executable, "-m", "scenarios.storage.test_aibrix"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == f"{PAGES} equal\n", done.stderr[-2000:]


def read_in_another_process() -> None:
    """Print how many pages are there with the bytes that the first process must have written."""
    host = HostPages.of("aibrix", GQA, "page_first")
    store = open_backend("aibrix", host.setting({}))
    store.get(host.names(), host.targets())
    pairs = zip(host.sources(), host.targets(), strict=True)
    print(sum(payload(source) == payload(target) for source, target in pairs), "equal")
    store.close()


@pytest.mark.parametrize("missing", [{0}, {7}, {1, 2, 5}, {0, 7}, set(range(8))])
def test_each_page_of_a_batch_is_answered_by_itself(
    host: HostPages, store: Backend, missing: set[int]
) -> None:
    names = host.names()
    there = [at for at in range(PAGES) if at not in missing]
    store.set([names[at] for at in there], [host.page(at) for at in there])
    expected = [at not in missing for at in range(PAGES)]
    assert store.exists(names) == expected
    assert store.get(names, host.targets()) == expected
    for at in there:
        assert payload(host.page(at)) == payload(host.page(PAGES + at))


def test_setting_a_name_again_keeps_the_first_value(host: HostPages, store: Backend) -> None:
    names = host.names()[:2]
    store.set(names[:1], [host.page(0)])
    assert store.set(names, [host.page(1), host.page(2)]) == [True, True]
    store.get(names, host.targets(2))
    assert payload(host.page(PAGES)) == payload(host.page(0))
    assert payload(host.page(PAGES + 1)) == payload(host.page(2))


@pytest.mark.parametrize("size", [1, 31, 33, 254])
def test_a_small_value_of_another_size_is_a_miss(
    host: HostPages, store: Backend, size: int
) -> None:
    names = [f"{name}.sum" for name in host.names()]
    values = [HostPage((memoryview(bytes([at] * 32)),)) for at in range(PAGES)]
    assert store.set(names, values) == [True] * PAGES
    assert store.exists(names) == [True] * PAGES
    assert store.exists(host.names()) == [False] * PAGES
    assert store.get(names[:1], [loose(bytes(size))]) == [False]
    targets = [loose(bytes(32)) for _ in names]
    assert store.get(names, targets) == [True] * PAGES
    assert list(map(payload, targets)) == list(map(payload, values))


def test_a_value_of_no_size_that_aibrix_keeps_is_refused(store: Backend) -> None:
    with pytest.raises(StorageError, match="pages of 65536 bytes and values of up to 254, not 300"):
        store.set(["value"], [loose(bytes(300))])


def test_clear_deletes_its_own_namespace_and_nothing_else(host: HostPages, store: Backend) -> None:
    strangers = HostPages.of("aibrix", GQA, "page_first", weights="2").names()
    store.set(host.names(), host.sources())
    # Past the backend, which then knows nothing of them: RocksDB has one user at a time.
    blocks = store._pages  # type: ignore[attr-defined]
    assert blocks.write(strangers, lambda *_: None) == list(range(PAGES))
    assert store.clear() == PAGES
    assert store.exists(host.names()) == [False] * PAGES
    assert blocks.there(strangers) == list(range(PAGES))


def test_deleted_pages_can_be_written_again(host: HostPages, store: Backend) -> None:
    check_deleted_pages_can_be_written_again(host, store)


def test_threads_share_one_client_without_mixing_pages(host: HostPages, store: Backend) -> None:
    check_threads_mix_no_pages(host, store, turns=5)


def test_each_block_that_is_read_is_given_back_before_the_next(
    host: HostPages, store: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    out: list[object] = []
    manager = store._pages._manager  # type: ignore[attr-defined]
    acquire = manager.acquire

    def noticing(*arguments: object) -> object:
        assert out == []
        status = acquire(*arguments)
        if status.is_ok():
            handle = status.get()[1]
            out.append(handle)
            release = handle.release
            monkeypatch.setattr(handle, "release", lambda: (out.remove(handle), release()))
        return status

    store.set(host.names()[:4], host.sources(4))
    monkeypatch.setattr(manager, "acquire", noticing)
    assert store.get(host.names(), host.targets()) == [True] * 4 + [False] * 4
    assert out == []


@pytest.mark.parametrize("geometry", [MLA], ids=["mla"])
def test_a_latent_cache_is_refused(geometry: Geometry) -> None:
    host = HostPages.of("aibrix", geometry, "page_first")
    with pytest.raises(ConfigError, match="aibrix stores no latent"):
        open_backend("aibrix", host.setting({}))


def test_without_a_store_it_says_which_variable_to_set(
    host: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND", raising=False)
    with pytest.raises(ConfigError, match="set AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND to SHFS"):
        open_backend("aibrix", host.setting({}))


@pytest.mark.live
def test_loading_the_client_keeps_the_event_loops_of_the_process() -> None:
    code = (
        "import asyncio; before = type(asyncio.get_event_loop_policy())\n"
        "import refimpl.storage.aibrix\n"
        "assert type(asyncio.get_event_loop_policy()) is before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_closed_backend_says_so(host: HostPages, store: Backend) -> None:
    store.close()
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.exists(host.names())


if __name__ == "__main__":
    read_in_another_process()

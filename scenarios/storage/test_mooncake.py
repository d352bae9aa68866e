"""A real Mooncake store: a master on loopback, clients in this process and in another."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from refimpl.config import ConfigError
from refimpl.memory.layout import Geometry
from refimpl.storage.backend import Backend, HostPage, StorageError
from refimpl.storage.factory import open_backend
from refimpl.storage.servers import MooncakeMaster, free_ports, mooncake_master, stop
from scenarios.storage.client_checks import (
    check_deleted_pages_can_be_written_again,
    check_the_first_value_is_kept,
    check_threads_mix_no_pages,
    check_what_is_missing_leaves_the_rest_alone,
)
from scenarios.storage.host_pages import GQA, KEYS, MLA, PAGES, HostPages, loose, payload
from scenarios.tidy import ROOT

pytest.importorskip(
    "mooncake.store",
    reason="the extra mooncake, or a library of the system that it needs, is absent",
    exc_type=ImportError,
)
pytestmark = pytest.mark.live

SEGMENT = "64mb"
SECONDS_QUICK = 2.0  # the library itself takes more than four to say that there is no master
SECONDS_BACK = 20.0  # measured: 1.6


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """One with memory of a client that stays: what lies in that of another goes when it closes."""
    with mooncake_master(tmp_path_factory.mktemp("mooncake") / "master.log") as running:
        lender = opened(
            HostPages.of("mooncake", GQA, "page_first"), running, global_segment_size=SEGMENT
        )
        yield running
        lender.close()


def opened(host: HostPages, master: MooncakeMaster, **extra: Any) -> Backend:
    keys = master.extra_config | {"global_segment_size": 0} | extra
    return open_backend("mooncake", host.setting(keys))


@pytest.fixture(scope="module")
def host() -> HostPages:
    return HostPages.of("mooncake", GQA, "page_first")


@pytest.fixture(scope="module")
def client(host: HostPages, master: MooncakeMaster) -> Iterator[Backend]:
    backend = opened(host, master)
    yield backend
    backend.close()  # takes the library two seconds, so the tests share one client


@pytest.fixture
def store(host: HostPages, client: Backend) -> Backend:
    client.clear()
    for slot in range(2 * PAGES):
        host.write(slot, slot)
    return client


@pytest.mark.parametrize(
    ("geometry", "layout"),
    [
        (GQA, "page_first"),
        (GQA, "page_first_direct"),
        (GQA, "page_head"),
        (MLA, "page_first"),
        (MLA, "page_first_direct"),
    ],
    ids=lambda value: value if isinstance(value, str) else "mla" if value.is_mla else "gqa",
)
def test_pages_come_back_bit_for_bit(
    master: MooncakeMaster, geometry: Geometry, layout: str
) -> None:
    host = HostPages.of("mooncake", geometry, layout, weights="round trip")
    store = opened(host, master)
    assert store.exists(host.names()) == [False] * PAGES
    assert store.get(host.names(), host.targets()) == [False] * PAGES
    assert store.set(host.names(), host.sources()) == [True] * PAGES
    assert store.exists(host.names()) == [True] * PAGES
    assert store.get(host.names(), host.targets()) == [True] * PAGES
    for source, target in zip(host.sources(), host.targets(), strict=True):
        assert payload(source) == payload(target)
    assert store.clear() == PAGES
    store.close()


@pytest.mark.parametrize(("geometry", "suffixes"), [(GQA, ("_0_k", "_0_v")), (MLA, ("__k",))])
def test_objects_have_the_names_that_sglang_gives_them(
    master: MooncakeMaster, geometry: Geometry, suffixes: tuple[str, ...]
) -> None:
    host = HostPages.of("mooncake", geometry, "page_first", compat="sglang")
    store = opened(host, master)
    assert store.set(host.names(KEYS[:1]), host.sources(1)) == [True]
    bare = pytest.importorskip("mooncake.store").MooncakeDistributedStore()
    assert bare.setup(*_bare(master)) == 0
    names = [KEYS[0].hex() + suffix for suffix in suffixes]
    assert [bare.is_exist(name) for name in names] == [1] * len(names)
    tries = (b"".join(bare.get(name) for name in names) for _ in range(5))
    assert payload(host.page(0)) in tries  # on a busy machine a transfer of the library's may fail
    bare.close()
    store.clear()
    store.close()


def _bare(master: MooncakeMaster) -> tuple[Any, ...]:
    """Arguments of a client that lends no memory."""
    return ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{master.rpc_port}")


def test_a_second_process_reads_what_the_first_wrote(
    master: MooncakeMaster, host: HostPages, store: Backend
) -> None:
    assert store.set(host.names(), host.sources()) == [True] * PAGES
    done = subprocess.run(
        [sys.executable, "-m", "scenarios.storage.test_mooncake", json.dumps(master.extra_config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.strip() == f"{PAGES} found, 0 of them wrong", done.stderr[-2000:]
    assert not re.search(
        r"^[IW]\d{4} ", done.stderr, re.MULTILINE
    )  # what it does it keeps to itself


def read_in_another_process(extra: dict[str, Any]) -> None:
    """Print how many pages are there, and how many without the bytes that the first process has."""
    host = HostPages.of("mooncake", GQA, "page_first")
    store = open_backend("mooncake", host.setting(extra | {"global_segment_size": 0}))
    found = store.get(host.names(), host.targets())
    pairs = zip(found, host.sources(), host.targets(), strict=True)
    wrong = [is_there and payload(one) != payload(two) for is_there, one, two in pairs]
    print(found.count(True), "found,", wrong.count(True), "of them wrong")
    store.close()


def test_what_is_missing_of_a_batch_leaves_the_rest_alone(host: HostPages, store: Backend) -> None:
    check_what_is_missing_leaves_the_rest_alone(host, store)


def test_setting_a_name_again_keeps_the_first_value(host: HostPages, store: Backend) -> None:
    check_the_first_value_is_kept(host, store)


def test_a_name_that_comes_three_times_in_a_call_fills_every_page(
    host: HostPages, store: Backend
) -> None:
    first, second = host.names()[:2]
    names = [first, second, first, first]
    sources = [host.page(0), host.page(1), host.page(2), host.page(3)]
    assert store.set(names, sources) == [True] * 4  # the first value of a name is kept
    assert store.get(names, host.targets(4)) == [True] * 4
    assert [payload(each) for each in host.targets(4)] == [
        payload(host.page(at)) for at in (0, 1, 0, 0)
    ]


@pytest.mark.parametrize("size", [1, 31, 33, 4096])
def test_a_value_of_another_size_is_a_miss(host: HostPages, store: Backend, size: int) -> None:
    name = [f"{host.names()[0]}.sum"]
    assert store.set(name, [loose(bytes(range(32)))]) == [True]
    assert store.get(name, [loose(bytes(size))]) == [False]
    target = loose(bytes(32))
    assert store.get(name, [target]) == [True]
    assert payload(target) == bytes(range(32))


@pytest.mark.parametrize("size", [100, 1 << 20], ids=["short", "long"])
def test_an_object_read_in_vain_for_its_size_is_not_there_and_is_replaced(
    host: HostPages, store: Backend, size: int
) -> None:
    name = host.names()[:1]
    half = memoryview(bytearray(size))
    assert store.set(name, [HostPage((half, half))]) == [True]
    assert store.exists(name) == [True]
    assert store.get(name, host.targets(1)) == [False]
    assert store.exists(name) == [False]
    assert store.set(name, host.sources(1)) == [True]
    assert store.exists(name) == [True]
    assert store.get(name, host.targets(1)) == [True]
    assert payload(host.targets(1)[0]) == payload(host.page(0))


def test_a_page_without_its_second_half_is_a_miss(
    master: MooncakeMaster, host: HostPages, store: Backend
) -> None:
    name = host.names()[:1]
    store.set(name, [host.page(0)])
    bare = pytest.importorskip("mooncake.store").MooncakeDistributedStore()
    bare.setup(*_bare(master))
    assert bare.remove(f"{name[0]}_v", True) == 0
    bare.close()
    assert store.exists(name) == [False]
    assert store.get(name, host.targets(1)) == [False]
    assert store.set(name, [host.page(0)]) == [True]
    assert store.get(name, host.targets(1)) == [True]


def test_values_that_can_not_be_written_to_can_be_stored(host: HostPages, store: Backend) -> None:
    names = [f"{name}.sum" for name in host.names()]
    values = [HostPage((memoryview(bytes([at] * 32)),)) for at in range(PAGES)]
    assert store.set(names, values) == [True] * PAGES
    targets = [loose(bytes(32)) for _ in names]
    assert store.get(names, targets) == [True] * PAGES
    assert list(map(payload, targets)) == list(map(payload, values))


def test_clear_deletes_its_own_namespace_and_nothing_else(
    master: MooncakeMaster, host: HostPages, store: Backend
) -> None:
    other = HostPages.of("mooncake", GQA, "page_first", model="or.*/Model", weights="2")
    theirs = opened(other, master)
    store.set(host.names(), host.sources())
    theirs.set(other.names(), other.sources())
    assert store.clear() == PAGES
    assert store.exists(host.names()) == [False] * PAGES
    assert theirs.exists(other.names()) == [True] * PAGES
    assert theirs.clear() == PAGES
    theirs.close()


def test_deleted_pages_can_be_written_again(host: HostPages, store: Backend) -> None:
    check_deleted_pages_can_be_written_again(host, store, f"{host.names()[0]}.sum")


def test_threads_share_one_client_without_mixing_pages(host: HostPages, store: Backend) -> None:
    check_threads_mix_no_pages(host, store, turns=20)


def test_a_full_store_refuses_pages_without_failing(tmp_path: Path) -> None:
    """On a master of its own: one that had no room evicts, somewhat later, whatever nobody reads."""
    host = HostPages.of("mooncake", GQA, "page_first", weights="full")
    with mooncake_master(tmp_path / "master.log") as master:
        store = opened(host, master, global_segment_size=SEGMENT)
        big = loose(bytes(80 << 20))
        assert store.set([f"{host.names()[0]}.big"], [big]) == [False]
        store.close()


def test_the_second_half_can_be_grouped_with_the_first(
    master: MooncakeMaster, host: HostPages
) -> None:
    grouped = opened(host, master, enable_group_semantics=True)
    grouped.clear()
    assert grouped.set(host.names(), host.sources()) == [True] * PAGES
    assert grouped.get(host.names(), host.targets()) == [True] * PAGES
    grouped.clear()
    grouped.close()


# ---- servers that are not there -----------------------------------------------------------------


def test_a_switch_as_a_word_is_a_switch(host: HostPages, master: MooncakeMaster) -> None:
    with pytest.raises(ConfigError, match="enable_group_semantics must be true or false"):
        opened(host, master, enable_group_semantics="perhaps")
    store = opened(host, master, enable_group_semantics="false")
    assert store._grouped is False  # type: ignore[attr-defined]
    store.close()


def test_without_a_master_opening_fails_at_once(host: HostPages) -> None:
    rpc_port, _ = free_ports()
    begun = monotonic()
    with pytest.raises(StorageError, match=f"no mooncake master listens at 127.0.0.1:{rpc_port}"):
        open_backend("mooncake", host.setting({"master_server_address": f"127.0.0.1:{rpc_port}"}))
    assert monotonic() - begun < SECONDS_QUICK


def test_without_its_metadata_server_opening_fails_at_once(
    host: HostPages, master: MooncakeMaster
) -> None:
    port, _ = free_ports()
    with pytest.raises(StorageError, match=f"no mooncake metadata server listens at .*:{port}"):
        opened(host, master, metadata_server=f"http://127.0.0.1:{port}/metadata")


def test_check_server_waits_until_somebody_lends_memory(
    host: HostPages, master: MooncakeMaster, client: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.exists(host.names())  # it lends some
    opened(host, master, check_server=True).close()
    monkeypatch.setattr("refimpl.storage.mooncake_client._CHECK_S", 0.0)
    port, _ = free_ports()
    with pytest.raises(StorageError, match="no storage joined mooncake within 0 s"):
        opened(host, master, check_server=True, master_metrics_port=port)


def test_pages_in_one_piece_a_layer_are_refused(master: MooncakeMaster) -> None:
    layered = HostPages.of("mooncake", GQA, "layer_first")
    with pytest.raises(ConfigError, match=r"choose page_first \(kernel\) or page_first_direct"):
        opened(layered, master)


def test_a_stranger_on_the_masters_port_is_found_out(
    host: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refimpl.storage.mooncake_client._SETUP_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        with pytest.raises(StorageError, match=f"{address} does not answer as a mooncake master"):
            open_backend(
                "mooncake", host.setting({"master_server_address": address, "protocol": "tcp"})
            )


def test_a_master_that_dies_costs_time_and_comes_back(tmp_path: Path) -> None:
    host = HostPages.of("mooncake", GQA, "page_first", weights="mortal")
    names, log = host.names(), tmp_path / "master.log"
    with mooncake_master(log) as first:
        store = opened(host, first, global_segment_size=SEGMENT)
        assert store.set(names[:4], host.sources(4)) == [True] * 4
        first.process.kill()
        first.process.wait()
        for call in (
            lambda: store.exists(names),
            lambda: store.get(names, host.targets()),
            lambda: store.set(names, host.sources()),
            store.clear,
        ):
            begun = monotonic()
            with pytest.raises(StorageError, match="no mooncake master listens"):
                call()
            assert monotonic() - begun < SECONDS_QUICK
        ports = (first.rpc_port, first.metrics_port)
    with mooncake_master(log, ports=ports):
        # A new master knows nothing; at first the client has not even heard of it.
        _until(lambda: store.get(names, host.targets()) == [False] * PAGES)
        _until(lambda: store.set(names, host.sources()) == [True] * PAGES)
        assert store.get(names, host.targets()) == [True] * PAGES
        assert [*map(payload, host.targets())] == [*map(payload, host.sources())]
        store.close()


def _until(holds: Callable[[], bool]) -> None:
    """Ask again while the store is away or refuses, as the requests that come next would."""
    begun = monotonic()
    while monotonic() - begun < SECONDS_BACK:
        with suppress(StorageError):
            if holds():
                return
    pytest.fail(f"not within {SECONDS_BACK} s")


def test_a_closed_backend_says_so(host: HostPages, master: MooncakeMaster) -> None:
    store = opened(host, master)
    store.close()
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.exists(host.names())


def test_a_stopped_master_is_gone(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "master.log") as running:
        pass
    assert running.process.poll() == 0
    stop(running.process)  # twice does no harm
    assert running.log.stat().st_size > 0


if __name__ == "__main__":
    read_in_another_process(json.loads(sys.argv[1]))

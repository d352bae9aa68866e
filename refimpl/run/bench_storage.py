"""``refimpl bench storage``: what our backends leave of the speed of what is under them.

Both move the same pages of the same pool, in the same batches, in the same run, turn by turn: the ratio
carries over to another machine, GB/s do not. Must not know: the terminal. Called by: the command line.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

from refimpl.config import ConfigError
from refimpl.keys import page_keys
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.storage.backend import Backend, HostPage, Setting
from refimpl.storage.factory import open_backend
from refimpl.storage.names import Identity, namespace_of
from refimpl.storage.objects import HALVES, address_of
from refimpl.storage.servers import MooncakeMaster, mooncake_master

_BATCH: Final = 64  # pages
_ROUNDS: Final = 9
_MEMORY: Final = Path("/dev/shm")
_SEGMENT_BYTES: Final = 256 << 20
# Pages of 256 KiB and of 1 MiB.
_GEOMETRIES: Final = {
    "256_kib": Geometry(layers=8, kvs=2, heads=4, dim=128, page_size=16),
    "1_mib": Geometry(layers=8, kvs=2, heads=8, dim=128, page_size=32),
}
# Pages of 8 MiB, as an 8B model's at 64 tokens.
_LARGE: Final = {"8_mib": Geometry(layers=32, kvs=2, heads=8, dim=128, page_size=64)}
Calls = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]  # put, get, delete


class _Load:
    """A pool of pages, named, and a backend that knows it."""

    def __init__(self, backend: str, geometry: Geometry) -> None:
        identity = Identity(
            model="bench",
            layout="page_first",
            page_size=geometry.page_size,
            layers=geometry.layers,
            kv_heads=geometry.heads,
            head_dim=geometry.dim,
        )
        self._backend = backend
        pool = Pool(geometry, "page_first", _BATCH)
        words = pool.words()
        words[:] = range(len(words))
        self.setting = Setting(
            identity, namespace_of(backend, identity), {}, (words.data.cast("B"),)
        )
        keys = page_keys(list(range(_BATCH * geometry.page_size)), geometry.page_size)
        self.names = [self.setting.namespace.name(key) for key in keys]
        self.pages = [HostPage(pool.pieces(slot), slot) for slot in range(_BATCH)]
        self.bytes = _BATCH * geometry.page_bytes
        pieces = [piece for page in self.pages for piece in page.pieces]
        self.addresses = [address_of(piece) for piece in pieces]
        self.sizes = [piece.nbytes for piece in pieces]
        self.bare_names = [f"bare_{name}{half}" for name in self.names for half in HALVES]

    def open(self, extra: dict[str, Any]) -> Backend:
        """The backend over this pool."""
        setting = self.setting
        return open_backend(
            self._backend, Setting(setting.identity, setting.namespace, extra, setting.memory)
        )

    def ours(self, backend: Backend) -> Calls:
        """Put, get and delete of the batch through our backend."""
        return (
            lambda: _all_true(backend.set(self.names, self.pages)),
            lambda: _all_true(backend.get(self.names, self.pages)),
            backend.clear,
        )


def _all_true(answers: list[bool]) -> None:
    assert all(answers), "a page was refused or missing: there is nothing to measure"


def _compare(load: _Load, ours: Calls, bare: Calls) -> dict[str, float]:
    """Medians over rounds in which both take turns."""
    spent: dict[str, list[int]] = {}
    for _ in range(_ROUNDS + 1):
        for who, (put, get, delete) in (("backend", ours), ("client", bare)):
            for what, call in (("put", put), ("get", get)):
                begun = perf_counter_ns()
                call()
                spent.setdefault(f"{who}_{what}", []).append(perf_counter_ns() - begun)
            delete()
    rates = {name: load.bytes / median(times[1:]) for name, times in spent.items()}
    for what in ("put", "get"):
        rates[f"{what}_to_client"] = rates[f"backend_{what}"] / rates[f"client_{what}"]
    return rates


def bench_mooncake() -> dict[str, Any]:
    """GB/s of batches against a master and a segment of this process, over loopback."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as masters:
        # One for each, so that each client finds its own segment and nothing else.
        ours, bare = (
            masters.enter_context(mooncake_master(Path(folder) / f"{who}.log"))
            for who in ("ours", "bare")
        )
        for name, geometry in _GEOMETRIES.items():
            results[name] = _bench_mooncake(_Load("mooncake", geometry), ours, bare)
    return results


def _bench_mooncake(
    load: _Load, master: MooncakeMaster, bare_master: MooncakeMaster
) -> dict[str, float]:
    backend = load.open(master.extra_config | {"global_segment_size": _SEGMENT_BYTES})
    store = import_module("mooncake.store").MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", _SEGMENT_BYTES, 16 << 20, "tcp", "")
    assert store.setup(*arguments, f"127.0.0.1:{bare_master.rpc_port}") == 0
    names, addresses, sizes = load.bare_names, load.addresses, load.sizes
    start = min(addresses)
    store.register_buffer(start, load.bytes)
    bare = (
        lambda: store.batch_put_from(names, addresses, sizes),
        lambda: store.batch_get_into(names, addresses, sizes),
        lambda: store.batch_remove(names, True),
    )
    try:
        return _compare(load, load.ours(backend), bare)
    finally:
        store.close()
        backend.close()


def bench_nixl() -> dict[str, Any]:
    """GB/s of batches of one file an object through the POSIX plugin, in a file system in memory: what a
    disk takes to create files would hide both."""
    results: dict[str, Any] = {}
    for name, geometry in _GEOMETRIES.items():
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            results[name] = _bench_nixl(_Load("nixl", geometry), Path(folder))
    return results


def _bench_nixl(load: _Load, folder: Path) -> dict[str, float]:
    backend = load.open({"storage_dir": str(folder), "plugin": "POSIX"})
    api = import_module("nixl_cu12._api")
    agent = api.nixl_agent("bench", api.nixl_agent_config(backends=[]))
    agent.create_backend("POSIX", {})
    agent.register_memory([(min(load.addresses), load.bytes, 0, "")], "DRAM")
    paths = [folder / name for name in load.bare_names]

    def move(direction: str) -> None:
        files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in paths]
        _nixl_transfer(agent, direction, load, files)
        for file in files:
            os.close(file)

    def delete() -> None:
        for path in paths:
            path.unlink()

    bare = (lambda: move("WRITE"), lambda: move("READ"), delete)
    try:
        return _compare(load, load.ours(backend), bare)
    finally:
        backend.close()


def _nixl_transfer(agent: Any, direction: str, load: _Load, files: Sequence[int]) -> None:
    whole = list(zip(load.sizes, files, strict=True))
    known = agent.register_memory([(0, size, file, "") for size, file in whole], "FILE")
    memory = zip(load.addresses, load.sizes, strict=True)
    handle = agent.initialize_xfer(
        direction,
        agent.get_xfer_descs([(address, size, 0) for address, size in memory], "DRAM"),
        agent.get_xfer_descs([(0, size, file) for size, file in whole], "FILE"),
        agent.name,
    )
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert state == "DONE", state
    agent.release_xfer_handle(handle)
    agent.deregister_memory(known)


def bench_file() -> dict[str, Any]:
    """GB/s of one file a page, beside one large file written and read piece by piece in the same order."""
    results: dict[str, Any] = {}
    for name, geometry in (_GEOMETRIES | _LARGE).items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = _bench_file(_Load("file", geometry), Path(folder))
    return results


def _bench_file(load: _Load, folder: Path) -> dict[str, float]:
    backend = load.open({"file_storage_path": str(folder / "pages")})
    path = folder / "large"
    large = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    starts = range(0, load.bytes, load.pages[0].nbytes)
    rows = list(zip(load.pages, starts, strict=True))

    def write() -> None:
        for page, start in rows:
            os.pwritev(large, page.pieces, start)

    def read() -> None:
        for page, start in rows:
            os.preadv(large, page.pieces, start)

    bare = (write, read, lambda: os.ftruncate(large, 0))
    try:
        return _compare(load, load.ours(backend), bare)
    finally:
        os.close(large)
        backend.close()


_STORES: Final[dict[str, tuple[str, Callable[[], dict[str, Any]]]]] = {
    "file": ("refimpl.storage.file", bench_file),
    "mooncake": ("refimpl.storage.mooncake", bench_mooncake),
    "nixl": ("refimpl.storage.nixl", bench_nixl),
}


def bench_storage(stores: Sequence[str] = ()) -> dict[str, Any]:
    """All stores whose client library is installed, or those that are named."""
    results: dict[str, Any] = {"batch_pages": _BATCH}
    for name in stores or _STORES:
        if name not in _STORES:
            raise ConfigError(f"bench storage knows no {name!r}: choose from {', '.join(_STORES)}")
        module, bench = _STORES[name]
        try:
            import_module(module)
        except (ImportError, ConfigError) as error:
            if stores:
                raise ConfigError(f"{name} can't be loaded: {error}") from None
            results[name] = f"not installed: {error}"
        else:
            results[name] = bench()
    ratios = {
        name: {size: _ratios(rates) for size, rates in found.items()}
        for name, found in results.items()
        if isinstance(found, dict)
    }
    return results | {"ratios": ratios}


def _ratios(rates: dict[str, float]) -> dict[str, float]:
    return {f"{what}_to_client": rates[f"{what}_to_client"] for what in ("put", "get")}

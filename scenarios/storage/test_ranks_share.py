"""Ranks and L3: instances of different TP share pages to the bit, one rank writes what is the same on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count, permutations
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

import pytest

torch = pytest.importorskip("torch", reason="host pools need torch")

from refimpl.config import ConfigError  # noqa: E402
from refimpl.memory.layout import Geometry  # noqa: E402
from refimpl.memory.pool import Pool  # noqa: E402
from refimpl.messages import Fetch, Fetched, Store, Stored  # noqa: E402
from refimpl.run.live_storage import LiveStorage  # noqa: E402
from refimpl.run.storage_setup import StoreOpener  # noqa: E402
from refimpl.storage.backend import BATCH_NAMES  # noqa: E402
from refimpl.storage.memory import MemoryBackend  # noqa: E402
from refimpl.storage.names import Identity  # noqa: E402
from refimpl.storage.servers import mooncake_master  # noqa: E402
from scenarios.storage.aibrix_patience import PATIENCE  # noqa: E402

PAGES = 6
LAYERS, DIM, PAGE_SIZE = 2, 4, 4
_ops = count(1)


class RankStore:
    """A host pool of one rank and its pumps to L3."""

    def __init__(
        self,
        rank: int,
        size: int,
        heads: int,
        backend: str,
        extra: dict[str, object],
        layout: str,
        pages: int = PAGES,
    ) -> None:
        is_mla = heads == 0
        own = 1 if is_mla else max(heads // size, 1)
        geometry = Geometry(LAYERS, 1 if is_mla else 2, own, DIM, PAGE_SIZE, "float32")
        self.pool = Pool(geometry, layout, pages)
        self.pages = pages
        self._keys = [number.to_bytes(32, "big") for number in range(pages)]
        self.rank, self.size, self.heads = rank, size, heads
        identity = Identity(
            model="model",
            dtype="float32",
            layout=layout,
            page_size=PAGE_SIZE,
            layers=LAYERS,
            kv_heads=max(heads, 1),
            head_dim=DIM,
            is_mla=is_mla,
            tp_rank=rank,
            tp_size=size,
        )
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self.storage = LiveStorage(self.pool, StoreOpener(identity, self.pool), self._inbox)  # type: ignore[arg-type]
        self.storage.open_now(backend, json.dumps(extra))

    def store(self) -> int:
        """Write all pages; how many are there now."""
        self.storage.submit(Store(next(_ops), self._keys, list(range(self.pages))))
        said = self._inbox.get(timeout=30)
        assert isinstance(said, Stored)
        return said.pages

    def fetch(self) -> int:
        """Read all pages over what is there; how many came."""
        self.pool.tensor.fill_(float("nan"))
        self.storage.submit(Fetch(next(_ops), self._keys, list(range(self.pages))))
        while not isinstance(said := self._inbox.get(timeout=30), Fetched):
            pass
        return said.pages

    def own_heads(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``[page, kv, layer, token, head, dim]``."""
        if not self.heads:
            return whole
        first = self.rank * self.heads // self.size
        return whole[..., first : first + self.pool.geometry.heads, :]

    def fill(self, whole: torch.Tensor) -> None:
        """Compute, as it were."""
        self.pool.by_page().copy_(self.own_heads(whole))

    def close(self) -> None:
        self.storage.shut(is_idle=True)


def instance(
    size: int,
    heads: int,
    backend: str,
    extra: dict[str, object],
    layout: str = "page_head",
    pages: int = PAGES,
) -> list[RankStore]:
    return [RankStore(rank, size, heads, backend, extra, layout, pages) for rank in range(size)]


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def whole_pages(heads: int, seed: int, pages: int = PAGES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kvs = 2 if heads else 1
    shape = (pages, kvs, LAYERS, PAGE_SIZE, max(heads, 1), DIM)
    return torch.randn(shape, generator=generator)


def extra_of(backend: str, folder: Path, **more: object) -> dict[str, object]:
    where: dict[str, dict[str, object]] = {
        "file": {"file_storage_path": str(folder)},
        "memory": {"store": str(folder)},
        "nixl": {"storage_dir": str(folder), "plugin": "POSIX"},
        "dynamic": {
            "backend_name": "folder",
            "module_path": "scenarios.conformance.classes",
            "class_name": "FolderStorage",  # written for SGLang
            "folder": str(folder),
        },
    }
    return where[backend] | more


def have(backend: str) -> None:
    """Skip without the package that a backend needs."""
    if backend == "nixl":
        pytest.importorskip("refimpl.storage.nixl", reason="the extra nixl is absent")


def check_shared(
    backend: str, extra: dict[str, object], heads: int, writer: int, reader: int
) -> None:
    whole = whole_pages(heads, writer)
    ranks = instance(writer, heads, backend, extra)
    for rank in ranks:
        rank.fill(whole)
        assert rank.store() == PAGES
    others = instance(reader, heads, backend, extra)
    for rank in others:
        assert rank.fetch() == PAGES
        assert torch.equal(rank.pool.by_page(), rank.own_heads(whole))
    for rank in [*ranks, *others]:
        rank.close()


@pytest.mark.parametrize("backend", ["memory", "file"])
@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize(("writer", "reader"), list(permutations((2, 4, 8), 2)))
def test_instances_of_different_tp_share_pages_bit_by_bit(
    backend: str, heads: int, writer: int, reader: int, tmp_path: Path
) -> None:
    extra = extra_of(backend, tmp_path, tp_lcm_size=8, integrity="require")
    check_shared(backend, extra, heads, writer, reader)


@pytest.mark.parametrize("backend", ["nixl", "dynamic"])
@pytest.mark.parametrize("heads", [8, 2])
def test_instances_share_pages_in_other_stores(backend: str, heads: int, tmp_path: Path) -> None:
    have(backend)
    for writer, reader in ((2, 8), (8, 4), (4, 2)):
        extra = extra_of(backend, tmp_path / f"{writer}to{reader}", tp_lcm_size=8)
        check_shared(backend, extra, heads, writer, reader)


@pytest.mark.parametrize("heads", [8, 2])
def test_what_one_tp_has_stored_another_does_not_store_again(heads: int, tmp_path: Path) -> None:
    """An object for each page and rank of the largest TP, whoever writes first."""
    extra = extra_of("file", tmp_path, tp_lcm_size=8)
    whole, seen = whole_pages(heads, 1), []
    for size in (2, 4, 8):
        for rank in instance(size, heads, "file", extra):
            rank.fill(whole)
            assert rank.store() == PAGES
            rank.close()
        seen.append({path: path.stat().st_ino for path in files_below(tmp_path)})
    assert len(seen[0]) == 8 * PAGES
    assert seen[0] == seen[1] == seen[2]


def test_no_call_has_more_names_than_one_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, list[int]] = {}

    def counted(kind: str) -> Callable[..., list[bool]]:
        call = getattr(MemoryBackend, kind)

        def count_names(self: MemoryBackend, names: list[str], *pages: object) -> list[bool]:
            counts.setdefault(kind, []).append(len(names))
            done: list[bool] = call(self, names, *pages)
            return done

        return count_names

    for kind in ("exists", "get", "set"):
        monkeypatch.setattr(MemoryBackend, kind, counted(kind))
    extra = extra_of("memory", tmp_path, tp_lcm_size=8)
    whole = whole_pages(8, 1, pages=130)
    (rank, other) = instance(2, 8, "memory", extra, pages=130)
    rank.fill(whole)
    assert rank.store() == rank.fetch() == 130
    assert torch.equal(rank.pool.by_page(), rank.own_heads(whole))
    for each in (rank, other):
        each.close()
    assert {kind: sorted(each) for kind, each in counts.items()} == dict.fromkeys(
        ("exists", "get", "set"), [2] * 4 + [BATCH_NAMES] * 4
    )


def test_a_corrupt_part_spoils_its_page_for_the_ranks_that_need_it(tmp_path: Path) -> None:
    """Each part has a checksum of its own."""
    extra = extra_of("file", tmp_path, tp_lcm_size=8, integrity="require")
    whole = whole_pages(8, 1)
    for rank in instance(8, 8, "file", extra):
        rank.fill(whole)
        rank.store()
        rank.close()
    assert len(files_below(tmp_path)) == 2 * 8 * PAGES
    third = (2).to_bytes(32, "big").hex()
    (part,) = [
        path
        for path in files_below(tmp_path)
        if path.name.startswith(third) and path.name.endswith("_5_8.bin")
    ]
    spoiled = bytearray(part.read_bytes())
    spoiled[3] ^= 1
    part.write_bytes(spoiled)
    found = []
    for rank in instance(4, 8, "file", extra):
        found.append(rank.fetch())
        rank.close()
    assert found == [PAGES, PAGES, 2, PAGES]  # the third of four has heads 4 and 5


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.timeout(300)
def test_instances_share_pages_in_mooncake(tmp_path: Path) -> None:
    pytest.importorskip("mooncake.store", reason="mooncake is not installed, or lacks a library")
    with mooncake_master(tmp_path / "master.log") as master:
        # Each rank has a client of its own, which takes two seconds to close.
        for heads, writer, reader, lcm in ((8, 2, 8, 8), (2, 4, 2, 4)):
            extra: dict[str, object] = {
                **master.extra_config,
                "global_segment_size": "128mb",
                "tp_lcm_size": lcm,
                "extra_backend_tag": f"{heads}heads{writer}to{reader}",
            }
            check_shared("mooncake", extra, heads, writer, reader)


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.timeout(300)
def test_the_parts_of_a_rank_have_one_client_of_mooncake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing one holds up the whole process for two seconds, whoever closes it."""
    pytest.importorskip("mooncake.store", reason="mooncake is not installed, or lacks a library")
    from refimpl.storage import mooncake_client

    clients: list[object] = []
    real = mooncake_client.MooncakeDistributedStore

    def counted() -> object:
        clients.append(real())
        return clients[-1]

    monkeypatch.setattr(mooncake_client, "MooncakeDistributedStore", counted)
    with mooncake_master(tmp_path / "master.log") as master:
        extra = {**master.extra_config, "global_segment_size": "16mb", "tp_lcm_size": 8}
        whole = whole_pages(8, 1)
        for count in (1, 2):
            (rank,) = instance(1, 8, "mooncake", extra)
            rank.fill(whole)
            assert rank.store() == rank.fetch() == PAGES
            assert torch.equal(rank.pool.by_page(), whole)
            begun = monotonic()
            rank.close()
            assert monotonic() - begun < 8  # eight clients took fifteen
            assert len(clients) == count
    assert not mooncake_client._clients


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.timeout(300)
def test_ranks_do_not_read_one_another_in_mooncake(tmp_path: Path) -> None:
    """Field report G07."""
    pytest.importorskip("mooncake.store", reason="mooncake is not installed, or lacks a library")
    with mooncake_master(tmp_path / "master.log") as master:
        check_apart("mooncake", {**master.extra_config, "global_segment_size": "64mb"})


@pytest.mark.parametrize("store", ["SHFS", "ROCKSDB"])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # the client's own
def test_ranks_do_not_read_one_another_in_aibrix(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report G07. RocksDB lets a folder be open once, and ranks of one process are several."""
    pytest.importorskip("refimpl.storage.aibrix", reason="the extra aibrix is absent")
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND", store)
    monkeypatch.setenv(*PATIENCE)
    monkeypatch.setenv(f"AIBRIX_KV_CACHE_OL_{store}_ROOT", str(tmp_path))
    check_apart("aibrix", {})


def test_a_page_that_lacks_a_part_is_a_miss(tmp_path: Path) -> None:
    extra = extra_of("file", tmp_path, tp_lcm_size=8)
    whole = whole_pages(8, 1)
    for rank in instance(8, 8, "file", extra):
        rank.fill(whole)
        if rank.rank != 5:
            rank.store()
        rank.close()
    found = []
    for rank in instance(2, 8, "file", extra):
        found.append(rank.fetch())
        rank.close()
    assert found == [PAGES, 0]


def check_apart(backend: str, extra: dict[str, object]) -> None:
    """Four ranks store pages of their own under the same keys, and each reads its own back."""
    ranks = instance(4, 8, backend, extra, "page_first")
    for rank in ranks:
        rank.pool.tensor.fill_(float(rank.rank))
        assert rank.store() == PAGES
    for rank in ranks:
        assert rank.fetch() == PAGES
        assert bool((rank.pool.tensor == rank.rank).all())
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("backend", ["memory", "file", "nixl", "dynamic"])
def test_ranks_do_not_read_one_another_under_one_key(backend: str, tmp_path: Path) -> None:
    """Field report G07."""
    have(backend)
    check_apart(backend, extra_of(backend, tmp_path / "store"))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_latent_cache_is_written_once_whatever_the_ranks(size: int, tmp_path: Path) -> None:
    """Field reports O02, O04: one writer, one object a page, and every rank of another instance reads it."""
    extra = extra_of("file", tmp_path, tp_lcm_size=16)  # which says nothing of a latent cache
    whole = whole_pages(0, 1, pages=100)
    ranks = instance(size, 0, "file", extra, "page_first", pages=100)
    for rank in reversed(ranks):  # the others say that they have written, and have not
        rank.fill(whole)
        assert rank.store() == 100
        assert len(files_below(tmp_path)) == (100 if rank.rank == 0 else 0)
    fresh = instance(size, 0, "file", extra, "page_first", pages=100)
    for rank in fresh:
        assert rank.fetch() == 100
        assert torch.equal(rank.pool.by_page(), whole)
    for rank in [*ranks, *fresh]:
        rank.close()


def test_a_replicated_pool_is_written_once_and_a_local_one_by_every_rank(tmp_path: Path) -> None:
    """Field report O03: what one pool skips says nothing of the other."""
    replicated, local = whole_pages(0, 1), whole_pages(8, 2)
    pools = [
        (instance(4, 0, "file", extra_of("file", tmp_path / "a"), "page_first"), replicated),
        (instance(4, 8, "file", extra_of("file", tmp_path / "b"), "page_first"), local),
    ]
    for ranks, whole in pools:
        for rank in ranks:
            rank.fill(whole)
            rank.store()
    counts = [len(files_below(tmp_path / name)) for name in "ab"]
    assert counts == [PAGES, 4 * PAGES]
    for ranks, whole in pools:
        for rank in ranks:
            assert rank.fetch() == PAGES
            assert torch.equal(rank.pool.by_page(), rank.own_heads(whole))
            rank.close()


@pytest.mark.parametrize(("lcm", "size", "heads"), [(6, 4, 8), (3, 1, 8), (12, 4, 8)])
def test_sizes_that_do_not_go_together_are_refused(
    lcm: int, size: int, heads: int, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        RankStore(0, size, heads, "file", extra_of("file", tmp_path, tp_lcm_size=lcm), "page_head")


def test_another_layout_shares_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = extra_of("file", tmp_path, tp_lcm_size=8)
    rank = RankStore(0, 2, 8, "file", extra, "page_first")
    rank.fill(whole_pages(8, 1))
    assert rank.store() == PAGES
    rank.close()
    assert "page_head" in caplog.text

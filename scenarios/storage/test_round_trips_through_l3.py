"""L1 -> L2 -> L3 -> L2 -> L1: pages come back bit for bit, in every layout, by every way."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

import torch

from refimpl.keys import namespace_seed, page_keys
from refimpl.memory.layout import AXES, Geometry
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Mover
from refimpl.messages import AnyEvent, Fetch, Fetched, Probe, Probed, Store, Stored
from refimpl.run.live_storage import LiveStorage
from refimpl.run.storage_setup import StoreOpener
from scenarios.bytes.rig import bits
from scenarios.bytes.test_round_trips import GQA, MLA, tag
from scenarios.storage.host_pages import identity_of

pytestmark = pytest.mark.live

COMBINATIONS = [
    (geometry, layout, io, store)
    for geometry, layout, io, store in itertools.product(
        (GQA, MLA), AXES, ("kernel", "direct"), ("memory", "file", "require", "sglang")
    )
    if not (geometry.is_mla and layout == "page_head")
]
SLOTS, BACK = [5, 6, 0, 3], [1, 2, 4, 7]  # of L1, before and after
FIRST, SECOND = [2, 3, 9, 7], [8, 0, 10, 4]  # of L2, on the way out and back
KEYS = page_keys(list(range(4 * GQA.page_size)), GQA.page_size)


@pytest.fixture
def inbox() -> SimpleQueue[AnyEvent]:
    return SimpleQueue()


def extra_config(store: str, folder: Path) -> tuple[str, str]:
    """(backend, extra config)"""
    own = {
        "memory": f'{{"store": "{folder}"}}',
        "file": f'{{"file_storage_path": "{folder}"}}',
        "require": f'{{"file_storage_path": "{folder}", "integrity": "require"}}',
        "sglang": f'{{"file_storage_path": "{folder}", "compat": "sglang"}}',
    }
    return ("memory" if store == "memory" else "file"), own[store]


@pytest.fixture
def opened() -> Iterator[list[LiveStorage]]:
    storages: list[LiveStorage] = []
    yield storages
    for storage in storages:
        storage.shut(is_idle=True)


def asked(
    storage: LiveStorage, inbox: SimpleQueue[AnyEvent], command: Probe | Fetch | Store
) -> AnyEvent:
    storage.submit(command)
    return inbox.get(timeout=20)


@pytest.mark.parametrize(("geometry", "layout", "io", "store"), COMBINATIONS)
def test_pages_come_back_through_l3_as_they_went(
    geometry: Geometry,
    layout: str,
    io: str,
    store: str,
    tmp_path: Path,
    inbox: SimpleQueue[AnyEvent],
    opened: list[LiveStorage],
) -> None:
    device, host = Pool(geometry, "layer_first", 8), Pool(geometry, layout, 11)
    storage = LiveStorage(host, StoreOpener(identity_of(geometry, layout), host), inbox)
    storage.open_now(*extra_config(store, tmp_path))
    opened.append(storage)
    tag(device, 5)
    before, mover = device.by_page().clone(), Mover(device, host, io)
    mover.back_up(SLOTS, FIRST)
    assert asked(storage, inbox, Store(1, KEYS, FIRST)) == Stored(1, 4)
    for pool in (device, host):
        pool.tensor.fill_(float("nan"))
    assert asked(storage, inbox, Probe(2, 1, KEYS)) == Probed(2, 4)
    assert asked(storage, inbox, Fetch(2, KEYS, SECOND)) == Fetched(2, 4)
    mover.load(SECOND, BACK).wait(geometry.layers - 1)
    assert torch.equal(bits(device.by_page()[BACK]), bits(before[SLOTS]))


def test_a_salted_prompt_has_names_of_its_own_in_every_store(
    tmp_path: Path, inbox: SimpleQueue[AnyEvent], opened: list[LiveStorage]
) -> None:
    """Field report G04: what a salt tells apart stays apart outside; deleting one leaves the other."""
    tokens = list(range(4 * GQA.page_size))
    salted = page_keys(tokens, GQA.page_size, namespace_seed(cache_salt="tenant"))
    host = Pool(GQA, "page_first", 11)
    storage = LiveStorage(host, StoreOpener(identity_of(GQA, "page_first"), host), inbox)
    storage.open_now(*extra_config("file", tmp_path))
    opened.append(storage)
    tag(host, 1)
    assert asked(storage, inbox, Store(1, KEYS, FIRST)) == Stored(1, 4)
    assert asked(storage, inbox, Probe(2, 1, salted)) == Probed(2, 0)
    assert asked(storage, inbox, Store(3, salted, SECOND)) == Stored(3, 4)
    assert len(list(tmp_path.iterdir())) == 8
    for path in tmp_path.glob(f"{KEYS[0].hex()}*"):
        path.unlink()
    assert asked(storage, inbox, Probe(4, 1, salted)) == Probed(4, 4)


def test_pages_cut_short_outside_are_repaired_by_the_next_backup(
    tmp_path: Path, inbox: SimpleQueue[AnyEvent], opened: list[LiveStorage]
) -> None:
    host = Pool(GQA, "page_first", 11)
    storage = LiveStorage(host, StoreOpener(identity_of(GQA, "page_first"), host), inbox)
    storage.open_now(*extra_config("file", tmp_path))
    opened.append(storage)
    tag(host, 1)
    assert asked(storage, inbox, Store(1, KEYS, FIRST)) == Stored(1, 4)
    for path in tmp_path.iterdir():
        os.truncate(path, 100)
    assert asked(storage, inbox, Fetch(2, KEYS, SECOND)) == Fetched(2, 0)
    assert asked(storage, inbox, Store(3, KEYS, FIRST)) == Stored(3, 4)
    assert asked(storage, inbox, Fetch(4, KEYS, SECOND)) == Fetched(4, 4)

"""AIBrix's KV cache (package aibrix-kvcache): its stores, chosen by its own variables.

``AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND`` names one, such as SHFS (files) or ROCKSDB, and
``AIBRIX_KV_CACHE_OL_SHFS_ROOT`` or ``…_ROCKSDB_ROOT`` its place; RocksDB forgets pages after
``…_ROCKSDB_TTL_S``, 600 s unless set. AIBrix's own memory tier stays off unless it is asked for, since L2
is one already; with it, all that is stored is handed on.

A page is a block of AIBrix's, as upstream's adapter describes it. Whether blocks are there it answers
with the length of the leading run, so each missing page splits a batch. Pages are read one a call: read
together from SHFS, 0.8.0 counts those it found and takes them for the first ones, whichever they were.
Values of a few bytes, such as checksums, are blocks of 256 bytes with their length in front.
Must not know: pools, policies. Called by: factory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import Any, Final

_policy = asyncio.get_event_loop_policy()
import aibrix_kvcache.cache_manager as cache_manager
from aibrix_kvcache import (
    BaseKVCacheManager,
    BlockHashes,
    KVCacheBlockLayout,
    KVCacheBlockSpec,
    KVCacheConfig,
    KVCacheTensorSpec,
    ModelSpec,
)

from refimpl.config import require
from refimpl.storage.backend import BATCH_NAMES, HostPage, Setting, StorageError

asyncio.set_event_loop_policy(_policy)  # what is loaded above replaces that of the whole process

_VARIABLES: Final = "AIBRIX_KV_CACHE_OL_"
_SMALL_BYTES: Final = 256
_LENGTH_BYTES: Final = 2


class AibrixBackend:
    """No keys in the extra config: AIBrix reads its variables."""

    def __init__(self, setting: Setting) -> None:
        require(
            not setting.identity.is_mla,
            "aibrix stores no latent (MLA) caches; choose file, mooncake or nixl",
        )
        _require_store()
        self._setting = setting
        self._lock = Lock()
        self._is_closed = False
        self._known: set[str] = set()  # that have a value, as far as was seen; for clear
        page_spec, small_spec = _specs(setting)
        self._pages = _Blocks(page_spec)
        try:
            self._small = _Blocks(small_spec)
        except BaseException:
            self._pages.close()
            raise

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend."""
        self._require_open()
        there = [False] * len(names)
        for blocks, at in self._by_kind(list(map(self._setting.namespace.is_page, names))):
            for each in blocks.there([names[one] for one in at]):
                there[at[each]] = True
        self._know(names, there)
        return there

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        self._require_open()
        filled = [False] * len(names)
        for blocks, at in self._by_kind(self._are_pages(pages)):
            for each, block in blocks.read([names[one] for one in at]):
                data = block if blocks is self._pages else _unwrapped(block)
                filled[at[each]] = pages[at[each]].fill(data)
        return filled

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend. Asks first what is there, because AIBrix would overwrite it."""
        self._require_open()
        stored = [False] * len(names)
        for blocks, at in self._by_kind(self._are_pages(pages)):
            there = set(blocks.there([names[one] for one in at]))
            new = [one for each, one in enumerate(at) if each not in there]
            for each in there:
                stored[at[each]] = True
            values = [pages[one] for one in new]
            fill = partial(_gather, values, is_wrapped=blocks is self._small)
            for each in blocks.write([names[one] for one in new], fill):
                stored[new[each]] = True
        self._know(names, stored)
        return stored

    def _know(self, names: Sequence[str], there: Sequence[bool]) -> None:
        with self._lock:
            self._known |= {name for name, is_there in zip(names, there, strict=True) if is_there}

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Drop values, [name]: True where there is none now."""
        self._require_open()
        dropped = [(self._pages.drop(name), self._small.drop(name)) for name in names]
        return [all(each) for each in dropped]

    def clear(self) -> int:
        """See Backend, for what this object has stored or found: AIBrix can't list what it holds, and its
        own flush would take others' as well."""
        self._require_open()
        with self._lock:
            known, self._known = sorted(self._known), set()
        count = 0
        for at in range(0, len(known), BATCH_NAMES):
            batch = known[at : at + BATCH_NAMES]
            there = [name for name, found in zip(batch, self.exists(batch), strict=True) if found]
            count += self.delete(there).count(True)
        return count

    def close(self) -> None:
        """See Backend."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._pages.close()
        self._small.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise StorageError("the aibrix backend is closed")

    def _are_pages(self, pages: Sequence[HostPage]) -> list[bool]:
        most = _SMALL_BYTES - _LENGTH_BYTES
        for page in pages:
            if page.nbytes not in range(1, most + 1) and page.nbytes != self._pages.nbytes:
                raise StorageError(
                    f"aibrix keeps pages of {self._pages.nbytes} bytes and values of up to {most},"
                    f" not {page.nbytes}"
                )
        return [page.nbytes == self._pages.nbytes for page in pages]

    def _by_kind(self, are_pages: Sequence[bool]) -> Iterator[tuple[_Blocks, list[int]]]:
        """Pages and small values apart, as positions."""
        for blocks, kind in ((self._pages, True), (self._small, False)):
            at = [each for each, is_one in enumerate(are_pages) if is_one is kind]
            if at:
                yield blocks, at


class _Blocks:
    """Blocks of one size; everything AIBrix is asked goes through here."""

    def __init__(self, spec: Any) -> None:
        self.nbytes: int = spec.block_nbytes
        self._tokens: int = spec.block_ntokens
        length = BATCH_NAMES * self._tokens
        config = KVCacheConfig(
            block_spec=spec, model_spec=ModelSpec(length, length), multi_threaded=True
        )
        self._manager = BaseKVCacheManager(config)
        self._one_put = Lock()  # of 0.8.0, two at once lose the result of one over SHFS

    def there(self, names: Sequence[str]) -> list[int]:
        """Positions of the names that have a value."""
        found: list[int] = []
        start = 0
        while start < len(names):
            status = self._manager.exists(None, self._query(names[start:]))
            count = 0 if status.is_not_found() else _value(status) // self._tokens
            found += range(start, start + count)
            start += count + 1
        return found

    def read(self, names: Sequence[str]) -> Iterator[tuple[int, memoryview]]:
        """Positions and blocks of the names that have a value; a block is good until the next."""
        for at, name in enumerate(names):
            status = self._manager.acquire(None, self._query([name]))
            if status.is_not_found():
                continue
            _, handle = _value(status)
            try:
                yield at, _bytes_of(handle.to_tensors()[0])
            finally:
                handle.release()

    def _query(self, names: Sequence[str]) -> Any:
        return BlockHashes(list(names), self._tokens)

    def write(self, names: Sequence[str], fill: Callable[[int, memoryview], None]) -> list[int]:
        """Positions of the names that are stored now; ``fill`` puts the value of one into a block."""
        start = 0
        while start < len(names):
            status = self._manager.allocate_for(None, self._query(names[start:]))
            if status.is_out_of_memory() or status.is_denied():
                break
            handle = _value(status)
            tensors = handle.to_tensors()
            for each, tensor in enumerate(tensors):
                fill(start + each, _bytes_of(tensor))
            end = start + len(tensors)
            with self._one_put:
                status = self._manager.put(None, self._query(names[start:end]), handle)
            count = _value(status)
            if count != len(tensors) * self._tokens:
                return self.there(names)  # how many were stored does not tell which
            start = end
        return list(range(start))

    def drop(self, name: str) -> bool:
        """Delete a value; True where there is none now."""
        status = self._manager.delete(None, self._query([name]))
        return bool(status.is_ok() or status.is_not_found())

    def close(self) -> None:
        loop = self._manager._event_loop  # AIBrix stops it and leaves it open, with its sockets
        self._manager.close()
        if loop is not None and not loop.is_running():
            loop.close()


def _value(status: Any) -> Any:
    if not status.is_ok():
        raise StorageError(f"aibrix: {status}")
    return status.value


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


def _gather(pages: Sequence[HostPage], which: int, block: memoryview, *, is_wrapped: bool) -> None:
    """Put the value of one page into a block, with its length in front if need be."""
    page, at = pages[which], 0
    if is_wrapped:
        block[:_LENGTH_BYTES] = page.nbytes.to_bytes(_LENGTH_BYTES, "little")
        at = _LENGTH_BYTES
    for piece in page.pieces:
        block[at : at + piece.nbytes] = piece
        at += piece.nbytes
    block[at:] = bytes(len(block) - at)


def _unwrapped(block: memoryview) -> memoryview:
    length = int.from_bytes(block[:_LENGTH_BYTES], "little")
    return block[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _require_store() -> None:
    """Raises ConfigError without a store, and sets what AIBrix's defaults would do to L3."""
    require(
        bool(os.environ.get(f"{_VARIABLES}L2_CACHE_BACKEND")),
        f"aibrix needs a store: set {_VARIABLES}L2_CACHE_BACKEND to SHFS or ROCKSDB, and"
        f" {_VARIABLES}SHFS_ROOT or {_VARIABLES}ROCKSDB_ROOT to a folder",
    )
    os.environ.setdefault(f"{_VARIABLES}L1_CACHE_ENABLED", "0")
    os.environ.setdefault(f"{_VARIABLES}L2_CACHE_INGESTION_TYPE", "ALL")


def _specs(setting: Setting) -> tuple[Any, Any]:
    """A page as upstream's adapter describes it, and a block for a few bytes."""
    import torch

    if not torch.cuda.is_available():
        cache_manager.TESTING_DISABLE_PIN_MEMORY = True  # there is nothing to pin memory for
    identity = setting.identity
    heads = max(identity.kv_heads // identity.tp_size, 1)
    page = KVCacheBlockSpec(
        identity.page_size,
        getattr(torch, identity.dtype),
        KVCacheBlockLayout.NCLD,
        KVCacheTensorSpec(
            heads=[identity.tp_rank * heads + head for head in range(heads)],
            layers=list(range(identity.layers)),
            head_size=identity.head_dim,
        ),
    )
    small = KVCacheBlockSpec(
        1,
        torch.uint8,
        KVCacheBlockLayout.LCND,  # another layout is another place in the store
        # RocksDB lets a place be open once, so that each rank needs its own.
        KVCacheTensorSpec(heads=[identity.tp_rank], layers=[0], head_size=_SMALL_BYTES // 2),
    )
    return page, small

"""Classes as users bring them: plain ones, and ones written for SGLang's storage interface.

The latter know nothing of this project: what they import is SGLang's, or the stand-in's.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar
from uuid import uuid4

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.memory_pool_host import HostKVCache


class FolderStorage(HiCacheStorage):
    """The generic calls: flat pages as tensors. A file a page; names end in model and rank."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        assert kwargs == {}
        assert storage_config.extra_config is not None
        self.folder = Path(storage_config.extra_config["folder"])
        self.folder.mkdir(exist_ok=True)
        model = (storage_config.model_name or "").replace("/", "-")
        self.suffix = f"_{model}_{storage_config.tp_rank}_{storage_config.tp_size}.kv"

    def _path(self, key: str) -> Path:
        return self.folder / (key + self.suffix)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        del target_sizes
        path = self._path(key)
        if not path.exists() or path.stat().st_size != target_location.nbytes:
            return None
        with path.open("rb") as file:
            file.readinto(target_location.view(torch.uint8).numpy())
        return target_location

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        del target_sizes
        return [self.get(key, where) for key, where in zip(keys, target_locations, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        del target_location, target_sizes
        if not self.exists(key):
            unfinished = self.folder / uuid4().hex
            unfinished.write_bytes(value.view(torch.uint8).numpy().tobytes())
            unfinished.rename(self._path(key))
        return True

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        del target_locations, target_sizes
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def exists(self, key: str) -> bool:
        return self._path(key).exists()

    def clear(self) -> None:
        for path in self.folder.glob(f"*{self.suffix}"):
            path.unlink()


class MinimalStorage(HiCacheStorage):
    """Only what can't be done without; tensors are kept as they are given."""

    lifetime = "object"

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        del storage_config, kwargs
        self.values: dict[str, torch.Tensor] = {}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        del target_location, target_sizes
        return self.values.get(key)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        del target_location, target_sizes
        self.values[key] = value
        return True

    def exists(self, key: str) -> bool:
        return key in self.values


class PointerStorage(HiCacheStorage):
    """The v1 calls: it is given token indices, and asks the host pool where those lie."""

    lifetime = "process"
    values: ClassVar[dict[str, bytes]] = {}
    lock: ClassVar[Lock] = Lock()

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        assert kwargs == {}
        assert storage_config.extra_config is not None
        self.is_closed = False

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        assert isinstance(mem_pool_host, HostKVCache)

    def _pieces(self, keys: list[str], host_indices: torch.Tensor) -> Any:
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        count = len(addresses) // len(keys)
        pieces = list(zip(addresses, sizes, strict=True))
        return [pieces[at : at + count] for at in range(0, len(pieces), count)]

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        assert extra_info is not None
        return [
            self._fill(key, pieces)
            for key, pieces in zip(keys, self._pieces(keys, host_indices), strict=True)
        ]

    def _fill(self, key: str, pieces: list[tuple[int, int]]) -> bool:
        value = self.values.get(key)
        if value is None or len(value) != sum(size for _, size in pieces):
            return False
        at = 0
        for address, size in pieces:
            ctypes.memmove(address, value[at : at + size], size)
            at += size
        return True

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        del extra_info
        for key, pieces in zip(keys, self._pieces(keys, host_indices), strict=True):
            value = b"".join(ctypes.string_at(address, size) for address, size in pieces)
            with self.lock:
                self.values.setdefault(key, value)
        return [True] * len(keys)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        raise NotImplementedError

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        return key in self.values

    def close(self) -> None:
        self.is_closed = True


class FillsNoPointer(PointerStorage):
    def _fill(self, key: str, pieces: list[tuple[int, int]]) -> bool:
        del pieces
        return key in self.values


class FillsKeysOnly(PointerStorage):
    def _fill(self, key: str, pieces: list[tuple[int, int]]) -> bool:
        whole = sum(size for _, size in pieces)
        address, size = pieces[0]
        value = self.values.get(key, b"")
        ctypes.memmove(address, value[:size], size)
        return len(value) == whole


class ReturnsItsTarget(MinimalStorage):
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        del target_sizes
        return target_location if key in self.values else None


class LosesTheLast(MinimalStorage):
    def batch_set(self, keys: list[str], values: Any = None, *_: Any) -> bool:
        for key, value in zip(keys[:-1], values[:-1], strict=True):
            self.set(key, value)
        return True


class HeldInMemory:
    """A plain class that says it outlives its process, and does not."""

    lifetime = "store"
    values: ClassVar[dict[str, bytes]] = {}

    def exists(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> bytes | None:
        return self.values.get(name)

    def set(self, name: str, value: bytes) -> None:
        self.values.setdefault(name, value)

    def clear(self, owns: Any) -> int:
        ours = [name for name in self.values if owns(name)]
        for name in ours:
            del self.values[name]
        return len(ours)


class PidStore:
    """A plain class whose values belong to the process that wrote them."""

    def __init__(self, extra: dict[str, Any]) -> None:
        self.folder = Path(extra["folder"]) / str(os.getpid())
        self.folder.mkdir(parents=True, exist_ok=True)

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def get(self, name: str) -> bytes | None:
        return (self.folder / name).read_bytes() if self.exists(name) else None

    def set(self, name: str, value: bytes) -> bool:
        unfinished = self.folder / uuid4().hex
        unfinished.write_bytes(value)
        unfinished.rename(self.folder / name)
        return True

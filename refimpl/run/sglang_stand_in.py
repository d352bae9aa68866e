"""The few names that classes written for SGLang's ``HiCacheStorage`` import, where SGLang is absent.

Such a class says ``from sglang.srt.mem_cache.hicache_storage import HiCacheStorage``. Where SGLang is
installed it gets SGLang's own; where it is not, and only while a dynamic backend is loaded or open, it
gets the types below, and the log says so. They are written from the facts of the interface (spec 5.1)
and hold no logic of a cache. Must not know: tensors, backends of ours. Called by: dynamic.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import Lock
from types import ModuleType
from typing import Any, Final

from refimpl.storage.backend import BATCH_NAMES

PACKAGE: Final = "sglang"
INTERFACE: Final = "sglang.srt.mem_cache.hicache_storage"
_POOLS: Final = ("sglang.srt.mem_cache.memory_pool_host", "sglang.srt.mem_cache.pool_host")
_PACKAGES: Final = ("sglang", "sglang.srt", "sglang.srt.mem_cache")

_log = logging.getLogger(__name__)


@dataclass
class HiCacheStorageConfig:
    """What a class is constructed with: who this rank is, and the extra config."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        """Whether this rank writes: every rank, but of equal copies (MLA) only one."""
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class HiCacheStorageExtraInfo:
    """What a call may be given beside its keys."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(StrEnum):
    """Pools a page can be in; here there is only the KV itself."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    AUXILIARY_SWA = "auxiliary_swa"
    INDEXER = "indexer"
    DRAFT = "draft"
    DRAFT_INDEXER = "draft_indexer"
    DRAFT_SWA = "draft_swa"


class PoolHitPolicy(StrEnum):
    """Which pages of a companion pool a hit needs."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    """Pages of one pool to move."""

    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    """How many leading pages each pool has."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int] = field(default_factory=dict)
    restorable_prefix_pages: int | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        """Nothing found."""
        return cls(0)


class HostKVCache:
    """Base of the host pools, for annotations and ``isinstance``; see host_pool_view."""


class HiCacheStorage(ABC):
    """The base class: five methods to write, the rest as upstream gives it."""

    mem_pool_host: Any

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Be told of the host pool; called once, after construction."""
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The value as a tensor, or None."""

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        """The values, None where there is none."""

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one value."""

    @abstractmethod
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store values; True when all are stored."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Is there a value?"""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading keys have a value."""
        del extra_info
        return next((at for at, key in enumerate(keys) if not self.exists(key)), len(keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fill pages of the host pool in place."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_get_v1")

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool from where they lie."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_set_v1")

    def clear(self) -> None:
        """Delete everything; nothing to do unless the class says how."""
        return  # not abstract upstream either

    def get_stats(self) -> Any:
        """Figures of the backend, if it has any."""
        return None


_INTERFACE_NAMES: Final = {
    each.__name__: each
    for each in (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
} | {"STORAGE_BATCH_SIZE": BATCH_NAMES}


class _Finder(MetaPathFinder, Loader):
    """Last in line: it is asked only for what no other finder knows."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname not in (*_PACKAGES, INTERFACE, *_POOLS):
            return None
        top = sys.modules.get(PACKAGE)
        if fullname != PACKAGE and not _is_ours(top):
            return None  # SGLang itself is there, and this module is not in it
        return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name == INTERFACE:
            vars(module).update(_INTERFACE_NAMES)
        elif name in _POOLS:
            vars(module)["HostKVCache"] = HostKVCache
        elif name == PACKAGE:
            _log.warning(
                "sglang is not installed: storage classes written for it get a stand-in with"
                " the names of its storage interface and nothing else"
            )


_finder: Final = _Finder()
_lock: Final = Lock()
_holders = 0


def hold_stand_in() -> None:
    """Let imports of SGLang's storage interface succeed, until as many calls of ``release_stand_in``."""
    global _holders
    with _lock:
        _holders += 1
        if _finder not in sys.meta_path:
            sys.meta_path.append(_finder)


def release_stand_in() -> None:
    """The last one out removes every trace from ``sys.modules``."""
    global _holders
    with _lock:
        assert _holders > 0, "released more often than held"
        _holders -= 1
        if _holders:
            return
        sys.meta_path.remove(_finder)
        for name in (*_PACKAGES, INTERFACE, *_POOLS):
            if _is_ours(sys.modules.get(name)):
                del sys.modules[name]


def interface() -> ModuleType:
    """The module with the interface: SGLang's where a class has loaded it, else the stand-in's.

    For whoever holds the stand-in. It is not imported for classes that never asked for it.
    """
    found = sys.modules.get(INTERFACE)
    if found is not None:
        return found
    ours = ModuleType(INTERFACE)
    vars(ours).update(_INTERFACE_NAMES)
    return ours


def is_sglang_installed() -> bool:
    """Whether imports reach SGLang itself."""
    found = sys.modules.get(PACKAGE)
    if found is not None:
        return not _is_ours(found)
    spec = util.find_spec(PACKAGE)
    return spec is not None and spec.loader is not _finder


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and getattr(module.__spec__, "loader", None) is _finder

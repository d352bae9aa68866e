"""What the file backend can be told: its directory, its bounds, its habits.

Keys of the extra config carry upstream's names and defaults where upstream has them (spec 5.3); an
environment variable of upstream's stands in for a key that is absent, but the directory's wins over
its key, as upstream has it. Must not know: files. Called by: file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from refimpl.config import require
from refimpl.storage.extra import (
    NAME,
    ratio_per_million,
    size_bytes,
    switch,
    time_ns,
    whole,
)
from refimpl.units import NS_PER_S

FILE_KEYS: Final = (
    "file_storage_path",
    "max_size",
    "min_free_space",
    "eviction_ratio",
    "enable_metadata_cache",
    "metadata_ttl",
    "ttl",
    "fsync",
    "io_threads",
)
_ENV: Final = "SGLANG_HICACHE_FILE_BACKEND_"
_FROM_ENV: Final = (
    "max_size",
    "min_free_space",
    "eviction_ratio",
    "enable_metadata_cache",
    "metadata_ttl",
)
_NUMBERS: Final = ("eviction_ratio", "metadata_ttl")  # what a variable holds as text
_FOR_EVER_NS: Final = 1 << 62
_THREADS_MAX: Final = 4  # as many as there are cores, but no more: memory is busy by then


@dataclass(frozen=True, slots=True)
class FileOptions:
    """See FILE_KEYS. A bound of None is no bound."""

    directory: str
    bytes_max: int | None = None  # of all pages in the directory, whoever wrote them
    free_bytes_min: int = 0  # of the disk
    eviction_per_million: int = 900_000  # share of bytes_max down to which eviction goes
    presence_ns: int = 0  # for how long exists() may rely on what it saw
    ttl_ns: int | None = None  # since a page was last used
    is_synced: bool = False
    threads: int = _THREADS_MAX


def file_options(extra: Mapping[str, Any]) -> FileOptions:
    """Read the keys. Raises ConfigError, naming the key."""
    keys = {**_environment(), **extra}
    ratio = ratio_per_million(keys, "eviction_ratio")
    ttl_ns = time_ns(keys, "ttl")
    require(ttl_ns != 0, f"{NAME}: ttl must be above 0 seconds; without it nothing expires")
    return FileOptions(
        directory=_directory(keys),
        bytes_max=size_bytes(keys, "max_size") if keys.get("max_size") is not None else None,
        free_bytes_min=size_bytes(
            {"min_free_space": 0, **keys}, "min_free_space", may_be_zero=True
        ),
        eviction_per_million=900_000 if ratio is None else ratio,
        presence_ns=_presence_ns(keys),
        ttl_ns=ttl_ns,
        is_synced=switch(keys, "fsync", default=False),
        threads=whole(keys, "io_threads") or min(_THREADS_MAX, os.cpu_count() or 1),
    )


def _environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _FROM_ENV:
        text = os.environ.get(_ENV + name.upper())
        if text:
            found[name] = _number(text) if name in _NUMBERS else text
    return found


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # refused by whoever reads the key


def _directory(keys: Mapping[str, Any]) -> str:
    told = keys.get("file_storage_path")
    is_path = told is None or isinstance(told, str)
    require(is_path, f"{NAME}: file_storage_path must be a path, not {told!r}")
    told = told or "/tmp/hicache"
    return str(Path(os.environ.get(f"{_ENV}STORAGE_DIR") or told).expanduser())


def _presence_ns(keys: Mapping[str, Any]) -> int:
    if not switch(keys, "enable_metadata_cache", default=False):
        return 0
    if keys.get("metadata_ttl") == -1:
        return _FOR_EVER_NS
    told = time_ns(keys, "metadata_ttl")
    return 5 * NS_PER_S if told is None else told

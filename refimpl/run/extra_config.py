"""``--hicache-storage-backend-extra-config``: what it may hold and where it comes from.

Inline JSON, or ``@FILE`` in JSON, TOML or YAML. Keys for HiCache are taken out and checked; what
remains belongs to the backend. Must not know: backends. Called by: setup, the conformance kit.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import yaml

from refimpl.config import ConfigError, PrefetchConfig, require
from refimpl.storage.extra import NAME, size_bytes, time_ns, whole
from refimpl.storage.file_options import FILE_KEYS
from refimpl.storage.stack import STACK_KEYS

_TIMES: Final = (
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_max",
)
_OURS: Final = (
    "prefetch_threshold",
    *_TIMES,
    "tp_lcm_size",
    "hicache_storage_pass_prefix_keys",
    "compat",
)
# Keys of the backends (spec 5.2-5.4); a backend that is not listed takes any key.
_THEIRS: Final[dict[str, tuple[str, ...]]] = {
    "memory": ("max_size", "store"),
    "file": FILE_KEYS,
    "mooncake": (
        "local_hostname",
        "metadata_server",
        "global_segment_size",
        "protocol",
        "device_name",
        "master_server_address",
        "master_metrics_port",
        "check_server",
        "standalone_storage",
        "client_server_address",
        "enable_ssd_offload",
        "ssd_offload_path",
        "tenant_id",
        "extra_backend_tag",
        "enable_group_semantics",
    ),
    "aibrix": (),
    "hf3fs": ("use_mock_hf3fs_client",),
    "nixl": (
        "storage_dir",
        "plugin",
        "use_direct_io",
        "l3_cleaner_enabled",
        "l3_cleaner_high_watermark",
        "l3_cleaner_low_watermark",
    ),
}
_DYNAMIC: Final = ("backend_name", "module_path", "class_name")


@dataclass(frozen=True, slots=True)
class ExtraConfig:
    """The keys that HiCache itself reads, in integers; None: not given."""

    compat: str = ""  # sglang: names are upstream's
    prefetch_threshold: int | None = None  # tokens
    prefetch_timeout_base_ns: int | None = None
    prefetch_timeout_per_ki_token_ns: int | None = None
    prefetch_timeout_max_ns: int | None = None
    tp_lcm_size: int | None = None
    max_size_bytes: int | None = None  # of memory and file
    backend: dict[str, Any] = field(default_factory=dict)  # of the backend and what is around it

    def pages_max(self, page_bytes: int) -> int | None:
        """How many pages of that size it may hold; None: no limit. Raises ConfigError below one."""
        if self.max_size_bytes is None:
            return None
        pages = self.max_size_bytes // page_bytes
        require(pages >= 1, "max_size of the storage backend is below one page")
        return pages


def read_extra_config(text: str | None, storage_backend: str | None) -> ExtraConfig:
    """Parse and check. Raises ConfigError, one line, naming the key or the place in the file."""
    if text is None:
        return ExtraConfig()
    require(storage_backend is not None, f"{NAME} needs --hicache-storage-backend")
    assert storage_backend is not None
    keys = parse_extra_config(text)
    _check_names(keys, storage_backend)
    keys = _without_nulls(keys, storage_backend)
    times = {f"{name}_ns": time_ns(keys, name) for name in _TIMES}
    return ExtraConfig(
        prefetch_threshold=whole(keys, "prefetch_threshold"),
        tp_lcm_size=whole(keys, "tp_lcm_size"),
        max_size_bytes=size_bytes(keys, "max_size") if "max_size" in keys else None,
        backend={name: value for name, value in keys.items() if name not in _OURS},
        compat=_compat(keys),
        **times,
    )


def prefetch_of(config: PrefetchConfig, extra: ExtraConfig) -> PrefetchConfig:
    """``config`` with what an extra config says of prefetches."""
    changes = {
        "threshold_tokens": extra.prefetch_threshold,
        "timeout_base_ns": extra.prefetch_timeout_base_ns,
        "timeout_per_ki_token_ns": extra.prefetch_timeout_per_ki_token_ns,
        "timeout_max_ns": extra.prefetch_timeout_max_ns,
    }
    said = {name: value for name, value in changes.items() if value is not None}
    return replace(config, **said)  # type: ignore[arg-type]  # names and types as in changes


def parse_extra_config(text: str) -> dict[str, Any]:
    """The keys as they stand there, unchecked, numbers as decimals. Raises ConfigError."""
    where = NAME
    load: Callable[[str], Any] = _load_json
    if text.startswith("@"):
        path = Path(text[1:])
        where, load = f"{NAME}: {path}", _loader(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} can't be read: {_line(error)}") from None
    try:
        keys = load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{where} is malformed: {_line(error)}") from None
    require(isinstance(keys, dict), f"{where} must be an object of keys and values")
    assert isinstance(keys, dict)
    for name in keys:
        require(isinstance(name, str), f"{where}: key {name!r} must be a string")
    return keys


def _compat(keys: dict[str, Any]) -> str:
    value = keys.get("compat", "")
    require(value in ("", "sglang"), f"{NAME}: compat must be sglang or absent, not {value!r}")
    return str(value)


def _load_json(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _loader(path: Path) -> Callable[[str], Any]:
    match path.suffix:
        case ".json":
            return _load_json
        case ".toml":
            return lambda text: tomllib.loads(text, parse_float=Decimal)
        case ".yaml" | ".yml":
            return yaml.safe_load
        case _:
            raise ConfigError(f"{NAME}: {path} must end in .json, .toml, .yaml or .yml")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _without_nulls(keys: dict[str, Any], backend: str) -> dict[str, Any]:
    """null is as good as absent; what a class of a user's own is told stays as it was said."""
    known = (*_OURS, *STACK_KEYS, *_DYNAMIC, *_THEIRS.get(backend, ()))
    return {name: said for name, said in keys.items() if said is not None or name not in known}


def _check_names(keys: dict[str, Any], backend: str) -> None:
    if backend == "dynamic":
        for name in _DYNAMIC:
            require(keys.get(name) is not None, f"{NAME}: dynamic needs the key {name}")
        return
    if backend not in _THEIRS:
        return
    known = (*_OURS, *STACK_KEYS, *_THEIRS[backend])
    for name in keys:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            own = ", ".join(_THEIRS[backend]) or "none"
            raise ConfigError(
                f"{NAME}: unknown key {name!r} for backend {backend}{hint}; its own keys: {own}"
            )

"""How to reach a Mooncake store, from the places where users of SGLang write it down.

Extra config if it names a server; else the JSON file of ``SGLANG_HICACHE_MOONCAKE_CONFIG_PATH``; else
the variables ``MOONCAKE_*``. Must not know: the store. Called by: mooncake,
foreground.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from refimpl.config import ConfigError, require
from refimpl.storage.backend import Setting

CONFIG_PATH: Final = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
P2P: Final = "P2PHANDSHAKE"
# Key of extra config and file: variable, default (spec 1.9).
_KEYS: Final[dict[str, tuple[str, Any]]] = {
    "local_hostname": ("MOONCAKE_LOCAL_HOSTNAME", "localhost"),
    "metadata_server": ("MOONCAKE_TE_META_DATA_SERVER", P2P),
    "global_segment_size": ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb"),
    "protocol": ("MOONCAKE_PROTOCOL", "rdma"),
    "device_name": ("MOONCAKE_DEVICE", ""),
    "master_server_address": ("MOONCAKE_MASTER", ""),
    "master_metrics_port": ("MOONCAKE_MASTER_METRICS_PORT", 9003),
    "check_server": ("MOONCAKE_CHECK_SERVER", False),
    "standalone_storage": ("MOONCAKE_STANDALONE_STORAGE", False),
    "client_server_address": ("MOONCAKE_CLIENT", ""),
    "enable_ssd_offload": ("MOONCAKE_ENABLE_SSD_OFFLOAD", False),
    "ssd_offload_path": ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", ""),
    "tenant_id": ("MOONCAKE_TENANT_ID", "default"),
}
_TEXTS: Final = (
    "local_hostname",
    "metadata_server",
    "protocol",
    "master_server_address",
    "client_server_address",
    "ssd_offload_path",
    "tenant_id",
)
_SEGMENT_BYTES_MIN: Final = 16 << 20  # the library says so when it refuses less (0.3.13)
_UNITS: Final = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """What a client of a Mooncake store is set up with."""

    master: str
    metadata_server: str
    local_hostname: str
    segment_bytes: int  # of this rank
    protocol: str
    device: str
    metrics_port: int
    check_server: bool
    ssd_offload_path: str | None  # None: no offload
    tenant: str

    @property
    def master_address(self) -> tuple[str, int] | None:
        """Host and port of the master; None where it is found another way, such as through etcd."""
        return _host_and_port(self.master)

    @property
    def metadata_address(self) -> tuple[str, int] | None:
        """Host and port of a metadata server that speaks HTTP."""
        if not self.metadata_server.startswith(("http://", "https://")):
            return None
        parts = urlsplit(self.metadata_server)
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None


def _host_and_port(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() and "/" not in host else None


def read_mooncake_config(
    setting: Setting, environ: Mapping[str, str] = os.environ
) -> MooncakeConfig:
    """Find and check the configuration. Raises ConfigError, which says what to change and where."""
    keys, where = _keys(setting.extra, environ)
    said = {name: _said(keys, name, where) for name in _KEYS}
    hostname = environ.get("MOONCAKE_LOCAL_HOSTNAME", said["local_hostname"])
    standalone = _truth(said, "standalone_storage", where)
    require(
        bool(said["master_server_address"]) and not standalone,
        f"{where}: master_server_address must name a master; standalone_storage with"
        " client_server_address needs host memory of Mooncake's own, which this pool is not",
    )
    identity = setting.identity
    rank, ranks = identity.tp_rank // setting.parts, identity.tp_size // setting.parts
    offload = _truth(said, "enable_ssd_offload", where)
    return MooncakeConfig(
        master=str(said["master_server_address"]),
        metadata_server=str(said["metadata_server"] or P2P),
        local_hostname=str(hostname),
        segment_bytes=_share(said["global_segment_size"], ranks, where),
        protocol=str(said["protocol"]),
        device=_device(said["device_name"], rank, where),
        metrics_port=_port(said["master_metrics_port"], where),
        check_server=_truth(said, "check_server", where),
        ssd_offload_path=_offload(said, rank) if offload else None,
        tenant=str(said["tenant_id"] or "default").strip() or "default",
    )


def _share(said: Any, ranks: int, where: str) -> int:
    """What one of ``ranks`` lends."""
    share = segment_bytes(said, f"{where}: global_segment_size") // ranks
    require(
        share == 0 or share >= _SEGMENT_BYTES_MIN,
        f"{where}: global_segment_size {said!r} is {share} bytes for each of {ranks} ranks, and mooncake"
        f" takes {_SEGMENT_BYTES_MIN} or more, or 0 of one that lends nothing: make it at least"
        f" {ranks * _SEGMENT_BYTES_MIN}",
    )
    return share


def _said(keys: Mapping[str, Any], name: str, where: str) -> Any:
    """What is said of a key, or its default where it is absent or null."""
    value, default = keys.get(name), _KEYS[name][1]
    if value is None:
        return default
    is_text = isinstance(value, str) or name not in _TEXTS
    require(is_text, f"{where}: {name} must be a string, not {value!r}")
    return value


def _keys(extra: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Mapping[str, Any], str]:
    """The keys that count, and where they stand."""
    addresses = ("master_server_address", "client_server_address")
    if any(extra.get(name) is not None for name in addresses):
        return extra, "mooncake"
    if path := environ.get(CONFIG_PATH):
        return _read_file(Path(path)), f"{CONFIG_PATH} {path}"
    found = {
        name: environ[variable] for name, (variable, _) in _KEYS.items() if variable in environ
    }
    if "local_hostname" not in found and "LOCAL_HOSTNAME" in environ:
        found["local_hostname"] = environ["LOCAL_HOSTNAME"]
    require(
        "master_server_address" in found or "client_server_address" in found,
        "mooncake needs a master: master_server_address in the extra config, a JSON file named by"
        f" {CONFIG_PATH}, or MOONCAKE_MASTER; refimpl storage up mooncake starts one",
    )
    return found, "mooncake, from MOONCAKE_*"


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CONFIG_PATH}: {path} can't be read: {error}") from None
    require(isinstance(keys, dict), f"{CONFIG_PATH}: {path} must be an object of keys and values")
    assert isinstance(keys, dict)
    return keys


def segment_bytes(value: Any, what: str) -> int:
    """Bytes of memory to lend: a number, or one with a unit, of which a gb is 1024³ as upstream."""
    text = str(value).strip().lower().replace("ib", "b")
    digits = text.rstrip("bkmgt ")
    unit = text[len(digits) :].strip()
    require(
        digits.isdigit() and unit in _UNITS and not isinstance(value, bool),
        f"{what} {value!r} is no size; write a number of bytes, or 4gb",
    )
    return int(digits) * _UNITS[unit]


def _truth(keys: Mapping[str, Any], name: str, where: str) -> bool:
    value = str(keys[name]).lower()
    require(
        value in ("true", "false", "1", "0", ""),
        f"{where}: {name} must be true or false, not {value}",
    )
    return value in ("true", "1")


def _port(value: Any, where: str) -> int:
    text = str(value)
    require(
        text.isdigit() and 0 < int(text) < 1 << 16,
        f"{where}: master_metrics_port must be a port, not {value!r}",
    )
    return int(text)


def _device(value: Any, rank: int, where: str) -> str:
    """A device, or the one of this rank from an object of ranks and devices."""
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where}: device_name is malformed: {error}") from None
    if isinstance(value, Mapping):
        by_rank = {str(rank): device for rank, device in value.items()}
        require(str(rank) in by_rank, f"{where}: device_name has no device for rank {rank}")
        value = by_rank[str(rank)]
    return str(value)


def _offload(said: Mapping[str, Any], rank: int) -> str:
    """Each rank has a folder of its own, named as upstream's with one DP, PP and CP rank."""
    root = str(said["ssd_offload_path"] or "")
    return f"{root}/rank_0_{rank}_0_0" if root else ""

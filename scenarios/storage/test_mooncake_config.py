"""Where the configuration of a Mooncake store comes from, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refimpl.config import ConfigError
from refimpl.storage.backend import Setting
from refimpl.storage.mooncake_config import MooncakeConfig, read_mooncake_config
from refimpl.storage.names import Identity, Namespace

MASTER = {"master_server_address": "10.0.0.1:50051"}
CONFIG_PATH = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"


def identity(rank: int = 0, size: int = 1) -> Identity:
    return Identity(
        model="m",
        layout="page_first",
        page_size=64,
        layers=2,
        kv_heads=8,
        head_dim=128,
        tp_rank=rank,
        tp_size=size,
    )


def read(
    extra: dict[str, Any], environ: dict[str, str] | None = None, rank: int = 0, size: int = 1
) -> MooncakeConfig:
    return read_mooncake_config(Setting(identity(rank, size), Namespace(), extra), environ or {})


def test_what_is_not_said_has_upstreams_default() -> None:
    assert read(MASTER) == MooncakeConfig(
        master="10.0.0.1:50051",
        metadata_server="P2PHANDSHAKE",
        local_hostname="localhost",
        segment_bytes=4 << 30,
        protocol="rdma",
        device="",
        metrics_port=9003,
        check_server=False,
        ssd_offload_path=None,
        tenant="default",
    )


def test_extra_config_goes_before_the_file_and_the_file_before_variables(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "file:1", "protocol": "tcp"}))
    variables = {"MOONCAKE_MASTER": "variable:1", "MOONCAKE_PROTOCOL": "ascend"}
    with_file = variables | {CONFIG_PATH: str(path)}
    assert read(MASTER, with_file).master == "10.0.0.1:50051"
    assert read({"protocol": "x"}, with_file).master == "file:1"
    assert read({}, with_file).protocol == "tcp"
    assert read({}, variables).master == "variable:1"
    assert read({}, variables).protocol == "ascend"
    assert read(MASTER, variables).protocol == "rdma"


def test_the_hostname_of_the_environment_wins() -> None:
    extra = MASTER | {"local_hostname": "from-extra"}
    assert read(extra).local_hostname == "from-extra"
    assert read(extra, {"MOONCAKE_LOCAL_HOSTNAME": "from-env"}).local_hostname == "from-env"
    variables = {"MOONCAKE_MASTER": "m:1", "LOCAL_HOSTNAME": "older"}
    assert read({}, variables).local_hostname == "older"


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [
        (0, 0),
        (23456789, 23456789),
        ("23456789", 23456789),
        ("4gb", 4 << 30),
        ("4 GB", 4 << 30),
        ("512mb", 512 << 20),
        ("65536kb", 64 << 20),
        ("1GiB", 1 << 30),
    ],
)
def test_sizes_are_bytes_or_have_a_unit(size: Any, bytes_: int) -> None:
    assert read(MASTER | {"global_segment_size": size}).segment_bytes == bytes_


def test_each_rank_lends_its_share_of_the_segment() -> None:
    extra = MASTER | {"global_segment_size": 816043786240}
    assert read(extra, rank=3, size=8).segment_bytes == 816043786240 // 8
    assert read(MASTER | {"global_segment_size": "128mb"}, size=8).segment_bytes == 16 << 20
    with pytest.raises(ConfigError, match=r"each of 8 ranks.*make it at least 134217728"):
        read(MASTER | {"global_segment_size": "127mb"}, size=8)


def test_the_parts_of_a_rank_are_set_up_alike_and_lend_its_share_once() -> None:
    """With tp_lcm_size 8, rank 1 of two has the parts 4 to 7: one client, one device, one folder."""
    extra = {
        "global_segment_size": "32mb",
        "device_name": {"0": "mlx5_0", "1": "mlx5_1"},
        "enable_ssd_offload": True,
        "ssd_offload_path": "/ssd",
    }
    parts = [
        read_mooncake_config(Setting(identity(part, 8), Namespace(), MASTER | extra, parts=4), {})
        for part in range(8)
    ]
    assert parts == [parts[0]] * 4 + [parts[4]] * 4
    assert [each.segment_bytes for each in parts] == [16 << 20] * 8
    assert (parts[0].device, parts[4].device) == ("mlx5_0", "mlx5_1")
    assert parts[4].ssd_offload_path == "/ssd/rank_0_1_0_0"


@pytest.mark.parametrize("devices", [{"0": "mlx5_0", "1": "mlx5_1"}, '{"0": "a", "1": "mlx5_1"}'])
def test_each_rank_finds_its_device(devices: Any) -> None:
    assert read(MASTER | {"device_name": devices}, rank=1, size=2).device == "mlx5_1"
    assert read(MASTER | {"device_name": "mlx5_7"}, rank=1, size=2).device == "mlx5_7"


def test_each_rank_has_its_folder_for_offload() -> None:
    extra = MASTER | {"enable_ssd_offload": True, "ssd_offload_path": "/ssd"}
    assert read(extra, rank=1, size=2).ssd_offload_path == "/ssd/rank_0_1_0_0"


@pytest.mark.parametrize(
    ("master", "address"),
    [
        ("10.0.0.1:50051", ("10.0.0.1", 50051)),
        ("[::1]:50051", ("::1", 50051)),
        ("etcd://10.0.0.1:2379", None),
        ("10.0.0.1", None),
    ],
)
def test_a_master_that_is_found_another_way_has_no_address(
    master: str, address: tuple[str, int] | None
) -> None:
    assert read({"master_server_address": master}).master_address == address


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {},
            "mooncake needs a master: master_server_address in the extra config, .* MOONCAKE_MASTER",
        ),
        ({"client_server_address": "c:1"}, "master_server_address must name a master"),
        (MASTER | {"standalone_storage": True}, "needs host memory of Mooncake's own"),
        (MASTER | {"global_segment_size": "lots"}, "global_segment_size 'lots' is no size"),
        (MASTER | {"global_segment_size": "16383kb"}, "make it at least 16777216"),
        (MASTER | {"global_segment_size": "-1"}, "global_segment_size '-1' is no size"),
        (MASTER | {"global_segment_size": True}, "global_segment_size True is no size"),
        (MASTER | {"check_server": "maybe"}, "check_server must be true or false, not maybe"),
        (MASTER | {"master_metrics_port": "http"}, "master_metrics_port must be a port"),
        (MASTER | {"tenant_id": 5}, "tenant_id must be a string, not 5"),
        ({"master_server_address": ["m:1"]}, "master_server_address must be a string"),
        (MASTER | {"device_name": '{"0": "a"'}, "device_name is malformed"),
        (MASTER | {"device_name": {"1": "a"}}, "device_name has no device for rank 0"),
    ],
)
def test_what_can_not_be_is_refused_in_one_sentence(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(extra)


def test_null_is_as_good_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    nulls = dict.fromkeys(("tenant_id", "protocol", "device_name", "check_server"))
    path.write_text(json.dumps(MASTER | nulls))
    assert read({}, {CONFIG_PATH: str(path)}) == read(MASTER)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        read({}, {CONFIG_PATH: str(path)})
    with pytest.raises(ConfigError, match=r"absent\.json can't be read"):
        read({}, {CONFIG_PATH: str(tmp_path / "absent.json")})

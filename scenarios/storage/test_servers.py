"""Servers that are started, waited for and stopped, by a context and by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from refimpl.config import ConfigError
from refimpl.storage.backend import StorageError
from refimpl.storage.factory import open_backend
from refimpl.storage.mooncake_lender import lent_memory
from refimpl.storage.servers import MooncakeMaster, free_ports, mooncake_master, stop
from refimpl.storage.watch import Watch
from scenarios.storage.host_pages import GQA, PAGES, HostPages

pytestmark = pytest.mark.live

needs_mooncake = pytest.mark.skipif(
    not Path(sys.executable).with_name("mooncake_master").exists(),
    reason="the extra mooncake is absent",
)
Starter: TypeAlias = Callable[..., "subprocess.Popen[str]"]
UP: Sequence[str] = (sys.executable, "-m", "refimpl", "storage", "up", "mooncake")


@needs_mooncake
def test_a_master_runs_for_as_long_as_its_block(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    with mooncake_master(log) as running:
        assert running.process.poll() is None
    assert running.process.poll() == 0
    stop(running.process)  # twice does no harm
    assert log.stat().st_size > 0


@needs_mooncake
def test_a_master_that_can_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    starting = mooncake_master(log, ports=free_ports(), flags=["--no_such_flag=1"])
    with pytest.raises(StorageError, match=f"does not come up .*{log}"):
        starting.__enter__()
    assert "no_such_flag" in log.read_text()


def test_a_program_that_is_not_installed_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    starting = mooncake_master(tmp_path / "master.log")
    with pytest.raises(ConfigError, match="mooncake_master is not installed: pip install"):
        starting.__enter__()


@needs_mooncake
def test_a_watch_sees_the_end_of_a_server_and_its_return(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    with mooncake_master(log) as first:
        watch = Watch("127.0.0.1", first.rpc_port)
        assert [watch.is_up(), watch.is_up()] == [True, True]
        first.process.kill()
        first.process.wait()
        assert not watch.is_up()
        ports = first.rpc_port, first.metrics_port
    with mooncake_master(log, ports=ports):
        assert watch.is_up()
        watch.close()


# ---- the command line ---------------------------------------------------------------------------


@pytest.fixture
def storage_up(tmp_path: Path) -> Iterator[Starter]:
    """Starts the command; whatever becomes of a test, none is left running."""
    started = []

    def start(*flags: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*UP, "--log", str(tmp_path / "master.log"), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=30)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    told: dict[str, Any] = json.loads(process.stdout.readline())
    return told


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@needs_mooncake
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_storage_up_serves_until_it_is_told_to_stop(
    storage_up: Starter, end: signal.Signals
) -> None:
    process = storage_up("--json")
    told = _told(process)
    host, port = told["extra_config"]["master_server_address"].split(":")
    watch = Watch(host, int(port))
    assert watch.is_up()
    assert told["environment"]["MOONCAKE_MASTER"] == f"{host}:{port}"
    process.send_signal(end)
    assert process.wait(30) == 0
    assert process.stdout is not None
    assert process.stdout.read() == ""
    assert not watch.is_up()
    assert not _is_running(told["pid"])
    assert not _is_running(told["lender_pid"])
    watch.close()


@needs_mooncake
def test_what_engines_store_in_lent_memory_outlives_them(storage_up: Starter) -> None:
    told = _told(storage_up("--json", "--memory", "64mb"))
    assert told["extra_config"]["global_segment_size"] == 0
    host = HostPages.of("mooncake", GQA, "page_first")
    first = open_backend("mooncake", host.setting(told["extra_config"]))
    assert first.set(host.names(), host.sources()) == [True] * PAGES
    first.close()
    second = open_backend("mooncake", host.setting(told["extra_config"]))
    assert second.get(host.names(), host.targets()) == [True] * PAGES
    second.close()


@needs_mooncake
def test_lent_memory_goes_with_whoever_asked_for_it_even_if_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    with mooncake_master(log) as running, lent_memory(running, 32 << 20, log) as lender:
        assert lender.poll() is None
        assert lender.stdin is not None
        lender.stdin.close()  # as the end of a process does
        assert lender.wait(30) == 0


@needs_mooncake
def test_memory_that_can_not_be_lent_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    lent = 1 << 50  # more than a process can have
    with mooncake_master(log) as running:
        starting = lent_memory(running, lent, log)
        with pytest.raises(StorageError, match=f"no {lent} bytes can be lent .* {log}"):
            starting.__enter__()
    assert f"can't be set up with {lent} bytes" in log.read_text()


@pytest.mark.parametrize(
    ("memory", "message"), [("lots", "--memory 'lots' is no size"), ("1kb", "is too little")]
)
def test_memory_that_can_not_be_is_refused_in_one_sentence(
    storage_up: Starter, memory: str, message: str
) -> None:
    process = storage_up("--memory", memory)
    assert process.wait(30) == 2
    assert process.stderr is not None
    assert message in process.stderr.read()


@needs_mooncake
def test_storage_up_ends_when_the_memory_is_gone(storage_up: Starter) -> None:
    process = storage_up("--json", "--memory", "64mb")
    told = _told(process)
    os.kill(told["lender_pid"], signal.SIGKILL)
    assert process.wait(30) == 2
    assert not _is_running(told["pid"])


@needs_mooncake
def test_storage_up_says_that_the_server_has_ended_by_itself(storage_up: Starter) -> None:
    process = storage_up("--json")
    os.kill(_told(process)["pid"], signal.SIGKILL)
    assert process.wait(30) == 2
    assert process.stderr is not None
    errors = process.stderr.read()
    assert "has ended by itself" in errors
    assert len(errors.splitlines()) == 1


@needs_mooncake
def test_storage_up_tells_people_what_to_type(storage_up: Starter) -> None:
    process = storage_up()
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(6)]
    assert "--hicache-storage-backend mooncake" in lines[2]
    assert "MOONCAKE_MASTER=127.0.0.1:" in lines[4]


def test_storage_up_knows_no_other_servers(tmp_path: Path) -> None:
    done = subprocess.run(
        [*UP[:-1], "etcd", "--log", str(tmp_path / "log")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "refimpl: error: the server 'etcd' is unknown; choose one of mooncake\n"


def test_what_a_master_is_told_and_what_it_tells_agree(tmp_path: Path) -> None:
    process: Any = None  # not asked
    master = MooncakeMaster(process, 1234, 5678, tmp_path)
    name: Callable[[str], str] = {
        "master_server_address": "MOONCAKE_MASTER",
        "master_metrics_port": "MOONCAKE_MASTER_METRICS_PORT",
        "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
        "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
        "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
        "protocol": "MOONCAKE_PROTOCOL",
    }.__getitem__
    by_variable = {name(key): str(value) for key, value in master.extra_config.items()}
    assert by_variable == master.environment

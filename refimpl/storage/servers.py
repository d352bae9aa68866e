"""Servers that stores need, as processes of their own on loopback: started, waited for, stopped.

Must not know: backends, pages. Called by: the command line, live scenarios.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

from refimpl.config import ConfigError
from refimpl.storage.backend import StorageError

HOST: Final = "127.0.0.1"
_START_S: Final = 20.0  # measured: below 0.1 s on an idle machine
_STOP_S: Final = 10.0  # measured: 0.6 s
_POLL_S: Final = 0.02
_ASK_AGAIN_S: Final = 1.0
_TRIES: Final = 5  # ports found free may be taken before the server has them


@dataclass(frozen=True, slots=True)
class MooncakeMaster:
    """A running ``mooncake_master``; its clients meet peer to peer, without a metadata server."""

    process: subprocess.Popen[bytes]
    rpc_port: int
    metrics_port: int
    log: Path

    @property
    def extra_config(self) -> dict[str, Any]:
        """What a backend is told to use it, and to lend nothing itself."""
        return {
            "master_server_address": f"{HOST}:{self.rpc_port}",
            "master_metrics_port": self.metrics_port,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": HOST,
            "global_segment_size": 0,
            "protocol": "tcp",
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "MOONCAKE_MASTER": f"{HOST}:{self.rpc_port}",
            "MOONCAKE_MASTER_METRICS_PORT": str(self.metrics_port),
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_LOCAL_HOSTNAME": HOST,
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
            "MOONCAKE_PROTOCOL": "tcp",
        }


@contextmanager
def mooncake_master(
    log: Path, *, ports: tuple[int, int] | None = None, flags: Sequence[str] = ()
) -> Iterator[MooncakeMaster]:
    """A master for as long as the block runs.

    ``ports`` are those of RPC and metrics, for a restart where it was before; else two free ones.
    Its output goes to ``log``. Raises ConfigError when it is not installed and StorageError when it
    does not come up.
    """
    master = _start(log, ports, flags)
    try:
        yield master
    finally:
        stop(master.process)


def _start(log: Path, ports: tuple[int, int] | None, flags: Sequence[str]) -> MooncakeMaster:
    for _ in range(1 if ports else _TRIES):
        rpc_port, metrics_port = ports or free_ports()
        command = [
            _program(),
            f"--rpc_address={HOST}",
            f"--rpc_port={rpc_port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={metrics_port}",
            *flags,
        ]
        process = _spawn(command, log)
        try:
            is_up = _is_up(process, rpc_port, f"http://{HOST}:{metrics_port}/health")
        except BaseException:  # Ctrl-C as well must not leave it running
            stop(process)
            raise
        if is_up:
            return MooncakeMaster(process, rpc_port, metrics_port, log)
        stop(process)
    raise StorageError(f"mooncake_master does not come up on {HOST}; its output is in {log}")


def _program() -> str:
    """The console script beside this interpreter, or the one on PATH; it replaces itself by the server."""
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if found is None:
        raise ConfigError(
            "mooncake_master is not installed: pip install 'hicache-refimpl[mooncake]'"
        )
    return found


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal is for us; we tell it
        )


def _is_up(process: subprocess.Popen[bytes], port: int, url: str) -> bool:
    """Wait until the server says it serves and listens; False when it ends, or takes too long.

    It answers about its health a moment before it listens.
    """
    until = monotonic() + _START_S
    while monotonic() < until:
        if _serves(url) and _is_listening(port):
            return True
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return False
    return False


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def _serves(url: str) -> bool:
    try:
        with urlopen(url, timeout=1) as answer:
            return bool(json.load(answer).get("service_ready"))
    except (URLError, OSError, ValueError):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then make it."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports() -> tuple[int, int]:
    """Two ports of loopback that nobody listens on at the moment."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind((HOST, 0))
        return one.getsockname()[1], other.getsockname()[1]


def wait_until_answered(url: str, seconds: float) -> bool:
    """Ask until somebody answers with more than nothing; False when nobody does in that time."""
    until = monotonic() + seconds
    while not _answers(url):
        if monotonic() > until:
            return False
        Event().wait(_ASK_AGAIN_S)
    return True


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=_ASK_AGAIN_S) as answer:
            return bool(answer.read())
    except (URLError, OSError):
        return False

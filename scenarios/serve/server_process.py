"""``refimpl serve`` as a process of its own, on free ports of loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic

from scenarios.tidy import ROOT

START_S = 90  # torch and numba are loaded meanwhile
STOP_S = 60
LOOK_AGAIN_S = 0.02
SERVER = (sys.executable, "-m", "refimpl")
PORTS = ("--port", "0", "--zmq-port", "0")
PLACES = re.compile(r"serving .* on (http://\S+)\n(?:.*\n)*?requests over ZMQ on (tcp://\S+)\n")


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens; ``log`` is the file it writes stderr to."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    zmq_endpoint: str

    def stop(self) -> int:
        """Tell it to end, as a system does, and wait until it has; its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_S)


@contextmanager
def server_process(
    log: Path, *flags: str, launch: Sequence[str] = SERVER
) -> Iterator[ServerProcess]:
    """Listening; ended by force at the end if nobody has stopped it."""
    command = [*launch, "serve", *PORTS, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    try:
        url, zmq_endpoint = _places(process, log)
        yield ServerProcess(process, log, url, zmq_endpoint)
    finally:
        process.kill()  # of no effect where it has ended
        process.wait(STOP_S)


def _places(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """Where it listens, from what it prints once it does."""
    end, pause = monotonic() + START_S, Event()
    while (found := PLACES.search(said := log.read_text(encoding="utf-8"))) is None:
        assert process.poll() is None, f"the server has ended: {said}"
        assert monotonic() < end, f"the server does not listen: {said}"
        pause.wait(LOOK_AGAIN_S)
    return found[1], found[2]

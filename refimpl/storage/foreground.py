"""``refimpl storage up``: a server for as long as somebody leaves it running.

Must not know: backends. Called by: the command line.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from refimpl.config import ConfigError, require, require_choice
from refimpl.storage.backend import StorageError
from refimpl.storage.mooncake_config import segment_bytes
from refimpl.storage.mooncake_lender import lent_memory
from refimpl.storage.servers import MooncakeMaster, mooncake_master

SERVERS: Final = ("mooncake",)
_LEAST_BYTES: Final = 16 << 20  # a page of the library's own allocator
_ENDS: Final = (signal.SIGINT, signal.SIGTERM)


class _ToldToStop(BaseException):
    """A signal, as an exception: wherever it strikes, what was started is stopped on the way out."""


def serve(name: str, log: Path | None, memory: str, *, as_json: bool) -> None:
    """Start the server and what lends it ``memory``, print how to use it, wait for a signal, stop it.

    Raises ConfigError when it can't be started, or has ended by itself.
    """
    require_choice("the server", name, SERVERS)
    nbytes = _memory_bytes(memory)
    output = log or _default_log(name)
    before = {each: signal.signal(each, _stop_once) for each in _ENDS}
    try:
        with mooncake_master(output) as master, lent_memory(master, nbytes, output) as lender:
            told = _as_json(master, lender.pid) if as_json else _as_text(master, memory)
            print(told, flush=True)
            _wait_for_an_end(master.process, lender)
        raise ConfigError(f"the server has ended by itself; its output is in {output}")
    except StorageError as error:
        raise ConfigError(str(error)) from None
    except _ToldToStop:
        return
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _stop_once(*_: object) -> None:
    for each in _ENDS:
        signal.signal(
            each, signal.SIG_IGN
        )  # it is being stopped; a second signal would cut that short
    raise _ToldToStop


def _memory_bytes(text: str) -> int:
    """1gb is 1024³ bytes, as everywhere in the settings of Mooncake."""
    nbytes = segment_bytes(text, "--memory")
    require(
        nbytes >= _LEAST_BYTES,
        f"--memory {text} is too little: a store needs {_LEAST_BYTES} bytes or more",
    )
    return nbytes


def _wait_for_an_end(*processes: subprocess.Popen[bytes]) -> None:
    """Until one of them has ended. A file descriptor of a process can be read when it has."""
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for process in processes:
            watched = os.pidfd_open(process.pid)
            opened.callback(os.close, watched)
            selector.register(watched, selectors.EVENT_READ)
        selector.select()


def _as_json(master: MooncakeMaster, lender: int) -> str:
    told = {
        "extra_config": master.extra_config,
        "environment": master.environment,
        "log": str(master.log),
        "pid": master.process.pid,
        "lender_pid": lender,
    }
    return json.dumps(told, sort_keys=True)


def _as_text(master: MooncakeMaster, memory: str) -> str:
    extra = shlex.quote(json.dumps(master.extra_config))
    variables = " ".join(f"{name}={value}" for name, value in master.environment.items())
    return (
        f"mooncake_master runs as process {master.process.pid}, its output goes to {master.log};"
        f" another process lends {memory}\n"
        f"Use it with\n"
        f"  --hicache-storage-backend mooncake --hicache-storage-backend-extra-config {extra}\n"
        f"or with\n"
        f"  {variables}\n"
        f"Ctrl-C stops it; what is stored goes with it."
    )


def _default_log(name: str) -> Path:
    folder = Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "refimpl"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"

"""Memory for a Mooncake store, lent by a process of its own, so that pages outlive the engines.

A store has as much room as its clients lend, and what lies in the memory of a client goes with it.
This client does nothing but lend: ``lent_memory`` starts it and stops it; it also ends by itself when
whoever started it has died, because it waits on a pipe from there.
Must not know: backends, pages. Called by: foreground, live scenarios; run as a program by itself.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

from refimpl.storage.backend import StorageError
from refimpl.storage.servers import HOST, MooncakeMaster, stop

_READY: Final = b"lent"
_START_S: Final = (
    60.0  # measured: 2 s for 64 MB; the memory is touched, and there may be a lot of it
)
_LOCAL_BUFFER_BYTES: Final = 16 << 20  # of the library, as in the backend


@contextmanager
def lent_memory(
    master: MooncakeMaster, nbytes: int, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """``nbytes`` of a process of its own in the store of ``master``, for as long as the block runs.

    Raises StorageError when they can't be lent; why is in ``log``.
    """
    command = [sys.executable, "-m", __name__, f"{HOST}:{master.rpc_port}", str(nbytes)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a terminal is for us; we tell it
        )
    try:
        if not _is_ready(process):
            raise StorageError(f"no {nbytes} bytes can be lent to mooncake; the reason is in {log}")
        yield process
    finally:
        stop(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _is_ready(process: subprocess.Popen[bytes]) -> bool:
    """Wait until it says so; False when it ends, or takes too long. The library may print before."""
    assert process.stdout is not None
    said, until = b"", monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(until - monotonic(), 0)):
            part = os.read(process.stdout.fileno(), 4096)
            said += part
            if _READY in said.splitlines():
                return True
            if not part:
                return False
    return False


def _lend(master: str, nbytes: int) -> int:
    """Lend until the other end of standard input is closed; an exit code."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # before it is loaded: it tells all it does
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", nbytes, _LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code:
        print(f"mooncake can't be set up with {nbytes} bytes at {master}: {code}", file=sys.stderr)
        return 1
    os.write(sys.stdout.fileno(), b"\n" + _READY + b"\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads what comes after
    sys.stdin.buffer.read()
    store.close()
    return 0


if __name__ == "__main__":
    os._exit(_lend(sys.argv[1], int(sys.argv[2])))  # leaving in good order would take a second

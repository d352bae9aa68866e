"""Clients of a Mooncake store, each for all who use the same memory and the same settings.

Closing one takes two seconds in which nothing else in this process runs, since the library holds the
interpreter's lock; so the parts of a rank's pages (``tp_lcm_size``), eight maybe, have one client together.
A master that restarts has forgotten all objects; the client registers with it again by itself, within about
two seconds in which it has no room. While there is no master, calls fail at once, because each asks first
whether somebody listens there: the library itself would try for more than four seconds.
Must not know: objects, names, pages. Called by: mooncake.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, TypeAlias

from refimpl.config import ConfigError
from refimpl.storage.backend import StorageError
from refimpl.storage.mooncake_config import MooncakeConfig
from refimpl.storage.objects import Regions
from refimpl.storage.servers import wait_until_answered
from refimpl.storage.watch import Watch

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # before it is loaded: it tells all it does
try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ModuleNotFoundError:
    raise
except ImportError as error:  # it is there, and a library of the system is not
    raise ConfigError(
        f"mooncake can't be loaded: {error}; on Debian: apt-get install libibverbs1 libnuma1 libcurl4"
    ) from None

_LOCAL_BUFFER_BYTES: Final = 16 << 20  # of the library, for calls that copy; ours do not
_SETUP_S: Final = 30.0
_CHECK_S: Final = 600.0  # upstream's

# Setting up a client holds the interpreter's lock and, where the server does not answer, never ends.
# So it is tried in a process that can be stopped.
_TRIAL: Final = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(*json.loads(sys.argv[1]))
os._exit(1 if code else 0)  # leaving in good order would take a second
"""

__all__ = ["Lease", "ReplicateConfig", "lease_of"]

_Key: TypeAlias = tuple[MooncakeConfig, Regions]


class _Client:
    """A client that is set up, and who uses it. The last call out shuts it down: later ones would crash."""

    def __init__(self, config: MooncakeConfig, regions: Regions) -> None:
        self.config, self.regions = config, regions
        self.users = 0
        self._calls = 0
        self._lock, self._opening = Lock(), Lock()
        self._is_over = False
        self._store: Any = None  # until it is set up
        address = config.master_address
        self._watch = None if address is None else Watch(*address)

    def open(self) -> None:
        """Set it up, if nobody has. Raises StorageError."""
        with self._opening:
            if self._store is not None:
                return
            store = _connect(self.config)
            try:
                self._register(store)
            except BaseException:
                store.close()
                raise
            self._store = store

    def _register(self, store: Any) -> None:
        for first, end in self.regions.bounds:
            code = store.register_buffer(first, end - first)
            if code:
                raise StorageError(
                    f"mooncake can't register {end - first} bytes of host memory (code {code});"
                    " with rdma, check ulimit -l and the device"
                )

    def call(self, call: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self._is_over:
                raise StorageError(_CLOSED)
            self._calls += 1
        try:
            if self._watch is not None and not self._watch.is_up():
                raise StorageError(f"no mooncake master listens at {self.config.master}")
            return call(self._store)
        finally:
            self._leave(1)

    def end(self) -> None:
        """Nobody uses it any more."""
        with self._lock:
            self._is_over = True
        self._leave(0)

    def _leave(self, calls: int) -> None:
        with self._lock:
            self._calls -= calls
            is_last = self._is_over and not self._calls
        if is_last:
            if self._store is not None:
                self._store.close()
            if self._watch is not None:
                self._watch.close()


class Lease:
    """One user's share of a client."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._is_closed = False

    @property
    def regions(self) -> Regions:
        """The memory that the store knows."""
        return self._client.regions

    def call(self, call: Callable[[Any], Any]) -> Any:
        """One call of the library. Raises StorageError where it can't be made."""
        if self._is_closed:
            raise StorageError(_CLOSED)
        return self._client.call(call)

    def close(self) -> None:
        """Use it no more; what this process lent to the store goes with the last user."""
        with _counting:
            if self._is_closed:
                return
            self._is_closed = True
            self._client.users -= 1
            is_last = not self._client.users
            if is_last:
                del _clients[self._client.config, self._client.regions]
        if is_last:
            self._client.end()


_CLOSED: Final = "the mooncake backend is closed"
_clients: Final[dict[_Key, _Client]] = {}
_counting: Final = Lock()  # of the clients, and of how many use each


def lease_of(config: MooncakeConfig, regions: Regions) -> Lease:
    """A client of these settings that knows this memory. Raises StorageError when there is no store."""
    with _counting:
        client = _clients.get((config, regions))
        if client is None:
            client = _clients[config, regions] = _Client(config, regions)
        client.users += 1
    lease = Lease(client)
    try:
        client.open()
    except BaseException:
        lease.close()
        raise
    return lease


def _require_servers(config: MooncakeConfig) -> None:
    """Raise StorageError when a server is not there; with ``check_server``, wait for storage first."""
    if config.check_server and config.master_address is not None:
        host = config.master_address[0]
        segments = f"http://{host}:{config.metrics_port}/get_all_segments"
        if not wait_until_answered(segments, _CHECK_S):
            raise StorageError(f"no storage joined mooncake within {_CHECK_S:.0f} s: {segments}")
    servers = {"master": config.master_address, "metadata server": config.metadata_address}
    for what, address in servers.items():
        if address is None:
            continue
        watch = Watch(*address)
        is_up = watch.is_up()
        watch.close()
        if not is_up:
            host, port = address
            raise StorageError(
                f"no mooncake {what} listens at {host}:{port}; refimpl storage up mooncake starts one"
            )


def _connect(config: MooncakeConfig) -> Any:
    """A client that is set up. Raises StorageError when that fails."""
    _require_servers(config)
    arguments: list[Any] = [
        config.local_hostname,
        config.metadata_server,
        config.segment_bytes,
        _LOCAL_BUFFER_BYTES,
        config.protocol,
        config.device,
        config.master,
        None,
        config.ssd_offload_path is not None,
        config.ssd_offload_path or "",
        config.tenant,
    ]
    _try_setup([*arguments[:2], 0, *arguments[3:8]], config)
    store = MooncakeDistributedStore()
    code = store.setup(*arguments)
    if code:
        raise StorageError(f"mooncake can't be set up at {config.master}: code {code}")
    return store


def _try_setup(arguments: list[Any], config: MooncakeConfig) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, json.dumps(arguments)],
            capture_output=True,
            timeout=_SETUP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StorageError(
            f"what listens at {config.master} does not answer as a mooncake master within {_SETUP_S:.0f} s"
        ) from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StorageError(f"mooncake can't be set up at {config.master}: {last}")

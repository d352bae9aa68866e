"""Files through NIXL (package nixl-cu12): one transfer a batch, by the plugin of the storage at hand.

POSIX is what is tested here; GDS, GDS_MT and 3FS take the same calls and need their drivers. NIXL has no
time limit of its own, so each transfer has a deadline here: past it the transfer is taken back, and
where NIXL can't take it back the call goes on waiting, because memory that is still being filled must
not be given to anybody else.
Must not know: pools, policies. Called by: factory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event
from time import monotonic, sleep
from typing import Any, Final
from uuid import uuid4

from refimpl.config import ConfigError, require
from refimpl.storage.backend import HostPage, Setting, StorageError
from refimpl.storage.nixl_files import (
    NixlFiles,
    Part,
    close_all,
    open_new,
    storage_folders,
)
from refimpl.storage.objects import Placed, Regions, address_of

os.environ.setdefault(
    "NIXL_LOG_LEVEL", "FATAL"
)  # before it is loaded: it tells on standard output what it does
from nixl_cu12._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

PLUGIN_VARIABLE: Final = "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"
DIRECT_VARIABLE: Final = "SGLANG_HICACHE_NIXL_USE_DIRECT_IO"
FILE_PLUGINS: Final = ("3FS", "POSIX", "GDS_MT", "GDS")  # in the order that auto tries them
_ALIGNMENT: Final = 4096  # of address and length, which every file system accepts for direct I/O
_DEADLINE_S: Final = 30.0
# Between two looks at a transfer. Asking is what drives it in some plugins, and on a busy machine the
# shortest sleep takes milliseconds, so the first looks, about ten, only let other threads run.
_FIRST_WAIT_S: Final = 1e-7
_LEAST_WAIT_S: Final = 1e-4
_LAST_WAIT_S: Final = 1e-3


class NixlBackend:
    """Extra config: ``plugin`` (a name, or an object of plugins and their parameters, of which the
    first with ``active`` is taken), ``use_direct_io``, ``storage_dir``."""

    def __init__(self, setting: Setting) -> None:
        self._files = NixlFiles(setting, storage_folders(setting))
        self._is_direct = _wants_direct_io(setting.extra)
        self._closing = Event()
        self._agent = nixl_agent(
            f"refimpl-{uuid4()}",
            nixl_agent_config(backends=[], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_RW),
        )
        self.plugin = _create_plugin(self._agent, setting.extra)
        self._regions = Regions.of(setting.memory)
        self._registered = [
            self._agent.register_memory([(first, end - first, 0, "")], "DRAM")
            for first, end in self._regions.bounds
        ]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend."""
        self._require_open()
        return [all(map(self._files.is_there, self._files.expected(name))) for name in names]

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        self._require_open()
        parts = self._parts(names, pages)
        placed = _Placement(parts, self._regions)
        filled = [bool(page.pieces) for page in pages]
        files: list[tuple[int, int]] = []  # part, descriptor
        try:
            for at, part in enumerate(parts):
                file = self._files.open_whole(part, is_direct=self._may_be_direct(placed, at))
                if file is None:
                    filled[part.owner] = False
                else:
                    files.append((at, file))
            whole = [(at, file) for at, file in files if filled[parts[at].owner]]
            self._transfer("READ", placed, whole)
        finally:
            close_all(file for _, file in files)
        for at, _ in whole:
            placed.give_back(at)
        return filled

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend. What is there, and has the size of its page, is not written again."""
        self._require_open()
        every = self._parts(names, pages)
        parts = [part for part in every if not self._files.is_there(part.path, part.nbytes)]
        stored = [bool(page.pieces) for page in pages]
        placed = _Placement(parts, self._regions)
        unfinished = [self._files.unfinished(part.path) for part in parts]
        files: list[tuple[int, int]] = []
        try:
            for at, path in enumerate(unfinished):
                files.append((at, open_new(path, is_direct=self._may_be_direct(placed, at))))
            self._transfer("WRITE", placed, files)
            self._name(unfinished, parts, stored)
        except OSError as error:
            raise StorageError(f"nixl can't write: {error}") from error
        finally:
            close_all(file for _, file in files)
            _remove(unfinished)  # none, unless something failed
        return stored

    def _name(self, unfinished: list[str], parts: Sequence[Part], stored: list[bool]) -> None:
        """Let complete files have their names. Raises OSError when none can."""
        stuck: list[str] = []
        for part in parts:
            try:
                self._files.name(unfinished[0], part)
            except OSError:  # a folder stands there, say: the other pages are stored all the same
                stored[part.owner] = False
                stuck.append(unfinished[0])
                if len(stuck) == len(parts):
                    raise
            del unfinished[0]
        unfinished += stuck

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Drop values, [name]: True where there is none now."""
        self._require_open()
        return [self._files.delete(name) for name in names]

    def clear(self) -> int:
        """See Backend. Upstream empties the folders; this leaves others' files alone."""
        self._require_open()
        return self._files.clear()

    def close(self) -> None:
        """See Backend."""
        if self._closing.is_set():
            return
        self._closing.set()
        for registered in self._registered:
            self._agent.deregister_memory(registered)

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise StorageError("the nixl backend is closed")

    def _parts(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[Part]:
        return [
            part
            for at, (name, page) in enumerate(zip(names, pages, strict=True))
            if page.nbytes
            for part in self._files.parts(at, name, page)
        ]

    def _may_be_direct(self, placed: _Placement, at: int) -> bool:
        return self._is_direct and placed.is_aligned(at)

    # ---- NIXL -------------------------------------------------------------------------------------

    def _transfer(
        self, direction: str, placed: _Placement, files: Sequence[tuple[int, int]]
    ) -> None:
        """Move the parts that ``files`` names, [part, descriptor]. Raises StorageError."""
        if not files:
            return
        memory: list[tuple[int, int, int]] = []
        ends: list[tuple[int, int, int]] = []
        known: list[tuple[int, int, int, str]] = []
        for at, file in files:
            offset = 0
            for address, size in placed.places[at]:
                memory.append((address, size, 0))
                ends.append((offset, size, file))
                offset += size
            known.append((0, offset, file, ""))
        try:
            with self._known(known, "FILE"), self._known(placed.staged, "DRAM"):
                self._run(direction, memory, ends)
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"nixl {self.plugin}: a {direction} failed: {error}") from error

    @contextmanager
    def _known(self, what: list[tuple[int, int, int, str]], kind: str) -> Iterator[None]:
        registered = self._agent.register_memory(what, kind) if what else None
        try:
            yield
        finally:
            if registered is not None:
                self._agent.deregister_memory(registered)

    def _run(self, direction: str, memory: Sequence[Any], files: Sequence[Any]) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            direction,
            agent.get_xfer_descs(memory, "DRAM"),
            agent.get_xfer_descs(files, "FILE"),
            agent.name,
        )
        try:
            state = agent.transfer(handle)
            wait_s, until = _FIRST_WAIT_S, monotonic() + _DEADLINE_S
            while state == "PROC":
                sleep(0 if wait_s < _LEAST_WAIT_S else wait_s)
                wait_s = min(2 * wait_s, _LAST_WAIT_S)
                state = agent.check_xfer_state(handle)
                if state == "PROC" and monotonic() > until and _is_taken_back(agent, handle):
                    raise StorageError(f"nixl {self.plugin}: no end after {_DEADLINE_S:.0f} s")
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise StorageError(f"nixl {self.plugin}: a {direction} ended as {state}")


def _is_taken_back(agent: Any, handle: Any) -> bool:
    """Try to cancel a transfer; False while it goes on."""
    try:
        agent.release_xfer_handle(handle)
    except Exception:
        return False
    return True


class _Placement:
    """Where the pieces of parts lie: ``places[at]`` are addresses and lengths of part ``at``."""

    def __init__(self, parts: Sequence[Part], regions: Regions) -> None:
        self._placed = Placed([piece for part in parts for piece in part.pieces], regions)
        places = list(zip(self._placed.addresses, self._placed.sizes, strict=True))
        self.places: list[list[tuple[int, int]]] = []
        self._first: list[int] = []
        first = 0
        for part in parts:
            count = len(part.pieces)
            self.places.append(places[first : first + count])
            self._first.append(first)
            first += count

    def is_aligned(self, at: int) -> bool:
        """Can it be moved by direct I/O?"""
        return not any(
            address % _ALIGNMENT or size % _ALIGNMENT for address, size in self.places[at]
        )

    def give_back(self, at: int) -> None:
        """Let the pieces of a part have what was read for them."""
        for each in range(self._first[at], self._first[at] + len(self.places[at])):
            self._placed.give_back(each)

    @property
    def staged(self) -> list[tuple[int, int, int, str]]:
        staging = self._placed.staging
        return [(address_of(memoryview(staging)), len(staging), 0, "")] if staging else []


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


# ---- settings -----------------------------------------------------------------------------------


def _wants_direct_io(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> bool:
    said = extra.get("use_direct_io", environ.get(DIRECT_VARIABLE, "true"))
    text = str(said).lower()
    require(
        text in ("true", "false", "1", "0"),
        f"nixl: use_direct_io must be true or false, not {said!r}",
    )
    return text in ("true", "1")


def _wanted_plugin(
    extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> tuple[str, dict[str, str]]:
    """Its name and its parameters."""
    said = extra.get("plugin", environ.get(PLUGIN_VARIABLE, "auto"))
    if isinstance(said, str):
        return said.upper(), {}
    require(
        isinstance(said, Mapping) and all(isinstance(each, Mapping) for each in said.values()),
        f"nixl: plugin must be a name or an object of plugins, not {said!r}",
    )
    for name, keys in said.items():
        if keys.get("active"):
            parameters = {key: str(value) for key, value in keys.items() if key != "active"}
            return str(name).upper(), parameters
    raise ConfigError('nixl: none of the plugins is chosen; give one of them "active": true')


def _create_plugin(agent: Any, extra: Mapping[str, Any]) -> str:
    """Create the wanted plugin, or the first that can be; its name."""
    name, parameters = _wanted_plugin(extra)
    choices = FILE_PLUGINS if name == "AUTO" else (name,)
    require(
        name in ("AUTO", *FILE_PLUGINS),
        f"nixl: plugin {name} is unknown or stores no files; choose auto or one of"
        f" {', '.join(FILE_PLUGINS)}",
    )
    reasons = []
    for choice in choices:
        try:
            agent.create_backend(choice, parameters)
        except Exception as error:
            is_part = choice in agent.get_plugin_list()
            hint = (
                "it needs a driver of its own"
                if is_part
                else "not part of this installation of nixl"
            )
            reasons.append(f"{choice}: {error}, {hint}")
        else:
            return choice
    raise StorageError(f"nixl: no plugin can be created here ({'; '.join(reasons)})")

"""Backends by name: who they are, what they need, how one is opened.

A module is loaded when its backend is opened, so an extra that is not installed matters only then.
Must not know: how a backend works. Called by: the storage pumps, the conformance kit, users who
register their own.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Final, TypeAlias

from refimpl.config import ConfigError
from refimpl.storage.backend import Backend, Setting, StorageError

Maker: TypeAlias = Callable[[Setting], Backend]

# Where a maker is: "module:name". What must be installed for it is an extra of the same name.
_MAKERS: Final[dict[str, str | Maker]] = {
    "memory": "refimpl.storage.memory:MemoryBackend",
    "file": "refimpl.storage.file:FileBackend",
    "mooncake": "refimpl.storage.mooncake:MooncakeBackend",
    "nixl": "refimpl.storage.nixl:NixlBackend",
    "aibrix": "refimpl.storage.aibrix:AibrixBackend",
}


def register_backend(name: str, maker: str | Maker) -> None:
    """Add a backend, or replace one: a callable, or "module:name" of one that is loaded when used."""
    _MAKERS[name] = maker


def backend_names() -> tuple[str, ...]:
    """All that can be opened, in the order of registration."""
    return tuple(_MAKERS)


def open_backend(name: str, setting: Setting) -> Backend:
    """Build and connect a backend.

    Raises ConfigError for a name nobody registered, a missing package or keys that can't be; and
    StorageError when the store can't be reached.
    """
    maker = _MAKERS.get(name)
    if maker is None and name == "hf3fs":
        raise ConfigError(
            "hf3fs is simulated only; a 3FS mount serves through nixl with its 3FS plugin"
        )
    if maker is None:
        close = get_close_matches(name, _MAKERS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = ", ".join(_MAKERS)
        raise ConfigError(f"unknown storage backend {name!r}: choose from {known}{hint}")
    if isinstance(maker, str):
        maker = _load(name, maker)
    try:
        return maker(setting)
    except (ConfigError, StorageError):
        raise
    except Exception as error:
        raise StorageError(f"storage backend {name!r} can't be opened: {error}") from error


def _load(name: str, where: str) -> Maker:
    module, _, attribute = where.partition(":")
    try:
        maker: Maker = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"storage backend {name!r} needs a package that is not installed ({error.name}):"
            f" pip install 'hicache-refimpl[{name}]'"
        ) from None
    return maker

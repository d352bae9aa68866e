"""What is certified: a backend by name or a class of the user's, and how to open it.

Must not know: rules. Called by: rules, kit, the process on the other side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic
from typing import Any

from refimpl.config import ConfigError, require, require_choice
from refimpl.conformance.lifetime import LIFETIMES, lifetime_of
from refimpl.conformance.room import PlainRoom, Room
from refimpl.conformance.shapes import Shape
from refimpl.keys import PageKey
from refimpl.run.dynamic import find_class, with_floats
from refimpl.run.extra_config import parse_extra_config, read_extra_config
from refimpl.storage.backend import Backend, HostPage, Setting
from refimpl.storage.factory import backend_names, open_backend
from refimpl.storage.names import Identity, Namespace, namespace_of


class RefusedError(ConfigError):
    """The backend refuses to be opened so, and its message says why."""


class ViolationError(AssertionError):
    """The backend broke a rule; the message says what it did."""


def demand(condition: bool, message: str) -> None:
    """Raise ViolationError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ViolationError(message)


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend under test. ``run`` marks the names of this run, so that runs do not meet."""

    backend: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    lifetime: str = "store"
    compat: str = ""
    needs_host_pool: bool = False
    run: str = field(default_factory=lambda: token_hex(6))
    used: dict[tuple[Shape, Identity], float] = field(default_factory=dict, compare=False)

    @property
    def opened_last(self) -> float:
        """When something was opened last, in seconds of ``monotonic``; 0 before that."""
        return max(list(self.used.values()), default=0.0)

    def identity(self, shape: Shape) -> Identity:
        """Whose pages the rules store."""
        return shape.identity(f"conform-{self.run}")

    @contextmanager
    def opened(
        self, shape: Shape, slots: int, identity: Identity | None = None
    ) -> Iterator[Opened]:
        """A connection with ``slots`` pages of host memory, closed at the end."""
        store = self.open(shape, slots, identity)
        try:
            yield store
        finally:
            store.backend.close()

    def open(self, shape: Shape, slots: int, identity: Identity | None = None) -> Opened:
        """The same for whoever closes it himself."""
        whose = identity or self.identity(shape)
        self.used[shape, whose] = monotonic()
        room = self._room(shape, slots)
        space = namespace_of(self.backend, whose, compat=self.compat)
        setting = Setting(whose, space, self.extra, room.memory, room.host)
        try:
            backend = open_backend(self.backend, setting)
        except ConfigError as error:
            raise RefusedError(str(error)) from error
        return Opened(backend, room, space, self.run)

    def _room(self, shape: Shape, slots: int) -> Room:
        if not self.needs_host_pool:
            return PlainRoom(shape, slots)
        try:
            from refimpl.conformance.pool_room import PoolRoom
        except ImportError as error:
            raise ConfigError(
                f"a class written for SGLang's interface needs {error.name}:"
                " pip install 'hicache-refimpl[torch,kernels]'"
            ) from None
        return PoolRoom(shape, slots)


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection, and pages of host memory to use with it. Its answers are checked for their form."""

    backend: Backend
    room: Room
    namespace: Namespace
    run: str

    def name(self, label: str) -> str:
        """The name of a page of this namespace."""
        return self.namespace.name(PageKey(hashlib.sha256(f"{self.run}/{label}".encode()).digest()))

    def names(self, label: str, count: int) -> list[str]:
        """Names of several pages."""
        return [self.name(f"{label}-{at}") for at in range(count)]

    def pages(self, slots: range) -> list[HostPage]:
        """Pages of the host memory."""
        return [self.room.page(slot) for slot in slots]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend."""
        return _answers("exists", self.backend.exists(names), names)

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        return _answers("get", self.backend.get(names, pages), names)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        return _answers("set", self.backend.set(names, pages), names)


def _answers(method: str, answers: object, names: Sequence[str]) -> list[bool]:
    is_list = isinstance(answers, list) and all(isinstance(each, bool) for each in answers)
    demand(is_list, f"{method} answered {answers!r}; it must answer a list of bools")
    assert isinstance(answers, list)
    demand(
        len(answers) == len(names),
        f"{method} gave {len(answers)} answers for {len(names)} names",
    )
    return answers


# ---- from what users type -----------------------------------------------------------------------


def subject_of(spec: str, extra: str | None = None, lifetime: str | None = None) -> Subject:
    """``spec`` is a backend's name or MODULE:CLASS; ``extra`` is JSON or @FILE as for serving.

    Raises ConfigError, one line. ``lifetime`` overrides what is known of the backend, or what the class
    says of itself in an attribute of that name.
    """
    module, _, name = spec.partition(":")
    if name:
        keys = with_floats(parse_extra_config(extra)) if extra else {}
        keys |= {"backend_name": name, "module_path": module, "class_name": name}
        return _of("dynamic", json.dumps(keys, default=str), lifetime)
    known = ", ".join(backend_names())
    require(
        spec in backend_names(),
        f"unknown storage backend {spec!r}: name one of {known}, or a class as MODULE:CLASS",
    )
    return _of(spec, extra, lifetime)


def _of(backend: str, text: str | None, lifetime: str | None) -> Subject:
    given = read_extra_config(text, backend)
    extra = with_floats(given.backend)
    if given.max_size_bytes is not None:
        extra["max_size"] = given.max_size_bytes
    needs_host_pool, said = False, lifetime_of(backend, extra)
    if backend == "dynamic":
        found = find_class(extra)
        needs_host_pool = found.is_sglang
        said = getattr(found.cls, "lifetime", said)
    chosen = lifetime or said
    require_choice("the lifetime of values", chosen, LIFETIMES)
    return Subject(backend, extra, chosen, given.compat, needs_host_pool)

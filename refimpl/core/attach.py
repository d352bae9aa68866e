"""Turning L3 on and off at run time.

    DETACHED  -> OPENING    attach asked for while idle: ``OpenStorage``
    OPENING   -> ATTACHED   opened; a new generation begins
    OPENING   -> DETACHED   could not be opened; nothing has changed
    ATTACHED  -> CLOSING    detach asked for while idle: ``CloseStorage``
    CLOSING   -> DETACHED   closed; what is stored stays stored
    CLOSING   -> ATTACHED   could not be closed; nothing has changed
    ATTACHED  -> CLEARING   clear asked for while idle: ``EmptyStorage``
    CLEARING  -> ATTACHED   emptied, or in part: a new generation begins, so that L2 is written again

An attach can be taken back once, which restores the policies from before it, and leaves L3 on where the
attach found it so: whoever attaches several ranks does that where one of them fails.

Not idle: refused, unless ``drain`` says to wait until it is, with new requests held back in the
meantime ("queue") or refused ("refuse").
Must not know: how a backend is built. Called by: engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeAlias

from refimpl.config import PREFETCH_POLICIES, WRITE_POLICIES, CacheConfig
from refimpl.core.cache import HiCache
from refimpl.core.outbox import Outbox
from refimpl.core.prefetch import Prefetcher
from refimpl.facts import StorageChanged
from refimpl.messages import (
    Answer,
    AttachStorage,
    ClearStorage,
    CloseStorage,
    DetachStorage,
    EmptyStorage,
    OpenStorage,
)

DETACHED: Final = "detached"
OPENING: Final = "opening"
ATTACHED: Final = "attached"
CLOSING: Final = "closing"
CLEARING: Final = "clearing"
DRAINS: Final = ("none", "queue", "refuse")

Change: TypeAlias = AttachStorage | DetachStorage | ClearStorage
NAMES: Final = {AttachStorage: "attach", DetachStorage: "detach", ClearStorage: "clear"}


class Attachment:
    """The state of L3 and the change that is asked for, if one is."""

    __slots__ = (
        "_before",
        "_cache",
        "_generations",
        "_out",
        "_prefetcher",
        "backend",
        "change",
        "state",
    )

    def __init__(self, cache: HiCache, prefetcher: Prefetcher, out: Outbox, backend: str) -> None:
        self._cache = cache
        self._prefetcher = prefetcher
        self._out = out
        self._generations = 0
        self._before: tuple[str, CacheConfig] | None = None  # state and policies before an attach
        self.backend = backend  # the one that is attached, or was last
        self.state = DETACHED
        self.change: Change | None = None  # waits for idleness, or is being carried out
        if backend:
            self._enter_attached()

    @property
    def holds_back(self) -> bool:
        """New requests must not start now: a change drains the engine or is being carried out."""
        return self.change is not None

    @property
    def refuses(self) -> bool:
        """New requests are refused while the change waits."""
        return self.change is not None and self.change.drain == "refuse"

    def ask(self, change: Change, *, busy: str) -> None:
        """A change is asked for; ``busy`` says what is going on, empty when idle."""
        error = self._objection(change)
        if error:
            self._answer(change, error)
        elif isinstance(change, DetachStorage) and change.takes_back and self._before is None:
            self._answer(change, "no attach is there to take back")
        elif isinstance(change, DetachStorage) and change.takes_back and self._is_policies_only:
            self._restore_policies()
            self._answer(change, "", "policies taken back")
        elif isinstance(change, DetachStorage) and self.state == DETACHED:
            self._answer(change, "", "nothing was attached")
        elif isinstance(change, ClearStorage) and self.state == DETACHED:
            self._answer(change, "no storage backend is attached")
        elif isinstance(change, AttachStorage) and self.state == ATTACHED:
            if change.backend != self.backend:
                self._answer(
                    change, f"storage backend {self.backend!r} is attached. Detach it first."
                )
            else:
                self._before = ATTACHED, self._cache.config
                self._apply_policies(change)
                self._answer(change, "", "already enabled with same backend; policies updated.")
        elif busy and change.drain == "none":
            self._answer(change, f"scheduler is not idle. {busy}")
        else:
            self.change = change
            if not busy:
                self.start()

    def _objection(self, change: Change) -> str:
        if not self._cache.config.has_l2:
            return "Hierarchical cache is not enabled."
        if self.change is not None:
            return "another attach, detach or clear is under way"
        if change.drain not in DRAINS:
            return f"unknown drain mode {change.drain!r}; choose one of {', '.join(DRAINS)}"
        if isinstance(change, AttachStorage):
            for name, value, choices in (
                ("hicache_storage_prefetch_policy", change.prefetch_policy, PREFETCH_POLICIES),
                ("hicache_write_policy", change.write_policy, WRITE_POLICIES),
            ):
                if value is not None and value not in choices:
                    return f"Invalid {name}: {value!r}. Expected one of {', '.join(choices)}."
        return ""

    def start(self) -> None:
        """The engine is idle and a change waits: carry it out."""
        change = self.change
        if isinstance(change, AttachStorage) and self.state == DETACHED:
            self.state = OPENING
            self._out.commands.append(OpenStorage(change.backend, change.extra_config))
        elif isinstance(change, DetachStorage) and self.state == ATTACHED:
            self.state = CLOSING
            self._out.commands.append(CloseStorage())
        elif isinstance(change, ClearStorage) and self.state == ATTACHED:
            self.state = CLEARING
            self._out.commands.append(EmptyStorage())

    def opened(self, error: str) -> None:
        """``OpenStorage`` has ended."""
        change = self.change
        assert self.state == OPENING and isinstance(change, AttachStorage)
        self.change = None
        if error:
            self.state = DETACHED
        else:
            self.backend = change.backend
            self._before = DETACHED, self._cache.config
            self._apply_policies(change)
            self._enter_attached()
        self._answer(change, error, "attached")

    def closed(self, error: str) -> None:
        """``CloseStorage`` has ended."""
        change = self.change
        assert self.state == CLOSING and isinstance(change, DetachStorage)
        self.change = None
        if error:
            self.state = ATTACHED
        else:
            self.state = DETACHED
            self._cache.host.generation = 0
            if change.takes_back:
                self._restore_policies()
            self._before = None
            self._note()
        self._answer(change, error, "detached")

    def emptied(self, error: str) -> None:
        """``EmptyStorage`` has ended. What it left behind nobody knows when it has failed."""
        change = self.change
        assert self.state == CLEARING and change is not None
        self.change = None
        self._enter_attached()
        self._answer(change, error, "cleared")

    def _enter_attached(self) -> None:
        self._generations += 1
        self._prefetcher.forget_suspects()
        self.state = ATTACHED
        self._cache.host.generation = self._generations
        self._note()

    def _apply_policies(self, change: AttachStorage) -> None:
        cache = self._cache
        config: CacheConfig = cache.config
        if change.prefetch is not None:
            config = replace(config, prefetch=change.prefetch)
        if change.prefetch_policy is not None:
            config = replace(
                config, prefetch=replace(config.prefetch, policy=change.prefetch_policy)
            )
        if change.write_policy is not None:
            config = replace(config, write_policy=change.write_policy)
        self._follow(config)

    @property
    def _is_policies_only(self) -> bool:
        """The last attach found L3 on, and changed policies alone."""
        return self._before is not None and self._before[0] == ATTACHED

    def _restore_policies(self) -> None:
        """Those from before the last attach."""
        assert self._before is not None
        _, config = self._before
        self._before = None
        self._follow(config)

    def _follow(self, config: CacheConfig) -> None:
        self._cache.set_policies(config)
        self._prefetcher.set_config(config.prefetch)

    def _note(self) -> None:
        self._out.facts.append(StorageChanged(self.state, self._cache.host.generation))

    def _answer(self, change: Change, error: str, done: str = "") -> None:
        name = NAMES[type(change)]
        message = f"Reject {name}: {error}" if error else done
        self._out.commands.append(Answer(name, not error, message))

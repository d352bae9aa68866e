"""What an engine decided, and why: the record, of which reports and metrics are folds.

Must not know: how anything is carried out. Called by: core, run, serve.
"""

from __future__ import annotations

from refimpl.messages import Fact


class Matched(Fact, frozen=True, gc=False):
    """What the tree held for ``rid`` at submit: full pages in L1, then in L2, out of ``pages``."""

    rid: int
    pages: int
    l1: int
    l2: int


class Admitted(Fact, frozen=True, gc=False):
    """First admission of ``rid``: where its prompt's tokens come from."""

    rid: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    output_tokens: int


class Readmitted(Fact, frozen=True, gc=False):
    """``rid`` was retracted and runs again; of ``tokens``, ``cached_tokens`` were still there."""

    rid: int
    tokens: int
    cached_tokens: int


class Inserted(Fact, frozen=True, gc=False):
    """Computed pages of ``rid`` that entered the tree, without those it found there."""

    rid: int
    pages: int


class Demoted(Fact, frozen=True, gc=False):
    """Pages that gave up their L1 copy and stay in L2."""

    pages: int


class Evicted(Fact, frozen=True, gc=False):
    """Pages that left a tier and are in no other local one, and why.

    capacity, flush, or on their way from L1 to L2 host_pressure (no room) and copy_failed.
    """

    tier: str
    pages: int
    reason: str


class Dropped(Fact, frozen=True, gc=False):
    """L2 copies given up whose page stays in L1."""

    pages: int


class LoadedBack(Fact, frozen=True, gc=False):
    """Pages copied L2 -> L1 for ``rid``."""

    rid: int
    pages: int


class Wrote(Fact, frozen=True, gc=False):
    """A write to the next tier has ended: ``done`` of ``pages``. Tier is host or storage."""

    tier: str
    pages: int
    done: int


class Prefetch(Fact, frozen=True, gc=False):
    """A step in the life of an L3 read for ``rid``; ``reason`` is given with revoked.

    ``step``: probed, joined, started, landed, completed, timed_out, stopped, failed, revoked.
    """

    rid: int
    step: str
    pages: int
    reason: str = ""


class Skipped(Fact, frozen=True, gc=False):
    """Something that could have been done for ``rid`` (0: for no one) and was not, with the reason."""

    rid: int
    action: str
    pages: int
    reason: str


class Retracted(Fact, frozen=True, gc=False):
    """``rid`` gave up its place in the decode batch for lack of L1 and waits again."""

    rid: int


class Finished(Fact, frozen=True, gc=False):
    """``rid`` is over after ``tokens`` output tokens."""

    rid: int
    tokens: int
    reason: str


class StorageChanged(Fact, frozen=True, gc=False):
    """The attach/detach state machine moved; ``generation`` counts attaches."""

    state: str
    generation: int

"""What can be said to an engine, and what it orders.

Events are facts from outside, commands are orders, facts (``facts``) are the record of decisions.
Commands and facts encode to MessagePack, which the decision digest is taken over.
The contract, asserted on both sides:
1. every command with an ``op`` gets exactly one completing event, also after a cancel, also on
   failure; ``Landed`` comes once per storage batch before the last and is no completion;
2. ``Engine.handle`` runs to the end, never waits, is never re-entered; 3. ``now`` never decreases;
4. a FILLING copy is written by its op alone, a READY copy never;
5. slots: free + owned by pages + owned by ops + owned by requests = capacity, always;
6. at most one ``RunBatch`` is in flight, answered by ``BatchDone`` when its streams have finished;
7. of the events handled at once, completions come before what clients ask for.

Must not know: how anything is carried out. Called by: core (commands), run, serve (events).
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from refimpl.config import PrefetchConfig
from refimpl.keys import PageKey, Prompt


class Event(msgspec.Struct, frozen=True, gc=False):
    """A fact from outside."""


class Command(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """An order."""


class Fact(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Something decided, and why."""


# ---- events -------------------------------------------------------------------------------------


class Submit(Event, frozen=True, gc=False):
    """A request. ``output_tokens`` is the most it may produce; a scripted prompt produces just that."""

    rid: int
    prompt: Prompt
    output_tokens: int
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    priority: int = 0


class Abort(Event, frozen=True, gc=False):
    """The client of ``rid`` is gone."""

    rid: int


class Tick(Event, frozen=True, gc=False):
    """Time has passed: a deadline is due, or nothing happened."""


class BatchDone(Event, frozen=True, gc=False):
    """The batch in flight has finished after ``steps`` steps (1 for a prefill).

    What items of requests in ``loads_failed`` computed is void. Hands with a model say which ``tokens``
    each request produced, one a step, and who ``ended`` with a stop token in the last step.
    """

    steps: int = 1
    loads_failed: tuple[int, ...] = ()
    tokens: dict[int, list[int]] = {}
    ended: tuple[int, ...] = ()


class BackedUp(Event, frozen=True, gc=False):
    """Completes ``BackUp``: the leading ``pages`` pages are in L2."""

    op: int
    pages: int


class Probed(Event, frozen=True, gc=False):
    """Completes ``Probe``: the leading ``pages`` keys are in L3, the minimum over ranks."""

    op: int
    pages: int


class Landed(Event, frozen=True, gc=False):
    """Of ``Fetch``: the leading ``pages`` pages are in L2 so far."""

    op: int
    pages: int


class Fetched(Event, frozen=True, gc=False):
    """Completes ``Fetch``: the leading ``pages`` pages are in L2, no more will come."""

    op: int
    pages: int


class Stored(Event, frozen=True, gc=False):
    """Completes ``Store``: the leading ``pages`` pages are in L3."""

    op: int
    pages: int


class AttachStorage(Event, frozen=True, gc=False):
    """Turn L3 on. ``drain`` says what to do when the engine is not idle: see ``core.attach``.

    ``extra_config`` is for whoever opens the backend; what of it concerns the core is ``prefetch``.
    """

    backend: str
    prefetch_policy: str | None = None
    write_policy: str | None = None
    drain: str = "none"
    extra_config: str = ""
    prefetch: PrefetchConfig | None = None


class DetachStorage(Event, frozen=True, gc=False):
    """Turn L3 off; nothing that is stored is deleted. ``takes_back``: undo the last attach instead."""

    drain: str = "none"
    takes_back: bool = False


class ClearStorage(Event, frozen=True, gc=False):
    """Delete what L3 holds of this instance's namespace; L1 and L2 keep what they have."""

    drain: str = "none"


class StorageOpened(Event, frozen=True, gc=False):
    """Completes ``OpenStorage``; ``error`` is empty on success."""

    error: str = ""


class StorageClosed(Event, frozen=True, gc=False):
    """Completes ``CloseStorage``; ``error`` is empty on success."""

    error: str = ""


class StorageEmptied(Event, frozen=True, gc=False):
    """Completes ``EmptyStorage``; ``error`` is empty on success."""

    error: str = ""


class Flush(Event, frozen=True, gc=False):
    """Empty L1 and L2, if idle. L3 keeps what it has."""


# ---- commands -----------------------------------------------------------------------------------


class Load(Command, frozen=True, gc=False):
    """L2 -> L1 copies that run layer by layer beside the batch they belong to."""

    rid: int
    l2_slots: list[int]
    l1_slots: list[int]


class PageTable(Command, frozen=True, gc=False):
    """From page ``first`` on, the L1 slots of ``rid`` are these; what stood there is void."""

    rid: int
    first: int
    slots: list[int]


class PrefillItem(Command, frozen=True, gc=False):
    """Compute ``tokens`` tokens of ``rid`` from position ``start``; ``is_last``: a token comes of it."""

    rid: int
    start: int
    tokens: int
    is_last: bool


class RunBatch(Command, frozen=True, gc=False):
    """One forward pass: a prefill of ``items``, or up to ``steps_max`` decode steps of all running.

    ``tables`` are applied first. A request decodes from the prefill item that is its last until its
    final ``Reply`` or its ``Withdraw``; ``context_tokens`` sums up the contexts at the first step.
    """

    steps_max: int
    items: list[PrefillItem] = []
    tables: list[PageTable] = []
    loads: list[Load] = []
    running: int = 0
    context_tokens: int = 0

    @property
    def is_decode(self) -> bool:
        """True for decode steps."""
        return not self.items


class Withdraw(Command, frozen=True, gc=False):
    """``rid`` gave up its slots: it decodes no longer and its page table is void."""

    rid: int


class CutBatch(Command, frozen=True, gc=False):
    """End the decode in flight at its next step boundary; ``BatchDone`` says how many steps ran."""


class BackUp(Command, frozen=True, gc=False):
    """Copy L1 slots to L2 slots, in this order."""

    op: int
    l1_slots: list[int]
    l2_slots: list[int]


class Probe(Command, frozen=True, gc=False):
    """Ask L3 how many leading keys it has."""

    op: int
    rid: int
    keys: list[PageKey]


class Fetch(Command, frozen=True, gc=False):
    """Read pages from L3 into L2 slots, in this order."""

    op: int
    keys: list[PageKey]
    l2_slots: list[int]


class CancelFetch(Command, frozen=True, gc=False):
    """Stop a fetch at the end of the storage batch it is in; ``Fetched`` still comes."""

    op: int


class Store(Command, frozen=True, gc=False):
    """Write L2 slots to L3 under these keys, in this order, where they don't exist yet."""

    op: int
    keys: list[PageKey]
    l2_slots: list[int]


class OpenStorage(Command, frozen=True, gc=False):
    """Build and connect the L3 backend."""

    backend: str
    extra_config: str = ""


class CloseStorage(Command, frozen=True, gc=False):
    """Stop using L3 and let its backend go."""


class EmptyStorage(Command, frozen=True, gc=False):
    """Delete the pages of this instance's namespace from L3."""


class Reply(Command, frozen=True, gc=False):
    """To the client of ``rid``: its first token, or its end with a reason."""

    rid: int
    first: bool
    finish: str = ""  # "length", "abort", "error: ..." or empty


class Answer(Command, frozen=True, gc=False):
    """To whoever asked for an attach, a detach, a clear or a flush: whether it was done."""

    request: str
    ok: bool
    message: str


# ---- one step ----------------------------------------------------------------------------------


class Step(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one ``Engine.handle`` ordered and decided."""

    NOTHING: ClassVar[Step]
    commands: list[Command]
    facts: list[Fact]


Step.NOTHING = Step([], [])

AnyEvent: TypeAlias = (
    Submit | Abort | Tick | BatchDone | BackedUp | Probed | Landed | Fetched | Stored
    | AttachStorage | DetachStorage | StorageOpened | StorageClosed | Flush
    | ClearStorage | StorageEmptied
)  # fmt: skip

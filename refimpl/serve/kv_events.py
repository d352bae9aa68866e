"""KV events: which pages came to and left which tier, as routers read them (spec 2.12).

A watcher of the engine's cache that knows the tokens of what it announces. Events that follow each other
and say the same of a run of pages are one. Must not know: sockets, threads. Called by: kv_publisher,
start.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from refimpl.core.page import Page
from refimpl.core.request import Request
from refimpl.core.residency import DEVICE, HOST
from refimpl.keys import PageKey, block_event_hash

MEDIA: Final = {DEVICE: "GPU", HOST: "CPU_PINNED"}
_BITS: Final = {DEVICE: 1, HOST: 2}


class KvEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A map with ``type``; fields with a default are left out when they have it."""


class BlockStored(KvEvent):
    """A chain of pages is in ``medium``; ``parent_block_hash`` is None before the first page of a prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None


class BlockRemoved(KvEvent):
    """Pages are no longer in ``medium``; they may be in another."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KvEvent):
    """Nothing is cached any more."""


AnyKvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one step changed. ``ts`` in seconds of the Unix clock."""

    ts: float
    events: list[AnyKvEvent]
    attn_dp_rank: int | None = None


class _Block:
    """A page that is announced, or may be in this step."""

    __slots__ = ("salt", "tiers", "tokens")

    def __init__(self, tokens: array[int], salt: str | None) -> None:
        self.tokens, self.salt = tokens, salt
        self.tiers = 0  # bits of the tiers it is in


class KvEventRecorder:
    """Watches one cache; ``take`` gives what happened since it was last asked.

    Pages whose tokens nobody knows are not announced: their names are their own, so nobody can ask for
    them. A page keeps its tokens here, 4 bytes each, while it is in L1 or L2.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._blocks: dict[PageKey, _Block] = {}
        self._named: list[PageKey] = []  # in this step
        self._events: list[AnyKvEvent] = []

    def __len__(self) -> int:
        """Pages whose tokens are kept."""
        return len(self._blocks)

    def take(self) -> list[AnyKvEvent]:
        """The events so far, oldest first; they are gone from here then."""
        for key in self._named:
            block = self._blocks.get(key)
            if block is not None and not block.tiers:
                del self._blocks[key]
        self._named.clear()
        events, self._events = self._events, []
        return events

    def naming(self, request: Request, first: int, last: int) -> None:
        """Learn the tokens of pages that may come now."""
        for index in range(first, last):
            key = request.keys[index]
            if key in self._blocks:
                continue
            tokens = request.page_tokens(index, self._page_size)
            if tokens is not None:
                self._blocks[key] = _Block(tokens, request.cache_salt)
                self._named.append(key)

    def came(self, tier: str, pages: Sequence[Page]) -> None:
        """Pages are READY in a tier."""
        for page in pages:
            block = self._blocks.get(page.key)
            if block is not None:
                block.tiers |= _BITS[tier]
                self._stored(page, block, MEDIA[tier])

    def went(self, tier: str, pages: Sequence[Page]) -> None:
        """Pages have left a tier."""
        gone = []
        for page in pages:
            block = self._blocks.get(page.key)
            if block is not None:
                gone.append(block_event_hash(page.key))
                block.tiers &= ~_BITS[tier]
                if not block.tiers:
                    del self._blocks[page.key]
        if not gone:
            return
        tail = self._events[-1] if self._events else None
        if isinstance(tail, BlockRemoved) and tail.medium == MEDIA[tier]:
            tail.block_hashes += gone
        else:
            self._events.append(BlockRemoved(gone, MEDIA[tier]))

    def cleared(self) -> None:
        """No page is left anywhere."""
        self._blocks.clear()
        self._events.append(AllBlocksCleared())

    def _stored(self, page: Page, block: _Block, medium: str) -> None:
        name, parent = block_event_hash(page.key), _parent_hash(page)
        tail = self._events[-1] if self._events else None
        if (
            isinstance(tail, BlockStored)
            and tail.medium == medium
            and tail.cache_salt == block.salt
            and tail.block_hashes[-1] == parent
        ):
            tail.block_hashes.append(name)
            tail.token_ids.extend(block.tokens)
            return
        tokens, size = block.tokens.tolist(), self._page_size
        self._events.append(
            BlockStored([name], parent, tokens, size, None, medium, cache_salt=block.salt)
        )


def _parent_hash(page: Page) -> int | None:
    node, at = page.node, page.depth - page.node.start
    if at:
        return block_event_hash(node.keys[at - 1])
    above = node.parent
    assert above is not None
    return block_event_hash(above.keys[-1]) if above.keys else None

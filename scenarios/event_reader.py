"""A router's view of a cache, built from KV events alone, and what is true of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from refimpl.core.cache import HiCache
from refimpl.core.check import walk
from refimpl.core.page import READY
from refimpl.keys import PageKey, block_event_hash, namespace_seed, page_keys

MEDIA = ("GPU", "CPU_PINNED")


class EventReader:
    """What is where; an event that contradicts what is known is an AssertionError.

    ``spaces`` are the (extra_key, cache_salt, lora_id) that prompts may have: a first page's hash depends
    on them, and an event tells of the salt alone.
    """

    def __init__(self, page_size: int, spaces: Iterable[tuple[str | None, ...]] = ((None,) * 3,)):
        self._page_size = page_size
        self._seeds: dict[str | None, set[bytes]] = {}
        for space in spaces:
            self._seeds.setdefault(space[1] or None, set()).add(namespace_seed(*space))
        self._keys: dict[int, PageKey] = {}  # the whole name behind a hash
        self.held: dict[str, set[PageKey]] = {medium: set() for medium in MEDIA}

    def read(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    gone = {self._keys[name] for name in event["block_hashes"]}
                    assert gone <= self.held[event["medium"]], "removed what was not there"
                    self.held[event["medium"]] -= gone
                case "AllBlocksCleared":
                    self.held = {medium: set() for medium in MEDIA}
                case other:
                    raise AssertionError(other)

    def _stored(self, event: dict[str, Any]) -> None:
        names, size = event["block_hashes"], self._page_size
        assert event["block_size"] == size
        assert len(event["token_ids"]) == size * len(names)
        assert event["medium"] in MEDIA
        assert set(event) - {"cache_salt"} == {
            "type",
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
        }
        parent = event["parent_block_hash"]
        priors = (
            [self._keys[parent]] if parent is not None else self._seeds[event.get("cache_salt")]
        )
        chains = [page_keys(event["token_ids"], size, prior) for prior in priors]
        fitting = [one for one in chains if list(map(block_event_hash, one)) == names]
        assert len(fitting) == 1, "the tokens of an event do not hash to its blocks"
        (keys,) = fitting
        held = self.held[event["medium"]]
        assert not held & set(keys), "stored what was there already"
        held.update(keys)
        self._keys.update(zip(names, keys, strict=True))


def as_maps(events: list[Any]) -> list[dict[str, Any]]:
    """Events as they look to whoever decodes them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(events))


def resident(cache: HiCache, known: set[PageKey] | None = None) -> dict[str, set[PageKey]]:
    """The pages with a READY copy by medium: of those in ``known``, of all without it."""
    pages = [page for node in walk(cache) for page in node.pages]
    device = {page.key for page in pages if page.l1_state == READY}
    host = {page.key for page in pages if page.l2_state == READY}
    if known is not None:
        device, host = device & known, host & known
    return dict(zip(MEDIA, (device, host), strict=True))

"""A request and its life.

    QUEUED   -> RUNNING   admitted: its first chunk is in a batch
    RUNNING  -> QUEUED    retracted: L1 had no slot for its next token
    RUNNING  -> OVER      its last token, or an abort after the batch it was in
    QUEUED   -> OVER      refused, or aborted while waiting

Must not know: tree, tiers, batches. Called by: prefetch, scheduler, engine.
"""

from __future__ import annotations

from array import array
from typing import Final

from refimpl.core.page import Node, Page
from refimpl.keys import PageKey, Prompt, namespace_seed
from refimpl.messages import Submit

QUEUED: Final = 0
RUNNING: Final = 1
OVER: Final = 2


class Request:
    """One request. Tokens before ``computed`` have KV in L1; pages before ``inserted`` are the tree's."""

    __slots__ = (
        "aborted",
        "admitted_at",
        "anchor",
        "asked",
        "asked_at",
        "cache_salt",
        "computed",
        "epoch",
        "expected",
        "fetched",
        "fetches",
        "inserted",
        "is_counted",
        "keys",
        "load_failed",
        "loading",
        "output_tokens",
        "own",
        "priority",
        "produced",
        "prompt",
        "rid",
        "seed",
        "slots",
        "state",
        "tokens",
        "waits_until",
    )

    def __init__(self, submit: Submit, page_size: int) -> None:
        self.rid = submit.rid
        self.prompt: Prompt = submit.prompt
        self.priority = submit.priority
        self.output_tokens = submit.output_tokens
        self.seed = namespace_seed(submit.extra_key, submit.cache_salt, submit.lora_id)
        self.cache_salt = submit.cache_salt or None
        self.keys: list[PageKey] = submit.prompt.page_keys(page_size, self.seed)
        self.produced: array[int] = array("I")  # output tokens, where hands report them
        self.state = QUEUED
        self.tokens = submit.prompt.length  # prompt plus what was generated
        self.computed = 0
        self.inserted = 0
        self.slots: list[int] = []  # L1 slots of its pages from ``inserted`` on
        self.anchor: Page | None = None  # last page of its own in the tree, pinned
        self.own: Node | None = None  # the node its last insertion made
        self.loading: list[Page] = []  # pages its batch copies L2 -> L1
        self.load_failed = False  # a load for it failed: it recomputes, whatever L2 has
        self.fetches: list[int] = []  # ops of L3 reads it waits for
        self.fetched: list[tuple[int, int]] = []  # depths its L3 reads brought in
        self.waits_until = 0  # before that time nothing but an answer from L3 ends its wait
        self.asked = 0  # times L3 was asked
        self.asked_at = 0  # when it was last
        self.expected = 0  # pages that were in L1 or L2 when L3 was asked, or came from it since
        self.is_counted = False  # its hits have been counted
        self.aborted = False
        self.admitted_at = 0  # position in the order of admissions
        self.epoch = 0  # grows with each admission; older plans for it are void

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return self.tokens - self.prompt.length

    @property
    def remaining(self) -> int:
        """Output tokens still to come."""
        return self.output_tokens - self.generated

    def key(self, index: int, page_size: int) -> PageKey:
        """Key of page ``index``, all of whose KV has been computed; keys are made in order."""
        keys = self.keys
        while len(keys) <= index:
            prior = keys[-1] if keys else self.seed
            at = len(keys)
            key = self.prompt.output_key(at, page_size, prior, self.rid, self.produced, self.seed)
            keys.append(key)
        return keys[index]

    def page_tokens(self, index: int, page_size: int) -> array[int] | None:
        """Tokens of page ``index``; None where they are not known."""
        return self.prompt.page_tokens(index, page_size, self.produced)

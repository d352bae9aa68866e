"""Short names in stories: tokens, pages, requests, times; and steps written on a line.

``a*6`` is six tokens of the letter a: the same six, or the first of them, wherever a run of a
stands. ``1..10`` are ten numbers. ``a*4+b*2`` is one behind the other. A page is called by the
letters in it and its place in the prompt: with pages of 2, ``a*3+b*1`` has the pages a0 and ab1.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from refimpl.keys import PageKey, namespace_seed, page_keys
from refimpl.messages import (
    Answer,
    BackUp,
    CancelFetch,
    CloseStorage,
    Command,
    CutBatch,
    EmptyStorage,
    Fact,
    Fetch,
    OpenStorage,
    PrefillItem,
    Probe,
    Reply,
    RunBatch,
    Store,
    Withdraw,
)
from refimpl.units import NS_PER_MS, NS_PER_S, NS_PER_US, scaled_decimal
from scenarios.tabletop import Tabletop

_LETTER_TOKENS: Final = 100_000  # ids of letter x begin at its place in the alphabet times this
_NS: Final = {"ns": 1, "us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S}
_GENERATED: Final = 1
_PLAIN: Final[dict[type, str]] = {
    CutBatch: "cut",
    OpenStorage: "open_storage",
    CloseStorage: "close_storage",
    EmptyStorage: "empty_storage",
}


def tokens_of(text: str) -> array[int]:
    """Tokens of ``a*4+b*2`` or ``1..10``."""
    tokens = array("I")
    for part in filter(None, text.split("+")):
        if ".." in part:
            first, _, last = part.partition("..")
            tokens.extend(range(int(first), int(last) + 1))
        else:
            letter, _, count = part.partition("*")
            base = (ord(letter) - ord("a") + 1) * _LETTER_TOKENS
            tokens.extend(range(base, base + int(count or 1)))
    return tokens


def ns_of(text: str) -> int:
    """Nanoseconds of ``2s``, ``100ms``, ``1ns``."""
    unit = text.lstrip("-0123456789.")
    return scaled_decimal(text.removesuffix(unit), _NS[unit])


def rid_of(text: str) -> int:
    """The id of a request called ``r12``."""
    return int(text.removeprefix("r"))


class Labels:
    """Pages by their short names, in both directions."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._names: dict[PageKey, str] = {}

    def learn(
        self, tokens: Sequence[int], extra: str | None, salt: str | None, lora: str | None
    ) -> list[PageKey]:
        """Name the full pages of these tokens in that namespace."""
        keys = page_keys(tokens, self._page_size, namespace_seed(extra, salt, lora))
        named = (("", extra), ("salt=", salt), ("lora=", lora))
        space = "/".join(f"{field}{value}" for field, value in named if value)
        for index, key in enumerate(keys):
            page = tokens[index * self._page_size : (index + 1) * self._page_size]
            letters = "".join(dict.fromkeys(map(_letter, page)))
            self._names.setdefault(
                key, f"{space}:{letters}{index}" if space else f"{letters}{index}"
            )
        return keys

    def name(self, key: PageKey | None) -> str:
        if key is None:
            return "?"
        if key in self._names:
            return self._names[key]
        rid, index, _, kind = struct.unpack("<QQQQ", key)
        assert kind == _GENERATED, "a key that no prompt of this story has"
        return f"r{rid}out{index}"

    def names(self, keys: Iterable[PageKey | None]) -> str:
        """Names with runs folded: a0 a1 a2 b3 is ``a0-2 b3``."""
        runs: list[tuple[str, int, int]] = []
        for name in map(self.name, keys):
            stem = name.rstrip("0123456789")
            at = int(name[len(stem) :] or 0)
            if runs and runs[-1][0] == stem and runs[-1][2] + 1 == at:
                runs[-1] = (stem, runs[-1][1], at)
            else:
                runs.append((stem, at, at))
        return " ".join(f"{stem}{a}" if a == b else f"{stem}{a}-{b}" for stem, a, b in runs)


def _letter(token: int) -> str:
    return chr(ord("a") + token // _LETTER_TOKENS - 1) if token >= _LETTER_TOKENS else "t"


# ---- steps --------------------------------------------------------------------------------------


def command_line(command: Command, table: Tabletop, labels: Labels) -> str:
    match command:
        case RunBatch():
            return _batch_line(command)
        case BackUp():
            return f"back_up #{command.op} {labels.names(map(table.l1.get, command.l1_slots))}"
        case Probe():
            return f"probe #{command.op} r{command.rid} {labels.names(command.keys)}"
        case Fetch():
            return f"fetch #{command.op} {labels.names(command.keys)}"
        case Store():
            return f"store #{command.op} {labels.names(command.keys)}"
        case CancelFetch():
            return f"cancel_fetch #{command.op}"
        case Reply():
            words = ["first"] * command.first + [command.finish] * bool(command.finish)
            return f"reply r{command.rid} {', '.join(words)}"
        case Withdraw():
            return f"withdraw r{command.rid}"
        case Answer():
            return f"{command.request} {'done' if command.ok else 'refused'}: {command.message}"
        case _:
            return _PLAIN[type(command)]


def _batch_line(batch: RunBatch) -> str:
    if batch.is_decode:
        return f"decode {batch.running} running, up to {batch.steps_max} steps"
    loads = "".join(f" load r{load.rid}:{len(load.l1_slots)}" for load in batch.loads)
    return "prefill " + " ".join(map(_item, batch.items)) + loads


def _item(item: PrefillItem) -> str:
    more = "" if item.is_last else "..."
    return f"r{item.rid}[{item.start}:{item.start + item.tokens}]{more}"


def fact_line(fact: Fact) -> str:
    """``- Evicted tier=device pages=2 reason=capacity``; empty strings are left out."""
    words = [f"- {type(fact).__name__}"]
    for field in fact.__struct_fields__:
        value = getattr(fact, field)
        if field == "rid":
            words.append(f"r{value}" if value else "-")
        elif value != "":
            words.append(f"{field}={value}")
    return " ".join(words)

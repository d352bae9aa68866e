"""Traces that name blocks by prefix-chained ids: Mooncake (512 tokens) and Bailian (16 tokens).

Must not know: files, how often anything hits. Called by: trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from refimpl.keys import BlockPrompt
from refimpl.units import NS_PER_MS, NS_PER_S, ceil_div
from refimpl.workload.request import RequestSpec
from refimpl.workload.trace_lines import TOKENS_MAX, LineError, TraceRow, time_ns

MOONCAKE_BLOCK: Final = 512  # tokens
BAILIAN_BLOCK: Final = 16  # tokens

Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
BlockId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: msgspec.Raw  # as written, so that it never becomes a float
    input_length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    output_length: Tokens
    hash_ids: tuple[BlockId, ...]


class _BailianLine(_MooncakeLine, gc=False, kw_only=True):
    chat_id: Annotated[int, Meta(ge=0)]
    parent_chat_id: Annotated[int, Meta(ge=-1)]  # -1: the first turn of a chat
    turn: Annotated[int, Meta(ge=0)] = 1


L = TypeVar("L", bound=_MooncakeLine)

_mooncake_decoder = msgspec.json.Decoder(_MooncakeLine)
_bailian_decoder = msgspec.json.Decoder(_BailianLine)


def mooncake_row(text: str) -> TraceRow:
    """One line of a Mooncake trace, timestamps in ms. Raises LineError."""
    line = _decoded(_mooncake_decoder, text, MOONCAKE_BLOCK)
    at_ns = time_ns(bytes(line.timestamp).decode(), NS_PER_MS)
    return TraceRow(at_ns, line.input_length, line.output_length, line.hash_ids)


def bailian_row(text: str) -> TraceRow:
    """One line of a Bailian trace, timestamps in s; its turns count from 1. Raises LineError."""
    line = _decoded(_bailian_decoder, text, BAILIAN_BLOCK)
    if line.parent_chat_id == line.chat_id:
        raise LineError("parent_chat_id is the chat_id of the line itself")
    return TraceRow(
        at_ns=time_ns(bytes(line.timestamp).decode(), NS_PER_S),
        input_length=line.input_length,
        output_length=line.output_length,
        block_ids=line.hash_ids,
        chat=line.chat_id,
        parent=line.parent_chat_id,
        turn=max(line.turn - 1, 0),
    )


def mooncake_requests(rows: Sequence[TraceRow]) -> list[RequestSpec]:
    """Requests of rows in the order of their times; each is a session of its own."""
    return [
        RequestSpec(
            rid=rid,
            prompt=BlockPrompt(row.input_length, row.block_ids, MOONCAKE_BLOCK),
            output_tokens=row.output_length,
            arrival_ns=row.at_ns - rows[0].at_ns,
            session=rid - 1,
        )
        for rid, row in enumerate(rows, 1)
    ]


def bailian_requests(rows: Sequence[TraceRow]) -> list[RequestSpec]:
    """Requests of rows in the order of their times; a turn waits for its parent.

    A parent that is not in the trace, or comes later than its child, is no parent: the turn opens
    a session, so a cycle of parents can't make requests that wait for each other.
    """
    parents = _parents(rows)
    answers = _answers(rows, parents)
    sessions: list[int] = []
    requests = []
    for rid, (row, parent) in enumerate(zip(rows, parents, strict=True), 1):
        sessions.append(sessions[parent - 1] if parent else rid - 1)
        requests.append(
            RequestSpec(
                rid=rid,
                prompt=BlockPrompt(row.input_length, answers[rid - 1], BAILIAN_BLOCK),
                output_tokens=row.output_length,
                arrival_ns=row.at_ns - rows[0].at_ns,
                after=(parent,) if parent else (),
                session=sessions[-1],
                turn=row.turn,
            )
        )
    return requests


def _parents(rows: Sequence[TraceRow]) -> list[int]:
    """The rid of each row's parent, 0 for none; the latest where a chat id repeats."""
    latest: dict[int, int] = {}
    parents = []
    for rid, row in enumerate(rows, 1):
        parents.append(latest.get(row.parent, 0))
        latest[row.chat] = rid
    return parents


def _answers(rows: Sequence[TraceRow], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Block ids of each row, reaching over its output where its first child repeats it.

    The child also renames the parent's last block unless that is full: where the parent's own id
    stands for the part before the output, the child's stands for the block the output filled.
    Prompt pages that end there, which only pages smaller than a block do, take the child's name.
    """
    named = [row.block_ids for row in rows]
    for child, parent in zip(rows, parents, strict=True):
        if not parent:
            continue
        row = rows[parent - 1]
        full = row.input_length // BAILIAN_BLOCK
        own = len(row.block_ids)
        unnamed = named[parent - 1] is row.block_ids
        if (
            unnamed
            and len(child.block_ids) > own
            and child.block_ids[:full] == row.block_ids[:full]
        ):
            # One id past the prompt marks the output as linked, even if it ends inside that block.
            reach = max(ceil_div(row.input_length + row.output_length, BAILIAN_BLOCK), own + 1)
            named[parent - 1] = child.block_ids[:reach]
    return named


def _decoded(decoder: msgspec.json.Decoder[L], text: str, block_size: int) -> L:
    try:
        line = decoder.decode(text)
    except msgspec.ValidationError as error:
        raise LineError(_reason(str(error))) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from None
    blocks = ceil_div(line.input_length, block_size)
    if len(line.hash_ids) != blocks:
        raise LineError(
            f"hash_ids: {len(line.hash_ids)} ids where {line.input_length} tokens fill {blocks}"
            f" blocks of {block_size}"
        )
    return line


def _reason(text: str) -> str:
    """The decoder's ``what - at `$.field``` as ``field: what``."""
    what, _, where = text.replace("`", "").partition(" - at $.")
    return f"{where}: {what}" if where else what

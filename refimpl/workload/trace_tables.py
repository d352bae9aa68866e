"""Traces in CSV that name neither tokens nor blocks: Azure LLM inference and BurstGPT.

What two of their prompts share is unknown, so no two share a page: hits are a lower bound of 0
within the trace, and these traces serve arrival times and lengths.
Must not know: files. Called by: trace.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from refimpl.keys import BlockPrompt
from refimpl.units import NS_PER_S
from refimpl.workload.request import RequestSpec
from refimpl.workload.trace_lines import TOKENS_MAX, LineError, TraceRow, time_ns

RowParser = Callable[[str], TraceRow]

_NS_DIGITS: Final = 9
_COUNT: Final = re.compile(r"-?[0-9]{1,30}")
_DATE_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT: Final = ("Timestamp", "Request tokens", "Response tokens")
_BURSTGPT_SESSION: Final = "Session ID"  # a column of the later release


def azure_parser(header: str) -> RowParser:
    """Reads rows under ``header``; times are dates, taken as UTC. Raises LineError, as does it."""
    columns = _columns(header, _AZURE)
    at, context, generated = (columns[name] for name in _AZURE)

    def parse(text: str) -> TraceRow:
        cells = _cells(text, len(columns))
        return TraceRow(
            at_ns=_date_time_ns(cells[at]),
            input_length=_tokens(cells[context], "ContextTokens", least=1),
            output_length=_tokens(cells[generated], "GeneratedTokens"),
        )

    return parse


def burstgpt_parser(header: str) -> RowParser:
    """Reads rows under ``header``; times are seconds. Raises LineError, as does what it returns.

    A failed request has 0 response tokens and is kept.
    """
    columns = _columns(header, _BURSTGPT)
    at, request, response = (columns[name] for name in _BURSTGPT)
    session = columns.get(_BURSTGPT_SESSION)

    def parse(text: str) -> TraceRow:
        cells = _cells(text, len(columns))
        return TraceRow(
            at_ns=time_ns(cells[at], NS_PER_S),
            input_length=_tokens(cells[request], "Request tokens", least=1),
            output_length=_tokens(cells[response], "Response tokens"),
            session="" if session is None else cells[session],
        )

    return parse


def table_requests(rows: Sequence[TraceRow]) -> list[RequestSpec]:
    """Requests of rows in the order of their times.

    A prompt is one block, as long as itself, whose id is the rid: nothing is shared. Rows of one
    session count its turns but do not wait for each other, since the trace says when each was sent.
    """
    sessions: dict[str, int] = {}
    turns: list[int] = []  # seen so far, by session
    requests = []
    for rid, row in enumerate(rows, 1):
        session = sessions.get(row.session, len(turns)) if row.session else len(turns)
        if session == len(turns):
            sessions[row.session] = session
            turns.append(0)
        requests.append(
            RequestSpec(
                rid=rid,
                prompt=BlockPrompt(row.input_length, (rid,), row.input_length),
                output_tokens=row.output_length,
                arrival_ns=row.at_ns - rows[0].at_ns,
                session=session,
                turn=turns[session],
            )
        )
        turns[session] += 1
    return requests


def _columns(header: str, needed: Sequence[str]) -> dict[str, int]:
    """Position of each column. Raises LineError when one is missing or named twice."""
    names = _cells(header)
    columns = {name: index for index, name in enumerate(names)}
    for name in needed:
        if name not in columns:
            raise LineError(f"the header lacks the column {name!r}")
    if len(columns) != len(names):
        raise LineError("the header names a column twice")
    return columns


def _cells(text: str, expected: int | None = None) -> list[str]:
    # A reader for each line: a quote left open must not swallow the lines after it.
    try:
        (row,) = csv.reader([text], strict=True)
    except csv.Error as error:
        raise LineError(f"not CSV: {error}") from None
    if expected is not None and len(row) != expected:
        raise LineError(f"{len(row)} columns where the header has {expected}")
    return [cell.strip() for cell in row]


def _tokens(text: str, column: str, least: int = 0) -> int:
    if _COUNT.fullmatch(text) is None:
        raise LineError(f"{column}: {text[:40]!r} is not a whole number")
    value = int(text)
    if not least <= value <= TOKENS_MAX:
        raise LineError(f"{column}: {value} is not from {least} to {TOKENS_MAX}")
    return value


def _date_time_ns(text: str) -> int:
    """ns since 1970. The fraction is taken apart first: ``datetime`` drops what is below 1 us."""
    match = _DATE_TIME.fullmatch(text)
    if match is None:
        raise LineError(f"TIMESTAMP: {text[:40]!r} is not a date and time")
    date, clock, fraction, zone = match.groups(default="")
    try:
        moment = datetime.fromisoformat(f"{date}T{clock}{zone or '+00:00'}")
    except ValueError as error:
        raise LineError(f"TIMESTAMP: {error}") from None
    whole = moment - _EPOCH
    below = int(fraction[:_NS_DIGITS].ljust(_NS_DIGITS, "0"))
    return (whole.days * 86_400 + whole.seconds) * NS_PER_S + below

"""Requests as whoever sent them saw them: from a run of our own, or a file of a load generator.

Must not know: engines, what the figures are compared with. Called by: live figures, pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from refimpl.config import ConfigError, require
from refimpl.run.record import Row
from refimpl.run.report import PERCENTILES
from refimpl.units import nearest_rank

TIERS: Final = ("device", "host", "storage")
_GOOD_ENDS: Final = ("length", "stop", "tool_calls", "function_call", "content_filter")
_NUMBERS: Final = ("turn", "prompt_tokens", "first_token_ns", "end_ns")
_NUMBERS_AT_WILL: Final = ("intended_ns", "hit_tokens", *(f"{tier}_tokens" for tier in TIERS))
_WORDS_AT_WILL: Final = ("finish", "error")
_SENT: Final = ("sent_ns", "arrival_ns")  # as a load generator and as a run of ours call it


class Result(msgspec.Struct, frozen=True):
    """One request. Times in ns of the run, tokens in counts; None for what nobody knows."""

    turn: int  # 0 for the first
    prompt_tokens: int | None
    sent_ns: int
    end_ns: int
    ttft_ns: int | None  # from when it was sent
    ttft_intended_ns: int | None = None  # from when it was due
    tiers: tuple[int, int, int] | None = None  # hit tokens in device, host and storage
    hit_tokens: int | None = None
    failure: str = ""  # why it failed; empty: it did not


Times: TypeAlias = Callable[[Result], int | None]  # which of its times is meant


def from_rows(rows: Iterable[Row]) -> list[Result]:
    """What the record of a run holds of each request."""
    return [_from_row(row) for row in rows]


def _from_row(row: Row) -> Result:
    has_token = row.first_token_ns >= 0
    hits = row.device_tokens, row.host_tokens, row.storage_tokens
    tiers = hits if row.admitted else None  # who was never admitted had no chance to hit
    return Result(
        turn=row.turn,
        prompt_tokens=row.prompt_tokens,
        sent_ns=row.arrival_ns,
        end_ns=max(row.end_ns, row.arrival_ns),
        ttft_ns=row.ttft_ns if has_token else None,
        tiers=tiers,
        hit_tokens=None if tiers is None else sum(tiers),
        failure=_failure(row.finish, "", is_answered=has_token and row.end_ns >= 0),
    )


def failures(results: Iterable[Result]) -> dict[str, int]:
    """How many requests failed, by reason, the most frequent first."""
    counts = Counter(result.failure for result in results if result.failure)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def percentiles_of(results: Sequence[Result], time: Times) -> dict[str, int]:
    """Nearest-rank percentiles of a time, in ns; empty when nobody has it."""
    times = sorted(each for result in results if (each := time(result)) is not None)
    return {f"p{percent}": nearest_rank(times, percent) for percent in PERCENTILES if times}


def _failure(finish: str, error: str, *, is_answered: bool) -> str:
    if error:
        return error
    if finish not in ("", *_GOOD_ENDS):
        return finish.removeprefix("error: ")
    return "" if is_answered else "no answer"


# ---- files --------------------------------------------------------------------------------------


def read_results(path: Path) -> list[Result]:
    """The requests of a parquet file: of a load generator, or of a run's ``--output``.

    Raises ConfigError, one line, for a file that can't be read or is empty, a column that is missing or
    of another type, and times that can't be.
    """
    import polars  # slow to load, and needed for files alone

    require(path.is_file(), f"{path}: there is no such file")
    try:
        with path.open("rb") as file:
            table = polars.read_parquet(file)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise ConfigError(f"{path} can't be read as parquet: {error}") from None
    require(table.height > 0, f"{path} holds no request")
    sent = _sent_column(path, table.columns)
    _check_columns(path, table.schema, (*_NUMBERS, sent))
    known = [*_NUMBERS, sent, *_NUMBERS_AT_WILL, *_WORDS_AT_WILL]
    rows = table.select([name for name in known if name in table.columns]).to_dicts()
    return [_from_file(path, number, row, sent) for number, row in enumerate(rows, 1)]


def _sent_column(path: Path, columns: list[str]) -> str:
    found = [name for name in _SENT if name in columns]
    require(bool(found), f"{path} has neither a column {' nor '.join(_SENT)}")
    return found[0]


def _check_columns(path: Path, schema: Mapping[str, Any], needed: Iterable[str]) -> None:
    missing = [name for name in needed if name not in schema]
    require(
        not missing,
        f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)};"
        f" it has {', '.join(schema)}",
    )
    for name in (*needed, *_NUMBERS_AT_WILL):
        kind = schema.get(name)
        is_number = kind is None or kind.is_integer() or str(kind) == "Null"
        require(is_number, f"{path}: the column {name} must hold whole numbers, not {kind}")
    for name in _WORDS_AT_WILL:
        is_text = str(schema.get(name, "String")) in ("String", "Null")
        require(is_text, f"{path}: the column {name} must hold text, not {schema.get(name)}")


def _from_file(path: Path, number: int, row: Mapping[str, Any], sent_column: str) -> Result:
    turn, sent, first, end = (
        row[name] for name in ("turn", sent_column, "first_token_ns", "end_ns")
    )
    require(turn is not None and turn >= 0, f"{path}, row {number}: turn is {turn}, not 0 or more")
    require(sent is not None, f"{path}, row {number}: {sent_column} is null: it was never sent")
    for name in ("first_token_ns", "end_ns"):
        late = row[name] is None or row[name] >= sent
        require(late, f"{path}, row {number}: {name} is before {sent_column}")
    intended = row.get("intended_ns")
    tiers = _tiers(path, number, row)
    hits = row.get("hit_tokens")
    return Result(
        turn=turn,
        prompt_tokens=row["prompt_tokens"],
        sent_ns=sent,
        end_ns=sent if end is None else end,
        ttft_ns=None if first is None else first - sent,
        ttft_intended_ns=None if first is None or intended is None else first - intended,
        tiers=tiers,
        hit_tokens=sum(tiers) if hits is None and tiers is not None else hits,
        failure=_failure(
            row.get("finish") or "",
            row.get("error") or "",
            is_answered=first is not None and end is not None,
        ),
    )


def _tiers(path: Path, number: int, row: Mapping[str, Any]) -> tuple[int, int, int] | None:
    device, host, storage = (row.get(f"{tier}_tokens") for tier in TIERS)
    if device is None or host is None:
        return None
    tiers = device, host, storage or 0  # a server without L3 says nothing of it
    prompt = row["prompt_tokens"]
    fits = min(tiers) >= 0 and (prompt is None or sum(tiers) <= prompt)
    require(fits, f"{path}, row {number}: {sum(tiers)} hit tokens of {prompt} prompt tokens")
    return tiers

"""The table of results: one row a request, as seen by its client.

Must not know: transports, Locust. Called by: _player makes rows, _director keeps and writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from perf._answer import Answer
from refimpl.workload.request import RequestSpec

_TEXTS: Final = frozenset({"scenario", "transport", "finish", "error"})


class Row(NamedTuple):
    """Times are in ns since the run began; None where the thing never came, or is unknown."""

    scenario: str
    transport: str
    session: int
    turn: int  # from 0
    intended_ns: int  # when it was due
    sent_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None
    end_ns: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    output_events: int
    device_tokens: int | None
    host_tokens: int | None
    storage_tokens: int | None
    hit_tokens: int | None
    finish: str
    error: str  # empty: all is well

    @property
    def ttft_ns(self) -> int | None:
        """From being sent to the first token."""
        return _between(self.sent_ns, self.first_token_ns)

    @property
    def ttft_intended_ns(self) -> int | None:
        """From when it was due to the first token."""
        return _between(self.intended_ns, self.first_token_ns)

    @property
    def tpot_ns(self) -> int | None:
        """Time for each output token after the first; None with fewer than two, or uncounted ones."""
        span_ns, tokens = _between(self.first_token_ns, self.last_token_ns), self.output_tokens
        return None if span_ns is None or tokens is None or tokens < 2 else span_ns // (tokens - 1)

    @property
    def end_to_end_ns(self) -> int | None:
        """From being sent to the end."""
        return _between(self.sent_ns, self.end_ns)


def row_of(named: tuple[str, str], spec: RequestSpec, intended_ns: int, answer: Answer) -> Row:
    """The row of one request; ``named`` is scenario and transport."""
    noted = {name: getattr(answer, name) for name in Row._fields if hasattr(answer, name)}
    scenario, transport = named
    return Row(
        scenario=scenario,
        transport=transport,
        session=spec.session,
        turn=spec.turn,
        intended_ns=intended_ns,
        **noted,
    )


def write_rows(rows: list[Row], path: Path, loop: str) -> None:
    """Write ``rows``, in the order in which they were due, as parquet. Raises OSError."""
    import polars  # only who writes a table pays for it

    types: dict[str, Any] = {
        name: polars.String if name in _TEXTS else polars.Int64 for name in Row._fields
    }
    ordered = sorted(rows, key=lambda row: (row.intended_ns, row.session, row.turn))
    path.parent.mkdir(parents=True, exist_ok=True)
    table = polars.DataFrame(ordered, schema=types, orient="row")
    table.write_parquet(path, metadata={"loop": loop})


def _between(start: int | None, end: int | None) -> int | None:
    return None if start is None or end is None else end - start

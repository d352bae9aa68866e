"""What a run has shown, as tables in the terminal.

Must not know: how the rows came about. Called by: _node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from perf._answer import UNFINISHED
from perf._director import Director
from perf._rows import Row
from refimpl.units import NS_PER_MS, NS_PER_S, nearest_rank

_PERCENTS: Final = (50, 90, 99)
_UNKNOWN: Final = "–"
_LOOPS: Final = {
    "open": "Open loop: sessions began when they were due; a turn waits for the one before it.",
    "closed": (
        "CLOSED LOOP: each user waits for its answer before it asks again. A slow server is asked"
        " less often, so its tail looks better than those who arrive on their own would find it."
    ),
}


def summarize(director: Director) -> None:
    """Print it."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    groups = _groups(director.rows)
    console.print()
    console.print(_LOOPS[director.options.loop])
    for scenario, transport in groups:
        console.print(f"Traffic over {transport}: {scenario}", markup=False)
    for table in (_times(groups), _tokens(groups)):
        console.print(table)
    _print_errors(console, director.rows)
    _print_generator(console, director)
    for reason in director.verdict():
        console.print(f"NOT VALID: {reason}", style="bold red", markup=False)


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.scenario, row.transport), []).append(row)
    return groups


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("traffic")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _times(groups: dict[tuple[str, str], list[Row]]) -> Table:
    table = _table(
        "Times in ms: p50 / p90 / p99 of the requests that succeeded",
        ("over", "good", "failed", "TTFT from due", "TTFT from sent", "a token", "to the end"),
    )
    for (scenario, transport), rows in groups.items():
        good = [row for row in rows if not row.error]
        failed = sum(row.error not in ("", UNFINISHED) for row in rows)
        table.add_row(
            scenario.partition(":")[0],
            transport,
            str(len(good)),
            str(failed),
            _percentiles(good, lambda row: row.ttft_intended_ns),
            _percentiles(good, lambda row: row.ttft_ns),
            _percentiles(good, lambda row: row.tpot_ns),
            _percentiles(good, lambda row: row.end_to_end_ns),
        )
    return table


def _tokens(groups: dict[tuple[str, str], list[Row]]) -> Table:
    table = _table(
        "Tokens",
        (
            "over",
            "prompt",
            "from L1",
            "from L2",
            "from L3",
            "hit rate",
            "output",
            "output/s",
            "an event",
        ),
    )
    for (scenario, transport), rows in groups.items():
        good = [row for row in rows if not row.error]
        output, is_estimate = _output_tokens(good)
        events = sum(row.output_events for row in good)
        mark = "~" if is_estimate else ""
        table.add_row(
            scenario.partition(":")[0],
            transport,
            _sum([row.prompt_tokens for row in good]),
            _sum([row.device_tokens for row in good]),
            _sum([row.host_tokens for row in good]),
            _sum([row.storage_tokens for row in good]),
            _hit_rate(good),
            f"{mark}{output:,}",
            f"{mark}{output * NS_PER_S // max(_span_ns(good), 1):,}",
            f"{mark}{output / events:.1f}" if events else _UNKNOWN,
        )
    return table


def _percentiles(rows: Sequence[Row], of: Callable[[Row], int | None]) -> str:
    ordered = sorted(value for row in rows if (value := of(row)) is not None)
    if not ordered:
        return _UNKNOWN
    return " / ".join(f"{nearest_rank(ordered, p) / NS_PER_MS:.1f}" for p in _PERCENTS)


def _output_tokens(rows: Sequence[Row]) -> tuple[int, bool]:
    """Tokens produced, and whether events had to stand in for some the server did not count."""
    is_estimate = any(row.output_tokens is None for row in rows)
    counted = (
        row.output_events if row.output_tokens is None else row.output_tokens for row in rows
    )
    return sum(counted), is_estimate


def _sum(values: Sequence[int | None]) -> str:
    """The sum of what is known; unknown when nothing is."""
    known = [value for value in values if value is not None]
    return f"{sum(known):,}" if known else _UNKNOWN


def _hit_rate(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row.hit_tokens is not None and row.prompt_tokens]
    prompt = sum(row.prompt_tokens or 0 for row in known)
    return (
        f"{100 * sum(row.hit_tokens or 0 for row in known) / prompt:.1f} %" if prompt else _UNKNOWN
    )


def _span_ns(rows: Sequence[Row]) -> int:
    """From the first request that was sent to the last end."""
    sent = [row.sent_ns for row in rows if row.sent_ns is not None]
    ends = [row.end_ns for row in rows if row.end_ns is not None]
    return max(ends) - min(sent) if sent and ends else 0


def _print_errors(console: Console, rows: Sequence[Row]) -> None:
    reasons = Counter(row.error for row in rows if row.error not in ("", UNFINISHED))
    for reason, count in reasons.most_common():
        console.print(f"failed {count} times: {reason}", markup=False)


def _print_generator(console: Console, director: Director) -> None:
    health, rows = director.health, director.rows
    if any(row.output_tokens is None and not row.error for row in rows):
        console.print("~ estimated: the server gave no usage, so each event counts as one token")
    console.print(
        f"The load generator: {health['sent']} requests sent, the latest"
        f" {health['lag_max_ns'] / NS_PER_MS:.1f} ms after it was due; its event loop was late by"
        f" {health['stall_max_ns'] / NS_PER_MS:.1f} ms at most"
    )
    for warning in director.warnings():
        console.print(f"warning: {warning}", markup=False)

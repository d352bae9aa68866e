"""Reports for people: tables and bars in the terminal.

Must not know: engines, how figures came about. Called by: the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from refimpl.run.record import Row
from refimpl.run.report import by_turn, failure_words, failures
from refimpl.run.tier_sets import TierSet
from refimpl.units import NS_PER_MS, NS_PER_S, PER_MILLION

_TURNS_MAX: Final = 20
_PIPE_WIDTH: Final = 110  # columns of a table that nobody's terminal limits


def terminal() -> Console:
    """Where tables go. In a pipe no line is broken to fit a terminal."""
    is_terminal = sys.stdout.isatty()
    return Console(soft_wrap=not is_terminal, width=None if is_terminal else _PIPE_WIDTH)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal, told how many more are done; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.update(task, advance=count)


def milliseconds(ns: int) -> str:
    """A time for reading, in ms; what never came has none, and is 0 here."""
    return f"{ns / NS_PER_MS:,.1f}" if ns else "-"


def failed_words(rows: list[Row]) -> str:
    """How many requests failed and why, in a line; empty when none did."""
    return failure_words(failures(rows), len(rows))


def percent(part: int, whole: int) -> str:
    """A share for reading."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table: names left, figures right."""
    table = Table(
        title=title,
        box=SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        padding=(0, 1, 0, 0),  # tight: the widest table has to fit into 80 columns
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*row)
    return table


def show_report(console: Console, figures: dict[str, Any], rows: list[Row]) -> None:
    """The report of one run."""
    prompt, hits = figures["prompt_tokens"], figures["hit_tokens"]
    total = sum(hits.values())
    console.print(
        grid(
            f"{figures['requests']:,} requests, {prompt:,} prompt tokens",
            ("prompt tokens from", "tokens", "share"),
            [
                *((f"{tier}", f"{hits[tier]:,}", percent(hits[tier], prompt)) for tier in hits),
                ("all hits", f"{total:,}", percent(total, prompt)),
                ("computed", f"{figures['computed_tokens']:,}", ""),
            ],
        )
    )
    if figures["virtual_ns"]:
        ttft = figures["ttft_ns"]
        console.print(grid("TTFT, ms", tuple(ttft), [[milliseconds(ttft[name]) for name in ttft]]))
    console.print(grid("Pages moved, then requests", ("what", "count"), _page_rows(figures)))
    if ranks := figures.get("ranks"):
        console.print(grid("Ranks", ("what", "count"), _rank_rows(ranks)))
    if failed := failed_words(rows):
        console.print(failed, style="bold red", highlight=False)
    turns = by_turn(rows)
    if 1 < len(turns) <= _TURNS_MAX:
        console.print(_turn_table(turns))


def _rank_rows(ranks: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("agreements", ranks["agreements"]),
        ("ops that ranks did not end alike", ranks["disagreements"]),
    ]
    lost = ranks["pages_lost"]
    rows += [(f"pages that some rank lacked: {op}", pages) for op, pages in lost.items() if pages]
    words = [(name, f"{count:,}") for name, count in rows]
    for who, at in ranks["died_ns"].items():
        words.append((f"{who.replace('_', ', ')} died, s", f"{at / NS_PER_S:,.1f}"))
    if ranks["died_ns"]:
        words.append(("ops that never end, their slots out of use", f"{ranks['unanswered']:,}"))
    return words


def show_workers(console: Console, workers: Sequence[dict[str, Any]], dp_size: int) -> None:
    """What each instance and data-parallel rank had; nothing where there is but one."""
    if len(workers) < 2:
        return
    rows = []
    for each in workers:
        rank = f", DP rank {each['dp_rank']}" if dp_size > 1 else ""
        prompt, hits, ttft = each["prompt_tokens"], each["hit_tokens"], each["ttft_ns"]
        shares = [percent(hits[tier], prompt) for tier in ("device", "host", "storage")]
        times = [milliseconds(ttft[name]) for name in ("p50", "p99")]
        rows.append(
            (f"instance {each['instance']}{rank}", f"{each['requests']:,}", *shares, *times)
        )
    columns = ("who", "requests", "device", "host", "storage", "p50, ms", "p99, ms")
    console.print(grid("By instance", columns, rows))


def _page_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    moved, evicted, prefetch = (
        figures["pages_moved"],
        figures["evicted_pages"],
        figures["prefetch"],
    )
    rows = [
        ("L1 -> L2 written", moved["backup"]),
        ("L2 -> L1 loaded back", moved["load_back"]),
        ("L2 -> L3 written", moved["store"]),
        ("L3 -> L2 read", moved["prefetch"]),
        ("left L1", evicted["device"]),
        ("left L2", evicted["host"]),
        ("dropped for lack of room in L2", figures["host_pressure_pages"]),
    ]
    rows += [(f"not done: {what}", pages) for what, pages in figures["skipped_pages"].items()]
    rows += [
        (f"prefetches {name.replace('_', ' ')}", prefetch[name])
        for name in ("started", "completed", "timed_out")
    ]
    revoked = prefetch["revoked_by_reason"]
    rows += [(f"prefetches revoked: {why}", count) for why, count in revoked.items()]
    rows += [("requests retracted", figures["retracted"])]
    return [(name, f"{pages:,}") for name, pages in rows if pages]


def _turn_table(
    turns: list[tuple[int, int, dict[str, int], dict[str, int]]], title: str = "By turn"
) -> Table:
    return grid(
        title,
        ("turn", "requests", "device", "host", "storage", "computed", "p50, ms", "p99, ms"),
        [
            (
                str(turn + 1),
                f"{count:,}",
                *(
                    percent(tokens[tier], tokens["prompt"])
                    for tier in ("device", "host", "storage")
                ),
                f"{tokens['prompt'] - tokens['device'] - tokens['host'] - tokens['storage']:,}",
                milliseconds(ttft["p50"]),
                milliseconds(ttft["p99"]),
            )
            for turn, count, tokens, ttft in turns
        ],
    )


def figure_rows(figures: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested figures as flat rows."""
    rows: list[tuple[str, str]] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            rows += figure_rows(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", _figure(value)))
    return rows


def _figure(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def show_tier_sets(console: Console, done: list[TierSet]) -> None:
    """The comparison of ``refimpl run``: one line a tier set, then the turns of the full one."""
    first = done[0].figures
    console.print(
        grid(
            f"{first['requests']:,} requests, {first['prompt_tokens']:,} prompt tokens",
            (
                "tiers",
                "from L1",
                "from L2",
                "from L3",
                "computed",
                "hit, %",
                "TTFT p50",
                "p99, ms",
            ),
            [_tier_set_row(each.name, each.figures) for each in done],
        )
    )
    for each in done:
        if failed := failed_words(each.rows):
            console.print(f"{each.name}: {failed}", style="bold red", highlight=False)
    turns = by_turn(done[-1].rows)
    if 1 < len(turns) <= _TURNS_MAX:
        console.print(_turn_table(turns, f"By turn, {done[-1].name}"))


def _tier_set_row(name: str, figures: dict[str, Any]) -> list[str]:
    hits, ttft = figures["hit_tokens"], figures["ttft_ns"]
    return [
        name,
        *(f"{hits[tier]:,}" for tier in ("device", "host", "storage")),
        f"{figures['computed_tokens']:,}",
        f"{100 * figures['hit_rate_ppm'] / PER_MILLION:.1f}",
        milliseconds(ttft["p50"]),
        milliseconds(ttft["p99"]),
    ]


def _rate(moved: dict[str, float]) -> str:
    if not moved["bytes"]:
        return "–"
    return f"{moved['bytes'] / 1e6:,.1f}, {moved['gb_per_s']:.1f}"


def show_served(console: Console, done: Sequence[Any], *, equal: bool | None) -> None:
    """What ``refimpl run --model-path`` served; ``equal`` is None where nothing was compared."""
    rows = []
    for each in done:
        moved = [_rate(each.moved[way]) for way in ("load_back", "backup", "l3_read", "l3_write")]
        rows.append([*_tier_set_row(each.name, each.figures)[:-1], *moved])
    header = (
        "tiers",
        "from L1",
        "L2",
        "L3",
        "computed",
        "hit, %",
        "TTFT p50",
        "L2>L1 MB, GB/s",
        "L1>L2",
        "L3>L2",
        "L2>L3",
    )
    console.print(grid(f"{done[0].figures['requests']} requests", header, rows))
    turns = by_turn(done[-1].rows)
    if 1 < len(turns) <= _TURNS_MAX:
        console.print(_turn_table(turns, f"By turn, {done[-1].name}"))
    for each in done:
        if failed := failed_words(each.rows):
            console.print(f"{each.name}: {failed}", style="bold red", highlight=False)
    if equal is not None:
        words = "every tier set gave the same answers" if equal else "the answers DIFFER"
        console.print(words, style="" if equal else "bold red", highlight=False)

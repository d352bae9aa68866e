"""Verdicts for people: a table in the terminal.

Must not know: how verdicts came about. Called by: the command line.
"""

from __future__ import annotations

from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from refimpl.conformance.kit import for_json, name_of
from refimpl.conformance.subject import Subject
from refimpl.conformance.verdict import Verdict

_STYLES: Final = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def show_verdicts(console: Console, subject: Subject, verdicts: list[Verdict]) -> None:
    """A line a rule, and the sum."""
    table = Table(title=escape(name_of(subject)), box=SIMPLE_HEAD, title_justify="left")
    table.add_column("rule", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("why", overflow="fold")
    for verdict in verdicts:
        style = _STYLES[verdict.outcome]
        table.add_row(
            verdict.rule.replace("_", " "),
            f"[{style}]{verdict.outcome}[/{style}]",
            escape(verdict.reason),
        )
    console.print(table)
    sums = for_json(subject, verdicts)
    console.print(
        f"{sums['passed']} passed, {sums['failed']} failed, {sums['skipped']} skipped",
        highlight=False,
    )

"""Verdicts for people and for programs: a table in the terminal, or one JSON object.

Must not know: what the rules do. Called by: the command line.
"""

from __future__ import annotations

import json
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from refimpl.config import ConfigError
from refimpl.conformance.kit import RULES, certify, for_json, name_of
from refimpl.conformance.subject import Subject, subject_of
from refimpl.conformance.verdict import Verdict
from refimpl.run.show import progress_bar, terminal
from refimpl.storage.backend import StorageError

_STYLES: Final = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def conform(
    spec: str, extra: str | None, lifetime: str | None, *, seconds: float, as_json: bool
) -> bool:
    """Certify a backend and print the verdicts; whether none failed. A rule has ``seconds``.

    Raises ConfigError for input that can't work, a store that can't be reached included.
    """
    try:
        subject = subject_of(spec, extra, lifetime)
        with progress_bar(len(RULES)) as progress:
            verdicts = certify(subject, progress, seconds)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    if as_json:
        print(json.dumps(for_json(subject, verdicts), sort_keys=True))
    else:
        show_verdicts(terminal(), subject, verdicts)
    return all(verdict.outcome != "failed" for verdict in verdicts)


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

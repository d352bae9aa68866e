"""What the golden gate found, for people and as JSON.

Must not know: how cases run. Called by: the command line, golden_report.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from refimpl.run.golden import Finding
from refimpl.run.golden_change import Change, Figure
from refimpl.run.show import grid

_DIGEST_SHOWN: Final = 12  # characters of a digest; enough to see that it differs


def show_findings(console: Console, findings: list[Finding]) -> None:
    """One block for each finding that says more than ``equal``, then a line that sums up."""
    for finding in findings:
        if not finding.is_failure and not finding.changes and not finding.problems:
            continue
        console.print(f"{finding.case}: {finding.verdict}", style="bold", highlight=False)
        for problem in finding.problems:
            console.print(f"  {problem}", highlight=False, markup=False)
        if finding.changes:
            console.print(grid("", *figure_table(finding.changes)))
    console.print(summary(findings), highlight=False)


def summary(findings: list[Finding]) -> str:
    """``24 cases: 23 equal, 1 worse``."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.verdict] = counts.get(finding.verdict, 0) + 1
    parts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    return f"{len(findings)} case{'' if len(findings) == 1 else 's'}" + (
        f": {parts}" if parts else ""
    )


def for_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings as one JSON object; what was measured is left out."""
    return {
        "passed": not any(finding.is_failure for finding in findings),
        "cases": {
            finding.case: {
                "verdict": finding.verdict,
                "problems": finding.problems,
                "changes": [
                    asdict(change) | {"change": change.change} for change in finding.changes
                ],
            }
            for finding in findings
        },
    }


def figure_table(changes: list[Change]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Header and rows; with the limits where there are any."""
    has_limits = any(change.limit is not None for change in changes)
    header = ("figure", "old", "new", "limit", "change", "verdict")
    rows = [
        [
            change.path,
            *(_shown(figure) for figure in (change.old, change.new, change.limit)),
            change.change,
            change.verdict,
        ]
        for change in changes
    ]
    if has_limits:
        return header, rows
    return header[:3] + header[4:], [row[:3] + row[4:] for row in rows]


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if isinstance(figure, str):
        return figure[:_DIGEST_SHOWN]
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:,.4g}"

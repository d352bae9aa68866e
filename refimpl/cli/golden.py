"""``refimpl golden``. Must not know: how figures are compared. Called by: __main__."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from refimpl.cli.flags import LOOK, AsJson, GoldenDir

golden = typer.Typer(help="Golden cases: hit rates and TTFT, compared exactly.", **LOOK)
Cases = Annotated[list[str] | None, typer.Argument(help="names of cases; default: all")]


@golden.command("check")
def golden_check(
    cases: Cases = None, golden_dir: GoldenDir = None, as_json: AsJson = False
) -> None:
    """Run the cases and compare exactly. Any difference fails, an improvement as well."""
    from refimpl.run.golden import check, golden_folder

    findings = check(golden_folder(golden_dir), cases or ())
    _report(findings, as_json)
    if any(finding.is_failure for finding in findings):
        raise typer.Exit(1)


@golden.command("update")
def golden_update(
    cases: Cases = None, golden_dir: GoldenDir = None, as_json: AsJson = False
) -> None:
    """Write down what the cases give now, and show what that changes."""
    from refimpl.run.golden import golden_folder, update
    from refimpl.run.tier_sets import rewrite_readme

    folder = golden_folder(golden_dir)
    findings = update(folder, cases or ())
    _report(findings, as_json)
    if rewrite_readme(folder):
        print("the table in README.md is new as well", file=sys.stderr)
    if any(finding.document is None for finding in findings):
        raise typer.Exit(1)


@golden.command("diff")
def golden_diff(
    revisions: Annotated[
        str, typer.Argument(metavar="BASE[..HEAD]", help="git revisions; BASE alone: against now")
    ],
    golden_dir: GoldenDir = None,
    as_json: AsJson = False,
) -> None:
    """Show how the written figures of two revisions differ. Runs nothing."""
    from refimpl.run.golden import golden_folder
    from refimpl.run.golden_history import diff

    findings = diff(golden_folder(golden_dir), revisions)
    if findings or as_json:
        _report(findings, as_json)
    else:
        print("no case differs")


@golden.command("table")
def golden_table(golden_dir: GoldenDir = None) -> None:
    """Print the table of the multi-turn cases, as the README has it."""
    from refimpl.run.golden import golden_folder
    from refimpl.run.tier_sets import markdown

    print(markdown(golden_folder(golden_dir)), end="")


def _report(findings: list[Any], as_json: bool) -> None:
    from refimpl.run.golden_show import for_json, show_findings
    from refimpl.run.show import terminal

    if as_json:
        print(json.dumps(for_json(findings), sort_keys=True))
    else:
        show_findings(terminal(), findings)

"""``refimpl golden``. Must not know: how figures are compared. Called by: __main__."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.cli.flags import LOOK, AsJson, GoldenDir
from refimpl.cli.run import Device
from refimpl.config import ConfigError

golden = typer.Typer(help="Golden cases: hit rates and TTFT that may not get worse.", **LOOK)
LIVE = "Live"
Cases = Annotated[list[str] | None, typer.Argument(help="names of cases; default: all")]
Live = Annotated[
    bool,
    typer.Option(
        "--live", help="the cases that a real model serves on the wall clock", rich_help_panel=LIVE
    ),
]
LiveModel = Annotated[
    str | None,
    typer.Option("--model-path", help="serve with this model instead", rich_help_panel=LIVE),
]
Results = Annotated[
    list[Path] | None,
    typer.Option(
        "--results",
        help="what a load generator measured, as parquet, under the one name given; may be repeated",
        rich_help_panel=LIVE,
    ),
]
References = Annotated[
    list[Path] | None,
    typer.Option(
        "--reference",
        help="and what it measured of the reference, one for each --results",
        rich_help_panel=LIVE,
    ),
]
ReportJson = Annotated[
    Path | None, typer.Option(help="write the verdicts as JSON", rich_help_panel="Output")
]
Junit = Annotated[
    Path | None, typer.Option(help="write the verdicts as JUnit XML", rich_help_panel="Output")
]
Html = Annotated[
    Path | None, typer.Option(help="write one page with plots", rich_help_panel="Output")
]


@golden.command("check")
def golden_check(
    cases: Cases = None,
    live: Live = False,
    model_path: LiveModel = None,
    device: Device = "auto",
    results: Results = None,
    reference: References = None,
    golden_dir: GoldenDir = None,
    as_json: AsJson = False,
    report_json: ReportJson = None,
    junit: Junit = None,
    html: Html = None,
) -> None:
    """Run the cases and compare: exactly, or with --live on the wall clock.

    Of exact cases any difference fails, an improvement as well; of live ones only what is worse.
    """
    from refimpl.run.golden import check, golden_folder

    files = _report_files(report_json, junit, html)
    folder = golden_folder(golden_dir)
    if live:
        from refimpl.run.golden_live import check_live

        measured = _Live(folder, cases or [], results or [], reference or [], model_path, device)
        findings = measured.run(check_live, is_baseline=False)
    else:
        _refuse_live_flags(results or reference or model_path or device != "auto")
        findings = check(folder, cases or (), with_pictures=html is not None)
    _report(findings, as_json)
    if files is not None:
        files.write(findings)
    if any(finding.is_failure for finding in findings):
        raise typer.Exit(1)


@golden.command("record")
def golden_record(
    cases: Cases = None,
    live: Live = False,
    model_path: LiveModel = None,
    device: Device = "auto",
    results: Results = None,
    reference: References = None,
    golden_dir: GoldenDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure live cases, keep that for machines of this class, and show what it changes."""
    if not live:
        raise ConfigError(
            "record keeps what is measured live: use --live; `refimpl golden update` writes down"
            " exact cases"
        )
    from refimpl.run.golden import golden_folder
    from refimpl.run.golden_live import record_live

    folder = golden_folder(golden_dir)
    measured = _Live(folder, cases or [], results or [], reference or [], model_path, device)
    findings = measured.run(record_live, is_baseline=True)
    _report(findings, as_json)
    if any(finding.is_failure for finding in findings):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Live:
    """What was asked of the live gate."""

    folder: Path
    names: list[str]
    results: list[Path]
    references: list[Path]
    model_path: str | None
    device: str

    def run(self, gate: Callable[[Path, list[Any]], list[Any]], *, is_baseline: bool) -> list[Any]:
        if self.results or self.references:
            return gate(self.folder, [self._files()])
        from refimpl.run.show import progress_bar

        subjects = self._served()
        total = sum(each.repetitions(is_baseline=is_baseline) for each in subjects)
        with progress_bar(total) as progress:
            for subject in subjects:
                subject.progress = progress
            return gate(self.folder, subjects)

    def _files(self) -> Any:
        from refimpl.run.live_case import live_case_names
        from refimpl.run.live_files import ResultFiles

        if len(self.names) != 1:
            raise ConfigError("--results needs one name of your choice for what was measured")
        if self.model_path is not None:
            raise ConfigError("--model-path serves a case, and --results were measured elsewhere")
        (name,) = self.names
        if name in live_case_names(self.folder):
            raise ConfigError(f"{name} is a case that is served here: give --results another name")
        return ResultFiles(name, self.results, self.references)

    def _served(self) -> list[Any]:
        from refimpl.run.golden_live import chosen_live
        from refimpl.run.live_case import read_live_case

        cases = [read_live_case(self.folder, name) for name in chosen_live(self.folder, self.names)]
        try:
            from refimpl.run.live_served import ServedCase
        except ImportError as error:
            raise ConfigError(
                f"--live needs {error.name}: pip install -e '.[torch,kernels]'"
            ) from None
        return [ServedCase(case, self.model_path, self.device) for case in cases]


def _report_files(*paths: Path | None) -> Any:
    """Reports that can be written; None where none is asked for."""
    if not any(paths):
        return None
    from refimpl.run.golden_report import ReportFiles

    return ReportFiles(*paths)


def _refuse_live_flags(is_given: object) -> None:
    if is_given:
        raise ConfigError("--results, --reference, --model-path and --device need --live")


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

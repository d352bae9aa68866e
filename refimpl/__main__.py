"""The command line: ``refimpl run | simulate | golden | storage …``, the same as ``python -m refimpl``.

What a command needs is imported when it runs, so that each starts as fast as it can: none of the
light ones loads torch or numba. Exit codes: 0 done, 1 a check failed, 2 the input can't work.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from refimpl.config import ConfigError
from refimpl.run.options import GROUPS, MULTI_TURN, Options

_LOOK: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}
app = typer.Typer(**_LOOK)
golden = typer.Typer(help="Golden cases: hit rates and TTFT, compared exactly.", **_LOOK)
app.add_typer(golden, name="golden")
storage = typer.Typer(help="Servers that stores need, on loopback.", **_LOOK)
app.add_typer(storage, name="storage")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"hicache-refimpl {version_of('hicache-refimpl')}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="say which")
    ] = False,
) -> None:
    """Reference implementation of hierarchical KV caching: HiCache with its three tiers."""
    del version  # its callback has done all there is to do


def _with_options(
    command: Callable[..., None], defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[..., None]:
    """Give a command the flags of ``Options`` in front of its own; it gets them as ``options``.

    ``defaults`` are the command's own, by field.
    """
    types, panel = get_type_hints(Options), "Load"
    own = [
        parameter.replace(annotation=eval(parameter.annotation, globals()))
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "options"
    ]
    shared = []
    for entry in fields(Options):
        panel = GROUPS.get(entry.name, panel)
        names = [f"--{entry.name.replace('_', '-')}"]
        if entry.metadata["alias"]:
            names.append(entry.metadata["alias"])
        option = typer.Option(*names, help=entry.metadata["help"], rich_help_panel=panel)
        shared.append(
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(entry.name, entry.default),
                annotation=Annotated[types[entry.name], option],
            )
        )

    def call(**flags: Any) -> None:
        known = {entry.name: flags.pop(entry.name) for entry in fields(Options)}
        command(options=Options(**known), **flags)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [*shared, *(parameter.replace(kind=keyword) for parameter in own)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


AsJson = Annotated[
    bool,
    typer.Option("--json", help="print one JSON object and nothing else", rich_help_panel="Output"),
]
Output = Annotated[
    Path | None,
    typer.Option(
        help="per-request results, by suffix .parquet, .csv or .jsonl", rich_help_panel="Output"
    ),
]
Explain = Annotated[
    int | None,
    typer.Option(
        help="say why request RID, counted from 1, hit or missed each tier",
        rich_help_panel="Output",
    ),
]


GoldenDir = Annotated[
    Path | None, typer.Option(help="folder of the cases; default: ./golden, or the project's own")
]
Cases = Annotated[list[str] | None, typer.Argument(help="names of cases; default: all")]


ModelPath = Annotated[
    str | None,
    typer.Option(
        help="serve with a real model on the wall clock: tiny-gqa, tiny-mla, smollm2, a .gguf file"
        " or a Hugging Face folder",
        rich_help_panel="Model",
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="with a model: serve without cache, with L1, L2 and L3, and compare the answers",
        rich_help_panel="Model",
    ),
]
ArithmeticName = Annotated[
    str, typer.Option(help="reference (batch-invariant) or fast", rich_help_panel="Model")
]


@app.command()
@partial(_with_options, defaults=MULTI_TURN)
def run(
    options: Options,
    model_path: ModelPath = None,
    arithmetic: ArithmeticName = "reference",
    compare: Compare = False,
    as_json: AsJson = False,
) -> None:
    """Show what each tier is worth: the same chats with no cache, L1, L2 and L3."""
    if model_path is not None:
        _run_real(options, model_path, arithmetic, compare, as_json)
        return
    from refimpl.run.show import show_tier_sets, terminal
    from refimpl.run.tier_sets import for_json, notices, run_tier_sets

    done = run_tier_sets(options)
    if as_json:
        print(json.dumps(for_json(done), sort_keys=True))
        return
    _tell(notices(done))
    print(
        f"Simulated on a virtual clock, {options.model} on {options.hardware}.\n"
        "No model was loaded and no byte was moved."
    )
    show_tier_sets(terminal(), done)


def _run_real(
    options: Options, model_path: str, arithmetic: str, compare: bool, as_json: bool
) -> None:
    """Exit code 1 when two tier sets answer differently."""
    try:
        from refimpl.run.real import RealRun, answers_equal, for_json
    except ImportError as error:
        raise ConfigError(
            f"--model-path needs {error.name}: pip install -e '.[torch,kernels]'"
        ) from None
    from refimpl.run.show import progress_bar, show_served, terminal

    plan = RealRun(options, model_path, arithmetic, compare=compare)
    with progress_bar(plan.requests) as progress:
        done = plan.run(progress)
    if as_json:
        print(json.dumps(for_json(done), sort_keys=True))
    else:
        print(f"Served by {model_path} on the wall clock, arithmetic {arithmetic}.")
        show_served(terminal(), done, equal=answers_equal(done) if compare else None)
    if not answers_equal(done):
        raise typer.Exit(1)


@app.command()
@_with_options
def simulate(
    options: Options,
    as_json: AsJson = False,
    output: Output = None,
    explain: Explain = None,
) -> None:
    """Replay a trace or a scenario through the three-tier cache on a virtual clock."""
    from refimpl.run.explain import Explanation
    from refimpl.run.report import for_output, integers
    from refimpl.run.setup import Simulation
    from refimpl.run.show import progress_bar, show_report, terminal

    if output is not None:
        from refimpl.run.table import check_output  # brings polars, which takes its time to load

        check_output(output)
    simulation = Simulation(options)
    explanation = None if explain is None else Explanation(simulation, explain)
    with progress_bar(len(simulation.workload.requests)) as progress:
        outcome = simulation.run(progress, explanation)
    _tell(simulation.notices)
    rows = list(outcome.record.rows.values())
    if output is not None:
        from refimpl.run.table import write_rows

        write_rows(rows, output)
    figures = for_output(integers(outcome.record), outcome.wall_ns)
    if as_json:
        said: dict[str, Any] = {} if explanation is None else {"explain": explanation.lines()}
        said["effective"] = simulation.effective()
        said["notices"] = simulation.notices
        print(json.dumps(figures | said, sort_keys=True))
        return
    console = terminal()
    show_report(console, figures, rows)
    if explanation is not None:
        console.print("\n".join(explanation.lines()), highlight=False)
    speed = figures["requests_per_wall_second"]
    console.print(
        f"{figures['virtual_seconds']:,.1f} virtual seconds in {figures['wall_seconds']:.2f} s,"
        f" {speed:,.0f} requests/s; decisions {figures['decisions_sha256'][:16]}",
        highlight=False,
    )


@app.command()
def workloads() -> None:
    """List the scenario families with their parameters."""
    from refimpl.workload.scenario import scenario_help

    print(scenario_help(), end="")


def _bench_bytes(name: str) -> dict[str, Any]:
    try:
        from refimpl.run.bench_bytes import bench_copy, bench_ttft
        from refimpl.run.bench_storage import bench_storage
    except ImportError as error:
        raise ConfigError(
            f"bench {name} needs {error.name}: pip install -e '.[torch,kernels]'"
        ) from None
    benches: dict[str, Callable[[], dict[str, Any]]]
    benches = {"copy": bench_copy, "ttft": bench_ttft, "storage": bench_storage}
    return benches[name]()


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="sim, tree, copy, ttft or storage")],
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace to replay in sim")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure simulator, tree, copies, a model or stores beside a floor taken in the same run."""
    from refimpl.run.bench import run_bench
    from refimpl.run.show import figure_rows, grid, terminal

    moves_bytes = name in ("copy", "ttft", "storage")
    figures = _bench_bytes(name) if moves_bytes else run_bench(name, trace)
    if as_json:
        print(json.dumps(figures, sort_keys=True))
    else:
        terminal().print(grid(f"bench {name}", ("figure", "value"), figure_rows(figures)))


@storage.command("up")
def storage_up(
    server: Annotated[str, typer.Argument(help="mooncake")],
    log: Annotated[Path | None, typer.Option(help="file for the server's output")] = None,
    as_json: AsJson = False,
) -> None:
    """Start a real server on free ports, say how to use it, and stop it at Ctrl-C or SIGTERM."""
    from refimpl.storage.foreground import serve

    serve(server, log, as_json=as_json)


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


def _tell(notices: list[str]) -> None:
    for notice in notices:
        print(f"notice: {notice}", file=sys.stderr)


def main() -> None:
    """Entry point. Impossible input gets one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except ConfigError as error:
        _fail(str(error))
    except typer.exceptions.TyperException as error:
        _fail(error.format_message())
    except (typer.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader is gone; Python would complain about it at exit
        sys.exit(1)
    except OSError as error:
        _fail(str(error))  # most often: no space left for what was printed
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    if message:  # none when a command group was called alone, which prints its help
        print(f"refimpl: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()

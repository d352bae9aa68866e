"""The command line: ``refimpl run | simulate | workloads``, the same as ``python -m refimpl``.

What a command needs is imported when it runs, so that each starts as fast as it can: none of the
light ones loads torch or numba. Exit codes: 0 done, 1 a check failed, 2 the input can't work.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from refimpl.config import ConfigError
from refimpl.run.options import GROUPS, Options

app = typer.Typer(
    help="Reference implementation of hierarchical KV caching: HiCache with its three tiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of ``Options`` in front of its own; it gets them as ``options``."""
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
                default=entry.default,
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
    from refimpl.run.show import show_report
    from refimpl.run.table import check_output, write_rows

    if output is not None:
        check_output(output)
    simulation = Simulation(options)
    explanation = None if explain is None else Explanation(simulation, explain)
    with _progress(len(simulation.workload.requests)) as progress:
        outcome = simulation.run(progress, explanation)
    for notice in simulation.notices:
        print(f"notice: {notice}", file=sys.stderr)
    rows = list(outcome.record.rows.values())
    if output is not None:
        write_rows(rows, output)
    figures = for_output(integers(outcome.record), outcome.wall_ns)
    if as_json:
        said = {} if explanation is None else {"explain": explanation.lines()}
        print(json.dumps(figures | {"notices": simulation.notices} | said, sort_keys=True))
        return
    console = _console()
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


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="sim or tree")],
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace to replay in sim")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the simulator or the tree beside a floor taken in the same run."""
    from refimpl.run.bench import run_bench
    from refimpl.run.show import figure_rows, grid

    figures = run_bench(name, trace)
    if as_json:
        print(json.dumps(figures, sort_keys=True))
    else:
        _console().print(grid(f"bench {name}", ("figure", "value"), figure_rows(figures)))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.update(task, advance=count)


def _console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 110)


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
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    print(f"refimpl: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()

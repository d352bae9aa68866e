"""``refimpl run``, ``simulate`` and ``workloads``. Must not know: how anything runs. Called by: __main__."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.cli.flags import AsJson, RankTimeout, RankTransport, given_in, tell, with_options
from refimpl.config import ConfigError
from refimpl.run.options import MULTI_TURN, Options

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
Dtype = Annotated[
    str,
    typer.Option(
        help="of weights and KV: auto (the file's own), bfloat16, float16 or float32",
        rich_help_panel="Model",
    ),
]
Device = Annotated[
    str,
    typer.Option(help="auto (a GPU if there is one), cpu or cuda", rich_help_panel="Model"),
]

_OF_A_MODEL = {"arithmetic", "compare", "device", "dtype", "rank_timeout", "rank_transport"}


@partial(with_options, defaults=MULTI_TURN)
def run(
    context: typer.Context,
    options: Options,
    model_path: ModelPath = None,
    arithmetic: ArithmeticName = "reference",
    dtype: Dtype = "auto",
    device: Device = "auto",
    compare: Compare = False,
    rank_transport: RankTransport = "thread",
    rank_timeout: RankTimeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show what each tier is worth: the same chats with no cache, L1, L2 and L3."""
    if model_path is not None:
        how = {"arithmetic": arithmetic, "dtype": dtype, "device": device}
        ranks = (rank_transport, rank_timeout)
        given = given_in(context)
        plan = _plan(options, {"path": model_path} | how, ranks, compare=compare, given=given)
        _run_real(plan, compare=compare, as_json=as_json)
        return
    for name in sorted(given_in(context) & _OF_A_MODEL):
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} needs --model-path: without a model nothing is computed")
    from refimpl.run.show import show_tier_sets, terminal
    from refimpl.run.tier_sets import for_json, notices, run_tier_sets

    done = run_tier_sets(options)
    if as_json:
        print(json.dumps(for_json(done), sort_keys=True))
        return
    tell(notices(done))
    print(
        f"Simulated on a virtual clock, {options.model} on {options.hardware}.\n"
        "No model was loaded and no byte was moved."
    )
    show_tier_sets(terminal(), done)


def _plan(
    options: Options,
    model: dict[str, str],
    ranks: tuple[str, float],
    *,
    compare: bool,
    given: set[str],
) -> Any:
    try:
        from refimpl.run.model_choice import ModelChoice
        from refimpl.run.rank_setup import RankChoice
        from refimpl.run.real import RealRun
    except ImportError as error:
        raise ConfigError(
            f"--model-path needs {error.name}: pip install -e '.[torch,kernels]'"
        ) from None
    choice = ModelChoice(**model)
    return RealRun(options, choice, compare=compare, given=given, ranks=RankChoice(*ranks))


def _run_real(plan: Any, *, compare: bool, as_json: bool) -> None:
    """Exit code 1 when two tier sets answer differently, or a request failed."""
    from refimpl.run.real import answers_equal, for_json
    from refimpl.run.show import progress_bar, show_served, terminal

    tell(plan.notices)
    with progress_bar(plan.requests) as progress:
        done = plan.run(progress)
    if as_json:
        said = {"effective": plan.effective, "notices": plan.notices}
        print(json.dumps(for_json(done) | said, sort_keys=True))
    else:
        pages = plan.effective
        print(
            f"Served by {plan.served_by} on the wall clock: pages of {plan.page_size} tokens,"
            f" {pages['l1_pages']} in L1, {pages['l2_pages']} in L2."
        )
        show_served(terminal(), done, equal=answers_equal(done) if compare else None)
    failed = any(row.finish.startswith("error") for each in done for row in each.rows)
    if failed or not answers_equal(done):
        raise typer.Exit(1)


@with_options
def simulate(
    options: Options,
    as_json: AsJson = False,
    output: Output = None,
    explain: Explain = None,
) -> None:
    """Replay a trace or a scenario through the three-tier cache on a virtual clock."""
    from refimpl.run.explain import Explanation
    from refimpl.run.report import by_worker, for_output, integers
    from refimpl.run.setup import Simulation
    from refimpl.run.show import progress_bar, show_report, show_workers, terminal

    if output is not None:
        from refimpl.run.table import check_output  # brings polars, which takes its time to load

        check_output(output)
    simulation = Simulation(options)
    explanation = None if explain is None else Explanation(simulation, explain)
    with progress_bar(len(simulation.workload.requests)) as progress:
        outcome = simulation.run(progress, explanation)
    tell(simulation.notices)
    rows = list(outcome.record.rows.values())
    if output is not None:
        from refimpl.run.table import write_rows

        write_rows(rows, output)
    figures = for_output(integers(outcome.record), outcome.wall_ns)
    workers = by_worker(rows, options.dp_size)
    if as_json:
        said: dict[str, Any] = {} if explanation is None else {"explain": explanation.lines()}
        said["workers"] = workers
        said["effective"] = simulation.effective()
        said["notices"] = simulation.notices
        print(json.dumps(figures | said, sort_keys=True))
        return
    console = terminal()
    show_report(console, figures, rows)
    show_workers(console, workers, options.dp_size)
    if explanation is not None:
        console.print("\n".join(explanation.lines()), highlight=False)
    speed = figures["requests_per_wall_second"]
    console.print(
        f"{figures['virtual_seconds']:,.1f} virtual seconds in {figures['wall_seconds']:.2f} s,"
        f" {speed:,.0f} requests/s; decisions {figures['decisions_sha256'][:16]}",
        highlight=False,
    )


def workloads() -> None:
    """List the scenario families with their parameters."""
    from refimpl.workload.scenario import scenario_help

    print(scenario_help(), end="")

"""``refimpl bench``. Must not know: how anything is measured. Called by: __main__."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.cli.flags import AsJson, GoldenDir
from refimpl.config import ConfigError


def _bench_bytes(name: str) -> dict[str, Any]:
    try:
        from refimpl.run.bench_backlog import bench_backlog
        from refimpl.run.bench_bytes import bench_copy, bench_ttft
        from refimpl.run.bench_storage import bench_storage
        from refimpl.run.bench_unique import bench_unique
    except ImportError as error:
        raise ConfigError(
            f"bench {name} needs {error.name}: pip install -e '.[torch,kernels]'"
        ) from None
    benches: dict[str, Callable[[], dict[str, Any]]]
    benches = {
        "copy": bench_copy,
        "ttft": bench_ttft,
        "unique": bench_unique,
        "storage": bench_storage,
        "backlog": bench_backlog,
    }
    return benches[name]()


def _bench_serve() -> dict[str, Any]:
    try:
        from refimpl.serve.bench import bench_serve
    except ImportError as error:
        raise ConfigError(f"bench serve needs {error.name}: pip install -e '.[serve]'") from None
    return bench_serve()


def bench(
    name: Annotated[
        str, typer.Argument(help="sim, tree, copy, ttft, unique, storage, backlog or serve")
    ],
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace to replay in sim")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="write the ratios into golden/wall_clock.json")
    ] = False,
    golden_dir: GoldenDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure one part beside a floor taken in the same run: simulator, tree, copies, a model, prompts that
    never repeat, stores, what waits for L3, or the server.

    Ratios that were kept on such a machine are printed beside those of this run.
    """
    from refimpl.run import baselines
    from refimpl.run.bench import OF_BYTES, run_bench
    from refimpl.run.golden import golden_folder
    from refimpl.run.show import figure_rows, grid, terminal

    if name == "serve":
        figures = _bench_serve()
    else:
        figures = _bench_bytes(name) if name in OF_BYTES else run_bench(name, trace)
    if keep:
        print(baselines.keep(golden_folder(golden_dir), name, figures), file=sys.stderr)
    elif "ratios" in figures:
        figures = baselines.with_kept(golden_folder(golden_dir), name, figures)
    if as_json:
        print(json.dumps(figures, sort_keys=True))
    else:
        terminal().print(grid(f"bench {name}", ("figure", "value"), figure_rows(figures)))

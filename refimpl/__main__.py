"""The command line: ``refimpl run | simulate | golden | conform | storage …``, as ``python -m refimpl``.

What a command needs is imported when it runs, so that each starts as fast as it can: none of the
light ones loads torch or numba. Exit codes: 0 done, 1 a check failed, 2 it can't work as it was asked for.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from refimpl.cli.bench import bench
from refimpl.cli.flags import LOOK
from refimpl.cli.golden import golden
from refimpl.cli.run import run, simulate, workloads
from refimpl.cli.serve import serve
from refimpl.cli.storage import conform, storage
from refimpl.cli.upstream import LaunchCommand
from refimpl.cluster.ranks import RankError
from refimpl.config import ConfigError
from refimpl.storage.backend import StorageError

app = typer.Typer(**LOOK)
for command in (run, simulate, workloads, bench, conform):
    app.command()(command)
app.command(cls=LaunchCommand)(serve)
app.add_typer(golden, name="golden")
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


def main() -> None:
    """Entry point. Impossible input gets one line on stderr and exit code 2."""
    # torch keeps a pool of threads for each thread that computes, and idle ones spin: with two cores a
    # server then takes half as long again. It reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a storage class of the user's may lie in the current folder
    try:
        code = app(standalone_mode=False)
    except (ConfigError, StorageError, RankError) as error:
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

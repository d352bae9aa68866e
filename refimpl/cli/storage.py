"""``refimpl conform`` and ``refimpl storage``. Must not know: any store. Called by: __main__."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from refimpl.cli.flags import LOOK, AsJson

storage = typer.Typer(help="Servers that stores need, on loopback.", **LOOK)


def conform(
    backend: Annotated[
        str,
        typer.Argument(metavar="NAME|MODULE:CLASS", help="a storage backend, or your own class"),
    ],
    extra_config: Annotated[
        str | None,
        typer.Option(
            "--extra-config",
            "--hicache-storage-backend-extra-config",
            help="its keys, as JSON or @FILE (.json, .toml, .yaml)",
        ),
    ] = None,
    lifetime: Annotated[
        str | None,
        typer.Option(help="how long values live: object, process or store; default: what is known"),
    ] = None,
    limit: Annotated[
        float, typer.Option(min=0.1, help="seconds that a rule waits for an answer")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Certify a storage backend. Give it a folder or server of its own: clear is tried as well."""
    from refimpl.conformance.limit import is_something_left
    from refimpl.conformance.show import conform as conform_and_show

    try:
        is_good = conform_and_show(backend, extra_config, lifetime, seconds=limit, as_json=as_json)
        code = 0 if is_good else 1
    except KeyboardInterrupt:
        code = 130
    if is_something_left():  # threads of a store that hangs would keep the process, or abort it
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)


@storage.command("up")
def storage_up(
    server: Annotated[str, typer.Argument(help="mooncake")],
    log: Annotated[Path | None, typer.Option(help="file for the server's output")] = None,
    memory: Annotated[
        str, typer.Option(help="what is lent to the store: bytes, or a number with kb, mb, gb")
    ] = "1gb",
    as_json: AsJson = False,
) -> None:
    """Start a real server on free ports, say how to use it, and stop it at Ctrl-C or SIGTERM."""
    from refimpl.storage.foreground import serve

    serve(server, log, memory, as_json=as_json)

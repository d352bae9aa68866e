"""Flags that commands share. Must not know: what a command does. Called by: the commands."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, get_type_hints

import typer

from refimpl.run.options import GROUPS, Options

LOOK: Final[dict[str, Any]] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}
AsJson = Annotated[
    bool,
    typer.Option("--json", help="print one JSON object and nothing else", rich_help_panel="Output"),
]
GoldenDir = Annotated[
    Path | None, typer.Option(help="folder of the cases; default: ./golden, or the project's own")
]

RankTransport = Annotated[
    str,
    typer.Option(
        help="ranks of --tp-size as thread (one copy of the weights) or process (torch.distributed)",
        rich_help_panel="Model",
    ),
]
RankTimeout = Annotated[
    float,
    typer.Option(
        help="seconds after which a silent rank is taken for dead", rich_help_panel="Model"
    ),
]


def with_options(
    command: Callable[..., None],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    hidden: Collection[str] = (),
) -> Callable[..., None]:
    """Give a command the flags of ``Options`` in front of its own; it gets them as ``options``.

    ``defaults`` are the command's own, by field; ``hidden`` are fields that have no meaning for it, which
    it refuses itself.
    """
    types, panel = get_type_hints(Options), "Load"
    own = [
        parameter.replace(annotation=eval(parameter.annotation, command.__globals__))
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "options"
    ]
    shared = []
    for entry in fields(Options):
        panel = GROUPS.get(entry.name, panel)
        names = [f"--{entry.name.replace('_', '-')}"]
        if entry.metadata["alias"]:
            names.append(entry.metadata["alias"])
        option = typer.Option(
            *names,
            help=entry.metadata["help"],
            rich_help_panel=panel,
            hidden=entry.name in hidden,
        )
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


def given_in(context: typer.Context) -> set[str]:
    """The options that somebody typed, by field, whatever they typed."""
    return {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }


def tell(notices: list[str]) -> None:
    """Say on stderr what was changed or left out on the way."""
    for notice in notices:
        print(f"notice: {notice}", file=sys.stderr)

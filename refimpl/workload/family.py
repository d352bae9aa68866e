"""What a scenario family is: a frozen dataclass whose fields are its parameters, set from text.

The field's metadata says how its value is written, what it may be and what it means, so that
parser, error messages and help read one table.
Must not know: any single family, traces. Called by: the families, scenario.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Final, TypeVar

from refimpl.config import ConfigError, require
from refimpl.units import PER_MILLION, scaled_decimal
from refimpl.workload.draws import Draws
from refimpl.workload.request import RequestSpec

COUNT_MAX: Final = 1 << 31
ORDERS: Final = ("random", "tile", "grouped")
_INTEGER: Final = re.compile(r"-?[0-9]{1,30}")
_RATE_SCALE: Final = PER_MILLION  # a rate is kept as events in a million seconds
_RATE_FINEST: Final = 10**30
_SHOWN_MAX: Final = 40

F = TypeVar("F", bound="Family")


def count(default: int, meaning: str, least: int = 1, most: int = COUNT_MAX) -> Any:
    """Field of a whole number from ``least`` to ``most``."""
    metadata = {"kind": "count", "meaning": meaning, "least": least, "most": most}
    return field(default=default, metadata=metadata)


def rate(default: int, meaning: str) -> Any:
    """Field of a decimal number a second, kept as an integer in a million seconds."""
    return field(default=default * _RATE_SCALE, metadata={"kind": "rate", "meaning": meaning})


def flag(*, default: bool, meaning: str) -> Any:
    """Field of ``true`` or ``false``."""
    return field(default=default, metadata={"kind": "flag", "meaning": meaning})


def choice(choices: tuple[str, ...], meaning: str) -> Any:
    """Field of one of ``choices``, the first of which is the default."""
    metadata = {"kind": "choice", "meaning": meaning, "choices": choices}
    return field(default=choices[0], metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(ABC):
    """One scenario: parameters, how large it gets, and how it is drawn.

    A subclass sets ``name`` and ``grows_with``, the parameters to lower when it is too large; its
    docstring is the summary in the help.
    """

    name: ClassVar[str]
    grows_with: ClassVar[tuple[str, ...]]

    output_length: int = count(64, "tokens a request produces, scripted")
    max_parallel: int = count(0, "requests in flight at most; 0: no limit", least=0)
    vocab: int = count(128_000, "token ids are below this", least=2)

    @abstractmethod
    def request_count(self) -> int:
        """Requests it sends."""

    @abstractmethod
    def token_count(self) -> int:
        """Tokens of all prompts and outputs together, at most."""

    @abstractmethod
    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """The requests, rids counting from 1. Raises ConfigError when parameters don't fit."""


def family_from(cls: type[F], settings: Mapping[str, str]) -> F:
    """``cls`` with the parameters that ``settings`` spells out.

    Raises ConfigError for a parameter the family lacks or a value that is not of its kind.
    """
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(cls)}
    values: dict[str, int | str] = {}
    for name, text in settings.items():
        require(
            name in known,
            f"{cls.name}: parameter {shown(name)} is unknown; choose from {', '.join(known)}",
        )
        values[name] = _parsed(known[name], text, f"{cls.name}: {name}={shown(text)}")
    return cls(**values)  # type: ignore[arg-type]  # kinds are those of the metadata


def shown(text: str) -> str:
    """``text`` as an error quotes it: on one line and not without end."""
    return repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "...")


def parameter_text(entry: Field[Any]) -> str:
    """``name=default`` as it would be written in a scenario string."""
    default: Any = entry.default
    if entry.metadata["kind"] == "rate":
        default //= _RATE_SCALE  # defaults are whole
    if entry.metadata["kind"] == "flag":
        default = "true" if default else "false"
    return f"{entry.name}={default}"


def _parsed(entry: Field[Any], text: str, label: str) -> int | str:
    """The value of one parameter; ``label`` opens the error."""
    metadata = entry.metadata
    match metadata["kind"]:
        case "count":
            return _parsed_count(text, metadata["least"], metadata["most"], label)
        case "rate":
            return _parsed_rate(text, label)
        case "flag":
            require(text in ("true", "false"), f"{label} is neither true nor false")
            return text == "true"
        case _:
            choices = metadata["choices"]
            require(text in choices, f"{label} is unknown; choose one of {', '.join(choices)}")
            return text


def _parsed_count(text: str, least: int, most: int, label: str) -> int:
    legal = f"a whole number from {least} to {most}"
    require(_INTEGER.fullmatch(text) is not None, f"{label} is not {legal}")
    value = int(text)
    require(least <= value <= most, f"{label} is not {legal}")
    return value


def _parsed_rate(text: str, label: str) -> int:
    legal = f"0 or a decimal number from 0.000001 to {COUNT_MAX} a second"
    try:
        finest = scaled_decimal(text, _RATE_FINEST)
    except ValueError:
        raise ConfigError(f"{label} is not {legal}") from None
    value = finest * _RATE_SCALE // _RATE_FINEST
    rounds_to_zero = finest != 0 and value == 0
    require(0 <= value <= COUNT_MAX * _RATE_SCALE and not rounds_to_zero, f"{label} is not {legal}")
    return value

"""Scenario strings as workloads: ``multi_turn:clients=80,rounds=10,rate=16``.

A family's name, then parameters; what is not named keeps its default.
Must not know: caches, engines, files. Called by: run, perf, the command line.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from refimpl.config import require
from refimpl.workload.conversations import Agent, MultiTurn
from refimpl.workload.documents import LongDocument, Rag, SharedPrefix
from refimpl.workload.draws import Draws
from refimpl.workload.extremes import AllEqual, AllUnique
from refimpl.workload.family import Family, family_from, parameter_text, shown
from refimpl.workload.request import Workload

REQUESTS_MAX: Final = 10_000_000
TOKENS_MAX: Final = 1 << 28  # 1 GB of them, and several times that while a long prompt is drawn
FAMILIES: Final[dict[str, type[Family]]] = {
    cls.name: cls
    for cls in (MultiTurn, SharedPrefix, LongDocument, Rag, Agent, AllUnique, AllEqual)
}


def parse_scenario(text: str, seed: int, page_size: int = 64) -> Workload:
    """The workload that ``text`` describes; equal text, seed and page size give an equal one.

    ``page_size`` is in tokens and matters where a family promises something of pages. Raises
    ConfigError, one line, for an unknown family or parameter, a value that is no number or out of
    its range, and for more than ``REQUESTS_MAX`` requests or ``TOKENS_MAX`` tokens.
    """
    name, _, parameters = text.strip().partition(":")
    require(
        name in FAMILIES,
        f"scenario {shown(name)} is unknown; choose one of {', '.join(FAMILIES)}",
    )
    require(page_size >= 1, f"page_size {page_size} must be at least 1 token")
    settings = _settings(name, parameters)
    family = family_from(FAMILIES[name], settings)
    _check_size(family)
    return Workload(
        name=":".join(filter(None, (name, ",".join(map("=".join, settings.items()))))),
        requests=family.build(Draws(seed, family.vocab), page_size),
        parallel_max=family.max_parallel or None,
    )


def scenario_help() -> str:
    """All families with their parameters, defaults and meanings, for a terminal."""
    lines = ["FAMILY[:PARAMETER=VALUE,...]"]
    for name, cls in FAMILIES.items():
        lines += ["", name, f"  {(cls.__doc__ or '').strip()}"]
        rows = [(parameter_text(entry), entry.metadata["meaning"]) for entry in fields(cls)]
        width = max(len(setting) for setting, _ in rows)
        lines += [f"    {setting:<{width}}  {meaning}" for setting, meaning in rows]
    return "\n".join(lines) + "\n"


def _settings(name: str, parameters: str) -> dict[str, str]:
    """``a=1,b=2`` as a dictionary; the order of the parameters does not matter."""
    settings: dict[str, str] = {}
    for part in parameters.split(",") if parameters.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        require(
            bool(key and equals and value),
            f"{name}: {shown(part.strip())} must be written PARAMETER=VALUE",
        )
        require(key not in settings, f"{name}: parameter {shown(key)} is given twice; keep one")
        settings[key] = value
    return settings


def _check_size(family: Family) -> None:
    """Refuse what would fill the memory before anything is drawn."""
    lower = ", ".join(family.grows_with)
    requests, tokens = family.request_count(), family.token_count()
    require(
        requests <= REQUESTS_MAX,
        f"{family.name}: {requests} requests are more than {REQUESTS_MAX}; lower one of {lower}",
    )
    require(
        tokens <= TOKENS_MAX,
        f"{family.name}: {tokens} tokens are more than {TOKENS_MAX};"
        f" lower one of {lower}, output_length",
    )

"""A golden case: a folder with ``case.toml``, what it says, and what running it gives.

A case is fully determined by its flags. Besides them it names the figures that have to be above
zero, so that a case about load-back can't go on passing when nothing is loaded back any more.
Must not know: what was expected before. Called by: golden, live_case.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias

from refimpl.config import ConfigError, require
from refimpl.run.golden_change import Figure, flatten
from refimpl.run.options import Options, options_from
from refimpl.run.record import Row
from refimpl.run.report import integers
from refimpl.run.setup import Simulation
from refimpl.workload.digest import workload_digest

Document: TypeAlias = dict[str, Any]

CASE_FILE: Final = "case.toml"
SCHEMA: Final = 1  # of expected.json; raise it when figures are renamed or mean something else
REQUESTS_MIN: Final = 200  # fewer, and a percentile or a hit rate is luck
_TABLES: Final = ("description", "flags", "expect")
_EXPECT: Final = ("above_zero", "equal_zero", "equal")
# Figures by reason: a reason that did not occur is not listed, and counts as 0.
_BY_REASON: Final = ("prefetch.revoked_by_reason.", "skipped_pages.", "finished.")


@dataclass(frozen=True, slots=True)
class Case:
    """What ``case.toml`` says."""

    name: str
    description: str
    options: Options
    above_zero: tuple[str, ...] = ()  # paths of figures
    equal: Mapping[str, int] = field(default_factory=dict)  # known without running anything


def read_case(folder: Path, name: str) -> Case:
    """The case ``name`` below ``folder``; raises ConfigError, one line, when it says nonsense."""
    where = f"{name}/{CASE_FILE}"
    said = read_toml(folder / name / CASE_FILE, where)
    require_known(where, said, _TABLES)
    expect = said.get("expect", {})
    require(isinstance(expect, dict), f"{where}: expect must be a table")
    require_known(f"{where}: expect", expect, _EXPECT)
    description, options = described(said, where)
    require(
        options.trace is None, f"{where}: a case replays a scenario, traces are not stored here"
    )
    return Case(
        name, description, options, _paths(where, expect, "above_zero"), _equal(where, expect)
    )


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """What a TOML file says; raises ConfigError, which calls it ``where``."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is malformed: {error}") from None


def described(said: Mapping[str, Any], where: str) -> tuple[str, Options]:
    """What every case says: a sentence of description, and flags."""
    description, flags = said.get("description", {}), said.get("flags", {})
    require(
        isinstance(description, str) and bool(description.strip()),
        f"{where}: description must be a sentence",
    )
    require(isinstance(flags, dict), f"{where}: flags must be a table of flag names and values")
    return description, options_from(flags, where)


def require_known(where: str, said: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise ConfigError for a key that nobody reads."""
    for key in said:
        close = get_close_matches(key, known, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; it may hold {', '.join(known)}"
        require(key in known, f"{where}: unknown key {key!r}{hint}")


def _paths(where: str, expect: Mapping[str, Any], key: str) -> tuple[str, ...]:
    paths = expect.get(key, [])
    is_list = isinstance(paths, list) and all(isinstance(path, str) for path in paths)
    require(is_list, f"{where}: expect.{key} must be a list of figures")
    return tuple(paths)


def _equal(where: str, expect: Mapping[str, Any]) -> dict[str, int]:
    equal = expect.get("equal", {})
    is_table = isinstance(equal, dict) and all(type(value) is int for value in equal.values())
    require(is_table, f"{where}: expect.equal must be a table of figures and whole numbers")
    return {**dict.fromkeys(_paths(where, expect, "equal_zero"), 0), **equal}


@dataclass(frozen=True, slots=True)
class CaseRun:
    """What running a case gave: its figures with where they come from, and its requests."""

    document: Document
    rows: list[Row]


def measure(case: Case) -> CaseRun:
    """Run the case. Raises ConfigError when its flags no longer work together."""
    simulation = Simulation(case.options)
    record = simulation.run().record
    document = {
        "schema": SCHEMA,
        "provenance": {
            "seed": case.options.seed,
            "config_sha256": digest_of(simulation.configuration()),
            "workload_sha256": workload_digest(simulation.workload),
        },
        "figures": integers(record),
    }
    return CaseRun(document, list(record.rows.values()))


def unmet(case: Case, document: Document) -> list[str]:
    """What the case promises of its figures and does not keep."""
    figures = flatten(document["figures"])
    problems = []
    requests = _figure(figures, "requests")
    if requests < REQUESTS_MIN:
        problems.append(f"{requests} requests are below the {REQUESTS_MIN} of a case")
    problems += [
        f"{path} is {value}, which no count or time can be"
        for path, value in figures.items()
        if isinstance(value, int) and value < 0
    ]
    for path in case.above_zero:
        value = _figure(figures, path)
        if value <= 0:
            problems.append(f"{path} is {value} and must be above 0: the case shows it no longer")
    for path, wanted in case.equal.items():
        value = _figure(figures, path)
        if value != wanted:
            problems.append(f"{path} is {value} and must be {wanted}")
    return problems


def _figure(figures: Mapping[str, Figure], path: str) -> int:
    """The figure at ``path``; raises ConfigError when there is none, or when it is no number."""
    value = figures.get(path, 0 if path.startswith(_BY_REASON) else None)
    if isinstance(value, int):
        return value
    close = get_close_matches(path, figures, 1)
    raise ConfigError(
        f"there is no figure {path}" + (f"; did you mean {close[0]}?" if close else "")
    )


def digest_of(configuration: Mapping[str, Any]) -> str:
    """SHA-256, hex, of what a run was configured with."""
    text = json.dumps(configuration, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

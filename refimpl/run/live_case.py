"""A live case: a TOML file that says what a real model serves, beside what, and what may not get worse.

Must not know: models, how anything is served, baselines. Called by: live_served, golden_live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from refimpl.config import require, require_choice
from refimpl.run.golden_case import described, read_toml, require_known
from refimpl.run.live_gate import GATED, HIT_RATE_POINTS, Gate
from refimpl.run.options import Options
from refimpl.run.tier_sets import NAMES

LIVE_FOLDER: Final = "live"
REPEATS: Final = 5
THREADS: Final = 1
_KEYS: Final = (
    "description", "model", "arithmetic", "threads", "reference", "repeats", "flags", "gate",
)  # fmt: skip
_SAID: Final = ("workload", "max-total-tokens")  # nobody's memory is sized by a default
_GATE_KEYS: Final = ("figures", "hit_rate_points")
_MODEL: Final = "tiny-gqa"
_ARITHMETICS: Final = ("reference", "fast")


@dataclass(frozen=True, slots=True)
class LiveCase:
    """What the file says. ``reference`` is a tier set that serves the same load in each repetition.

    ``threads`` compute where that is the processor; one makes times that repeat.
    """

    name: str
    description: str
    options: Options
    model: str
    arithmetic: str
    threads: int
    reference: str
    repeats: int
    gate: Gate

    @property
    def tiers(self) -> str:
        """The tier set that the flags make, which is what is judged."""
        options = self.options
        if not options.enable_hierarchical_cache:
            return NAMES[1]
        return NAMES[2] if options.hicache_storage_backend is None else NAMES[3]


def live_case_names(folder: Path) -> list[str]:
    """The names of the cases in the live folder of the goldens, sorted."""
    return sorted(path.stem for path in (folder / LIVE_FOLDER).glob("*.toml"))


def read_live_case(folder: Path, name: str) -> LiveCase:
    """The case ``name``; raises ConfigError, one line, when its file says nonsense."""
    where = f"{LIVE_FOLDER}/{name}.toml"
    said = read_toml(folder / where, where)
    require_known(where, said, _KEYS)
    description, options = described(said, where)
    for flag in _SAID:
        require(flag in said["flags"], f"{where}: flags must say {flag}")
    model, reference = said.get("model", _MODEL), said.get("reference", NAMES[0])
    require(isinstance(model, str) and bool(model), f"{where}: model must be a name")
    require_choice(f"{where}: reference", reference, NAMES)
    arithmetic = said.get("arithmetic", _ARITHMETICS[0])
    require_choice(f"{where}: arithmetic", arithmetic, _ARITHMETICS)
    require(
        options.hicache_storage_backend in (None, "memory"),
        f"{where}: a live case has its L3 in memory, since what a repetition leaves in"
        f" {options.hicache_storage_backend} would be a hit of the next",
    )
    case = LiveCase(
        name,
        description,
        options,
        model,
        arithmetic,
        _count(where, said, "threads", THREADS),
        reference,
        _count(where, said, "repeats", REPEATS),
        _gate(where, said),
    )
    require(
        case.tiers != reference,
        f"{where}: the flags make {case.tiers}, which is the reference as well",
    )
    return case


def _count(where: str, said: Mapping[str, Any], key: str, default: int) -> int:
    value = said.get(key, default)
    is_count = type(value) is int and value >= 1
    require(is_count, f"{where}: {key} must be a whole number of 1 or more")
    return int(value)


def _gate(where: str, said: Mapping[str, Any]) -> Gate:
    gate = said.get("gate", {})
    require(isinstance(gate, dict), f"{where}: gate must be a table")
    require_known(f"{where}: gate", gate, _GATE_KEYS)
    figures = gate.get("figures", list(GATED))
    is_list = isinstance(figures, list) and all(isinstance(name, str) and name for name in figures)
    require(is_list and bool(figures), f"{where}: gate.figures must be a list of figures")
    points = gate.get("hit_rate_points", HIT_RATE_POINTS)
    require(
        isinstance(points, int | float) and not isinstance(points, bool) and 0 <= points < 100,
        f"{where}: gate.hit_rate_points must be a number of percentage points, 0 or more",
    )
    return Gate(tuple(figures), float(points))

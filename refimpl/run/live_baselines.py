"""Baselines of live goldens: samples of each figure, by class of machine and case.

Must not know: how samples are judged or taken. Called by: golden_live.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from refimpl.config import ConfigError
from refimpl.run.baselines import read_kept
from refimpl.run.golden import replace_file
from refimpl.run.live_case import LIVE_FOLDER
from refimpl.run.live_gate import Baseline

FILE: Final = "baselines.json"


def read_baseline(folder: Path, machine: str, case: str) -> Baseline | None:
    """Of ``case`` on such a machine; None when there is none. ConfigError for a file that is none."""
    path = folder / LIVE_FOLDER / FILE
    kept = read_kept(path).get(machine, {}).get(case)
    if kept is None:
        return None
    if not _is_baseline(kept):
        raise ConfigError(f"{path}: {case} on {machine} must hold provenance, best and samples")
    return Baseline(kept["provenance"], kept["samples"], kept["best"])


def _is_baseline(kept: Any) -> bool:
    if not isinstance(kept, dict):
        return False
    provenance, samples, best = (kept.get(key) for key in ("provenance", "samples", "best"))
    return (
        isinstance(provenance, dict)
        and isinstance(samples, dict)
        and isinstance(best, dict)
        and best.keys() == samples.keys()
        and all(isinstance(values, list) and values for values in samples.values())
        and all(map(_is_number, best.values()))
        and all(_is_number(value) for values in samples.values() for value in values)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_baseline(folder: Path, machine: str, case: str, baseline: Baseline) -> Path:
    """Write it down in place of an older one; returns the file."""
    path = folder / LIVE_FOLDER / FILE
    kept = read_kept(path)
    kept.setdefault(machine, {})[case] = {
        "provenance": dict(baseline.provenance),
        "best": {name: _rounded(value) for name, value in baseline.best.items()},
        "samples": {name: [*map(_rounded, each)] for name, each in baseline.samples.items()},
    }
    path.parent.mkdir(exist_ok=True)
    replace_file(path, _text(kept))
    return path


def _rounded(value: float) -> float:
    """Four digits of a ratio, which is more than repeats; counts are small and stay whole."""
    return value if value == int(value) else float(f"{value:.4g}")


def _text(kept: Mapping[str, Any]) -> str:
    """JSON with the samples of a figure on one line, so that a diff is a line a figure."""
    text = json.dumps(kept, indent=2, sort_keys=True)
    lines: list[str] = []
    is_inside = False
    for line in text.splitlines():
        if is_inside:
            lines[-1] += line.strip() if line.strip().startswith("]") else f"{line.strip()} "
            is_inside = not line.strip().startswith("]")
            continue
        lines.append(line)
        is_inside = line.endswith("[")
    return "\n".join(lines).replace(" ]", "]") + "\n"

"""Baselines of live goldens: samples of each figure, by class of machine and case.

Must not know: how samples are judged or taken. Called by: golden_live.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from refimpl.config import ConfigError
from refimpl.run.baselines import read_kept
from refimpl.run.golden import replace_file
from refimpl.run.live_case import LIVE_FOLDER

Samples: TypeAlias = Mapping[str, Sequence[float]]  # by figure, a value a repetition

FILE: Final = "baselines.json"


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was written down: where it comes from, and the samples."""

    provenance: Mapping[str, str]
    samples: Samples


def read_baseline(folder: Path, machine: str, case: str) -> Baseline | None:
    """Of ``case`` on such a machine; None when there is none. ConfigError for a file that is none."""
    path = folder / LIVE_FOLDER / FILE
    kept = read_kept(path).get(machine, {}).get(case)
    if kept is None:
        return None
    if not _is_baseline(kept):
        raise ConfigError(f"{path}: {case} on {machine} must hold provenance and samples")
    return Baseline(kept["provenance"], kept["samples"])


def _is_baseline(kept: Any) -> bool:
    if not isinstance(kept, dict) or not isinstance(kept.get("provenance"), dict):
        return False
    samples = kept.get("samples")
    return isinstance(samples, dict) and all(
        isinstance(values, list)
        and values
        and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        for values in samples.values()
    )


def write_baseline(folder: Path, machine: str, case: str, baseline: Baseline) -> Path:
    """Write it down in place of an older one; returns the file."""
    path = folder / LIVE_FOLDER / FILE
    kept = read_kept(path)
    samples = {
        name: [float(f"{value:.4g}") for value in values]
        for name, values in baseline.samples.items()
    }
    kept.setdefault(machine, {})[case] = {
        "provenance": dict(baseline.provenance),
        "samples": samples,
    }
    path.parent.mkdir(exist_ok=True)
    replace_file(path, _text(kept))
    return path


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

"""Wall-clock baselines: ratios of a bench, kept for each class of machine.

Seconds of one machine say nothing about another, and little about the same one an hour later; ratios
to a floor of the same run do. Must not know: what is measured. Called by: the command line, live goldens.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any, Final

from refimpl.config import ConfigError
from refimpl.run.golden import replace_file

FILE: Final = "wall_clock.json"


def machine_class(accelerator: str = "") -> str:
    """What machines have in common whose ratios are alike: processor and cores, and what computes.

    ``accelerator`` is the device of a model, empty where that is the processor.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ", ".join(filter(None, (_processor(), f"{cores} cores", accelerator)))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def with_kept(folder: Path, bench: str, figures: dict[str, Any]) -> dict[str, Any]:
    """``figures`` with the ratios that were kept for this class of machine, if there are any."""
    kept = read_kept(folder / FILE).get(machine_class(), {}).get(bench)
    return figures if kept is None else {**figures, "kept_ratios": kept}


def keep(folder: Path, bench: str, figures: dict[str, Any]) -> Path:
    """Write the ratios down for this class of machine; returns the file.

    Raises ConfigError for a bench that has none.
    """
    if "ratios" not in figures:
        raise ConfigError(f"bench {bench} measures no ratios that could be kept: leave --keep out")
    path = folder / FILE
    kept = read_kept(path)
    kept.setdefault(machine_class(), {})[bench] = _rounded(figures["ratios"])
    replace_file(path, json.dumps(kept, indent=2, sort_keys=True) + "\n")
    return path


def _rounded(value: Any) -> Any:
    """Three digits: more would change with every run and mean nothing."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.3g}")


def read_kept(path: Path) -> dict[str, dict[str, Any]]:
    """What is kept in ``path``, by class of machine; raises ConfigError when that can't be read."""
    if not path.is_file():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not isinstance(kept, dict) or not all(isinstance(each, dict) for each in kept.values()):
        raise ConfigError(f"{path} must hold an object of machines")
    return kept

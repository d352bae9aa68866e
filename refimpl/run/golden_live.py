"""The live gate: measured beside a reference on the wall clock, compared with a baseline of such machines.

What is measured, a case with a model or the files of a load generator, is a ``Subject``.
Must not know: models, engines, the terminal. Called by: the command line, tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol

from refimpl.config import ConfigError, require
from refimpl.run.golden import Finding
from refimpl.run.golden_change import overall
from refimpl.run.live_baselines import read_baseline, write_baseline
from refimpl.run.live_case import LIVE_FOLDER, live_case_names
from refimpl.run.live_figures import Measured
from refimpl.run.live_gate import Baseline, Gate, blind, judged
from refimpl.run.picture import Picture, picture_of

# Noise that happens to be good is no news, so what is better passes here; the report says it.
PASSES: Final = ("equal", "better", "changed")
_RECORD: Final = "refimpl golden record --live"
_RECORDED: Final = (*PASSES, "worse", "new")


class Subject(Protocol):
    """What is measured. ``provenance`` is what has to be the same for figures to be comparable.

    ``arguments`` are the words that name it to ``golden record --live``.
    """

    name: str
    arguments: str
    machine: str
    gate: Gate

    @property
    def provenance(self) -> Mapping[str, str]: ...

    def measure(self, *, is_baseline: bool) -> Measured:
        """Take the samples; more of them for a baseline."""
        ...


def chosen_live(folder: Path, names: Sequence[str]) -> list[str]:
    """The named live cases, or all. Raises ConfigError for a name that isn't one."""
    known = live_case_names(folder)
    for name in names:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"
        require(name in known, f"there is no live case {name!r}; {hint}")
    require(bool(known), f"{folder / LIVE_FOLDER} holds no live case")
    return sorted(set(names)) or known


def check_live(folder: Path, subjects: Sequence[Subject]) -> list[Finding]:
    """Measure and compare, in order. Raises ConfigError before, when a baseline is missing."""
    baselines = [_baseline(folder, subject) for subject in subjects]
    return [
        _checked(subject, baseline) for subject, baseline in zip(subjects, baselines, strict=True)
    ]


def record_live(folder: Path, subjects: Sequence[Subject]) -> list[Finding]:
    """Measure, write down, and say what that changes. What failed is not written down."""
    return [_recorded(folder, subject) for subject in subjects]


def _baseline(folder: Path, subject: Subject) -> Baseline:
    baseline = read_baseline(folder, subject.machine, subject.name)
    if baseline is None:
        raise ConfigError(
            f"there is no baseline of {subject.name} for machines of this class"
            f" ({subject.machine}): run `{_RECORD} {subject.arguments}` first"
        )
    return baseline


def _checked(subject: Subject, baseline: Baseline) -> Finding:
    hint = f"run `{_RECORD} {subject.arguments}`"
    begun = perf_counter()
    differ = _differing(subject.provenance, baseline.provenance)
    if differ:
        what = f"{', '.join(differ)} differ from those of the baseline: {hint}"
        return Finding(subject.name, "broken", problems=[what], passes=PASSES)
    measured = _measured(subject, is_baseline=False)
    changes = judged(subject.gate, baseline, measured.best) if measured.best else []
    verdict = "broken" if measured.problems else overall(changes)
    problems = list(measured.problems)
    if verdict == "better":
        problems = [f"better than the baseline: {hint} to hold it"]
    return Finding(
        subject.name,
        verdict,
        changes,
        problems,
        passes=PASSES,
        picture=_picture(measured),
        seconds=perf_counter() - begun,
    )


def _recorded(folder: Path, subject: Subject) -> Finding:
    begun = perf_counter()
    old = read_baseline(folder, subject.machine, subject.name)
    measured = _measured(subject, is_baseline=True)
    if measured.problems:
        return Finding(subject.name, "broken", problems=measured.problems, passes=_RECORDED)
    fresh = Baseline(subject.provenance, measured.samples, measured.best)
    write_baseline(folder, subject.machine, subject.name, fresh)
    changes = judged(subject.gate, old or fresh, measured.best)
    return Finding(
        subject.name,
        "new" if old is None else overall(changes),
        changes,
        blind(subject.gate, fresh),
        passes=_RECORDED,
        picture=_picture(measured),
        seconds=perf_counter() - begun,
    )


def _measured(subject: Subject, *, is_baseline: bool) -> Measured:
    """Whatever goes wrong on the way is a finding too, but for input that can't be."""
    try:
        return subject.measure(is_baseline=is_baseline)
    except ConfigError:
        raise
    except Exception as error:  # whatever a run raises is what the gate has to report
        return Measured(problems=[f"{type(error).__name__}: {error}"])


def _differing(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({*now, *then}) if now.get(name) != then.get(name)]


def _picture(measured: Measured) -> Picture:
    return picture_of(
        {"measured": measured.subject, "reference": measured.reference}, measured.rates
    )

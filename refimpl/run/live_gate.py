"""Whether what is measured now is worse than a baseline, when both vary.

The best time of all runs now, over the best of the reference, has to stay below Q3 + 3 IQR of the
baseline's repetitions; a rate above Q1 - 3 IQR. The best of a few is what the code can do on a busy
machine, and a limit from the baseline's own spread is as tight as that machine allows. The margin has a
floor, so that a baseline that happened to vary little does not fail on the next day.
Must not know: where samples come from. Called by: live goldens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

from refimpl.run.golden_change import Change

GATED: Final = (
    "ttft_to_reference.p50",
    "ttft_to_reference.p90",
    "throughput_to_reference",
    "hit_rate",
)
HIT_RATE_POINTS: Final = 1.0
_LOWER_IS_BETTER: Final = ("ttft_",)
_HIGHER_IS_BETTER: Final = ("throughput_", "bandwidth_")
_IQRS: Final = 3
_MARGIN_LEAST: Final = 0.10  # of the quartile
_FEW: Final = 4  # samples; of fewer, quartiles say nothing
_MARGIN_OF_FEW: Final = 0.25
_LEAST: Final = 1e-9  # to divide by
_LOSS_SEEN_SHARE: Final = 0.5  # from the best of a baseline; one that sees less is a poor gate
_COUNTS_DIFFER_SHARE: Final = 0.05  # of a count, before it is said to have changed


@dataclass(frozen=True, slots=True)
class Gate:
    """Which figures can fail, by the beginning of their name, and how far the hit rate may fall.

    ``hit_rate_points``: percentage points. Figures that are not gated are shown.
    """

    figures: tuple[str, ...] = GATED
    hit_rate_points: float = HIT_RATE_POINTS


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was written down: where it comes from, a sample a repetition, the best of all runs."""

    provenance: Mapping[str, str]
    samples: Mapping[str, Sequence[float]]
    best: Mapping[str, float]


def judged(gate: Gate, baseline: Baseline, now: Mapping[str, float]) -> list[Change]:
    """Every figure of the best of now with its verdict, sorted by name: ``equal`` ones as well.

    A gated figure that is no longer measured is ``worse``.
    """
    return [
        _judged(gate, name, baseline, now.get(name)) for name in sorted({*baseline.samples, *now})
    ]


def limit(name: str, baseline: Sequence[float], gate: Gate | None = None) -> float | None:
    """What now is held to; None for a figure that is neither good nor bad."""
    if name == "hit_rate":
        return median(baseline) - (gate or Gate()).hit_rate_points / 100
    low, high, margin = _spread(baseline)
    if name.startswith(_LOWER_IS_BETTER):
        return high + margin
    return max(low - margin, 0.0) if name.startswith(_HIGHER_IS_BETTER) else None


def blind(gate: Gate, baseline: Baseline) -> list[str]:
    """A line for each gated figure that varied so much that a loss of half would pass."""
    found = []
    for name, samples in sorted(baseline.samples.items()):
        bound = limit(name, samples, gate)
        if bound is None or name == "hit_rate" or not name.startswith(gate.figures):
            continue
        best = baseline.best[name]
        loss = max(bound, best) / max(min(bound, best), _LEAST) - 1
        if loss > _LOSS_SEEN_SHARE:
            found.append(
                f"{name} varied so much that nothing below a loss of {100 * loss:,.0f} % shows:"
                " record again while the machine is idle"
            )
    return found


def _judged(gate: Gate, name: str, baseline: Baseline, new: float | None) -> Change:
    is_gated = name.startswith(gate.figures)
    samples, old = baseline.samples.get(name), baseline.best.get(name)
    if samples is None or old is None or new is None:
        verdict = "worse" if is_gated and new is None else "changed"
        return Change(name, _shown(name, old), _shown(name, new), verdict)
    bound = limit(name, samples, gate)
    verdict = _verdict(name, samples, new, bound)
    if not is_gated:
        verdict, bound = "equal" if verdict == "equal" else "changed", None
    return Change(name, _shown(name, old), _shown(name, new), verdict, _shown(name, bound))


def _verdict(name: str, samples: Sequence[float], new: float, bound: float | None) -> str:
    if bound is None:
        middle = median(samples)
        return "equal" if abs(new - middle) <= _COUNTS_DIFFER_SHARE * abs(middle) else "changed"
    low, high, margin = _spread(samples)
    if name.startswith(_LOWER_IS_BETTER):
        return "worse" if new > bound else "better" if new < low - margin else "equal"
    above = 2 * median(samples) - bound if name == "hit_rate" else high + margin
    return "worse" if new < bound else "better" if new > above else "equal"


def _spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """(Q1, Q3, margin): how far beyond a quartile is still what the samples themselves would give."""
    if len(samples) < _FEW:
        low, high, least = min(samples), max(samples), _MARGIN_OF_FEW
    else:
        low, _, high = quantiles(samples, n=4, method="inclusive")
        least = _MARGIN_LEAST
    return low, high, max(_IQRS * (high - low), least * high)


def _shown(name: str, value: float | None) -> float | int | None:
    """As it is written: counts whole, ratios with four digits, since more mean nothing."""
    if value is None:
        return None
    is_count = not name.startswith((*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER)) and name != "hit_rate"
    return round(value) if is_count else float(f"{value:.4g}")

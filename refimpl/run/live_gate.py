"""Whether what is measured now is worse than a baseline, when both are samples that vary.

Of times the best of now has to stay below Q3 + 3 IQR of the baseline, of rates above Q1 - 3 IQR: the best
of a few is what the code can do on a busy machine, and a limit from the baseline's own spread is as
tight as that machine allows. The margin has a floor, so that a baseline that happened to vary little
does not fail on the next day. Must not know: where samples come from. Called by: live goldens.
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
_COUNTS_DIFFER_SHARE: Final = 0.05  # of a count, before it is said to have changed


@dataclass(frozen=True, slots=True)
class Gate:
    """Which figures can fail, by the beginning of their name, and how far the hit rate may fall.

    ``hit_rate_points``: percentage points. Figures that are not gated are shown.
    """

    figures: tuple[str, ...] = GATED
    hit_rate_points: float = HIT_RATE_POINTS


def judged(
    gate: Gate, baseline: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]
) -> list[Change]:
    """Every figure with its verdict, sorted by name: ``equal`` ones as well.

    A gated figure that is no longer measured is ``worse``.
    """
    return [
        _judged(gate, name, baseline.get(name, ()), now.get(name, ()))
        for name in sorted({*baseline, *now})
    ]


def limit(name: str, baseline: Sequence[float], gate: Gate | None = None) -> float | None:
    """What the best of now is held to; None for a figure that is neither good nor bad."""
    if name == "hit_rate":
        return median(baseline) - (gate or Gate()).hit_rate_points / 100
    low, high, margin = _spread(baseline)
    if name.startswith(_LOWER_IS_BETTER):
        return high + margin
    return max(low - margin, 0.0) if name.startswith(_HIGHER_IS_BETTER) else None


def best(name: str, samples: Sequence[float]) -> float:
    """The least of times, the most of rates, the median of counts."""
    if name.startswith(_LOWER_IS_BETTER):
        return min(samples)
    is_rate = name.startswith(_HIGHER_IS_BETTER) or name == "hit_rate"
    return max(samples) if is_rate else median(samples)


def _judged(gate: Gate, name: str, baseline: Sequence[float], now: Sequence[float]) -> Change:
    is_gated = name.startswith(gate.figures)
    if not baseline or not now:
        verdict = "worse" if is_gated and not now else "changed"
        found = [shown(name, best(name, side)) if side else None for side in (baseline, now)]
        return Change(name, found[0], found[1], verdict)
    bound = limit(name, baseline, gate)
    verdict = _verdict(name, baseline, now, bound)
    if not is_gated and verdict != "equal":
        verdict = "changed"
    old, new = shown(name, best(name, baseline)), shown(name, best(name, now))
    said = None if bound is None or not is_gated else shown(name, bound)
    return Change(name, old, new, verdict, said)


def _verdict(
    name: str, baseline: Sequence[float], now: Sequence[float], bound: float | None
) -> str:
    if bound is None:
        old, new = median(baseline), median(now)
        return "equal" if abs(new - old) <= _COUNTS_DIFFER_SHARE * abs(old) else "changed"
    low, high, margin = _spread(baseline)
    if name.startswith(_LOWER_IS_BETTER):
        return "worse" if min(now) > bound else "better" if max(now) < low - margin else "equal"
    above = 2 * median(baseline) - bound if name == "hit_rate" else high + margin
    return "worse" if max(now) < bound else "better" if min(now) > above else "equal"


def _spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """(Q1, Q3, margin): how far beyond a quartile is still what the samples themselves would give."""
    if len(samples) < _FEW:
        low, high, least = min(samples), max(samples), _MARGIN_OF_FEW
    else:
        low, _, high = quantiles(samples, n=4, method="inclusive")
        least = _MARGIN_LEAST
    return low, high, max(_IQRS * (high - low), least * high)


def shown(name: str, value: float) -> float | int:
    """As it is written: counts whole, ratios with four digits, since more mean nothing."""
    is_count = not name.startswith((*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER)) and name != "hit_rate"
    return round(value) if is_count else float(f"{value:.4g}")

"""Figures of a load beside a reference taken in the same run: ratios, because seconds do not carry over.

Must not know: who sent the load, what was measured before. Called by: live goldens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from refimpl.config import require
from refimpl.run.report import PERCENTILES, failure_words
from refimpl.run.results import TIERS, Result, failures
from refimpl.units import NS_PER_S, nearest_rank

Figures: TypeAlias = dict[str, float]  # by dotted name
Times: TypeAlias = Callable[[Result], int | None]

TURNS_MAX: Final = 20  # whose TTFT is a figure of its own
_PROMPTS_DIFFER_SHARE: Final = 0.1  # of the mean length: beyond, two loads are not the same one


@dataclass(slots=True)
class Measured:
    """What one or more repetitions gave, each beside its reference.

    ``samples`` holds one value a repetition, by figure; ``rates`` GB/s by way, in the same order.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    subject: list[Result] = field(default_factory=list)
    reference: list[Result] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why the figures do not count

    def add(self, figures: Figures, subject: Sequence[Result], reference: Sequence[Result]) -> None:
        """One more repetition."""
        for name, value in figures.items():
            self.samples.setdefault(name, []).append(value)
        self.subject += subject
        self.reference += reference


def compared(subject: Sequence[Result], reference: Sequence[Result]) -> Figures:
    """The figures of one repetition. Requests that failed count for nothing but failure.

    Raises ConfigError when there is nothing to compare, or when the loads are two different ones.
    """
    subject, reference = _answered(subject), _answered(reference)
    require(bool(subject), "no request of the results was answered")
    require(bool(reference), "no request of the reference was answered")
    _check_same_load(subject, reference)
    figures = _ratios("ttft_to_reference", subject, reference, lambda each: each.ttft_ns)
    figures |= _ratios(
        "ttft_intended_to_reference", subject, reference, lambda each: each.ttft_intended_ns
    )
    figures |= _by_turn(subject, reference)
    figures["throughput_to_reference"] = _per_second(subject) / _per_second(reference)
    return figures | _hits(subject)


def failure_problems(subject: Sequence[Result], reference: Sequence[Result]) -> list[str]:
    """A line for each side that has failed requests, with their counts by reason."""
    sides = {"": subject, "reference: ": reference}
    return [
        f"{side}{words}"
        for side, results in sides.items()
        if (words := failure_words(failures(results), len(results)))
    ]


def percentiles_of(results: Sequence[Result], time: Times) -> dict[str, int]:
    """Nearest-rank percentiles of a time, in ns; empty when nobody has it."""
    times = sorted(each for result in results if (each := time(result)) is not None)
    return {f"p{percent}": nearest_rank(times, percent) for percent in PERCENTILES if times}


def _answered(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if not result.failure]


def _check_same_load(subject: Sequence[Result], reference: Sequence[Result]) -> None:
    ours, theirs = _mean_prompt(subject), _mean_prompt(reference)
    require(
        abs(ours - theirs) <= _PROMPTS_DIFFER_SHARE * max(ours, theirs),
        f"the reference is another load: its prompts have {theirs:,.0f} tokens on average,"
        f" those of the results {ours:,.0f}",
    )


def _mean_prompt(results: Sequence[Result]) -> float:
    lengths = [result.prompt_tokens for result in results if result.prompt_tokens is not None]
    return sum(lengths) / max(len(lengths), 1)


def _ratios(
    name: str, subject: Sequence[Result], reference: Sequence[Result], time: Times
) -> Figures:
    ours, theirs = percentiles_of(subject, time), percentiles_of(reference, time)
    return {f"{name}.{each}": ours[each] / max(theirs[each], 1) for each in ours if each in theirs}


def _by_turn(subject: Sequence[Result], reference: Sequence[Result]) -> Figures:
    figures = {}
    for turn in range(TURNS_MAX):
        ours, theirs = (
            percentiles_of([each for each in side if each.turn == turn], lambda each: each.ttft_ns)
            for side in (subject, reference)
        )
        if ours and theirs:
            figures[f"ttft_by_turn_to_reference.{turn + 1}"] = ours["p50"] / max(theirs["p50"], 1)
    return figures


def _per_second(results: Sequence[Result]) -> float:
    begun, ended = min(each.sent_ns for each in results), max(each.end_ns for each in results)
    return len(results) * NS_PER_S / max(ended - begun, 1)


def _hits(subject: Sequence[Result]) -> Figures:
    """Hit tokens by tier, and all of them as a share of the prompt tokens of those who know both."""
    figures: Figures = {}
    for at, tier in enumerate(TIERS):
        counts = [each.tiers[at] for each in subject if each.tiers is not None]
        if counts:
            figures[f"hit_tokens.{tier}"] = sum(counts)
    known = [each for each in subject if each.hit_tokens is not None and each.prompt_tokens]
    if known:
        prompts = sum(each.prompt_tokens or 0 for each in known)
        figures["hit_rate"] = sum(each.hit_tokens or 0 for each in known) / prompts
    return figures

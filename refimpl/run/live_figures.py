"""Figures of a load beside a reference taken in the same run: ratios, because seconds do not carry over.

Must not know: who sent the load, what was measured before. Called by: live goldens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, TypeAlias

from refimpl.config import require
from refimpl.run.report import failure_words
from refimpl.run.results import TIERS, Result, Times, failures, percentiles_of

Figures: TypeAlias = dict[str, float]  # by dotted name

TURNS_MAX: Final = 20  # whose TTFT is a figure of its own
_PER_REQUEST: Final = "request"  # ns of a run over its requests
_PROMPTS_DIFFER_SHARE: Final = 0.1  # of the mean length: beyond, two loads are not the same one


@dataclass(slots=True)
class Measured:
    """What one or more repetitions gave, each beside its reference.

    ``samples`` holds one value a repetition, by figure; ``best`` the figures of all their runs together,
    the best time of them over the best of the reference; ``rates`` are GB/s by way.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    best: Figures = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    subject: list[Result] = field(default_factory=list)
    reference: list[Result] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why the figures do not count

    def add(self, figures: Figures) -> None:
        """The figures of one more repetition."""
        for name, value in figures.items():
            self.samples.setdefault(name, []).append(value)


def compared(subject: Sequence[Sequence[Result]], reference: Sequence[Sequence[Result]]) -> Figures:
    """The figures of some runs: of each time the best of them, over the best of the reference's.

    Requests that failed count for nothing. Raises ConfigError when there is nothing to compare, or when
    the loads are two different ones.
    """
    subject = [_answered(run, "results") for run in subject]
    reference = [_answered(run, "reference") for run in reference]
    _check_same_load(subject[0], reference[0])
    ours, theirs = best_times(subject), best_times(reference)
    figures = {}
    for name in ours.keys() & theirs.keys():
        kind, dot, which = name.partition(".")
        figures[f"{kind}_to_reference{dot}{which}"] = ours[name] / theirs[name]
    figures["throughput_to_reference"] = 1 / figures.pop(f"{_PER_REQUEST}_to_reference")
    return figures | _hits(subject)


def best_times(runs: Sequence[Sequence[Result]]) -> Figures:
    """Times of some runs of one load, in ns, of each the least: TTFT, by turn, and time a request."""
    found = [_times(run) for run in runs]
    return {name: min(each[name] for each in found if name in each) for name in found[0]}


def failure_problems(subject: Sequence[Result], reference: Sequence[Result]) -> list[str]:
    """A line for each side that has failed requests, with their counts by reason."""
    sides = {"": subject, "reference: ": reference}
    return [
        f"{side}{words}"
        for side, results in sides.items()
        if (words := failure_words(failures(results), len(results)))
    ]


def _answered(results: Sequence[Result], which: str) -> list[Result]:
    answered = [result for result in results if not result.failure]
    require(bool(answered), f"no request of the {which} was answered")
    return answered


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


def _times(results: Sequence[Result]) -> Figures:
    kinds: dict[str, Times] = {
        "ttft": lambda each: each.ttft_ns,
        "ttft_intended": lambda each: each.ttft_intended_ns,
    }
    times: Figures = {
        f"{kind}.{percentile}": max(ns, 1)  # no clock is finer, and it has to divide
        for kind, time in kinds.items()
        for percentile, ns in percentiles_of(results, time).items()
    }
    for turn in range(TURNS_MAX):
        of_turn = [each for each in results if each.turn == turn]
        if (ns := percentiles_of(of_turn, kinds["ttft"]).get("p50")) is not None:
            times[f"ttft_by_turn.{turn + 1}"] = max(ns, 1)
    begun, ended = min(each.sent_ns for each in results), max(each.end_ns for each in results)
    return times | {_PER_REQUEST: max(ended - begun, 1) / len(results)}


def _hits(runs: Sequence[Sequence[Result]]) -> Figures:
    """Hit tokens by tier of the median run, and all of them as a share of the prompt tokens."""
    figures: Figures = {}
    for at, tier in enumerate(TIERS):
        counts = [[each.tiers[at] for each in run if each.tiers is not None] for run in runs]
        if any(counts):
            figures[f"hit_tokens.{tier}"] = median(sum(count) for count in counts)
    rates = [rate for run in runs if (rate := _hit_rate(run)) is not None]
    return figures | ({"hit_rate": median(rates)} if rates else {})


def _hit_rate(results: Sequence[Result]) -> float | None:
    """Of those requests of which both are known."""
    known = [
        (each.hit_tokens, each.prompt_tokens)
        for each in results
        if each.hit_tokens is not None and each.prompt_tokens
    ]
    prompts = sum(prompt for _, prompt in known)
    return sum(hits for hits, _ in known) / prompts if prompts else None

"""What a report draws of a run: distributions and sums, small however many requests there were.

Must not know: how anything is drawn. Called by: golden, live goldens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from refimpl.run.results import TIERS, Result, percentiles_of
from refimpl.units import NS_PER_MS

BINS: Final = 40
TURNS_MAX: Final = 64  # bars; what comes after them is one more


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values: bin i begins at ``low + i * width``."""

    low: float
    width: float
    counts: tuple[int, ...]


class Tail(msgspec.Struct, frozen=True):
    """TTFT of the requests of one range of prompt lengths, in ms."""

    bucket: str  # such as "257-512 tokens"
    requests: int
    ms: Mapping[str, float]  # by percentile


class Turn(msgspec.Struct, frozen=True):
    """Prompt tokens of one turn by where they came from: device, host, storage, computed."""

    turn: str
    tokens: Mapping[str, int]


class Run(msgspec.Struct, frozen=True):
    """One run in the picture."""

    requests: int
    ttft_ms: Histogram | None
    tails: tuple[Tail, ...]
    turns: tuple[Turn, ...]


class Picture(msgspec.Struct, frozen=True):
    """Runs by name, the one that is judged first, and GB/s by way where they were measured."""

    runs: Mapping[str, Run]
    rates: Mapping[str, float] = {}


def picture_of(
    runs: Mapping[str, Sequence[Result]], rates: Mapping[str, float] | None = None
) -> Picture:
    """The picture of one case; ``rates`` are GB/s by way."""
    times = [time for results in runs.values() for time in _ttft_ms(results)]
    low, high = min(times, default=0.0), max(times, default=0.0)
    width = (high - low) / BINS or high / BINS  # 0: a replay without time has no TTFT
    drawn = {
        name: Run(
            len(results),
            _histogram(_ttft_ms(results), low, width) if width else None,
            _tails(results),
            _turns(results),
        )
        for name, results in runs.items()
    }
    return Picture(drawn, rates or {})


def _ttft_ms(results: Sequence[Result]) -> list[float]:
    return [each.ttft_ns / NS_PER_MS for each in results if each.ttft_ns is not None]


def _histogram(times: Sequence[float], low: float, width: float) -> Histogram:
    counts = [0] * BINS
    for time in times:
        counts[min(int((time - low) / width), BINS - 1)] += 1
    return Histogram(low, width, tuple(counts))


def _tails(results: Sequence[Result]) -> tuple[Tail, ...]:
    """By powers of two of the prompt length, the shortest first."""
    buckets: dict[int, list[Result]] = {}
    for each in results:
        if each.prompt_tokens and each.ttft_ns:
            buckets.setdefault((each.prompt_tokens - 1).bit_length(), []).append(each)
    return tuple(
        Tail(
            f"{(1 << power >> 1) + 1:,}-{1 << power:,}" if power else "1",
            len(group),
            {
                name: ns / NS_PER_MS
                for name, ns in percentiles_of(group, lambda each: each.ttft_ns).items()
            },
        )
        for power, group in sorted(buckets.items())
    )


def _turns(results: Sequence[Result]) -> tuple[Turn, ...]:
    turns: dict[int, dict[str, int]] = {}
    for each in results:
        if each.tiers is None or each.prompt_tokens is None:
            continue
        sums = turns.setdefault(min(each.turn, TURNS_MAX), dict.fromkeys((*TIERS, "computed"), 0))
        for tier, tokens in zip(TIERS, each.tiers, strict=True):
            sums[tier] += tokens
        sums["computed"] += each.prompt_tokens - sum(each.tiers)
    return tuple(
        Turn(f"{turn + 1}" if turn < TURNS_MAX else f"{TURNS_MAX + 1}+", sums)
        for turn, sums in sorted(turns.items())
    )

"""Integer arithmetic the deterministic half rests on: time, sizes, and a random generator.

Must not know: caches, requests, clocks. Nothing here returns a float, reads a clock or uses the
standard library's generators, so every figure built on it is equal on every machine.
Called by: every other package.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import MutableSequence, Sequence
from typing import Final, TypeVar

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
GB: Final = 1_000_000_000  # upstream counts --hicache-size in units of 1e9 bytes (spec 1.1)
PER_MILLION: Final = 1_000_000

_MASK64: Final = (1 << 64) - 1
_FRACTION_BITS: Final = 32
_DECIMAL: Final = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,3}))?")
_DIGITS_MAX: Final = 60  # keeps a hostile number from costing time
_LN2_Q32: Final = 2_977_044_472  # floor(ln(2) * 2**32)

T = TypeVar("T")


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""
    return -(-a // b)


def scaled_decimal(text: str, scale: int) -> int:
    """Value of a decimal number times ``scale``, rounded down, without passing through a float.

    ``scaled_decimal("61.114", NS_PER_S)`` is 61_114_000_000. Raises ValueError when ``text`` is not
    a plain, finite decimal number (an exponent such as ``1e-3`` is accepted).
    """
    match = _DECIMAL.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a decimal number")
    sign, whole, fraction, exponent = match.groups(default="")
    digits, shift = whole + fraction, int(exponent or 0) - len(fraction)
    if not 1 <= len(digits) <= _DIGITS_MAX or abs(shift) > _DIGITS_MAX:
        raise ValueError(f"{text!r} is not a decimal number")
    value = int(sign + digits) * scale
    power: int = 10 ** abs(shift)
    return value * power if shift >= 0 else value // power


def nearest_rank(ordered: Sequence[int], percent: int) -> int:
    """Nearest-rank percentile of an ascending sequence: the value at rank ceil(percent/100 * n).

    An empty sequence has the percentile 0, so that a run of no requests still reports integers.
    """
    if not ordered:
        return 0
    return ordered[max(ceil_div(percent * len(ordered), 100), 1) - 1]


class Random:
    """SplitMix64: 64 bits of state, integers only, the same stream everywhere.

    Constants from Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK64

    def bits64(self) -> int:
        """Next 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK64
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return z ^ (z >> 31)

    def fork(self, label: int) -> Random:
        """Independent stream for one purpose, so that drawing more for one leaves the others alone."""
        return Random(self.bits64() ^ (label * 0xD1342543DE82EF95))

    def below(self, n: int) -> int:
        """Uniform in [0, n), for n > 0. Multiply-shift; its bias is below n / 2**64."""
        assert n > 0, n
        return (self.bits64() * n) >> 64

    def between(self, low: int, high: int) -> int:
        """Uniform in [low, high], both included."""
        return low + self.below(high - low + 1)

    def chance(self, per_million: int) -> bool:
        """True with probability per_million / 1e6."""
        return self.below(PER_MILLION) < per_million

    def exponential(self, mean: int) -> int:
        """Exponential with the given integer mean: the gap before the next event of a Poisson stream."""
        return (mean * _minus_ln_q32(self.bits64() | 1)) >> _FRACTION_BITS

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Fisher-Yates in place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


class Zipf:
    """Ranks 0..n-1, rank k with weight 1 / (k + 1): the popularity curve of documents and prompts."""

    __slots__ = ("_cumulative",)

    def __init__(self, n: int) -> None:
        assert n > 0, n
        total = 0
        self._cumulative: list[int] = []
        for rank in range(n):
            total += 1_000_000_000 // (rank + 1)
            self._cumulative.append(total)

    def draw(self, random: Random) -> int:
        """A rank."""
        return bisect_right(self._cumulative, random.below(self._cumulative[-1]))


def _minus_ln_q32(u: int) -> int:
    """-ln(u / 2**64) with 32 fraction bits: log2 bit by bit through repeated squaring."""
    exponent = u.bit_length() - 1
    mantissa = (u << 63) >> exponent  # in [2**63, 2**64)
    log2_q32 = exponent << _FRACTION_BITS
    for bit in range(_FRACTION_BITS - 1, -1, -1):
        mantissa = (mantissa * mantissa) >> 63
        if mantissa >> 64:
            mantissa >>= 1
            log2_q32 |= 1 << bit
    return (((64 << _FRACTION_BITS) - log2_q32) * _LN2_Q32) >> _FRACTION_BITS

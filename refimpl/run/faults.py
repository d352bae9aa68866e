"""What goes wrong, and when: chances per million, drawn from one seed.

A kind of fault has a stream of its own, so that turning one on leaves the draws of the others as
they were. Must not know: lanes, stores, what a failure looks like to an engine.
Called by: lanes and storage_lanes, the swarm, the command line.
"""

from __future__ import annotations

from typing import Final

from refimpl.config import ConfigError, require, require_choice
from refimpl.units import (
    NS_PER_MS,
    NS_PER_S,
    NS_PER_US,
    PER_MILLION,
    Random,
    scaled_decimal,
)

KINDS: Final = (
    "probe_fail",  # a probe answers 0
    "fetch_fail",  # a storage batch of a fetch brings nothing, and is its last
    "fetch_short",  # a storage batch of a fetch brings its first pages, and is its last
    "vanish",  # a page that a probe found is gone when it is read
    "store_fail",  # a storage batch of a store writes its first pages, and is its last
    "backup_fail",  # a backup copies its first pages alone
    "load_fail",  # the load-back of a request fails
    "open_fail",  # the backend does not open
    "close_fail",  # the backend does not close
    "delay",  # an op, or a storage batch of one, takes that much longer: chance:duration
)

_RANK_STRIDE: Final = 1_000_003  # a prime, so that ranks of neighbouring seeds differ
_UNITS: Final = (("ns", 1), ("us", NS_PER_US), ("ms", NS_PER_MS), ("s", NS_PER_S))


class Faults:
    """The faults of one run. ``delay_ns`` is the length of a delay."""

    def __init__(self, chances: dict[str, int], delay_ns: int = 0, seed: int = 0) -> None:
        self._chances = {kind: chances.get(kind, 0) for kind in KINDS}
        self._delay_ns = delay_ns
        self._seed = seed
        source = Random(seed)
        self._streams = {kind: source.fork(label) for label, kind in enumerate(KINDS)}
        self._sizes = source.fork(len(KINDS))

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Faults:
        """Faults such as ``probe_fail=20000,delay=100000:5ms``: chances per million.

        The empty string is no faults. ConfigError of one line for anything else that isn't that.
        """
        chances: dict[str, int] = {}
        delay_ns = 0
        for part in text.split(",") if text.strip() else []:
            kind, equals, value = part.strip().partition("=")
            require(bool(equals), f"--faults {part.strip()!r} is not kind=chance")
            require_choice("--faults", kind, KINDS)
            require(kind not in chances, f"--faults names {kind} twice")
            if kind == "delay":
                value, colon, duration = value.partition(":")
                require(bool(colon), "--faults delay needs a duration, as in delay=100000:5ms")
                delay_ns = _duration_ns(duration)
            chances[kind] = _chance(kind, value)
        return cls(chances, delay_ns, seed)

    def of_rank(self, rank: int) -> Faults:
        """The same chances, drawn for one rank of an instance; rank 0 has the draws of the instance."""
        return Faults(self._chances, self._delay_ns, self._seed + rank * _RANK_STRIDE)

    def strike(self, kind: str) -> bool:
        """True when a fault of ``kind`` happens now."""
        chance = self._chances[kind]
        return chance > 0 and self._streams[kind].chance(chance)

    def part_of(self, pages: int) -> int:
        """How many of ``pages`` a failure lets through: fewer than all."""
        return self._sizes.below(pages)

    def delay_ns(self) -> int:
        """By how much the op that starts now is late: 0 for most."""
        return self._delay_ns if self.strike("delay") else 0

    def stop(self) -> None:
        """End of the fault phase: from now on nothing fails."""
        self._chances = dict.fromkeys(KINDS, 0)


def _chance(kind: str, text: str) -> int:
    require(
        text.isascii() and text.isdigit() and len(text) <= 7 and int(text) <= PER_MILLION,
        f"--faults {kind}={text} must be a whole number of chances per million, 0 to 1000000",
    )
    return int(text)


def _duration_ns(text: str) -> int:
    for unit, scale in _UNITS:
        number = text.removesuffix(unit)
        if number != text and not number[-1:].isalpha():
            try:
                nanoseconds = scaled_decimal(number, scale)
            except ValueError:
                break
            if nanoseconds < 0:
                break
            return nanoseconds
    raise ConfigError(f"--faults duration {text!r} must be a number with ns, us, ms or s")

"""What goes wrong, when, and on which rank: chances per million, drawn from one seed.

A kind of fault has a stream of its own, so that turning one on leaves the draws of the others as
they were. Must not know: lanes, stores, what a failure looks like to an engine.
Called by: lanes and storage_lanes, virtual_ranks, the swarm, the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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

_FIRST: Final = (
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
_LATER: Final = (
    "probe_short",  # a probe finds the first of the pages that are there
    "slot_less",  # a copy into L2 has one slot less than it was given: its last page is not there
    "die",  # an order is the last that a rank hears; with chance:duration, not before that time
)
KINDS: Final = (*_FIRST, *_LATER)
# The stream of sizes stands where it was before there were later kinds, so that no draw has moved.
_STREAMS: Final = (*_FIRST, "sizes", *_LATER)
_TIMED: Final = ("delay", "die")  # those that may have a duration

_RANK_STRIDE: Final = 1_000_003  # a prime, so that ranks of neighbouring seeds differ
_DURATION_MAX_NS: Final = 86_400 * NS_PER_S  # a day; sums of it stay far below a lane's NEVER
_UNITS: Final = (("ns", 1), ("us", NS_PER_US), ("ms", NS_PER_MS), ("s", NS_PER_S))


@dataclass(frozen=True, slots=True)
class Chances:
    """Chances per million by kind, and the durations of those kinds that have one, in ns."""

    per_million: Mapping[str, int] = field(default_factory=dict)
    durations_ns: Mapping[str, int] = field(default_factory=dict)

    def but(self, own: Chances) -> Chances:
        """These, where ``own`` says nothing else."""
        return Chances(
            {**self.per_million, **own.per_million}, {**self.durations_ns, **own.durations_ns}
        )


class Faults:
    """The faults of one run. ``of_ranks`` are chances that single ranks have beside ``of_all``."""

    def __init__(
        self, of_all: Chances, seed: int = 0, of_ranks: Mapping[int, Chances] | None = None
    ) -> None:
        self._of_all, self._seed = of_all, seed
        self._of_ranks = of_ranks or {}
        self._chances = {kind: of_all.per_million.get(kind, 0) for kind in KINDS}
        self._durations_ns = of_all.durations_ns
        source = Random(seed)
        self._streams = {name: source.fork(label) for label, name in enumerate(_STREAMS)}
        self._sizes = self._streams["sizes"]

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Faults:
        """Faults such as ``probe_fail=20000,rank1.delay=100000:5ms``: chances per million.

        The empty string is no faults. ConfigError of one line for anything else that isn't that.
        """
        said: dict[int | None, Chances] = {}
        for part in text.split(",") if text.strip() else []:
            name, equals, value = part.strip().partition("=")
            require(bool(equals), f"--faults {part.strip()!r} is not kind=chance")
            rank, kind = _rank_and_kind(name)
            before = said.get(rank, Chances())
            require(kind not in before.per_million, f"--faults names {name} twice")
            said[rank] = before.but(_chances_of(kind, value))
        of_all = said.pop(None, Chances())
        return cls(of_all, seed, {rank: own for rank, own in said.items() if rank is not None})

    def of_rank(self, rank: int) -> Faults:
        """Drawn for one rank of an instance, with its own chances; rank 0 has the instance's draws."""
        own = self._of_ranks.get(rank, Chances())
        return Faults(self._of_all.but(own), self._seed + rank * _RANK_STRIDE)

    @property
    def has_any(self) -> bool:
        """Something may go wrong."""
        return any(any(chances.per_million.values()) for chances in self._all())

    def check_ranks(self, size: int) -> None:
        """Raise ConfigError for what can't be with so many ranks."""
        for rank in self._of_ranks:
            ranks = f"ranks 0 to {size - 1}" if size > 1 else "rank 0 alone"
            require(rank < size, f"--faults rank{rank}: --tp-size {size} has {ranks}")
        may_die = any(chances.per_million.get("die") for chances in self._all())
        require(
            size > 1 or not may_die,
            "--faults die needs --tp-size 2 or more: it is about the ranks that are left",
        )

    def _all(self) -> Iterator[Chances]:
        yield self._of_all
        yield from self._of_ranks.values()

    def strike(self, kind: str) -> bool:
        """True when a fault of ``kind`` happens now."""
        chance = self._chances[kind]
        return chance > 0 and self._streams[kind].chance(chance)

    def part_of(self, pages: int) -> int:
        """How many of ``pages`` a failure lets through: fewer than all."""
        return self._sizes.below(pages)

    def delay_ns(self) -> int:
        """By how much the op that starts now is late: 0 for most."""
        return self._durations_ns.get("delay", 0) if self.strike("delay") else 0

    def dies(self, now: int) -> bool:
        """True when a rank does not survive the order that it is given at ``now``, in ns."""
        return now >= self._durations_ns.get("die", 0) and self.strike("die")

    def stop(self) -> None:
        """End of the fault phase: from now on nothing fails."""
        self._chances = dict.fromkeys(KINDS, 0)


def _rank_and_kind(name: str) -> tuple[int | None, str]:
    """``rank1.vanish`` is of one rank, ``vanish`` of all."""
    before, dot, kind = name.rpartition(".")
    require_choice("--faults", kind, KINDS)
    if not dot:
        return None, kind
    number = before.removeprefix("rank")
    is_rank = number != before and number.isascii() and number.isdigit() and len(number) <= 4
    require(is_rank, f"--faults {name}: {before!r} is no rank, as rank1 is in rank1.{kind}")
    return int(number), kind


def _chances_of(kind: str, value: str) -> Chances:
    chance, colon, duration = value.partition(":") if kind in _TIMED else (value, "", "")
    require(
        bool(colon) or kind != "delay", "--faults delay needs a duration, as in delay=100000:5ms"
    )
    durations = {kind: _duration_ns(duration)} if colon else {}
    return Chances({kind: _chance(kind, chance)}, durations)


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
            if not 0 <= nanoseconds <= _DURATION_MAX_NS:
                break
            return nanoseconds
    raise ConfigError(
        f"--faults duration {text[:20]!r} must be a number with ns, us, ms or s,"
        " from 0 to a day (86400s)"
    )

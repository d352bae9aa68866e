"""Which worker serves a request: the router's policies, without a network.

Load is the number of requests in flight that this router sent to a worker. The index of the
cache-aware policy holds what was sent where, not what workers really keep.
Must not know: HTTP, engines, health checks; it is told who is there.
Called by: serve (the router process) and the simulated world.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from refimpl.config import require, require_choice
from refimpl.keys import PageKey
from refimpl.units import Random

POLICIES: Final = (
    "cache_aware",
    "round_robin",
    "random",
    "shortest_queue",
    "power_of_two",
    "consistent_hashing",
)

_RING_POINTS: Final = 64  # of one worker; evens out its share to within about an eighth


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Policy and its limits. Defaults are upstream's command line (spec 9.1), in whole numbers."""

    policy: str = "cache_aware"
    cache_threshold_percent: int = 30  # a match must cover more than this share of the prompt
    balance_abs: int = 64  # a worker this far above the least loaded is a candidate for diverting
    balance_rel_percent: int = 150  # and only if above this share of the least loaded's load
    index_pages_max: int = (
        1 << 18
    )  # of one worker; upstream: 2**26 characters, 4 a token, 64 a page
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("--policy", self.policy, POLICIES)
        require(
            0 <= self.cache_threshold_percent <= 100, "--cache-threshold must be between 0 and 1"
        )
        require(self.balance_abs >= 0, "--balance-abs-threshold must not be negative")
        require(self.balance_rel_percent >= 100, "--balance-rel-threshold must be at least 1")
        require(self.index_pages_max >= 1, "--max-tree-size must hold at least one page")


class Router:
    """Chooses among ``workers`` numbered workers. ConfigError when there are none."""

    def __init__(self, workers: int, config: RouterConfig | None = None) -> None:
        require(workers >= 1, "a router needs at least one worker")
        self.config = config if config is not None else RouterConfig()
        self.in_flight = [0] * workers
        self._sent = [0] * workers  # in all; breaks ties of load, so that idle workers take turns
        self._present = list(range(workers))  # ascending
        self._turn = 0
        self._random = Random(self.config.seed)
        self._indexes = [_Index(self.config.index_pages_max) for _ in range(workers)]
        self._ring = _ring(workers)
        self._choose = {
            "cache_aware": self._choose_cache_aware,
            "round_robin": self._choose_round_robin,
            "random": self._choose_random,
            "shortest_queue": self._choose_shortest_queue,
            "power_of_two": self._choose_power_of_two,
            "consistent_hashing": self._choose_consistent_hashing,
        }[self.config.policy]

    def choose(self, keys: Sequence[PageKey], session: int = 0) -> int:
        """The worker for a request with these pages; call ``started`` when it is sent.

        Some worker must be present; asked for with none is an AssertionError.
        """
        assert self._present, "no worker is present"
        worker = self._choose(keys, session)
        self._sent[worker] += 1
        return worker

    def told(self, worker: int, keys: Sequence[PageKey]) -> None:
        """Somebody else chose ``worker`` for these pages, and it will have them; then ``started``."""
        self._sent[worker] += 1
        self._indexes[worker].insert(keys)

    def started(self, worker: int) -> None:
        """A request was sent to ``worker``."""
        self.in_flight[worker] += 1

    def finished(self, worker: int) -> None:
        """A request of ``worker`` is over, well or not."""
        assert self.in_flight[worker] > 0, f"worker {worker} has nothing in flight"
        self.in_flight[worker] -= 1

    @property
    def has_workers(self) -> bool:
        """Somebody is there to be chosen."""
        return bool(self._present)

    def is_present(self, worker: int) -> bool:
        """``worker`` can be chosen."""
        return worker in self._present

    def left(self, worker: int) -> None:
        """``worker`` is gone, and what it had cached with it. What it has in flight still ends."""
        self._present.remove(worker)
        self._indexes[worker].clear()

    def joined(self, worker: int) -> None:
        """``worker`` is back, with an empty cache."""
        assert worker not in self._present, f"worker {worker} is present"
        self._present = sorted([*self._present, worker])

    def indexed_pages(self, worker: int) -> int:
        """Pages that the index remembers of ``worker``."""
        return len(self._indexes[worker])

    # ---- policies -------------------------------------------------------------------------------

    def _choose_cache_aware(self, keys: Sequence[PageKey], session: int) -> int:
        """Longest known prefix among the workers that are not overloaded, else the least loaded.

        Each worker is judged alone: one that is far above the least loaded loses its affinity, the
        others keep theirs. A short match counts as none, so that one popular beginning does not
        draw everything to where it was seen first.
        """
        del session
        least = min(self.in_flight[worker] for worker in self._present)
        matches = [
            (
                self._indexes[worker].match(keys),
                -self.in_flight[worker],
                -self._sent[worker],
                -worker,
            )
            for worker in self._present
            if not self._is_overloaded(worker, least)
        ]
        pages, _, _, negative = max(matches)
        is_hit = pages * 100 > len(keys) * self.config.cache_threshold_percent
        worker = -negative if is_hit else self._least_loaded(self._present)
        self._indexes[worker].insert(keys)
        return worker

    def _is_overloaded(self, worker: int, least: int) -> bool:
        load, config = self.in_flight[worker], self.config
        return load - least > config.balance_abs and load * 100 > least * config.balance_rel_percent

    def _choose_round_robin(self, keys: Sequence[PageKey], session: int) -> int:
        del keys, session
        self._turn += 1
        return self._present[(self._turn - 1) % len(self._present)]

    def _choose_random(self, keys: Sequence[PageKey], session: int) -> int:
        del keys, session
        return self._present[self._random.below(len(self._present))]

    def _choose_shortest_queue(self, keys: Sequence[PageKey], session: int) -> int:
        del keys, session
        return self._least_loaded(self._present)

    def _choose_power_of_two(self, keys: Sequence[PageKey], session: int) -> int:
        """The less loaded of two different workers drawn at random; the first on a tie."""
        del keys, session
        count = len(self._present)
        if count == 1:
            return self._present[0]
        first = self._random.below(count)
        second = (first + 1 + self._random.below(count - 1)) % count
        pair = (self._present[first], self._present[second])
        return min(pair, key=self.in_flight.__getitem__)

    def _choose_consistent_hashing(self, keys: Sequence[PageKey], session: int) -> int:
        """The next present worker on the ring: when one leaves, only its own sessions move."""
        del keys
        start = bisect_right(self._ring, (Random(session).bits64(), -1))
        for step in range(len(self._ring)):
            worker = self._ring[(start + step) % len(self._ring)][1]
            if worker in self._present:
                return worker
        raise AssertionError("every present worker has points on the ring")

    def _least_loaded(self, workers: Sequence[int]) -> int:
        return min(workers, key=lambda worker: (self.in_flight[worker], self._sent[worker], worker))


class _Index:
    """Pages that were sent to one worker, the least recently used first.

    A key contains its prefix, so no tree is needed. A prompt is touched from its last page to its
    first: a page is never colder than the pages after it, so dropping the coldest keeps the index
    closed under prefixes, and the length of a match can be bisected.
    """

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._keys: OrderedDict[PageKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[PageKey]) -> int:
        """Leading pages that are known."""
        if not keys or keys[0] not in self._keys:
            return 0
        return bisect_left(keys, True, key=lambda key: key not in self._keys)

    def insert(self, keys: Sequence[PageKey]) -> None:
        """Remember a prompt, or as much of its beginning as fits at all."""
        known = self._keys
        for key in reversed(keys[: self._pages_max]):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._pages_max:
            known.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()


def _ring(workers: int) -> list[tuple[int, int]]:
    points = []
    for worker in range(workers):
        # Worker numbers are small and so are session ids: an offset keeps their streams apart.
        stream = Random((worker + 1) << 32)
        points.extend([(stream.bits64(), worker) for _ in range(_RING_POINTS)])
    return sorted(points)

"""What a scenario draws: tokens, arrival times and streams, each named by its purpose and place.

A stream depends on the seed, a purpose and indexes (conversation, turn) and on nothing drawn
before it. So one more client, or a longer answer, leaves every other draw as it was, and a longer
prompt begins with the shorter one.
Must not know: scenarios, requests. Called by: the scenario families.
"""

from __future__ import annotations

import hashlib
from array import array
from enum import IntEnum
from itertools import accumulate
from typing import Final

from refimpl.units import NS_PER_S, PER_MILLION, Random

_WORD_BYTES: Final = 4


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every golden: append, never renumber."""

    ARRIVAL = 1
    SYSTEM = 2
    QUESTION = 3
    OUTPUT = 4
    DOCUMENT = 5
    ORDER = 6
    PICK = 7
    LENGTH = 8


class Draws:
    """All randomness of one scenario. ``vocabulary`` is at most 2**32 - 1."""

    __slots__ = ("_seed", "_vocabulary")

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._seed = seed
        self._vocabulary = vocabulary

    def stream(self, purpose: Purpose, *indexes: int) -> Random:
        """The random stream of one purpose at one place."""
        stream = Random(self._seed).fork(purpose)
        for index in indexes:
            stream = stream.fork(index)
        return stream

    def tokens(self, purpose: Purpose, count: int, *indexes: int) -> array[int]:
        """``count`` tokens below the vocabulary, the same for the same purpose and indexes.

        The stream gives the key and SHAKE-128 spreads it, because a Python-level draw for each
        token takes longer than the simulation of the request. ``(word * vocabulary) >> 32`` is
        taken of all words at once: as one integer with a 64-bit lane a word, whose products can't
        reach the next lane.
        """
        key = self.stream(purpose, *indexes).bits64().to_bytes(8, "little")
        words = array("I", hashlib.shake_128(key).digest(_WORD_BYTES * count))
        lane_bytes = 2 * _WORD_BYTES * count
        lanes = array("I", bytes(lane_bytes))
        lanes[::2] = words
        products = int.from_bytes(lanes.tobytes(), "little") * self._vocabulary
        return array("I", products.to_bytes(lane_bytes, "little"))[1::2]

    def arrivals(self, count: int, rate_per_million: int) -> list[int]:
        """``count`` ascending times in ns of a Poisson stream; all 0 for the rate 0.

        ``rate_per_million`` counts arrivals in a million seconds.
        """
        if rate_per_million == 0:
            return [0] * count
        mean_ns = NS_PER_S * PER_MILLION // rate_per_million
        stream = self.stream(Purpose.ARRIVAL)
        return list(accumulate(stream.exponential(mean_ns) for _ in range(count)))

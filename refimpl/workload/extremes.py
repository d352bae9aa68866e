"""The two scenario families with known answers: nothing is shared, everything is shared.

They audit a cache and its counters: 0 hits for one, the ceiling for the other.
Must not know: caches, how scenario text is parsed. Called by: scenario.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import ClassVar

from refimpl.config import require
from refimpl.keys import TokenPrompt
from refimpl.units import NS_PER_MS
from refimpl.workload.draws import Draws, Purpose
from refimpl.workload.family import Family, count, rate
from refimpl.workload.request import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AllUnique(Family):
    """No two prompts share a page: any hit is a fault."""

    name: ClassVar[str] = "all_unique"
    grows_with: ClassVar[tuple[str, ...]] = ("requests", "request_length")

    requests: int = count(200, "requests")
    request_length: int = count(2048, "tokens of a prompt")
    rate: int = rate(16, "requests a second, Poisson; 0: all at once")

    def request_count(self) -> int:
        """As given."""
        return self.requests

    def token_count(self) -> int:
        """All prompts have the same length."""
        return self.requests * (self.request_length + self.output_length)

    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """Requests whose first page spells the number of the request.

        A page key contains all pages before it, so prompts that differ in their first page share
        none. Random tokens alone would make that likely, not certain.
        """
        digits = _digits_needed(self.requests, self.vocab)
        require(
            digits <= min(page_size, self.request_length),
            f"all_unique: vocab={self.vocab} is too small for requests={self.requests} to differ"
            f" in one page of {page_size} tokens and in request_length={self.request_length};"
            " raise vocab",
        )
        arrivals = draws.arrivals(self.requests, self.rate)
        requests = []
        for index in range(self.requests):
            tokens = _number_tokens(index, digits, self.vocab)
            tokens += draws.tokens(Purpose.QUESTION, self.request_length, index)
            script = draws.tokens(Purpose.OUTPUT, self.output_length, index)
            prompt = TokenPrompt(tokens[: self.request_length], script)
            requests.append(
                RequestSpec(
                    rid=index + 1,
                    prompt=prompt,
                    output_tokens=len(script),
                    arrival_ns=arrivals[index],
                    session=index,
                )
            )
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class AllEqual(Family):
    """One prompt again and again: after the first request all but its tail hits."""

    name: ClassVar[str] = "all_equal"
    grows_with: ClassVar[tuple[str, ...]] = ("requests", "request_length")

    requests: int = count(200, "requests")
    request_length: int = count(2048, "tokens of the prompt")
    gap_ms: int = count(1000, "ms from one request to the next", least=0)

    def request_count(self) -> int:
        """As given."""
        return self.requests

    def token_count(self) -> int:
        """All prompts have the same length."""
        return self.requests * (self.request_length + self.output_length)

    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """Requests that share one prompt and one script."""
        del page_size
        prompt = TokenPrompt(
            draws.tokens(Purpose.QUESTION, self.request_length),
            draws.tokens(Purpose.OUTPUT, self.output_length),
        )
        return [
            RequestSpec(
                rid=index + 1,
                prompt=prompt,
                output_tokens=self.output_length,
                arrival_ns=index * self.gap_ms * NS_PER_MS,
                session=index,
            )
            for index in range(self.requests)
        ]


def _digits_needed(numbers: int, base: int) -> int:
    """Digits that ``numbers`` different numbers need in ``base``."""
    digits, reach = 1, base
    while reach < numbers:
        digits, reach = digits + 1, reach * base
    return digits


def _number_tokens(number: int, digits: int, base: int) -> array[int]:
    """``number`` as ``digits`` tokens below ``base``, the lowest digit first."""
    tokens = array("I")
    for _ in range(digits):
        number, digit = divmod(number, base)
        tokens.append(digit)
    return tokens

"""How a request wants its tokens chosen, and what is told of the choice.

Must not know: tensors, models, batches. Called by: sampling, hands, the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from refimpl.config import require

TOP_LOGPROBS_MAX: Final = 20  # as OpenAI


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen. Temperature 0 is greedy, whatever the rest says.

    ``top_k`` 0 keeps all tokens, ``top_p`` 1 keeps all of their mass. Raises ConfigError on values
    out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()  # beside the model's own
    ignores_eos: bool = False  # the model's own do not end the answer
    logprobs: bool = False  # of the chosen tokens are wanted
    top_logprobs: int = 0  # and of so many of the likeliest

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature {self.temperature} must not be negative")
        require(0 < self.top_p <= 1, f"top_p {self.top_p} must be above 0 and at most 1")
        require(self.top_k >= 0, f"top_k {self.top_k} must not be negative")
        require(
            0 <= self.top_logprobs <= TOP_LOGPROBS_MAX,
            f"top_logprobs {self.top_logprobs} must be 0 to {TOP_LOGPROBS_MAX}",
        )


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural logarithm of the probability of a chosen token, and the likeliest (token, logprob).

    Of the model's own distribution: temperature, top_k and top_p are not in it (as upstream).
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


GREEDY: Final = Sampling()

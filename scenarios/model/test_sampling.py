"""Which token comes next is a matter of logits, seed and position."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")

import torch

from refimpl.config import ConfigError
from refimpl.model.choice import GREEDY, Sampling
from refimpl.model.sampling import choose

LOGITS = torch.tensor([0.5, 2.0, -1.0, 2.0, 1.0])
DRAWS = 4000


def drawn(sampling: Sampling) -> Counter[int]:
    return Counter(choose(LOGITS, sampling, position) for position in range(DRAWS))


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert choose(LOGITS, GREEDY, position=7) == 1
    assert choose(LOGITS.flip(0), GREEDY, position=7) == 1


def test_seed_and_position_settle_the_token() -> None:
    def sequence(seed: int) -> list[int]:
        return [choose(LOGITS, Sampling(1.0, seed=seed), position) for position in range(50)]

    assert sequence(1) == sequence(1)
    assert sequence(1) != sequence(2)
    assert len(set(sequence(1))) > 1


def test_tokens_come_as_often_as_their_share_says() -> None:
    counts = drawn(Sampling(temperature=0.8))
    shares = torch.softmax(LOGITS / 0.8, -1).tolist()
    assert all(abs(counts[token] / DRAWS - share) < 0.03 for token, share in enumerate(shares))


def test_top_k_keeps_the_likeliest_and_of_equal_ones_the_first() -> None:
    assert set(drawn(Sampling(1.0, top_k=1))) == {1}
    assert set(drawn(Sampling(1.0, top_k=3))) == {1, 3, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    assert set(drawn(Sampling(1.0, top_p=0.01))) == {1}
    assert set(drawn(Sampling(1.0, top_p=0.5))) == {1, 3}
    assert set(drawn(Sampling(1.0, top_p=1.0))) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]

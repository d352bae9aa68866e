"""Integer arithmetic: decimals, percentiles, and the random generator with its samplers."""

from __future__ import annotations

import math
from decimal import ROUND_FLOOR, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.units import NS_PER_S, Random, Zipf, ceil_div, nearest_rank, scaled_decimal

DRAWS = 20_000


@given(st.integers(), st.integers(min_value=1))
def test_ceil_div_is_the_smallest_integer_not_below_the_quotient(a: int, b: int) -> None:
    quotient = ceil_div(a, b)
    assert (quotient - 1) * b < a <= quotient * b


def test_a_decimal_second_becomes_nanoseconds() -> None:
    assert scaled_decimal("61.114", NS_PER_S) == 61_114_000_000


def test_a_decimal_that_no_float_can_hold_keeps_every_digit() -> None:
    assert scaled_decimal("9007199254740993.000000001", NS_PER_S) == 9007199254740993000000001


@given(st.decimals(allow_nan=False, allow_infinity=False, places=9), st.integers(1, 10**9))
def test_a_decimal_is_scaled_as_exact_arithmetic_scales_it(value: Decimal, scale: int) -> None:
    if len(value.as_tuple().digits) > 50:
        return
    numerator, denominator = value.as_integer_ratio()
    assert scaled_decimal(str(value), scale) == numerator * scale // denominator


def test_a_negative_decimal_rounds_down() -> None:
    expected = int(Decimal("-0.5").to_integral_value(ROUND_FLOOR))
    assert scaled_decimal("-0.5", 1) == expected == -1


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1), ("1E3", 1_000_000), ("+2", 2000), (".5", 500), ("5.", 5000), (" 7 ", 7000)],
)
def test_a_decimal_may_have_an_exponent_a_sign_or_one_empty_side(text: str, value: int) -> None:
    assert scaled_decimal(text, 1000) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ".", "-", "e5", "1e", "--5", "+-1", "1_0", "1e1_0", "1 2", "0x10", "nan", "inf"),
        *("1,5", "\u0663", "1e999", "9" * 61, "9" * 100_000 + "x"),
    ],
    ids=lambda text: repr(text[:8]),
)
def test_what_is_no_plain_decimal_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a decimal number"):
        scaled_decimal(text, 1)


def test_nearest_rank_of_ten_values_takes_the_rank_rounded_up() -> None:
    values = list(range(1, 11))
    assert [nearest_rank(values, p) for p in (0, 1, 50, 51, 90, 99, 100)] == [1, 1, 5, 6, 9, 10, 10]


def test_nearest_rank_of_nothing_is_zero() -> None:
    assert nearest_rank([], 99) == 0


def test_the_generator_gives_the_published_splitmix64_stream() -> None:
    stream = Random(1234567)
    assert [stream.bits64() for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_the_first_value_of_seed_zero_is_the_published_one() -> None:
    assert Random(0).bits64() == 0xE220A8397B1DCDAF


def test_forks_with_different_labels_are_different_streams() -> None:
    streams = [Random(7).fork(label) for label in range(100)]
    assert len({stream.bits64() for stream in streams}) == 100


def test_drawing_from_a_fork_leaves_its_parent_alone() -> None:
    left, right = Random(7), Random(7)
    left.fork(1)
    fork = right.fork(1)
    for _ in range(10):
        fork.bits64()
    assert left.bits64() == right.bits64()


@given(st.integers(), st.integers(1, 2**64))
def test_below_stays_below(seed: int, n: int) -> None:
    assert 0 <= Random(seed).below(n) < n


@given(st.integers(), st.integers(-(10**6), 10**6), st.integers(0, 10**6))
def test_between_includes_both_ends_and_nothing_else(seed: int, low: int, width: int) -> None:
    assert low <= Random(seed).between(low, low + width) <= low + width


def test_between_reaches_both_ends() -> None:
    stream = Random(3)
    drawn = sorted({stream.between(4, 6) for _ in range(100)})
    assert drawn == [4, 5, 6]


def test_chance_is_never_at_zero_and_always_at_a_million() -> None:
    stream = Random(5)
    assert not any(stream.chance(0) for _ in range(1000))
    assert all(stream.chance(1_000_000) for _ in range(1000))


def test_exponential_gaps_have_the_mean_and_the_median_of_their_law() -> None:
    stream = Random(11)
    gaps = sorted(stream.exponential(1_000_000) for _ in range(DRAWS))
    assert abs(sum(gaps) // DRAWS - 1_000_000) < 20_000
    assert abs(gaps[DRAWS // 2] - 693_147) < 20_000
    assert gaps[0] >= 0


@pytest.mark.parametrize("seed", range(20))
def test_an_exponential_draw_is_minus_the_logarithm_of_the_uniform_one(seed: int) -> None:
    uniform = (Random(seed).bits64() | 1) / 2**64
    expected = -math.log(uniform) * 10**9
    assert abs(Random(seed).exponential(10**9) - expected) < 10


@given(st.integers(), st.lists(st.integers(), max_size=50))
def test_a_shuffle_keeps_the_items(seed: int, items: list[int]) -> None:
    shuffled = list(items)
    Random(seed).shuffle(shuffled)
    assert sorted(shuffled) == sorted(items)


def test_every_order_of_three_comes_up_about_equally_often() -> None:
    stream, seen = Random(13), dict.fromkeys(("abc", "acb", "bac", "bca", "cab", "cba"), 0)
    for _ in range(6000):
        letters = list("abc")
        stream.shuffle(letters)
        seen["".join(letters)] += 1
    assert all(850 < times < 1150 for times in seen.values())


def test_rank_k_of_zipf_is_drawn_one_kth_as_often_as_the_first() -> None:
    stream, zipf, seen = Random(17), Zipf(4), [0, 0, 0, 0]
    for _ in range(DRAWS):
        seen[zipf.draw(stream)] += 1
    for rank, times in enumerate(seen):
        assert abs(times * 25 * (rank + 1) - DRAWS * 12) < DRAWS * (rank + 1)  # 1/H(4) = 12/25


def test_zipf_of_one_rank_always_draws_it() -> None:
    assert Zipf(1).draw(Random(1)) == 0

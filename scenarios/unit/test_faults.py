"""Facts of injected faults: how they are written, and that their draws repeat."""

from __future__ import annotations

import pytest

from refimpl.config import ConfigError
from refimpl.run.faults import KINDS, Faults
from refimpl.units import NS_PER_MS


def draws(faults: Faults, kind: str, count: int = 2000) -> list[bool]:
    return [faults.strike(kind) for _ in range(count)]


def test_no_text_is_no_faults() -> None:
    faults = Faults.parse("")
    assert not any(faults.strike(kind) for kind in KINDS)
    assert faults.delay_ns() == 0


def test_a_chance_is_counted_in_millionths() -> None:
    struck = sum(draws(Faults.parse("fetch_fail=50000", seed=1), "fetch_fail", 20_000))
    assert 800 < struck < 1200


def test_certain_faults_always_strike() -> None:
    assert all(draws(Faults.parse("vanish=1000000"), "vanish"))


def test_one_seed_gives_one_sequence_and_another_seed_another() -> None:
    one, same, other = (Faults.parse("vanish=500000", seed) for seed in (7, 7, 8))
    sequence = draws(one, "vanish")
    assert sequence == draws(same, "vanish")
    assert sequence != draws(other, "vanish")


def test_a_further_kind_leaves_the_draws_of_the_first_alone() -> None:
    alone = Faults.parse("probe_fail=300000", seed=3)
    both = Faults.parse("probe_fail=300000,vanish=300000", seed=3)
    sequence = []
    for _ in range(500):
        sequence.append(both.strike("probe_fail"))
        both.strike("vanish")
    assert sequence == draws(alone, "probe_fail", 500)


def test_two_kinds_with_one_chance_strike_at_different_times() -> None:
    faults = Faults.parse("probe_fail=500000,vanish=500000", seed=3)
    assert draws(faults, "probe_fail") != draws(faults, "vanish")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5ms", 5 * NS_PER_MS), ("1.5us", 1500), ("20ns", 20), ("2s", 2_000_000_000)],
)
def test_a_delay_has_a_duration(text: str, expected: int) -> None:
    assert Faults.parse(f"delay=1000000:{text}").delay_ns() == expected


def test_a_delay_strikes_by_chance() -> None:
    faults = Faults.parse("delay=500000:5ms", seed=2)
    assert {faults.delay_ns() for _ in range(100)} == {0, 5 * NS_PER_MS}


def test_after_the_fault_phase_nothing_fails() -> None:
    faults = Faults.parse("load_fail=1000000,delay=1000000:1s")
    assert faults.strike("load_fail")
    faults.stop()
    assert not faults.strike("load_fail")
    assert faults.delay_ns() == 0


def test_a_failure_lets_fewer_pages_through_than_all() -> None:
    faults = Faults.parse("", seed=5)
    assert {faults.part_of(3) for _ in range(200)} == {0, 1, 2}


@pytest.mark.parametrize(
    "text",
    [
        "probe_fail",
        "probe_fail=",
        "probe_fail=1000001",
        "probe_fail=-1",
        "probe_fail=0.5",
        "probe_fail=" + "9" * 6000,
        "probe_fail=1,probe_fail=2",
        "probe_fail=1,,vanish=1",
        "flood=3",
        "delay=3",
        "delay=3:",
        "delay=3:5",
        "delay=3:5m",
        "delay=3:ms",
        "delay=3:-5ms",
        "delay=3:5xms",
    ],
)
def test_wrong_text_is_an_error_of_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Faults.parse(text)
    assert "--faults" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_kind_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="probe_fail, fetch_fail, fetch_short"):
        Faults.parse("flood=3")

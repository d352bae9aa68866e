"""Facts of injected faults: how they are written, and that their draws repeat."""

from __future__ import annotations

import pytest

from refimpl.config import ConfigError
from refimpl.run.faults import KINDS, Faults
from refimpl.units import NS_PER_MS


def draws(faults: Faults, kind: str, count: int = 2000) -> list[bool]:
    return [faults.strike(kind) for _ in range(count)]


@pytest.mark.parametrize("kind", ["delay", "die"])
def test_a_duration_is_a_day_at_most(kind: str) -> None:
    assert Faults.parse(f"{kind}=1:86400s").has_any
    for longer in ("86401s", "9223372036s", "9" * 5000 + "s"):
        with pytest.raises(ConfigError, match=r"must be .* from 0 to a day \(86400s\)$") as refused:
            Faults.parse(f"{kind}=1:{longer}")
        assert len(str(refused.value)) < 200


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
        "die=3:5m",
        "vanish=3:5ms",
        "rank.vanish=1",
        "rank1x.vanish=1",
        "rank-1.vanish=1",
        "rank1.flood=1",
        "rank1=1",
        ".vanish=1",
        "rank1.rank2.vanish=1",
        "rank1.vanish=1,rank1.vanish=2",
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


# ---- ranks ---------------------------------------------------------------------------------------


def test_a_kind_that_names_a_rank_is_of_that_rank_alone() -> None:
    faults = Faults.parse("rank1.vanish=1000000,rank2.delay=1000000:5ms,vanish=0")
    zero, one, two = (faults.of_rank(rank) for rank in range(3))
    assert [each.strike("vanish") for each in (zero, one, two)] == [False, True, False]
    assert [each.delay_ns() for each in (zero, one, two)] == [0, 0, 5 * NS_PER_MS]


def test_a_rank_has_the_chances_of_all_where_it_has_none_of_its_own() -> None:
    faults = Faults.parse("vanish=1000000,delay=1000000:1ms,rank1.vanish=0,rank1.delay=1000000:3ms")
    assert not faults.of_rank(1).strike("vanish")
    assert faults.of_rank(0).strike("vanish")
    assert [faults.of_rank(rank).delay_ns() for rank in (0, 1)] == [NS_PER_MS, 3 * NS_PER_MS]


def test_ranks_draw_apart_and_the_first_draws_as_the_instance_does() -> None:
    faults = Faults.parse("vanish=500000", seed=3)
    assert draws(faults.of_rank(0), "vanish") == draws(faults, "vanish")
    assert draws(faults.of_rank(0), "vanish") != draws(faults.of_rank(1), "vanish")


def test_a_rank_dies_of_an_order_and_not_before_its_time() -> None:
    faults = Faults.parse("die=1000000:2s")
    assert [faults.dies(now) for now in (0, 1_999_999_999, 2_000_000_000)] == [False, False, True]
    assert Faults.parse("die=1000000").dies(0)


@pytest.mark.parametrize(
    ("text", "size", "word"),
    [
        ("rank2.vanish=1", 2, "ranks 0 to 1"),
        ("rank1.vanish=1", 1, "rank 0 alone"),
        ("die=1", 1, "--tp-size 2 or more"),
        ("rank0.die=1", 1, "--tp-size 2 or more"),
    ],
)
def test_what_can_not_be_with_so_many_ranks_is_refused(text: str, size: int, word: str) -> None:
    faults = Faults.parse(text)
    with pytest.raises(ConfigError, match=word):
        faults.check_ranks(size)
    faults.check_ranks(3)


def test_later_kinds_have_moved_no_draw_of_the_first() -> None:
    """Else every run with faults, and every golden of one, would be another than it was."""
    faults = Faults.parse("probe_fail=500000,delay=500000:1ms", seed=1)
    assert "".join("01"[strike] for strike in draws(faults, "probe_fail", 16)) == "1010100111001001"
    assert "".join("01"[strike] for strike in draws(faults, "delay", 16)) == "0101010001010011"
    assert [faults.part_of(100) for _ in range(8)] == [79, 24, 70, 22, 32, 55, 40, 45]

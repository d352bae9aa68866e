"""A load test whose figures would mislead says so and fails."""

from __future__ import annotations

from pathlib import Path
from threading import Timer
from typing import Any, cast

import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")

from perf._director import Director
from perf._monitor import CPU_PERCENT_MAX, complaints, total
from perf._options import LoadOptions
from scenarios.perf import fixture_server as server
from scenarios.perf.load import Load, chats, load

pytestmark = pytest.mark.live

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def test_a_generator_that_can_not_keep_up_fails_its_run(tmp_path: Path) -> None:
    with server.answering(lambda _: server.chat(gap_s=0.003)) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(500), "--lag-limit-ms", "1")
    assert set(run.errors()) == {""}
    assert "this run is not valid" in run.out
    assert "requests were sent more than 1 ms after they were due" in run.out
    assert run.code == 1


def test_lateness_is_judged_by_its_share_and_a_busy_cpu_is_told_of() -> None:
    calm: dict[str, int] = {
        "sent": 100, "late": 1, "lag_max_ns": 60 * NS_PER_MS, "watched_ns": NS_PER_S,
        "stalled_ns": NS_PER_S // 100, "stall_max_ns": 10 * NS_PER_MS, "cpu_percent_max": 20,
    }  # fmt: skip
    limit = 50 * NS_PER_MS
    assert complaints(calm, limit) == []
    assert len(complaints(calm | {"late": 2}, limit)) == 1
    assert len(complaints(calm | {"stalled_ns": NS_PER_S // 50}, limit)) == 1
    both = total([calm, calm | {"cpu_percent_max": CPU_PERCENT_MAX + 1, "late": 5}])
    assert (both["sent"], both["late"]) == (200, 6)
    assert both["cpu_percent_max"] == CPU_PERCENT_MAX + 1
    assert warned(calm) == []
    (warning,) = warned(both)
    assert warning.startswith("a process of the load generator used 91 % of a CPU")


def warned(health: dict[str, int]) -> list[str]:
    director = Director(cast(LoadOptions, None), {})  # warnings depend on no option
    director.ended("local", health)
    return director.warnings()


def paused(folder: Path, loop: str) -> tuple[Load, int]:
    """A run against a server that holds all answers back for its first second, and asks after it."""
    seconds = 1.0
    with server.answering(lambda _: server.held) as fixture:

        def answers(number: int) -> server.Answer:
            if number == 0:
                Timer(seconds, fixture.resumed.set).start()
            return server.held

        fixture.answers = answers
        run = load(folder, "--host", fixture.url, *chats(60, rate=30), "--loop", loop)
        during = sum(at < fixture.came_ns[0] + NS_PER_S for at in fixture.came_ns)
    return run, during


def test_an_open_loop_asks_on_while_the_server_pauses_and_shows_the_pause(tmp_path: Path) -> None:
    run, during = paused(tmp_path, "open")
    assert len(run.rows) == 60
    assert run.code == 0, run.out
    assert during >= 15  # of 30 a second
    waits = sorted(row["first_token_ns"] - row["intended_ns"] for row in run.rows)
    assert waits[-1] >= 900 * NS_PER_MS
    assert waits[0] < 500 * NS_PER_MS  # those after the pause are served at once
    assert "Open loop" in run.out


def test_a_closed_loop_stops_asking_and_its_figures_are_labelled(tmp_path: Path) -> None:
    run, during = paused(tmp_path, "closed")
    assert len(run.rows) == 60
    assert during == 1  # its one user waits
    assert "CLOSED LOOP" in run.out


def test_what_is_under_way_at_the_end_is_kept_and_is_no_failure(tmp_path: Path) -> None:
    answers = [server.chat(), server.held]
    with server.answering(lambda number: answers[number]) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(2, rate=50), limit="2s")
    good, cut = sorted(run.rows, key=lambda row: str(row["error"]))  # either may be served first
    assert (good["error"], cut["error"]) == ("", "under way when the run ended")
    assert cut["sent_ns"] < cut["end_ns"]
    assert cut["first_token_ns"] is None
    assert "the run ended with 1 requests under way and 0 of the traffic not sent" in run.out
    assert run.code == 0, run.out


def flushed(folder: Path, cached: int = 0, status: int = 200, *words: str) -> tuple[Load, Any]:
    answer = server.chat(cached=cached)
    with server.answering(lambda _: answer, flush_status=status) as fixture:
        return load(folder, "--host", fixture.url, *chats(2), *words), fixture


def test_a_flush_that_is_refused_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    run, fixture = flushed(tmp_path, 0, 400, "--flush-first")
    assert (fixture.flushes, fixture.bodies, run.rows) == (1, [], [])
    assert "--flush-first: the server refused, HTTP 400" in run.out
    assert "Traceback" not in run.out
    assert run.code == 1


def test_a_start_that_is_warm_after_a_flush_fails_the_run(tmp_path: Path) -> None:
    run, fixture = flushed(tmp_path, 4, 200, "--flush-first")
    assert (fixture.flushes, len(run.rows)) == (1, 2)
    assert "the first request found 4 cached tokens, so the start was warm" in run.out
    assert run.code == 1


@pytest.mark.parametrize(("expected", "code"), [("0-10", 1), ("45-55", 0)])
def test_a_phase_may_state_which_hit_rate_it_expects(
    expected: str, code: int, tmp_path: Path
) -> None:
    run, _ = flushed(tmp_path, 4, 200, "--expect-hit-rate", expected)
    assert run.code == code, run.out
    assert ("50.0 % is not from 0 to 10 %" in run.out) == bool(code)

"""The wall clock: pumps and threads answer as the virtual clock does, and everything ends."""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.core.engine import Engine  # noqa: E402
from refimpl.memory.transfer import Mover  # noqa: E402
from refimpl.messages import BackedUp, BackUp  # noqa: E402
from refimpl.model.config import TINY_GQA  # noqa: E402
from refimpl.run.live import run_live  # noqa: E402
from refimpl.run.pump import Pump  # noqa: E402
from refimpl.run.report import integers  # noqa: E402
from refimpl.workload.request import unscripted  # noqa: E402
from scenarios.bytes.rig import Rig, live_executor, run_bytes, without_cache  # noqa: E402
from scenarios.bytes.test_answers import chats  # noqa: E402

pytestmark = pytest.mark.live


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_answers_on_the_wall_clock_are_those_without_a_cache(policy: str) -> None:
    rig = Rig(write_policy=policy)
    executor = live_executor(rig, TINY_GQA)
    record = run_live(Engine(rig.config), executor, unscripted(chats()))
    assert integers(record)["pages_moved"]["load_back"] > 0
    plain = run_bytes(without_cache(rig), TINY_GQA, unscripted(chats()))
    assert executor.outputs == plain.outputs


def test_no_pump_outlives_its_run() -> None:
    before = threading.active_count()
    executor = live_executor(Rig(), TINY_GQA)
    run_live(Engine(Rig().config), executor, unscripted(chats()))
    assert threading.active_count() == before


def test_what_stops_a_pump_comes_out_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(Mover, "back_up", broken)
    executor = live_executor(Rig(), TINY_GQA)
    with pytest.raises(RuntimeError, match="the link is down"):
        run_live(Engine(Rig().config), executor, unscripted(chats()))


def test_a_pump_does_its_jobs_in_order() -> None:
    done: list[int] = []
    pump = Pump("test")
    for number in range(50):
        pump.put(lambda number=number: done.append(number))
    pump.close()
    assert done == list(range(50))


SMALL = "multi_turn:clients=3,rounds=2,request_length=64,output_length=3,rate=0,vocab=256"

LOAD = ("--workload", SMALL, "--max-total-tokens", "256")


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    from refimpl.__main__ import main

    monkeypatch.setattr(sys, "argv", ["refimpl", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_run_serves_a_model_and_finds_all_answers_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--model-path", "tiny-gqa", "--compare", *LOAD)
    assert called(monkeypatch, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["answers_equal"] is True
    hits = [sum(each["hit_tokens"].values()) for each in report["tier_sets"]]
    assert hits[0] == 0
    assert hits[2] > hits[1]


def test_run_fails_when_a_tier_changes_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Mover, "load", lambda *_: SimpleNamespace(wait=lambda _: None))
    words = ("run", "--model-path", "tiny-gqa", "--compare", *LOAD)
    assert called(monkeypatch, *words, "--json") == 1
    assert json.loads(capsys.readouterr().out)["answers_equal"] is False


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_answers_are_equal_in_every_data_type(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--model-path", "tiny-gqa", "--compare", "--dtype", dtype, *LOAD)
    assert called(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert f"{dtype}, reference arithmetic" in out
    assert "every tier set gave the same answers" in out


def test_without_compare_a_model_serves_all_tiers_turn_by_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "run", "--model-path", "tiny-mla", *LOAD) == 0
    out = capsys.readouterr().out
    assert "By turn, L1 + L2 + L3" in out
    assert "no cache" not in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--model-path", "no-such-model"), "no-such-model"),
        (("--model-path", "tiny-gqa", "--arithmetic", "abacus"), "abacus"),
        (("--model-path", "tiny-gqa", "--dtype", "int8"), "bfloat16"),
        (("--model-path", "tiny-gqa", "--device", "tpu"), "cuda"),
        (("--model-path", "tiny-gqa", "--workload", "multi_turn:clients=2"), "vocab"),
        (("--model-path", "tiny-gqa", "--instances", "2"), "--instances"),
    ],
)
def test_what_a_real_run_can_not_do_is_one_line(
    words: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert called(monkeypatch, "run", *words) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert reason in error


def test_backups_that_wait_together_become_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each is told of by itself: one event a command (contract 1 of messages.py)."""
    asked: list[list[int]] = []
    first_runs, others_wait = threading.Event(), threading.Event()

    def noted(_: Mover, l1_slots: list[int], l2_slots: list[int]) -> None:
        asked.append([*l1_slots, *l2_slots])
        first_runs.set()
        assert others_wait.wait(20)

    monkeypatch.setattr(Mover, "back_up", noted)
    executor = live_executor(Rig(), TINY_GQA)
    executor.submit(BackUp(1, [0], [10]))
    assert first_runs.wait(20)
    executor.submit(BackUp(2, [1, 2], [11, 12]))
    executor.submit(BackUp(3, [3], [13]))
    others_wait.set()
    executor.close()
    assert asked == [[0, 10], [1, 2, 3, 11, 12, 13]]
    assert [executor.inbox.get_nowait() for _ in range(3)] == [
        BackedUp(1, 1),
        BackedUp(2, 2),
        BackedUp(3, 1),
    ]

"""A class that hangs or exits fails its rule with the reason, and the others are judged as well."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from time import monotonic

import pytest

from refimpl.conformance import other_process
from refimpl.conformance.kit import RULES, certify, clean_up
from refimpl.conformance.limit import StoppedError, is_something_left, within
from refimpl.conformance.subject import subject_of
from refimpl.conformance.verdict import judge
from refimpl.storage.backend import StorageError
from scenarios.conformance.hangs import Shelf
from scenarios.tidy import ROOT

CLASSES = "scenarios.conformance.hangs"
SHORT = 0.2  # seconds; long beside what a dictionary takes


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """What hangs goes on when the test is over."""
    before = set(threading.enumerate())
    Shelf.ends.clear()
    yield
    Shelf.ends.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("name", ["HangsInGet", "HangsInClose"])
def test_a_hanging_class_fails_rules_in_time_and_the_rest_is_judged(name: str) -> None:
    verdicts = certify(subject_of(f"{CLASSES}:{name}"), seconds=SHORT)
    assert [each.rule for each in verdicts] == list(RULES)
    reasons = {each.reason for each in verdicts if each.outcome == "failed"}
    assert f"no answer within {SHORT} s" in reasons
    assert {each.rule: each.outcome for each in verdicts}["processes"] == "skipped"
    assert is_something_left()


def test_a_class_that_hangs_at_opening_is_a_store_that_is_not_there() -> None:
    with pytest.raises(
        StorageError, match=r"HangsAtOpening can't be opened: no answer within 0.2 s"
    ):
        certify(subject_of(f"{CLASSES}:HangsAtOpening"), seconds=SHORT)


@pytest.mark.parametrize(
    ("name", "rule", "raised"),
    [
        ("Exits", "absent_names", "SystemExit(7)"),
        ("ExitsAtClose", "closing", "SystemExit(9)"),
        ("LeavesAGenerator", "round_trip", "GeneratorExit()"),
        ("Interrupts", "round_trip", "KeyboardInterrupt()"),
    ],
)
def test_what_would_end_the_command_fails_the_rule(name: str, rule: str, raised: str) -> None:
    found = subject_of(f"{CLASSES}:{name}")
    verdict = judge(rule, RULES[rule], found)
    assert (verdict.outcome, verdict.reason) == ("failed", f"it raised {raised}")
    clean_up(found)


def test_every_rule_of_a_class_that_exits_has_a_verdict() -> None:
    verdicts = certify(subject_of(f"{CLASSES}:ExitsAtClose"))
    assert [each.rule for each in verdicts] == list(RULES)


def test_time_counts_anew_from_each_sign_of_life() -> None:
    started, turns = monotonic(), iter(range(4))

    def alive() -> float:
        next(turns, None)
        return monotonic() if monotonic() < started + 3 * SHORT else 0.0

    assert within(SHORT, lambda: Shelf.ends.wait(2 * SHORT), alive) is False
    with pytest.raises(StoppedError, match="no answer within"):
        within(SHORT, Shelf.ends.wait)


def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 / 0)


def test_the_other_process_ends_when_its_store_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = f'{{"backend": "dynamic", "extra": {{"backend_name": "h", "module_path": "{CLASSES}",'
    task += ' "class_name": "HangsInGet"}}'
    monkeypatch.setattr(sys, "argv", ["other", task])
    monkeypatch.setattr(other_process, "SECONDS_MAX", SHORT)
    assert other_process.main() == 1
    assert capsys.readouterr().out == f"no answer within {SHORT} s\n"


def command(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "refimpl", "conform", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_ends_though_threads_of_the_class_do_not() -> None:
    process = command(f"{CLASSES}:HangsInAPool", "--limit", "0.2", "--json")
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (1, "")
    assert "no answer within 0.2 s" in out


def test_ctrl_c_ends_the_command_while_a_rule_hangs() -> None:
    process = command(f"{CLASSES}:HangsAtOpening", "--limit", "3600")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "opening\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130

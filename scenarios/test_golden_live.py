"""The live gate: red when something got worse, green when nothing did, one line for what can't be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import Any

import pytest

from refimpl.config import ConfigError
from refimpl.run import golden_live
from refimpl.run.golden_change import overall
from refimpl.run.live_case import live_case_names, read_live_case
from refimpl.run.live_gate import Baseline, Gate, blind, judged, limit
from scenarios.command_line import CommandLine
from scenarios.tidy import ROOT


@pytest.fixture
def refimpl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


# ---- verdicts -----------------------------------------------------------------------------------

STEADY = [1.00, 1.01, 1.02, 1.00, 1.01]  # the floor of the margin counts: Q3 + 10 %
VARIED = [1.0, 1.1, 1.2, 1.3, 1.4]  # quartiles 1.1 and 1.3: Q3 + 3 IQR is 1.9, Q1 - 3 IQR is 0.5


def verdict(name: str, samples: Sequence[float], now: float | None, gate: Gate) -> str:
    baseline = Baseline({}, {name: samples}, {name: min(samples)})
    (change,) = judged(gate, baseline, {} if now is None else {name: now})
    return change.verdict


@pytest.mark.parametrize(
    ("name", "samples", "now", "word"),
    [
        ("ttft_to_reference.p50", STEADY, 1.10, "equal"),
        ("ttft_to_reference.p50", STEADY, 1.12, "worse"),
        ("ttft_to_reference.p50", STEADY, 0.88, "better"),
        ("ttft_to_reference.p50", VARIED, 1.89, "equal"),
        ("ttft_to_reference.p50", VARIED, 1.91, "worse"),
        ("ttft_to_reference.p50", VARIED, 0.49, "better"),
        ("ttft_to_reference.p50", [1.0], 1.24, "equal"),  # of one sample nobody knows the spread
        ("ttft_to_reference.p50", [1.0], 1.26, "worse"),
        ("ttft_to_reference.p50", STEADY, None, "worse"),
        ("throughput_to_reference", STEADY, 0.91, "equal"),
        ("throughput_to_reference", STEADY, 0.89, "worse"),
        ("throughput_to_reference", STEADY, 1.12, "better"),
        ("throughput_to_reference", VARIED, 0.51, "equal"),
        ("throughput_to_reference", VARIED, 0.49, "worse"),
        ("hit_rate", [0.5, 0.5, 0.5], 0.491, "equal"),
        ("hit_rate", [0.5, 0.5, 0.5], 0.489, "worse"),
        ("hit_rate", [0.5, 0.5, 0.5], 0.511, "better"),
        ("hit_tokens.host", [100.0, 100.0], 50, "changed"),  # of a tier alone nothing is lost
        ("ttft_to_reference.p99", STEADY, 9.0, "changed"),  # shown, and not gated
        ("ttft_to_reference.p99", STEADY, 1.0, "equal"),
    ],
)
def test_the_limit_is_what_the_baseline_itself_would_give(
    name: str, samples: list[float], now: float | None, word: str
) -> None:
    assert verdict(name, samples, now, Gate()) == word


def test_a_case_may_allow_more_of_the_hit_rate() -> None:
    assert verdict("hit_rate", [0.5], 0.47, Gate(hit_rate_points=4)) == "equal"
    assert verdict("hit_rate", [0.5], 0.45, Gate(hit_rate_points=4)) == "worse"


def test_a_baseline_that_sees_too_little_says_so() -> None:
    gate, name = Gate(), "ttft_to_reference.p50"
    assert blind(gate, Baseline({}, {name: STEADY}, {name: 1.0})) == []
    (line,) = blind(gate, Baseline({}, {name: VARIED}, {name: 1.0}))
    assert "a loss of 90 % shows: record again while the machine is idle" in line
    assert limit(name, VARIED) == pytest.approx(1.9)


# ---- cases --------------------------------------------------------------------------------------

CASE = """\
description = "One chat of three turns."
repeats = 2

[flags]
workload = "multi_turn:clients=1,rounds=3,request_length=64,output_length=2,vocab=256,rate=0"
page-size = 16
max-total-tokens = 512
enable-hierarchical-cache = true

[gate]
figures = ["ttft_to_reference.p50", "ttft_to_bare_model.p50", "hit_rate"]
"""


def test_the_committed_live_cases_can_be_read() -> None:
    names = live_case_names(ROOT / "golden")
    assert {"chats_l1_l2", "chats_l3", "shared_prefix_l1"} <= set(names)
    for name in names:
        case = read_live_case(ROOT / "golden", name)
        assert case.reference != case.tiers


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('description = "One chat of three turns."', "", "description must be a sentence"),
        ("repeats = 2", "repeats = 0", "repeats must be a whole number of 1 or more"),
        ("repeats = 2", "repeat = 2", "did you mean repeats?"),
        ("repeats = 2", 'reference = "L4"', "reference 'L4' is unknown"),
        ("repeats = 2", 'reference = "L1 + L2"', "which is the reference as well"),
        ("max-total-tokens = 512", "", "flags must say max-total-tokens"),
        ("page-size = 16", 'hicache-storage-backend = "file"', "has its L3 in memory"),
        ('figures = ["', 'figures = [3, "', "must be a list of figures"),
        ("[gate]", "[gate]\nhit_rate_points = -1", "percentage points"),
        ("[gate]", "[gate", "malformed"),
    ],
)
def test_a_live_case_that_says_nonsense_is_one_error(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    (tmp_path / "live").mkdir()
    assert old in CASE
    (tmp_path / "live" / "small.toml").write_text(CASE.replace(old, new))
    with pytest.raises(ConfigError, match=r"live/small\.toml") as caught:
        read_live_case(tmp_path, "small")
    assert words in str(caught.value)


# ---- served for real ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden folder with a small live case, and a baseline that was recorded just now."""
    pytest.importorskip("torch", reason="a model needs torch")
    pytest.importorskip("numba", reason="io backend kernel needs numba")
    folder = tmp_path_factory.mktemp("golden")
    (folder / "live").mkdir()
    (folder / "live" / "small.toml").write_text(CASE)
    (finding,) = golden_live.record_live(folder, [served(folder)])
    assert finding.verdict == "new"
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of one's own, whose limits are 10 % from the best."""
    copy = Path(shutil.copytree(recorded, tmp_path / "golden"))
    spread(copy, [1.0, 1.0, 1.0, 1.0])
    return copy


def spread(folder: Path, shares: list[float], ratio: float | None = None) -> None:
    """Times at these shares of the best, or of ``ratio``: limits that no busy minute has made."""
    path = folder / "live" / "baselines.json"
    kept = json.loads(path.read_text())
    (case,) = (case for cases in kept.values() for case in cases.values())
    times = {name: best for name, best in case["best"].items() if name.startswith("ttft_")}
    case["samples"] |= {
        name: [(ratio or best) * each for each in shares] for name, best in times.items()
    }
    path.write_text(json.dumps(kept))


def served(folder: Path) -> Any:
    from refimpl.run.live_served import ServedCase

    return ServedCase(read_live_case(folder, "small"))


def checked(folder: Path) -> Any:
    (finding,) = golden_live.check_live(folder, [served(folder)])
    return finding


def worse(finding: Any) -> list[str]:
    return [change.path for change in finding.changes if change.verdict == "worse"]


@pytest.mark.live
def test_the_same_code_on_the_same_machine_passes(refimpl: CommandLine, folder: Path) -> None:
    spread(folder, [1.0, 1.0, 2.0, 2.0])  # what others do here meanwhile is not what is tested
    done = refimpl("golden", "check", "--live", "--golden-dir", str(folder))
    assert (done.code, done.err) == (0, "")
    assert "moved_bytes.backup" in done.out


@pytest.mark.live
def test_a_cache_that_is_off_fails_the_live_gate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refimpl.run.real import RealRun

    spread(folder, [1.0, 1.0, 1.0, 1.0], ratio=0.5)  # as with a cache; without one it is about 1
    serve = RealRun.serve_afresh
    monkeypatch.setattr(RealRun, "serve_afresh", lambda run, _: serve(run, "no cache"))
    finding = checked(folder)
    assert finding.is_failure
    assert set(worse(finding)) >= {"hit_rate", "ttft_to_reference.p50"}


@pytest.mark.live
def test_hands_that_wait_fail_the_gate_though_the_reference_waits_as_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refimpl.run.hands import TorchHands

    prefill = TorchHands.prefill

    def slow(hands: TorchHands, *arguments: Any) -> Any:
        begun = perf_counter()
        produced = prefill(hands, *arguments)
        Event().wait(3 * (perf_counter() - begun))  # four times as slow as it was
        return produced

    monkeypatch.setattr(TorchHands, "prefill", slow)
    assert "ttft_to_bare_model.p50" in worse(checked(folder))


@pytest.mark.live
def test_answers_that_differ_break_the_live_gate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refimpl.run.hands import TorchHands

    finished = TorchHands.finished
    calls = iter(range(1_000))
    monkeypatch.setattr(
        TorchHands, "finished", lambda hands, rid: [*finished(hands, rid), next(calls)]
    )
    finding = checked(folder)
    assert (finding.verdict, finding.is_failure) == ("broken", True)
    assert "L1 + L2 and no cache do not give the same answers" in finding.problems


@pytest.mark.live
def test_what_stops_a_run_is_a_finding_and_nothing_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refimpl.memory.transfer import Mover

    def broken(*_: object) -> None:
        raise RuntimeError("the link is down")

    before = (folder / "live" / "baselines.json").read_text()
    monkeypatch.setattr(Mover, "back_up", broken)
    assert checked(folder).problems == ["RuntimeError: the link is down"]
    (finding,) = golden_live.record_live(folder, [served(folder)])
    assert finding.is_failure
    assert (folder / "live" / "baselines.json").read_text() == before


@pytest.mark.live
def test_a_case_that_was_changed_asks_to_be_recorded_again(folder: Path) -> None:
    path = folder / "live" / "small.toml"
    path.write_text(CASE.replace("rounds=3", "rounds=2"))
    finding = checked(folder)
    assert (finding.verdict, finding.is_failure) == ("broken", True)
    assert finding.problems[0].startswith("workload_sha256 differ")
    assert "golden record --live small" in finding.problems[0]
    assert overall(finding.changes) == "equal"


@pytest.mark.live
def test_another_model_has_baselines_of_its_own(refimpl: CommandLine, folder: Path) -> None:
    words = ("--live", "--model-path", "tiny-mla", "--golden-dir", str(folder))
    done = refimpl("golden", "check", *words)
    assert done.code == 2
    assert "there is no baseline of small (tiny-mla)" in done.err
    assert "golden record --live small --model-path tiny-mla`" in done.err

"""The live gate: red when something got worse, green when nothing did, one line for what can't be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import Any

import polars
import pytest

from refimpl.config import ConfigError
from refimpl.run import baselines, golden_live
from refimpl.run.golden_change import overall
from refimpl.run.live_baselines import read_baseline
from refimpl.run.live_case import live_case_names, read_live_case
from refimpl.run.live_files import ResultFiles
from refimpl.run.live_gate import Baseline, Gate, blind, judged, limit
from scenarios.command_line import CommandLine
from scenarios.tidy import ROOT

MS = 1_000_000


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


# ---- what a load generator measured -------------------------------------------------------------


def requests(ttft_ms: float, hits: int = 100, **columns: Any) -> dict[str, Any]:
    """Twelve requests in the columns that load generators write; TTFT varies by a tenth."""
    rows = range(12)
    sent = [at * 20 * MS for at in rows]
    first = [at + int(ttft_ms * MS * (1 + 0.01 * n)) for n, at in enumerate(sent)]
    table = {
        "session": [n // 3 for n in rows],
        "turn": [n % 3 for n in rows],
        "intended_ns": [at - MS for at in sent],
        "sent_ns": sent,
        "first_token_ns": first,
        "end_ns": [at + 5 * MS for at in first],
        "prompt_tokens": [200 for _ in rows],
        "device_tokens": [hits for _ in rows],
        "host_tokens": [0 for _ in rows],
        "storage_tokens": [None for _ in rows],
        "hit_tokens": [hits for _ in rows],
        "finish": ["length" for _ in rows],
        "error": ["" for _ in rows],
    }
    return table | columns


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, dict[str, Any]], str]:
    """Writes a table of requests as ``NAME.parquet``; returns its path."""

    def write_table(name: str, table: dict[str, Any]) -> str:
        path = tmp_path / f"{name}.parquet"
        polars.DataFrame(table).write_parquet(path)
        return str(path)

    return write_table


@pytest.fixture
def files(
    write: Callable[[str, dict[str, Any]], str], tmp_path: Path, refimpl: CommandLine
) -> tuple[str, ...]:
    """Words of the command line, the action left out, with a baseline of 10 ms against 20 ms."""
    (tmp_path / "golden").mkdir()
    reference = write("reference", requests(20, hits=0))
    words = ("chat", "--live", "--reference", reference, "--golden-dir", str(tmp_path / "golden"))
    done = refimpl("golden", "record", *words, "--results", write("then", requests(10)))
    assert (done.code, done.err) == (0, "")
    assert "1 case: 1 new" in done.out
    return words


Write = Callable[[str, dict[str, Any]], str]


def test_results_like_the_baseline_pass(
    refimpl: CommandLine, files: tuple[str, ...], write: Write
) -> None:
    done = refimpl("golden", "check", *files, "--results", write("now", requests(11)))
    assert done.code == 0
    assert "1 case: 1 equal" in done.out
    assert "ttft_intended_to_reference.p50" in done.out


@pytest.mark.parametrize(
    ("now", "figure"),
    [
        (requests(16), "ttft_to_reference.p50"),
        (requests(10, hits=90), "hit_rate"),
        (requests(10, hits=0), "hit_rate"),
    ],
    ids=["slower", "fewer hits", "no hits"],
)
def test_results_that_are_worse_fail(
    refimpl: CommandLine, files: tuple[str, ...], write: Write, now: dict[str, Any], figure: str
) -> None:
    done = refimpl("golden", "check", *files, "--results", write("now", now), "--json")
    case = json.loads(done.out)["cases"]["chat"]
    assert (done.code, case["verdict"]) == (1, "worse")
    assert next(each["path"] for each in case["changes"] if each["verdict"] == "worse") == figure


def test_results_that_are_better_pass_and_say_how_to_hold_them(
    refimpl: CommandLine, files: tuple[str, ...], write: Write
) -> None:
    done = refimpl("golden", "check", *files, "--results", write("now", requests(4)))
    assert done.code == 0
    assert "chat: better" in done.out
    assert "golden record --live chat" in done.out


def test_failed_requests_fail_the_gate_with_their_reasons(
    refimpl: CommandLine, files: tuple[str, ...], write: Write
) -> None:
    good = requests(10)
    now = good | {
        "error": ["HTTP 503", "HTTP 503", *[""] * 10],
        "finish": ["", "", "abort", *["length"] * 9],
        "first_token_ns": [None, None, *good["first_token_ns"][2:11], None],
    }
    done = refimpl("golden", "check", *files, "--results", write("now", now))
    assert done.code == 1
    assert "4 of 12 requests failed: HTTP 503 (2); abort (1); no answer (1)" in done.out
    dead = good | {"error": ["refused"] * 12}
    done = refimpl("golden", "check", *files, "--results", write("dead", dead))
    assert (done.code, "12 of 12 requests failed: refused (12)" in done.out) == (1, True)
    done = refimpl("golden", "record", *files, "--results", write("now", now))
    assert (done.code, "chat: broken" in done.out) == (1, True)


def test_recording_shows_what_it_changes(
    refimpl: CommandLine, files: tuple[str, ...], write: Write
) -> None:
    slow = ("--results", write("slow", requests(18)))
    assert "ttft_to_reference.p50" in refimpl("golden", "record", *files, *slow, "--json").out
    assert refimpl("golden", "check", *files, *slow).code == 0
    done = refimpl("golden", "record", *files, "--results", write("then", requests(10)), "--json")
    (case,) = json.loads(done.out)["cases"].values()
    (ttft,) = (each for each in case["changes"] if each["path"] == "ttft_to_reference.p50")
    assert (ttft["old"], ttft["new"], ttft["verdict"]) == (0.9, 0.5, "better")


def test_several_pairs_of_files_are_several_samples(tmp_path: Path, write: Write) -> None:
    results = [Path(write(f"r{n}", requests(10 + n))) for n in range(5)]
    reference = [Path(write("f", requests(20)))] * 5
    golden_live.record_live(tmp_path, [ResultFiles("chat", results, reference)])
    kept = read_baseline(tmp_path, baselines.machine_class(), "chat")
    assert kept is not None
    assert kept.samples["ttft_to_reference.p50"] == [0.5, 0.55, 0.6, 0.65, 0.7]
    assert kept.best["ttft_to_reference.p50"] == 0.5


def test_the_output_of_a_run_is_taken_as_it_is(
    refimpl: CommandLine, tmp_path: Path, files: tuple[str, ...]
) -> None:
    load = (
        "simulate",
        "--workload",
        "multi_turn:clients=4,rounds=4",
        "--max-total-tokens",
        "60000",
    )
    paths = [str(tmp_path / name) for name in ("tiers.parquet", "none.parquet")]
    assert refimpl(*load, "--output", paths[0]).code == 0
    assert refimpl(*load, "--disable-radix-cache", "--output", paths[1]).code == 0
    words = ("sim", *files[1:3], paths[1], *files[4:], "--results", paths[0])
    assert refimpl("golden", "record", *words).code == 0
    done = refimpl("golden", "check", *words)
    assert (done.code, "hit_tokens.device" in done.out) == (0, True)


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("a missing column", {"turn": None}, "lacks the column turn; it has session"),
    ("no time sent", {"sent_ns": None}, "neither a column sent_ns nor arrival_ns"),
    ("text for a number", {"prompt_tokens": ["200"] * 12}, "prompt_tokens must hold whole numbers"),
    ("a fraction", {"end_ns": [1.5] * 12}, "end_ns must hold whole numbers"),
    ("a number for text", {"error": [0] * 12}, "error must hold text"),
    ("a turn below 0", {"turn": [-1] * 12}, "row 1: turn is -1"),
    ("no turn", {"turn": [0] * 11 + [None]}, "row 12: turn is None"),
    ("never sent", {"sent_ns": [None] * 12}, "row 1: sent_ns is null"),
    ("a token before its request", {"first_token_ns": [-5] * 12}, "first_token_ns is before"),
    ("more hits than tokens", {"device_tokens": [201] * 12}, "201 hit tokens of 200 prompt tokens"),
    ("another load", {"prompt_tokens": [900] * 12}, "the reference is another load"),
]


@pytest.mark.parametrize(
    ("columns", "words"), [row[1:] for row in HOSTILE], ids=[r[0] for r in HOSTILE]
)
def test_a_table_that_says_nonsense_is_one_line_of_error(
    refimpl: CommandLine,
    files: tuple[str, ...],
    write: Write,
    columns: dict[str, Any],
    words: str,
) -> None:
    table = {
        name: values for name, values in (requests(10) | columns).items() if values is not None
    }
    done = refimpl("golden", "check", *files, "--results", write("now", table))
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert words in done.err


def test_files_that_are_no_table_are_one_line_of_error(
    refimpl: CommandLine, files: tuple[str, ...], write: Write, tmp_path: Path
) -> None:
    (tmp_path / "text.parquet").write_text("turn,sent_ns\n")
    empty = {name: values[:0] for name, values in requests(10).items()}
    for path, words in (
        (str(tmp_path / "gone.parquet"), "there is no such file"),
        (str(tmp_path / "text.parquet"), "can't be read as parquet"),
        (write("empty", empty), "holds no request"),
    ):
        done = refimpl("golden", "check", *files, "--results", path)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert words in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "x", "--results", "a", "--reference", "b"), "need --live"),
        (("check", "x", "--live", "--results", "a"), "every --results needs its --reference"),
        (("check", "--live", "--results", "a", "--reference", "b"), "one name of your choice"),
        (("check", "a/b", "--live", "--results", "a", "--reference", "b"), "can't name a case"),
        (("check", "chats_l3", "--live", "--results", "a", "--reference", "b"), "another name"),
        (("check", "chats_13", "--live"), "did you mean chats_l3?"),
        (("record", "chats_l3"), "use --live"),
    ],
)
def test_what_cant_be_meant_is_refused_in_a_line(
    refimpl: CommandLine, words: tuple[str, ...], said: str
) -> None:
    done = refimpl("golden", *words, "--golden-dir", str(ROOT / "golden"))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert said in done.err


def test_without_a_baseline_of_such_machines_the_gate_says_what_to_run(
    refimpl: CommandLine, files: tuple[str, ...], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refimpl.run.live_files.machine_class", lambda: "another, 8 cores")
    done = refimpl("golden", "check", *files, "--results", write("now", requests(10)))
    assert (done.code, done.out) == (2, "")
    assert (
        "machines of this class (another, 8 cores): run `refimpl golden record --live" in done.err
    )


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"M": []}', '{"M": {"chat": {"samples": {}}}}', '{"M": {"chat": 3}}']
)
def test_a_file_of_baselines_that_is_none_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "live").mkdir()
    path = tmp_path / "live" / "baselines.json"
    path.write_text(text.replace('"M"', json.dumps(baselines.machine_class())))
    with pytest.raises(ConfigError, match=r"baselines\.json"):
        read_baseline(tmp_path, baselines.machine_class(), "chat")


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

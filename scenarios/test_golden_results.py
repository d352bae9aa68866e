"""What a load generator measured passes the live gate, or fails it, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pytest

from refimpl.config import ConfigError
from refimpl.run import baselines, golden_live
from refimpl.run.live_baselines import read_baseline
from refimpl.run.live_files import ResultFiles
from scenarios.command_line import CommandLine
from scenarios.tidy import ROOT

MS = 1_000_000


@pytest.fixture
def refimpl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


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

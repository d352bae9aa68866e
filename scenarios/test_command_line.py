"""What a user of the command line meets: reports, notices, errors of one line, files.

Field report N03 (settings that can't work are refused at start, by name) is answered here.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import polars
import pytest

from refimpl.run.options import option_names
from scenarios.command_line import CommandLine
from scenarios.tidy import ROOT

CHATS = ("--workload", "multi_turn:clients=3,rounds=3,request_length=300", "--seed", "1")
SIMULATE = ("simulate", *CHATS)
L2 = (*SIMULATE, "--enable-hierarchical-cache")
L3 = (*L2, "--hicache-storage-backend", "memory")
EXTRA = "--hicache-storage-backend-extra-config"
TRACE_LINES = (
    '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    '{"timestamp": 9, "input_length": 600, "output_length": 3, "hash_ids": [1, 3]}\n'
)


@pytest.fixture
def refimpl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> CommandLine:
    """The command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return CommandLine(monkeypatch, capsys)


def started(*words: str) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own, with pipes."""
    return subprocess.run(
        [sys.executable, "-m", "refimpl", *words],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---- settings that can't work -------------------------------------------------------------------

IMPOSSIBLE = [
    *[((*L2, "--hicache-ratio", text), "--hicache-ratio") for text in ("0", "1", "-1", "nan", "x")],
    *[((*L2, "--hicache-ratio", text), "--hicache-ratio") for text in ("", "1e400", "9" * 5000)],
    *[((*L2, "--hicache-size", text), "--hicache-size") for text in ("-1", "nan", "x", "1e-9")],
    *[((*SIMULATE, "--page-size", text), "--page-size") for text in ("0", "-1", "x", "1.5")],
    *[((*SIMULATE, "--max-total-tokens", text), "below one page") for text in ("63", "0", "-9")],
    *[((*SIMULATE, "--mem-fraction-static", text), "mem-fraction") for text in ("0", "1.1", "ä")],
    ((*SIMULATE, "--radix-eviction-policy", "lur"), "choose one of lru"),
    ((*SIMULATE, "--radix-eviction-policy", "tlru"), "--radix-eviction-policy-config"),
    ((*SIMULATE, "--radix-eviction-policy-config", "{"), "--radix-eviction-policy-config"),
    ((*SIMULATE, "--radix-eviction-policy-config", '{"x": 1}'), "lru has no key 'x'"),
    ((*L2, "--hicache-write-policy", "never"), "--hicache-write-policy 'never' is unknown"),
    ((*L2, "--hicache-mem-layout", "ünï"), "--hicache-mem-layout 'ünï' is unknown"),
    ((*L2, "--hicache-io-backend", ""), "--hicache-io-backend '' is unknown"),
    ((*L2, "--hicache-mem-layout", "page_head", "--hicache-io-backend", "direct"), "page_head"),
    ((*L2, "--hicache-storage-backend", "s3"), "--hicache-storage-backend 's3' is unknown"),
    ((*L3, "--hicache-storage-prefetch-policy", "x"), "--hicache-storage-prefetch-policy 'x'"),
    ((*L2, "--hicache-storage-prefetch-policy", "timeout"), "needs --hicache-storage-backend"),
    ((*SIMULATE, "--hicache-storage-backend", "memory"), "needs --enable-hierarchical-cache"),
    ((*L2, EXTRA, "{}"), "needs --hicache-storage-backend"),
    ((*L2, "--disable-radix-cache"), "mutually exclusive"),
    *[((*L3, EXTRA, text), "malformed") for text in ("{", "", "[" * 100_000, '{"a": NaN}')],
    *[((*L3, EXTRA, text), "must be an object") for text in ("[]", "1", '"x"')],
    ((*L3, EXTRA, '{"prefetch_treshold": 9}'), "did you mean prefetch_threshold?"),
    ((*L3, EXTRA, '{"prefetch_threshold": 0}'), "must be a whole number from 1"),
    ((*L3, EXTRA, '{"prefetch_timeout_base": -1}'), "must not be negative"),
    ((*L3, EXTRA, '{"max_size": "many"}'), "write 10GB or 512MiB"),
    ((*L3, EXTRA, '{"max_size": 1}'), "below one page"),
    ((*L3, EXTRA, "@gone.toml"), "gone.toml can't be read"),
    ((*L3, EXTRA, "@config.ini"), "must end in .json, .toml, .yaml or .yml"),
    ((*SIMULATE, "--hardware", "h900"), "choose one of h200"),
    ((*SIMULATE, "--model", "gpt"), "--model 'gpt' is unknown"),
    ((*SIMULATE, "--model", "llama-3.1-70b"), "raise --tp-size or --mem-fraction-static"),
    *[((*SIMULATE, "--tp", text), "--tp-size") for text in ("3", "0", "-1")],
    *[((*SIMULATE, "--instances", text), "--instances") for text in ("0", "-1", "9999")],
    ((*SIMULATE, "--router-policy", "best"), "--router-policy 'best' is unknown"),
    ((*SIMULATE, "--chunked-prefill-size", "63"), "below one page of 64 tokens"),
    ((*SIMULATE, "--max-running-requests", "0"), "--max-running-requests"),
    ((*SIMULATE, "--max-queued-requests", "0"), "--max-queued-requests"),
    *[((*SIMULATE, "--faults", text), "--faults") for text in ("x=1", "delay=1", "vanish=-1")],
    ((*SIMULATE, "--cache-only", "--instances", "2"), "leave --instances at 1"),
    ((*SIMULATE, "--cache-only", "--disable-radix-cache"), "leave out --disable-radix-cache"),
    ((*SIMULATE, "--cache-only", "--faults", "vanish=1"), "leave out --faults"),
    ((*SIMULATE, "--trace", "x.jsonl"), "exclude each other"),
    ((*SIMULATE, "--limit", "3"), "--limit needs --trace"),
    ((*SIMULATE, "--trace-format", "x"), "--trace-format 'x' is unknown"),
    *[((*SIMULATE, "--explain", rid), f"--explain {rid}: there is no") for rid in ("0", "10")],
    ((*SIMULATE, "--output", "rows.xlsx"), "must end in one of .parquet, .csv, .jsonl"),
    ((*SIMULATE, "--output", "gone/rows.csv"), "there is no folder gone"),
    (("simulate", "--trace", "gone.jsonl"), "gone.jsonl:0: can't be read"),
    (("simulate", "--workload", "multi_trun"), "scenario 'multi_trun' is unknown"),
    (("simulate", "--workload", "multi_turn:clients=0"), "clients='0'"),
    (("simulate", "--workload", "multi_turn:clients=999999999"), "lower one of clients"),
    (("simulate", "--workload", "rag:requests=1,question_length=2000000000"), "lower one of"),
    (("simulate", "--workload", "\udcff"), "is unknown"),
    (("simulate", "--nonsense"), "No such option"),
    (("nonsense",), "No such command"),
    (("run", "--cache-only"), "use refimpl simulate"),
    (("run", "--disable-radix-cache"), "leave out --disable-radix-cache"),
    (("run", "--hicache-ratio", "1"), "--hicache-ratio 1 must be above 1"),
    (("golden", "check", "--golden-dir", "gone"), "--golden-dir gone is not a folder"),
    (("golden", "check", "--golden-dir", "."), "index.toml is not there"),
    (("golden", "diff", "no..where"), "revision"),
]


@pytest.mark.parametrize(("words", "named"), IMPOSSIBLE, ids=lambda value: str(value)[-60:])
def test_an_impossible_setting_ends_with_code_2_and_one_line(
    refimpl: CommandLine, words: tuple[str, ...], named: str
) -> None:
    done = refimpl(*words)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("refimpl: error: ")
    assert done.err.count("\n") == 1
    assert len(done.err) < 400
    assert named in done.err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bad.json", "{"),
        ("bad.toml", "a = "),
        ("bad.yaml", "a: [1"),
        ("list.yaml", "- 1"),
        ("key.yaml", "1: 2"),
        ("typo.toml", "prefetch_treshold = 3"),
    ],
)
def test_a_bad_config_file_is_named_in_the_error(
    refimpl: CommandLine, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    done = refimpl(*L3, EXTRA, f"@{name}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert name in done.err or "prefetch_treshold" in done.err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 0', "not JSON"),
        ('{"timestamp": 0}', "input_length"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "negative"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_bad_trace_line_is_named_by_file_and_line(
    refimpl: CommandLine, tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes((TRACE_LINES + line + "\n").encode(errors="surrogateescape"))
    done = refimpl("simulate", "--trace", "trace.jsonl")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "trace.jsonl:3: " in done.err
    assert reason in done.err


# ---- notices ------------------------------------------------------------------------------------


def test_a_layout_that_the_backend_can_not_serve_is_switched_and_said(refimpl: CommandLine) -> None:
    done = refimpl(*L2, "--hicache-io-backend", "direct", "--json")
    report = json.loads(done.out)
    assert done.code == 0
    assert report["effective"]["layout"] == "layer_first"
    assert "--hicache-mem-layout is now layer_first" in report["notices"][0]
    assert done.err == f"notice: {report['notices'][0]}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SIMULATE, "--max-total-tokens", "9" * 30), "figures are those of a larger device"),
        ((*L2, "--hicache-size", "300"), "figures are those of a larger host"),
        ((*SIMULATE, "--hicache-ratio", "3"), "--hicache-ratio without --enable-hier"),
        ((*L3, EXTRA, '{"prefetch_threshold": 1}'), "it is now 64 tokens"),
        (("simulate", "--trace", "trace.jsonl"), "hit tokens are a lower bound"),
    ],
)
def test_what_a_user_may_not_expect_is_a_notice(
    refimpl: CommandLine, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE_LINES)
    done = refimpl(*words)
    assert done.code == 0
    assert said in done.err


def test_a_plain_run_has_nothing_to_say_on_stderr(refimpl: CommandLine) -> None:
    assert refimpl(*L3).err == ""
    assert refimpl("run", *CHATS).err == ""


# ---- reports ------------------------------------------------------------------------------------

PROMISED = {
    "requests", "prompt_tokens", "output_tokens", "hit_tokens", "hit_rate", "hit_rate_ppm",
    "computed_tokens", "recomputed_tokens", "ttft_ns", "ttft_ms", "evicted_pages", "pages_moved",
    "pages_lost", "prefetch", "skipped_pages", "host_pressure_pages", "retracted", "finished",
    "virtual_ns", "virtual_seconds", "wall_seconds", "requests_per_wall_second",
    "decisions_sha256", "notices", "effective",
}  # fmt: skip


def test_json_is_one_object_with_the_promised_keys(refimpl: CommandLine) -> None:
    done = refimpl(*L3, "--json")
    assert done.out.count("\n") == 1
    report = json.loads(done.out)
    assert report.keys() >= PROMISED
    assert report["requests"] == 9
    assert set(report["hit_tokens"]) == {"device", "host", "storage"}


def test_equal_runs_make_equal_decisions(refimpl: CommandLine) -> None:
    one, other = (json.loads(refimpl(*L3, "--json").out) for _ in range(2))
    timing = {"wall_seconds", "requests_per_wall_second"}
    assert {key: one[key] for key in one.keys() - timing} == {
        key: other[key] for key in other.keys() - timing
    }


def test_run_compares_the_four_tier_sets(refimpl: CommandLine) -> None:
    done = refimpl("run", "--json")
    report = json.loads(done.out)
    assert [each["tiers"] for each in report["tier_sets"]] == [
        "no cache", "L1", "L1 + L2", "L1 + L2 + L3",
    ]  # fmt: skip
    assert report["clock"] == "virtual"
    assert len(report["turns"]) == 10
    rates = [each["hit_rate_ppm"] for each in report["tier_sets"]]
    assert rates == sorted(set(rates))


def test_run_takes_a_trace_in_place_of_its_chats(refimpl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE_LINES)
    report = json.loads(refimpl("run", "--trace", "trace.jsonl", "--json").out)
    assert [each["requests"] for each in report["tier_sets"]] == [2, 2, 2, 2]


def test_tables_name_their_figures(refimpl: CommandLine) -> None:
    out = refimpl("run", *CHATS).out
    for words in ("virtual clock", "hit, %", "TTFT p50", "L1 + L2 + L3", "By turn"):
        assert words in out
    out = refimpl(*L3).out
    for words in ("9 requests", "prompt tokens from", "TTFT", "By turn", "virtual seconds"):
        assert words in out


def test_a_zipped_trace_gives_the_decisions_of_the_plain_one(
    refimpl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(TRACE_LINES)
    (tmp_path / "b.gz").write_bytes(gzip.compress(TRACE_LINES.encode()))
    digests = [
        json.loads(refimpl("simulate", "--trace", name, "--json").out)["decisions_sha256"]
        for name in ("a.jsonl", "b.gz")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_results_of_each_request_can_be_read_back(
    refimpl: CommandLine, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    report = json.loads(refimpl(*L3, "--output", str(path), "--json").out)
    readers = {
        "parquet": polars.read_parquet, "csv": polars.read_csv, "jsonl": polars.read_ndjson,
    }  # fmt: skip
    table = readers[suffix](path)
    assert table.height == report["requests"]
    assert table["hit_tokens"].sum() == sum(report["hit_tokens"].values())
    assert table["ttft_ns"].max() == report["ttft_ns"]["max"]
    assert table["rid"].to_list() == list(range(1, 10))


def test_results_go_into_a_file_of_any_name(refimpl: CommandLine, tmp_path: Path) -> None:
    assert refimpl(*SIMULATE, "--output", "\udcff.csv").code == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".csv"]


def test_scenarios_are_listed_with_their_parameters(refimpl: CommandLine) -> None:
    out = refimpl("workloads").out
    assert "multi_turn\n" in out
    assert "clients=80" in out


def test_the_help_of_a_simulation_names_every_flag(
    refimpl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    out = refimpl("simulate", "--help").out
    assert [name for name in option_names() if f"--{name}" not in out] == []


def test_the_golden_commands_work_on_a_folder_of_their_own(
    refimpl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "golden" / "small").mkdir(parents=True)
    (tmp_path / "golden" / "small" / "case.toml").write_text(
        'description = "x"\n[flags]\nworkload = "all_equal:requests=200,request_length=128"\n'
    )
    assert refimpl("golden", "update", "--golden-dir", "golden").code == 0
    assert refimpl("golden", "check").out == "1 case: 1 equal\n"
    expected = tmp_path / "golden" / "small" / "expected.json"
    expected.write_text(expected.read_text().replace('"p50": ', '"p50": 9'))
    done = refimpl("golden", "check")
    assert done.code == 1
    assert "small: better" in done.out
    assert "run `refimpl golden update small`" in done.out
    done = refimpl("golden", "check", "--json")
    assert (done.code, json.loads(done.out)["passed"]) == (1, False)
    assert "ttft_ns.p50" in refimpl("golden", "update", "small").out
    assert refimpl("golden", "check").code == 0


# ---- processes ----------------------------------------------------------------------------------


def test_a_pipe_gets_the_report_and_no_progress_bar() -> None:
    done = started(*L3, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["requests"] == 9
    assert "\x1b" not in done.stdout


def test_called_alone_it_shows_its_commands() -> None:
    done = started()
    assert done.stderr == ""
    assert all(word in done.stdout for word in ("run", "simulate", "golden", "workloads"))


@pytest.mark.parametrize("words", [("golden", "check", "audit_all_equal"), (*SIMULATE, "--json")])
def test_a_command_that_moves_no_byte_loads_no_tensors(words: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom refimpl.__main__ import main\n"
        f"sys.argv = ['refimpl', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numba', 'numpy', 'polars'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

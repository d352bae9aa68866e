"""Reports of the golden gate say what the terminal says, and a page needs nothing but itself."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from refimpl.config import ConfigError
from refimpl.run.golden import Finding, check, update
from refimpl.run.golden_change import Change
from refimpl.run.golden_live import PASSES
from refimpl.run.golden_report import ReportFiles, as_html, as_json, as_junit
from refimpl.run.golden_show import for_json, summary
from refimpl.run.picture import BINS, TURNS_MAX, Picture, picture_of
from refimpl.run.results import Result
from scenarios.command_line import CommandLine
from scenarios.tidy import ROOT

MS = 1_000_000
BYTES_MAX = 6_000_000  # of a page, most of it plotly's own JavaScript
NASTY = "<script>alert(1)</script> & \x00 \x1b[31m ]]> \ud800 \N{SNOWMAN}"


def result(turn: int = 0, prompt: int = 100, ttft_ms: float = 10, hits: int = 40) -> Result:
    ttft = int(ttft_ms * MS)
    return Result(turn, prompt, 0, ttft + MS, ttft, tiers=(hits, 0, 0), hit_tokens=hits)


def picture() -> Picture:
    chat = [result(turn, 100 * (turn + 1), 5 + turn) for turn in range(6)]
    plain = [result(turn, 100 * (turn + 1), 9 + turn, 0) for turn in range(6)]
    return picture_of({"measured": chat, "reference": plain}, {"backup": 2.5, "l3_read": 1.0})


@pytest.fixture
def findings() -> list[Finding]:
    """One of each kind, exact and live, with texts that hurt."""
    ratio = Change("ttft_to_reference.p50", 0.4, 0.8, "worse", 0.5)
    return [
        Finding("fine", "equal", seconds=0.25, picture=picture()),
        Finding("slow", "worse", [ratio], passes=PASSES, seconds=1.5, picture=picture()),
        Finding("gain", "better", [Change("hit_rate", 0.4, 0.5, "better", 0.39)], passes=PASSES),
        Finding("gain_exact", "better", [Change("ttft_ns.p50", 20, 10, "better")]),
        Finding("gone", "broken", problems=[NASTY]),
    ]


@pytest.fixture
def refimpl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A golden folder of two exact cases, one of which has become worse."""
    for name, length in (("small", 128), ("large", 256)):
        (tmp_path / "golden" / name).mkdir(parents=True)
        (tmp_path / "golden" / name / "case.toml").write_text(
            f'description = "x"\n[flags]\nworkload = "all_equal:requests=200,request_length={length}"\n'
        )
    update(tmp_path / "golden")
    path = tmp_path / "golden" / "large" / "expected.json"
    document = json.loads(path.read_text())
    document["figures"]["ttft_ns"]["p50"] -= 1
    path.write_text(json.dumps(document))
    return tmp_path / "golden"


# ---- JUnit XML ----------------------------------------------------------------------------------


def test_a_test_case_stands_for_each_case_and_fails_as_the_gate_does(
    findings: list[Finding],
) -> None:
    root = ElementTree.fromstring(as_junit(findings))
    assert root.tag == "testsuites"
    (suite,) = root.findall("testsuite")
    for element in (root, suite):
        assert (element.get("tests"), element.get("failures")) == ("5", "3")
    failed = {case.get("name") for case in suite if case.find("failure") is not None}
    assert [case.get("name") for case in suite] == [finding.case for finding in findings]
    assert failed == {finding.case for finding in findings if finding.is_failure}
    assert failed == {"slow", "gain_exact", "gone"}
    assert float(root.get("time", "")) == 1.75


def test_the_text_of_a_failure_holds_its_figures(findings: list[Finding]) -> None:
    root = ElementTree.fromstring(as_junit(findings))
    failure = root.find(".//testcase[@name='slow']/failure")
    assert failure is not None
    assert failure.get("message") == "slow: worse"
    assert failure.text == (
        "ttft_to_reference.p50: old 0.4, new 0.8, limit 0.5, change +0.4 (+100.00 %), verdict worse"
    )


def test_no_text_breaks_the_xml(findings: list[Finding]) -> None:
    root = ElementTree.fromstring(as_junit(findings).encode())
    text = root.findtext(".//testcase[@name='gone']/failure") or ""
    assert text.startswith("<script>alert(1)</script> & ")
    assert "\x00" not in text
    assert text.endswith("\N{SNOWMAN}")


# ---- JSON ---------------------------------------------------------------------------------------


def test_the_json_file_holds_what_the_terminal_says(
    refimpl: CommandLine, folder: Path, tmp_path: Path
) -> None:
    paths = {flag: tmp_path / f"report{flag}" for flag in ("--report-json", "--junit")}
    words = [str(word) for pair in paths.items() for word in pair]
    done = refimpl("golden", "check", "--golden-dir", str(folder), *words)
    assert done.code == 1
    said = json.loads(paths["--report-json"].read_text())
    assert said == json.loads(refimpl("golden", "check", "--golden-dir", str(folder), "--json").out)
    verdicts = {name: case["verdict"] for name, case in said["cases"].items()}
    assert verdicts == {"small": "equal", "large": "worse"}
    assert not said["passed"]
    for name, verdict in verdicts.items():
        assert (f"{name}: {verdict}" in done.out) == (verdict != "equal")
    assert "2 cases: 1 equal, 1 worse" in done.out
    root = ElementTree.parse(paths["--junit"]).getroot()
    assert (root.get("failures"), done.code) == ("1", 1)


def test_every_report_of_any_text_can_be_written(findings: list[Finding], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("report.json", "report.xml", "report.html")]
    ReportFiles(*paths).write(findings)
    assert all("slow" in path.read_text(encoding="utf-8") for path in paths)


def test_json_and_pictures_leave_each_other_alone(findings: list[Finding]) -> None:
    assert json.loads(as_json(findings)) == json.loads(json.dumps(for_json(findings)))
    assert "picture" not in as_json(findings)


# ---- HTML ---------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page would load, what stands in its tables, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.policy = ""
        self.cases: list[str] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        named = ("src", "href", "srcset", "data", "action", "poster", "background")
        self.loads += [f"{tag} {found[name]}" for name in named if name in found]
        self.loads += [tag] if tag in ("link", "iframe", "object", "embed", "base") else []
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "details":
            self.cases.append(found["data-case"] or "")
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "td":
            self.cells.append(data.strip())
        elif self._inside == "style":
            self.loads += [word for word in ("@import", "url(") if word in data]

    def handle_endtag(self, _: str) -> None:
        self._inside = ""


def plots_of(page: Page) -> dict[str, Any]:
    text = page.scripts[1].partition("const plots = ")[2].partition(";\n")[0]
    return {case: json.loads(figure) for case, figure in json.loads(text).items()}


def test_the_page_loads_nothing_and_forbids_to(findings: list[Finding]) -> None:
    page = Page(as_html(findings))
    assert page.loads == []
    assert page.policy.startswith("default-src 'none';")
    assert "http" not in page.policy
    assert len(page.scripts) == 2  # plotly once, and the few lines that draw


def test_the_page_shows_every_verdict_and_figure(findings: list[Finding]) -> None:
    text = as_html(findings)
    page = Page(text)
    assert summary(findings) in text
    assert page.cases == [finding.case for finding in findings]
    assert page.cells[:6] == [
        "ttft_to_reference.p50",
        "0.4",
        "0.8",
        "0.5",
        "+0.4 (+100.00 %)",
        "worse",
    ]
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_each_case_has_its_plots_and_the_page_stays_small(findings: list[Finding]) -> None:
    many = [result(turn % 90, 1 + turn % 5_000, turn % 777) for turn in range(20_000)]
    findings[0] = Finding("fine", "equal", picture=picture_of({"simulated": many}))
    text = as_html(findings)
    assert len(text) < BYTES_MAX
    plots = plots_of(Page(text))
    assert set(plots) == {"fine", "slow"}
    titles = [note["text"] for note in plots["slow"]["layout"]["annotations"]]
    assert len(titles) == 4
    drawn = {trace.get("name") for trace in plots["slow"]["data"]}
    assert {"measured, p99", "reference, p50", "tokens: device", "tokens: computed"} <= drawn
    assert len(plots["fine"]["layout"]["annotations"]) == 3  # no bandwidth where none was measured


def test_a_case_without_times_has_a_page_too() -> None:
    rows = [Result(0, 100, 0, 0, 0, tiers=(50, 0, 0), hit_tokens=50) for _ in range(3)]
    page = Page(as_html([Finding("replay", "equal", picture=picture_of({"simulated": rows}))]))
    (plot,) = plots_of(page).values()
    assert [note["text"] for note in plot["layout"]["annotations"]] == ["Prompt tokens by turn"]


def test_simulated_cases_are_drawn_from_their_record(folder: Path, tmp_path: Path) -> None:
    files = ReportFiles(html=tmp_path / "page.html")
    found = check(folder, with_pictures=True)
    files.write(found)
    plots = plots_of(Page((tmp_path / "page.html").read_text(encoding="utf-8")))
    assert set(plots) == {"small", "large"}
    assert plots["small"]["data"][0]["name"] == "simulated, 200 requests"
    assert [finding.picture for finding in check(folder)] == [None, None]


# ---- pictures -----------------------------------------------------------------------------------


def test_a_histogram_counts_every_request_once_and_shares_its_bins() -> None:
    drawn = picture().runs
    histograms = [run.ttft_ms for run in drawn.values()]
    assert [sum(each.counts) for each in histograms if each] == [6, 6]
    assert len({(each.low, each.width, len(each.counts)) for each in histograms if each}) == 1
    assert histograms[0] is not None
    assert len(histograms[0].counts) == BINS


def test_prompts_fall_into_powers_of_two() -> None:
    lengths = [1, 2, 256, 257, 512, 513]
    run = picture_of({"x": [result(prompt=length, hits=0) for length in lengths]}).runs["x"]
    buckets = {tail.bucket: tail.requests for tail in run.tails}
    assert buckets == {"1": 1, "2-2": 1, "129-256": 1, "257-512": 2, "513-1,024": 1}


def test_turns_beyond_the_last_bar_are_one_bar() -> None:
    run = picture_of({"x": [result(turn) for turn in range(TURNS_MAX + 50)]}).runs["x"]
    assert len(run.turns) == TURNS_MAX + 1
    assert run.turns[-1].turn == f"{TURNS_MAX + 1}+"
    assert run.turns[-1].tokens["device"] == 50 * 40


# ---- what can't be ------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["jinja2", "plotly"])
def test_a_missing_library_is_one_line_before_anything_runs(
    refimpl: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    done = refimpl("golden", "check", "--html", str(tmp_path / "page.html"))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"--html needs {missing}: pip install -e '.[report]'" in done.err


@pytest.mark.parametrize("flag", ["--report-json", "--junit", "--html"])
def test_a_report_that_cant_be_written_is_refused_before_anything_runs(
    refimpl: CommandLine, tmp_path: Path, flag: str
) -> None:
    done = refimpl("golden", "check", flag, str(tmp_path / "gone" / "report"))
    assert (done.code, done.out) == (2, "")
    assert f"{flag} {tmp_path}/gone/report: there is no folder" in done.err
    with pytest.raises(ConfigError, match="is a folder"):
        ReportFiles(json=tmp_path)


def test_a_check_without_reports_loads_neither_templates_nor_plots() -> None:
    code = (
        "import sys\nfrom refimpl.__main__ import main\n"
        "sys.argv = ['refimpl', 'golden', 'check', 'audit_all_equal']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'jinja2', 'plotly', 'polars', 'torch'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

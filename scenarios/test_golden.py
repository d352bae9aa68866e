"""The golden gate: the committed cases hold, and each way to fail is shown to fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refimpl.config import ConfigError
from refimpl.run import golden, golden_case, golden_history, tier_sets
from refimpl.run.golden import Finding, check, replace_file, update
from refimpl.run.golden_change import Change, compare, overall
from refimpl.run.live_case import LIVE_FOLDER
from refimpl.run.options import MULTI_TURN, Options
from scenarios.tidy import ROOT

FOLDER = ROOT / "golden"
NAMES = golden.case_names(FOLDER)
CASE = """\
description = "One prompt again and again."

[flags]
workload = "all_equal:requests=200,request_length=256"
seed = 1

[expect]
above_zero = ["hit_tokens.device"]
equal_zero = ["hit_tokens.host"]
equal = {requests = 200}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A golden folder with one tiny case, ``small``, that holds."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "case.toml").write_text(CASE)
    assert [finding.verdict for finding in update(tmp_path)] == ["new"]
    return tmp_path


def checked(folder: Path) -> Finding:
    (finding,) = check(folder)
    return finding


def edit_case(folder: Path, old: str, new: str) -> None:
    path = folder / "small" / "case.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit_expected(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "small" / "expected.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# ---- the committed cases ------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("name", NAMES)
def test_a_golden_case_gives_what_is_written_down(name: str) -> None:
    finding = golden.examine(FOLDER, name)
    assert (finding.verdict, finding.problems, finding.changes) == ("equal", [], [])


def test_the_committed_index_names_every_folder() -> None:
    folders = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    folders.remove(LIVE_FOLDER)  # whose cases are files
    assert folders == NAMES
    assert len(NAMES) >= 24


@pytest.mark.parametrize("family", ["multi_turn", "shared_prefix", "long_document", "agent"])
def test_each_tier_adds_hits_and_lowers_the_median_ttft(family: str) -> None:
    cases = [f"{family}_{tiers}" for tiers in ("no_cache", "l1", "l1_l2", "l1_l2_l3")]
    figures = [golden.expected(FOLDER, case)["figures"] for case in cases]
    rates = [each["hit_rate_ppm"] for each in figures]
    medians = [each["ttft_ns"]["p50"] for each in figures]
    assert rates[0] == 0
    assert rates == sorted(set(rates))
    assert medians == sorted(set(medians), reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_prompt_token_of_a_case_is_a_hit_or_computed(name: str) -> None:
    figures = golden.expected(FOLDER, name)["figures"]
    served = sum(figures["hit_tokens"].values()) + figures["computed_tokens"]
    if figures["finished"].get("error"):  # of prompts that were refused nothing was served
        assert 0 < served < figures["prompt_tokens"]
    else:
        assert served == figures["prompt_tokens"]


def test_the_table_of_the_readme_is_that_of_the_goldens() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tier_sets.TABLE_BEGIN in text
    assert tier_sets.with_table(text, tier_sets.markdown(FOLDER)) == text


def test_the_table_of_the_readme_shows_what_refimpl_run_runs() -> None:
    for name, options in tier_sets.tier_sets(Options(**MULTI_TURN)).items():
        case = golden_case.read_case(FOLDER, tier_sets.GOLDEN_CASES[name])
        assert case.options == options


# ---- what fails ---------------------------------------------------------------------------------


def test_an_untouched_case_is_equal(folder: Path) -> None:
    assert checked(folder) == Finding("small", "equal", document=checked(folder).document)


def test_a_figure_that_was_better_before_makes_the_case_worse(folder: Path) -> None:
    def lower(document: dict[str, Any]) -> None:
        document["figures"]["ttft_ns"]["p50"] -= 1

    edit_expected(folder, lower)
    finding = checked(folder)
    assert finding.verdict == "worse"
    (change,) = finding.changes
    assert (change.path, change.verdict) == ("ttft_ns.p50", "worse")
    assert change.change.startswith("+1 (+")


def test_an_improvement_fails_as_well_and_asks_for_an_update(folder: Path) -> None:
    def raise_(document: dict[str, Any]) -> None:
        document["figures"]["ttft_ns"]["p99"] += 5

    edit_expected(folder, raise_)
    finding = checked(folder)
    assert finding.verdict == "better"
    assert finding.is_failure
    assert "refimpl golden update small" in finding.problems[0]


def test_equal_totals_from_other_decisions_are_a_change(folder: Path) -> None:
    def forget(document: dict[str, Any]) -> None:
        document["figures"]["decisions_sha256"] = "0" * 64

    edit_expected(folder, forget)
    assert checked(folder).verdict == "changed"


@pytest.mark.parametrize("key", ["seed", "config_sha256", "workload_sha256"])
def test_another_origin_of_equal_figures_is_a_change(folder: Path, key: str) -> None:
    edit_expected(folder, lambda document: document["provenance"].update({key: "x"}))
    finding = checked(folder)
    assert finding.verdict == "changed"
    assert finding.changes[0].path == f"provenance.{key}"


def test_a_figure_that_is_gone_is_a_change(folder: Path) -> None:
    edit_expected(folder, lambda document: document["figures"].update({"nonsense": 3}))
    assert checked(folder).changes == [Change("nonsense", 3, None, "changed")]


def test_a_flag_changed_in_the_case_shows_as_another_configuration(folder: Path) -> None:
    edit_case(folder, "seed = 1", "seed = 1\npage-size = 32")
    assert "provenance.config_sha256" in [change.path for change in checked(folder).changes]


def test_a_case_whose_folder_is_gone_is_missing_and_update_does_not_drop_it(folder: Path) -> None:
    shutil.rmtree(folder / "small")
    assert checked(folder).verdict == "missing"
    (finding,) = update(folder)
    assert finding.verdict == "missing"
    assert checked(folder).verdict == "missing"


def test_a_case_without_its_expected_figures_is_missing(folder: Path) -> None:
    (folder / "small" / "expected.json").unlink()
    assert checked(folder).verdict == "missing"


def test_a_folder_that_the_index_lacks_is_new_and_fails(folder: Path) -> None:
    shutil.copytree(folder / "small", folder / "other")
    assert [finding.verdict for finding in check(folder)] == ["new", "equal"]
    assert golden.case_names(folder) == ["other", "small"]


def test_without_an_index_nothing_passes(folder: Path) -> None:
    (folder / "index.toml").unlink()
    with pytest.raises(ConfigError, match=r"index\.toml is not there"):
        check(folder)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("seed = 1", "page-size = 0", "--page-size 0 must be"),
        ("seed = 1", "sede = 1", "did you mean seed?"),
        ("seed = 1", 'seed = "1"', "seed must be of type int"),
        ("all_equal:", "all_eqal:", "scenario 'all_eqal' is unknown"),
        ("[expect]", "[expcet]", "did you mean expect?"),
        ("above_zero", "above_zer", "did you mean above_zero?"),
        ("hit_tokens.device", "hit_tokens.devic", "did you mean hit_tokens.device?"),
        ("seed = 1", "seed = ", "malformed"),
        ("requests=200", "requests=199", "199 requests are below the 200"),
        ("hit_tokens.device", "pages_moved.store", "pages_moved.store is 0 and must be above 0"),
        ("hit_tokens.host", "hit_tokens.device", "and must be 0"),
        ("requests = 200", "requests = 201", "requests is 200 and must be 201"),
        ('description = "One', 'description = "" # One', "description must be a sentence"),
        ("seed = 1", 'trace = "x"', "a case replays a scenario"),
    ],
)
def test_a_case_that_no_longer_runs_or_shows_its_feature_is_broken(
    folder: Path, old: str, new: str, problem: str
) -> None:
    edit_case(folder, old, new)
    before = (folder / "small" / "expected.json").read_text()
    finding = checked(folder)
    assert finding.verdict == "broken"
    assert problem in finding.problems[0]
    assert update(folder)[0].is_failure
    assert (folder / "small" / "expected.json").read_text() == before


def test_an_exception_in_the_engine_is_a_finding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("slot 3 is owned twice")

    monkeypatch.setattr(golden, "measure", fail)
    finding = checked(folder)
    assert (finding.verdict, finding.problems) == (
        "broken",
        ["AssertionError: slot 3 is owned twice"],
    )


def test_expected_figures_that_are_no_json_are_broken_until_updated(folder: Path) -> None:
    (folder / "small" / "expected.json").write_text("{")
    assert checked(folder).verdict == "broken"
    update(folder)
    assert checked(folder).verdict == "equal"


def test_an_update_writes_down_what_is_new_and_then_all_is_equal(folder: Path) -> None:
    edit_case(folder, "request_length=256", "request_length=512")
    assert update(folder, ["small"])[0].changes != []
    assert checked(folder).verdict == "equal"


def test_an_unknown_case_is_refused_with_a_hint(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean small"):
        check(folder, ["smal"])


def test_two_processes_find_what_one_finds(folder: Path) -> None:
    shutil.copytree(folder / "small", folder / "other")
    update(folder)
    (folder / "other" / "expected.json").unlink()
    assert check(folder, jobs=2) == check(folder, jobs=1)


# ---- verdicts -----------------------------------------------------------------------------------


def figures(**changes: int) -> dict[str, Any]:
    hits = {"device": 10, "host": 10}
    hits |= {tier: changes.pop(tier) for tier in ("device", "host") if tier in changes}
    return {"figures": {"hit_tokens": hits, "hit_rate_ppm": 5, "computed_tokens": 7} | changes}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (figures(), "equal"),
        (figures(hit_rate_ppm=6), "better"),
        (figures(hit_rate_ppm=4), "worse"),
        (figures(computed_tokens=8), "worse"),
        (figures(hit_rate_ppm=6, computed_tokens=8), "worse"),
        (figures(device=9), "worse"),
        (figures(host=11), "better"),
        (figures(device=9, host=11), "changed"),
        (figures(device=12, host=9), "better"),
        (figures(retracted=1), "worse"),
        (figures(prefetch=1), "changed"),
        (figures(virtual_ns=9), "changed"),
    ],
)
def test_the_verdict_knows_which_way_is_better(new: dict[str, Any], verdict: str) -> None:
    assert overall(compare(figures(), new)) == verdict


# ---- revisions ----------------------------------------------------------------------------------


@pytest.fixture
def repository(folder: Path) -> Path:
    """The folder under version control, with a better TTFT in its second revision."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*words: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        alone = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
        line = ["git", "-C", str(folder), *who, *words]
        subprocess.run(line, check=True, capture_output=True, env=alone)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    edit_expected(folder, lambda document: document["figures"]["ttft_ns"].update({"p50": 1}))
    git("commit", "-qam", "two")
    return folder


def test_a_diff_of_revisions_compares_what_both_wrote_down(repository: Path) -> None:
    (finding,) = golden_history.diff(repository, "HEAD~1..HEAD")
    assert (finding.case, finding.verdict) == ("small", "better")
    (finding,) = golden_history.diff(repository, "HEAD..HEAD~1")
    assert finding.verdict == "worse"


def test_a_diff_of_one_revision_compares_with_the_files_as_they_are(repository: Path) -> None:
    assert golden_history.diff(repository, "HEAD") == []
    shutil.copytree(repository / "small", repository / "other")
    assert [each.verdict for each in golden_history.diff(repository, "HEAD")] == ["new"]
    shutil.rmtree(repository / "small")
    verdicts = {each.case: each.verdict for each in golden_history.diff(repository, "HEAD")}
    assert verdicts == {"other": "new", "small": "missing"}


@pytest.mark.parametrize("revisions", ["", "nonsense", "--help", "HEAD..nonsense", "..HEAD"])
def test_a_revision_that_is_none_is_refused(repository: Path, revisions: str) -> None:
    with pytest.raises(ConfigError, match="revision"):
        golden_history.diff(repository, revisions)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "expected.json"
    replace_file(path, "old")

    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, "new")
    assert path.read_text(encoding="utf-8") == "old"

"""Ratios of a bench are kept for the class of machine that measured them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refimpl.config import ConfigError
from refimpl.run import baselines

FIGURES = {"megabytes": 33.5, "ratios": {"page_first": {"to_plain": 0.98765}}}


def test_what_is_kept_is_shown_beside_the_next_run(tmp_path: Path) -> None:
    assert baselines.with_kept(tmp_path, "copy", FIGURES) == FIGURES
    path = baselines.keep(tmp_path, "copy", FIGURES)
    shown = baselines.with_kept(tmp_path, "copy", {"ratios": {}})
    assert shown["kept_ratios"] == {"page_first": {"to_plain": 0.988}}
    assert list(json.loads(path.read_text())) == [baselines.machine_class()]


def test_other_machines_and_other_benches_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baselines.keep(tmp_path, "copy", FIGURES)
    baselines.keep(tmp_path, "ttft", {"ratios": {"to_computed": 0.03}})
    monkeypatch.setattr(baselines, "machine_class", lambda: "another, 8 cores")
    assert "kept_ratios" not in baselines.with_kept(tmp_path, "copy", FIGURES)
    path = baselines.keep(tmp_path, "copy", {"ratios": {"page_first": 1.0}})
    kept = json.loads(path.read_text())
    assert sorted(map(len, kept.values())) == [1, 2]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_object_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / baselines.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"wall_clock\.json"):
        baselines.keep(tmp_path, "copy", FIGURES)


def test_a_bench_without_ratios_keeps_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--keep"):
        baselines.keep(tmp_path, "sim", {"requests": 1})
    assert not list(tmp_path.iterdir())

"""Every story under cases/ goes as it says. ``--rewrite-stories`` makes the files say how it went."""

from __future__ import annotations

from pathlib import Path

import pytest

from scenarios import story
from scenarios.story import CASES, LINES_MAX, Block


@pytest.mark.parametrize(
    "path", story.paths(), ids=lambda path: path.relative_to(CASES).with_suffix("").as_posix()
)
def test_the_story_goes_as_it_says(path: Path, pytestconfig: pytest.Config) -> None:
    story.check(path, is_rewrite=pytestconfig.getoption("--rewrite-stories"))


def test_every_story_states_its_fact_and_fits_a_screen() -> None:
    for path in story.paths():
        text = path.read_text(encoding="utf-8")
        head, blocks = story.parse(text)
        assert head, f"{path} states no fact"
        assert head[-1].endswith("."), path
        assert len(text.splitlines()) <= LINES_MAX, path
        assert any(block.expected for block in blocks), f"{path} proves nothing"


def test_a_story_that_goes_otherwise_differs_from_its_text() -> None:
    text = "# A fact.\nsubmit r1 a*4\n----\nnothing at all\n"
    head, blocks = story.parse(text)
    assert (head, blocks) == (["# A fact."], [Block(["submit r1 a*4"], ["nothing at all"])])
    assert story.text_of(head, blocks) == text
    assert story.text_of(head, story.play(blocks)) != text

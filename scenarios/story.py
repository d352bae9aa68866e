"""Stories: text files that tell an engine what happens and hold what it answers.

    # The fact this story proves, in one sentence. Field report B14.
    config page_size=2 l1=4
    submit r1 a*4
    ----
    what the verbs print

A block is one verb a line, a line ``----``, and the expected output up to an empty line. After
every verb all invariants are checked; at the end everything in flight completes and nothing may be
left over, unless the last verb is ``leave``. Verbs stand in verbs.py.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scenarios.stage import Stage
from scenarios.tidy import ROOT
from scenarios.verbs import VERBS

CASES: Final = ROOT / "scenarios" / "cases"
LINES_MAX: Final = 60
_RULE: Final = "----"


@dataclass(frozen=True)
class Block:
    """Verbs and what they print."""

    verbs: list[str]
    expected: list[str]


def paths() -> list[Path]:
    return sorted(CASES.glob("*/*.txt"))


def parse(text: str) -> tuple[list[str], list[Block]]:
    """The comment at the head, and the blocks."""
    lines = text.splitlines()
    head = [line for line in lines if line.startswith("#")]
    blocks, verbs, expected, in_output = [], list[str](), list[str](), False
    for line in [*(line for line in lines if not line.startswith("#")), ""]:
        if line == _RULE:
            in_output = True
        elif in_output and line:
            expected.append(line)
        elif line:
            verbs.append(line)
        elif verbs:
            blocks.append(Block(verbs, expected))
            verbs, expected, in_output = [], [], False
    return head, blocks


def play(blocks: list[Block]) -> list[Block]:
    """The blocks with what their verbs really print."""
    stage = Stage()
    played = []
    for block in blocks:
        printed = [line for verb in block.verbs for line in _perform(stage, verb)]
        played.append(Block(block.verbs, printed))
    stage.close()
    return played


def _perform(stage: Stage, line: str) -> list[str]:
    verb, _, rest = line.strip().partition(" ")
    try:
        return VERBS[verb](stage, rest.strip())
    except Exception as error:
        error.add_note(f"in the story's line: {line}")
        raise


def text_of(head: list[str], blocks: list[Block]) -> str:
    parts = ["\n".join([*block.verbs, _RULE, *block.expected]) for block in blocks]
    return "\n".join(head) + "\n" + "\n\n".join(parts) + "\n"


def check(path: Path, *, is_rewrite: bool) -> None:
    """Play the story; its output is what the file says, or the file is made to say it."""
    text = path.read_text(encoding="utf-8")
    head, blocks = parse(text)
    found = text_of(head, play(blocks))
    if is_rewrite:
        path.write_text(found, encoding="utf-8")
    elif found != text:
        name = path.relative_to(ROOT).as_posix()
        diff = difflib.unified_diff(
            text.splitlines(), found.splitlines(), f"{name}: expected", "found", lineterm=""
        )
        raise AssertionError("the story went otherwise:\n" + "\n".join(diff))

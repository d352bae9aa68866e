"""Goldens of two revisions beside each other: what a branch does to hit rates and TTFT.

Reads what is written down and runs nothing. Must not know: cases, simulations.
Called by: the command line.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from refimpl.config import ConfigError, require
from refimpl.run.golden import EXPECTED_FILE, Finding, case_names, expected, parsed
from refimpl.run.golden_case import Document
from refimpl.run.golden_change import compare, overall


def diff(folder: Path, revisions: str) -> list[Finding]:
    """Compare ``BASE..HEAD``, or ``BASE`` with the files as they are. Cases that differ, by name.

    Raises ConfigError for a revision that isn't one, or a folder that git doesn't know.
    """
    base, dots, head = revisions.partition("..")
    before = _at(folder, base)
    after = _at(folder, head or "HEAD") if dots else _now(folder)
    findings = [_finding(name, before, after) for name in sorted(before | after)]
    return [finding for finding in findings if finding.is_failure]


def _finding(name: str, before: dict[str, Document], after: dict[str, Document]) -> Finding:
    if name not in before:
        return Finding(name, "new", problems=["the case is new"], document=after[name])
    if name not in after:
        return Finding(name, "missing", problems=["the case is gone"])
    changes = compare(before[name], after[name])
    return Finding(name, overall(changes), changes, document=after[name])


def _now(folder: Path) -> dict[str, Document]:
    names = [name for name in case_names(folder) if (folder / name / EXPECTED_FILE).is_file()]
    return {name: expected(folder, name) for name in names}


def _at(folder: Path, revision: str) -> dict[str, Document]:
    commit = _git(folder, revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    files = _git(folder, revision, "ls-tree", "-r", "--name-only", commit, "--", ".").splitlines()
    found = {}
    for file in files:
        name, _, rest = file.partition("/")
        if rest == EXPECTED_FILE:
            text = _git(folder, revision, "show", f"{commit}:./{file}")
            found[name] = parsed(text, f"{revision}:{file}")
    return found


def _git(folder: Path, revision: str, *words: str) -> str:
    require(
        revision != "" and not revision.startswith("-"),
        f"{revision!r} is not a revision; write BASE..HEAD or BASE",
    )
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ConfigError(f"git can't be started: {error}") from None
    if done.returncode:
        why = done.stderr.strip() or "there is no such commit"
        raise ConfigError(f"{folder} at revision {revision!r}: {why}")
    return done.stdout.strip()

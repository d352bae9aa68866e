"""The golden gate: cases are run and compared with what is written down, exactly.

The clock is virtual and every figure an integer, so nothing is tolerated: worse, better and merely
different all fail, and so does a case that is gone or no longer runs. Which of them it is, the
verdict says.
Must not know: the terminal, version control. Called by: the command line, tests.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from refimpl.config import ConfigError, require
from refimpl.run.golden_case import CASE_FILE, Document, measure, read_case, unmet
from refimpl.run.golden_change import Change, compare, overall
from refimpl.run.picture import Picture, picture_of
from refimpl.run.results import from_rows

EXPECTED_FILE: Final = "expected.json"
INDEX_FILE: Final = "index.toml"
_INDEX_HEAD: Final = """\
# What `refimpl golden check` runs. Deleting a folder is not enough to drop a case, so that none gets
# lost: delete its line as well. `refimpl golden update` adds the lines of new folders.
"""
_SERIAL_MAX: Final = 4  # cases below which starting processes takes longer than running them


@dataclass(frozen=True, slots=True)
class Finding:
    """What the gate says of one case.

    The verdict is ``equal``, ``worse``, ``better``, ``changed``, ``new`` (nothing is written down
    yet), ``missing`` or ``broken``; all but those in ``passes`` fail.
    """

    case: str
    verdict: str
    changes: list[Change] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    document: Document | None = None  # what was measured
    passes: tuple[str, ...] = ("equal",)
    picture: Picture | None = field(default=None, compare=False)  # for a report, where asked for
    seconds: float = field(default=0.0, compare=False)  # it took

    @property
    def is_failure(self) -> bool:
        """Whether the gate stays shut."""
        return self.verdict not in self.passes


def golden_folder(given: Path | None = None) -> Path:
    """The folder of the cases: ``given``, else ./golden, else the one beside the package."""
    if given is not None:
        require(given.is_dir(), f"--golden-dir {given} is not a folder")
        return given
    beside = Path(__file__).resolve().parents[2] / "golden"
    for folder in (Path("golden"), beside):
        if (folder / INDEX_FILE).is_file():
            return folder
    raise ConfigError(
        f"there is no golden/{INDEX_FILE} here or in {beside.parent}: use --golden-dir"
    )


def check(
    folder: Path,
    names: Sequence[str] = (),
    jobs: int | None = None,
    *,
    with_pictures: bool = False,
) -> list[Finding]:
    """Run the named cases, or all, and compare. In the order of their names.

    ``jobs`` is the number of processes; default: one a core. ``with_pictures`` keeps of each case what
    a report draws. Raises ConfigError for an unknown name.
    """
    require(
        (folder / INDEX_FILE).is_file(),
        f"{folder / INDEX_FILE} is not there: without it a lost case would not be missed",
    )
    one = partial(examine, folder, with_picture=with_pictures)
    return _each(one, _chosen(folder, names), jobs)


def update(folder: Path, names: Sequence[str] = (), jobs: int | None = None) -> list[Finding]:
    """The same, then write down what was measured, and the lines of new folders.

    What gave no figures that hold is left as it is: it has to be mended by hand.
    """
    found = _each(partial(examine, folder), _chosen(folder, names), jobs)
    findings = [_without_hints(finding) for finding in found]
    written = [finding for finding in findings if finding.document is not None]
    for finding in written:
        path = folder / finding.case / EXPECTED_FILE
        if finding.is_failure or not path.is_file():
            replace_file(path, _text(finding.document))
    listed = _listed(folder)
    added = [finding.case for finding in written if finding.case not in listed]
    if added:
        lines = "".join(f'    "{name}",\n' for name in sorted([*listed, *added]))
        replace_file(folder / INDEX_FILE, f"{_INDEX_HEAD}cases = [\n{lines}]\n")
    return findings


def _without_hints(finding: Finding) -> Finding:
    """What is written down anyway needs no advice to update it."""
    return finding if finding.document is None else replace(finding, problems=[])


def expected(folder: Path, name: str) -> Document:
    """What is written down of a case; raises ConfigError when that can't be read."""
    path = folder / name / EXPECTED_FILE
    try:
        return parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None


def parsed(text: str, where: str) -> Document:
    """The text of an ``expected.json``; raises ConfigError when it is none."""
    try:
        document: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is malformed: {error}") from None
    require(
        isinstance(document, dict) and isinstance(document.get("figures"), dict),
        f"{where} holds no figures",
    )
    return dict(document)


def case_names(folder: Path) -> list[str]:
    """The names in the index and those of the folders, sorted."""
    return sorted({*_listed(folder), *_on_disk(folder)})


# ---- one case -----------------------------------------------------------------------------------


def examine(folder: Path, name: str, *, with_picture: bool = False) -> Finding:
    """Run one case and compare it; whatever goes wrong is a finding."""
    begun = perf_counter()
    finding = _examined(folder, name, with_picture=with_picture)
    return replace(finding, seconds=perf_counter() - begun)


def _examined(folder: Path, name: str, *, with_picture: bool) -> Finding:
    if not (folder / name / CASE_FILE).is_file():
        return Finding(name, "missing", problems=[f"{name}/{CASE_FILE} is gone"])
    try:
        case = read_case(folder, name)
        ran = measure(case)
        problems = unmet(case, ran.document)
    except ConfigError as error:
        return Finding(name, "broken", problems=[f"no longer runs: {error}"])
    except Exception as error:  # whatever a run raises is what the gate has to report
        return Finding(name, "broken", problems=[f"{type(error).__name__}: {error}"])
    if problems:
        return Finding(name, "broken", problems=problems)
    picture = picture_of({"simulated": from_rows(ran.rows)}) if with_picture else None
    if name not in _listed(folder):
        hint = f"is not in {INDEX_FILE}: run `refimpl golden update {name}`"
        return Finding(name, "new", problems=[hint], document=ran.document, picture=picture)
    return replace(_compared(folder, name, ran.document), picture=picture)


def _compared(folder: Path, name: str, document: Document) -> Finding:
    hint = f"run `refimpl golden update {name}`"
    if not (folder / name / EXPECTED_FILE).is_file():
        gone = f"{name}/{EXPECTED_FILE} is gone: restore it, or {hint}"
        return Finding(name, "missing", problems=[gone], document=document)
    try:
        changes = compare(expected(folder, name), document)
    except ConfigError as error:
        return Finding(name, "broken", problems=[str(error)], document=document)
    verdict = overall(changes)
    problems = [f"better than what is written down: {hint}"] if verdict == "better" else []
    return Finding(name, verdict, changes, problems, document)


# ---- many cases ---------------------------------------------------------------------------------


def _each(one: Callable[[str], Finding], names: Sequence[str], jobs: int | None) -> list[Finding]:
    workers = min(jobs or os.cpu_count() or 1, len(names))
    if workers <= 1 or (jobs is None and len(names) < _SERIAL_MAX):
        return [one(name) for name in names]
    # Spawned, not forked: a fork would copy the threads' locks of whoever called.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(one, names))


def _chosen(folder: Path, names: Sequence[str]) -> list[str]:
    known = case_names(folder)
    for name in names:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        require(name in known, f"there is no golden case {name!r}; {hint}")
    require(bool(known), f"{folder} holds no golden case")
    return sorted(set(names)) or known


def _listed(folder: Path) -> list[str]:
    path = folder / INDEX_FILE
    if not path.is_file():
        return []
    try:
        cases = tomllib.loads(path.read_text(encoding="utf-8")).get("cases")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    is_list = isinstance(cases, list) and all(isinstance(name, str) for name in cases)
    require(is_list, f"{path} must hold a list of names, cases = [...]")
    return list(cases or ())


def _on_disk(folder: Path) -> Iterable[str]:
    files = (CASE_FILE, EXPECTED_FILE)
    return {path.parent.name for file in files for path in folder.glob(f"*/{file}")}


def _text(document: Document | None) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all: a full disk or a kill leaves the old one."""
    fresh = path.with_suffix(f"{path.suffix}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)

"""The kit finds each liar by the rule it breaks, and passes who is honest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from refimpl.conformance.kit import RULES, certify, clean_up
from refimpl.conformance.room import PlainRoom
from refimpl.conformance.shapes import SHAPES, Shape
from refimpl.conformance.subject import Subject, subject_of
from refimpl.conformance.verdict import Verdict, judge
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.storage import factory
from scenarios.command_line import CommandLine
from scenarios.conformance.liars import CAUGHT, ClearsNothing, Honest, LeavesAFile, LeavesAThread
from scenarios.tidy import ROOT

CLASSES = "scenarios.conformance.classes"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def swept() -> Iterator[None]:
    """What liars leave behind is gone after the test."""
    yield
    LeavesAThread.ends.set()
    LeavesAThread.ends = Event()
    while LeavesAFile.files:
        os.close(LeavesAFile.files.pop())


def subject(patch: pytest.MonkeyPatch, liar: type[Honest]) -> Subject:
    patch.setitem(factory._MAKERS, "liar", liar)
    return Subject("liar", lifetime="process")


def example() -> str:
    """The class of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("```python\n")[2].partition("```")[0]


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where modules in ``folder`` can be imported."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def outcomes(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.rule: verdict.outcome for verdict in verdicts}


# ---- liars --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("liar", "rule", "reason"), CAUGHT, ids=[f"{liar.__name__}-{rule}" for liar, rule, _ in CAUGHT]
)
def test_a_liar_fails_the_rule_it_breaks(
    monkeypatch: pytest.MonkeyPatch, swept: None, liar: type[Honest], rule: str, reason: str
) -> None:
    del swept
    verdict = judge(rule, RULES[rule], subject(monkeypatch, liar))
    assert (verdict.outcome, reason in verdict.reason) == ("failed", True), verdict


def test_every_rule_has_a_liar_that_fails_it() -> None:
    assert {rule for _, rule, _ in CAUGHT} | {"processes"} == set(RULES)


def test_values_that_stay_in_a_process_fail_where_they_are_said_to_leave_it(tmp_path: Path) -> None:
    for name in ("HeldInMemory", "PidStore"):
        found = subject_of(f"{CLASSES}:{name}", json.dumps({"folder": str(tmp_path)}))
        verdict = judge("processes", RULES["processes"], found)
        assert verdict.outcome == "failed"
        assert "the other process: page 1 of 4 was stored and get calls it a miss" in verdict.reason


@pytest.mark.parametrize(
    ("name", "extra", "reason"),
    [
        ("FillsNoPointer", {"interface_v1": True}, "no byte written, though get says True"),
        ("FillsKeysOnly", {"interface_v1": True}, "bytes wrong"),
        ("ReturnsItsTarget", {}, "bytes wrong"),
        ("LosesTheLast", {}, "page 3 of 3 was stored and get calls it a miss"),
    ],
)
def test_a_lie_of_a_class_shows_through_the_adapter(
    name: str, extra: dict[str, bool], reason: str
) -> None:
    verdict = judge(
        "round_trip", RULES["round_trip"], subject_of(f"{CLASSES}:{name}", json.dumps(extra))
    )
    assert (verdict.outcome, reason in verdict.reason) == ("failed", True), verdict


# ---- the honest ---------------------------------------------------------------------------------


def test_an_honest_backend_passes_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = outcomes(certify(subject(monkeypatch, Honest)))
    assert seen.pop("processes") == "skipped"
    assert set(seen.values()) == {"passed"}


def test_a_class_of_generic_calls_written_for_sglang_passes_every_rule(tmp_path: Path) -> None:
    found = subject_of(f"{CLASSES}:FolderStorage", json.dumps({"folder": str(tmp_path / "kv")}))
    verdicts = certify(found)
    assert set(outcomes(verdicts).values()) == {"passed"}, verdicts


def test_a_class_of_v1_calls_written_for_sglang_passes_all_that_applies() -> None:
    found = subject_of(f"{CLASSES}:PointerStorage", '{"interface_v1": true}')
    seen = outcomes(verdicts := certify(found))
    skipped = {rule for rule, outcome in seen.items() if outcome == "skipped"}
    assert skipped == {"other_values", "processes", "clearing"}
    assert set(seen.values()) == {"passed", "skipped"}, verdicts


def test_the_class_of_the_readme_passes_every_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_store.py").write_text(example(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = subject_of("my_store:Folder", json.dumps({"folder": str(tmp_path / "kv")}))
    verdicts = certify(found)
    assert set(outcomes(verdicts).values()) == {"passed"}, verdicts
    assert list((tmp_path / "kv").iterdir()) == []


def test_upstreams_names_keep_models_and_ranks_apart_through_the_class(tmp_path: Path) -> None:
    extra = json.dumps({"folder": str(tmp_path), "compat": "sglang"})
    found = subject_of(f"{CLASSES}:FolderStorage", extra)
    assert judge("namespaces", RULES["namespaces"], found).outcome == "passed"
    with found.opened(SHAPES[0], 1) as store:
        assert len(store.name("any")) == 64  # the bare hash


def test_upstreams_names_in_a_class_that_adds_nothing_are_found_out() -> None:
    found = subject_of(f"{CLASSES}:HeldInMemory", '{"compat": "sglang"}')
    verdict = judge("namespaces", RULES["namespaces"], found)
    assert verdict.outcome == "failed"
    assert "another model finds pages that are not its own" in verdict.reason


def test_an_object_that_forgets_is_asked_only_what_it_promises() -> None:
    seen = outcomes(certify(subject_of(f"{CLASSES}:MinimalStorage")))
    assert {rule for rule, outcome in seen.items() if outcome == "skipped"} == {
        "processes",
        "restart",
        "clearing",
    }
    assert "failed" not in seen.values()


def test_the_kit_leaves_nothing_behind(tmp_path: Path) -> None:
    found = subject_of(f"{CLASSES}:FolderStorage", json.dumps({"folder": str(tmp_path)}))
    judge("batches", RULES["batches"], found)
    assert any(tmp_path.iterdir())
    clean_up(found)
    assert list(tmp_path.iterdir()) == []


# ---- its own pages ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
def test_pages_of_the_kit_lie_as_pages_of_a_pool(shape: Shape) -> None:
    geometry = Geometry(shape.layers, shape.kvs, shape.heads, shape.dim, shape.page_size)
    pool, room = Pool(geometry, shape.layout, 3), PlainRoom(shape, 3)
    pool.words()[:] = range(pool.words().size)
    room.memory[0][:] = pool.words().data.cast("B")
    for slot in range(3):
        assert [bytes(piece) for piece in room.page(slot).pieces] == [
            bytes(piece) for piece in pool.pieces(slot)
        ]


def test_plain_classes_and_memory_are_certified_without_torch(tmp_path: Path) -> None:
    (tmp_path / "my_store.py").write_text(example(), encoding="utf-8")
    extra = json.dumps({"folder": str(tmp_path / "kv")})
    code = f"""
import sys
from refimpl.conformance.kit import certify
from refimpl.conformance.subject import subject_of
seen = [*certify(subject_of("memory")), *certify(subject_of("my_store:Folder", {extra!r}))]
assert "failed" not in {{verdict.outcome for verdict in seen}}, seen
assert not {{"torch", "numba", "polars"}} & set(sys.modules), sys.modules
"""
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


# ---- pytest and the command line ---------------------------------------------------------------------------


def test_the_command_says_each_verdict_and_ends_with_0(run: CommandLine) -> None:
    done = run("conform", "memory")
    assert done.code == 0
    assert [rule for rule in RULES if rule.replace("_", " ") not in done.out] == []
    assert "15 passed, 0 failed, 1 skipped" in done.out


def test_pytest_certifies_a_class_by_the_same_rules(tmp_path: Path) -> None:
    forgets = "\n\nclass Forgets(Folder):\n    def set(self, name, value):\n        pass\n"
    (tmp_path / "my_store.py").write_text(example() + forgets, encoding="utf-8")
    extra = f"--backend-extra-config={json.dumps({'folder': str(tmp_path / 'kv')})}"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "scenarios/test_backends.py", extra)
    done = python(tmp_path, *words, "--backend", "my_store:Folder")
    assert (done.returncode, "16 passed" in done.stdout) == (0, True), done.stdout
    done = python(tmp_path, *words, "--backend", "my_store:Forgets", "-k", "round_trip")
    assert (done.returncode, "was stored and get calls it a miss" in done.stdout) == (1, True)


def test_a_failed_rule_ends_the_command_with_1(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject(monkeypatch, ClearsNothing)
    done = run("conform", "liar", "--lifetime", "process", "--json")
    figures = json.loads(done.out)
    assert (done.code, figures["failed"], figures["passed"]) == (1, 1, 14)
    assert figures["verdicts"]["clearing"] == {
        "outcome": "failed",
        "reason": "4 of 4 pages are there after clear",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memry"], "unknown storage backend 'memry': name one of memory"),
        (["no_such_module:Store"], "there is no module 'no_such_module'"),
        ([f"{CLASSES}:FolderStore"], "has no 'FolderStore'; did you mean FolderStorage?"),
        ([f"{CLASSES}:FolderStorage"], "the constructor of class"),
        (["memory", "--extra-config", '{"max_sise": 1}'], "did you mean max_size?"),
        (
            ["memory", "--extra-config", '{"compat": "vllm"}'],
            "config: compat must be sglang or absent",
        ),
        (["memory", "--lifetime", "day"], "choose one of object, process, store"),
    ],
)
def test_input_that_can_not_work_is_one_line_and_2(
    run: CommandLine, words: list[str], message: str
) -> None:
    done = run("conform", *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err

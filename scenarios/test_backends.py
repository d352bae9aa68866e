"""The rules of the conformance kit for every backend that is here, or for one of the user's.

``pytest scenarios/test_backends.py --backend MODULE:CLASS --backend-extra-config JSON`` certifies a
class, ``--backend NAME`` a backend in a setting of the user's own, such as a server that runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from refimpl.conformance.kit import RULES, clean_up
from refimpl.conformance.subject import Subject, subject_of
from refimpl.conformance.verdict import judge
from refimpl.storage.factory import backend_names

# What needs no server, and its extra config; {folder} is one of the test's own.
_HERE = {"memory": None, "file": '{{"file_storage_path": "{folder}"}}'}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = metafunc.config.getoption("--backend")
    backends = [asked] if asked else [name for name in _HERE if name in backend_names()]
    metafunc.parametrize("backend", backends)
    metafunc.parametrize("rule", RULES)


@pytest.fixture
def subject(backend: str, pytestconfig: pytest.Config, tmp_path: Path) -> Subject:
    given = pytestconfig.getoption("--backend-extra-config")
    own = _HERE.get(backend)
    extra = given or (own and own.format(folder=tmp_path))
    return subject_of(backend, extra, pytestconfig.getoption("--backend-lifetime"))


def test_the_backend_keeps_the_rule(subject: Subject, rule: str) -> None:
    verdict = judge(rule, RULES[rule], subject)
    clean_up(subject)
    if verdict.outcome == "skipped":
        pytest.skip(reason=verdict.reason)
    assert verdict.outcome == "passed", verdict.reason

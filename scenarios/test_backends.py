"""The rules of the conformance kit for every backend that is here, or for one of the user's.

``pytest scenarios/test_backends.py --backend MODULE:CLASS --backend-extra-config JSON`` certifies a
class, ``--backend NAME`` a backend in a setting of the user's own, such as a server that runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from refimpl.conformance.kit import RULES, clean_up
from refimpl.conformance.subject import Subject, subject_of
from refimpl.conformance.verdict import judge
from refimpl.storage.mooncake_lender import lent_memory
from refimpl.storage.servers import mooncake_master
from scenarios.storage.aibrix_patience import PATIENCE

# The backends that come with the project, and what of their clients must be installed.
_OURS = {
    "memory": None,
    "file": None,
    "nixl": "nixl_cu12",
    "aibrix": "aibrix_kvcache",
    "mooncake": "mooncake",
}
_SLOW = ("mooncake",)  # closing a client takes the library two seconds


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = metafunc.config.getoption("--backend")
    ours = [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.live] if name in _SLOW else [])
        for name in _OURS
    ]
    metafunc.parametrize("backend", [asked] if asked else ours)
    metafunc.parametrize("rule", RULES)


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A master, and memory that a process of its own lends; the extra config to use both."""
    folder = tmp_path_factory.mktemp("mooncake")
    with (
        mooncake_master(folder / "master.log") as master,
        lent_memory(master, 256 << 20, folder / "lender.log"),
    ):
        yield master.extra_config


@pytest.fixture
def extra_config(
    backend: str,
    pytestconfig: pytest.Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> str | None:
    """The keys of a backend: those of the command line, else some of a folder or server of its own."""
    given: str | None = pytestconfig.getoption("--backend-extra-config")
    if given or backend not in _OURS:
        return given
    client = _OURS[backend]
    if client is not None and find_spec(client) is None:
        pytest.skip(f"the extra {backend} is not installed")
    match backend:
        case "file":
            return json.dumps({"file_storage_path": str(tmp_path)})
        case "nixl":
            plugin = {"posix": {"active": True}}
            return json.dumps({"storage_dir": str(tmp_path), "plugin": plugin})
        case "aibrix":
            monkeypatch.setenv(*PATIENCE)
            monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED", "0")
            monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND", "SHFS")
            monkeypatch.setenv("AIBRIX_KV_CACHE_OL_SHFS_ROOT", str(tmp_path))
            return None
        case "mooncake":
            return json.dumps(request.getfixturevalue("mooncake"))
        case _:
            return None


@pytest.fixture
def subject(backend: str, extra_config: str | None, pytestconfig: pytest.Config) -> Subject:
    return subject_of(backend, extra_config, pytestconfig.getoption("--backend-lifetime"))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # AIBrix reads into bytes
def test_the_backend_keeps_the_rule(subject: Subject, rule: str) -> None:
    verdict = judge(rule, RULES[rule], subject)
    clean_up(subject)
    if verdict.outcome == "skipped":
        pytest.skip(reason=verdict.reason)
    assert verdict.outcome == "passed", verdict.reason

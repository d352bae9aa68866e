"""Two engine processes, one store: what the first served, the second answers from L3 with equal tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.storage.factory import open_backend
from refimpl.storage.servers import mooncake_master
from scenarios.command_line import CommandLine
from scenarios.storage.host_pages import GQA, HostPages
from scenarios.tidy import ROOT

pytestmark = pytest.mark.live

PAGE, PROMPT, CLIENTS = 16, 70, 6
WORKLOAD = f"multi_turn:clients={CLIENTS},rounds=1,request_length={PROMPT},output_length=4,rate=0"
HITS = CLIENTS * ((PROMPT - 1) // PAGE) * PAGE  # at least one token is always computed


@contextmanager
def file_store(folder: Path) -> Iterator[dict[str, Any]]:
    yield {"file_storage_path": str(folder)}


@contextmanager
def nixl_store(folder: Path) -> Iterator[dict[str, Any]]:
    if find_spec("nixl_cu12") is None:  # importing it here would have it write to stdout
        pytest.skip("the extra nixl is not installed")
    yield {"storage_dir": str(folder), "plugin": {"posix": {"active": True}}}


@contextmanager
def mooncake_store(folder: Path) -> Iterator[dict[str, Any]]:
    """A master, and this process lending the memory: what engines store outlives them."""
    pytest.importorskip(
        "mooncake.store", reason="the extra mooncake is not installed", exc_type=ImportError
    )
    with mooncake_master(folder / "master.log") as master:
        lender = HostPages.of("mooncake", GQA, "page_first")
        own = {"global_segment_size": "64mb"}
        backend = open_backend("mooncake", lender.setting(master.extra_config | own))
        yield master.extra_config | {"global_segment_size": 0}
        backend.close()


STORES = {"file": file_store, "mooncake": mooncake_store, "nixl": nixl_store}


def words(backend: str, extra: dict[str, Any], model: str, *more: str) -> list[str]:
    given = ["run", "--model-path", model, "--workload", f"{WORKLOAD},vocab=256", "--json"]
    given += ["--page-size", str(PAGE), "--max-total-tokens", "1024"]
    given += ["--hicache-storage-backend", backend, "--hicache-storage-prefetch-policy"]
    given += ["wait_complete", "--hicache-storage-backend-extra-config"]
    return [*given, json.dumps(extra | {"prefetch_threshold": PAGE}), *more]


def figures(code: int, out: str, err: str) -> dict[str, Any]:
    assert code == 0, err[-2000:]
    (found,) = json.loads(out)["tier_sets"]
    assert found["finished"] == {"length": CLIENTS}
    return dict(found)


@pytest.fixture
def served_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """An engine of this process serves the conversations; what it says of the full tier set."""
    call = CommandLine(monkeypatch, capsys)

    def served(*given: Any) -> dict[str, Any]:
        done = call(*words(*given))
        return figures(done.code, done.out, done.err)

    return served


def served_elsewhere(*given: Any) -> dict[str, Any]:
    """A process of its own does."""
    done = subprocess.run(
        [sys.executable, "-m", "refimpl", *words(*given)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return figures(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        ("file", "tiny-gqa"),
        ("file", "tiny-mla"),
        ("mooncake", "tiny-gqa"),
        ("mooncake", "tiny-mla"),
        ("nixl", "tiny-gqa"),
    ],
)
def test_the_second_engine_answers_from_what_the_first_stored(
    backend: str, model: str, tmp_path: Path, served_here: Callable[..., dict[str, Any]]
) -> None:
    with STORES[backend](tmp_path) as extra:
        first = served_here(backend, extra, model)
        second = served_elsewhere(backend, extra, model)
    assert first["hit_tokens"] == {"device": 0, "host": 0, "storage": 0}
    assert first["pages_moved"]["store"] == HITS // PAGE
    assert second["hit_tokens"] == {"device": 0, "host": 0, "storage": HITS}
    assert second["answers_sha256"] == first["answers_sha256"]
    assert second["moved"]["l3_write"]["bytes"] == 0, "nothing is sent twice"


@pytest.mark.parametrize(
    "change",
    [
        ("--dtype", "bfloat16"),
        ("--hicache-mem-layout", "layer_first"),
        ("--page-size", "8"),
        ("--seed", "5"),  # of the weights, and of the prompts, which are other ones anyway
        ("--model-path", "tiny-mla"),
    ],
)
def test_an_engine_of_another_kind_finds_nothing(
    change: tuple[str, ...], tmp_path: Path, served_here: Callable[..., dict[str, Any]]
) -> None:
    """Field report G03: one folder for another model, data type, layout or page size."""
    extra = {"file_storage_path": str(tmp_path)}
    served_here("file", extra, "tiny-gqa")
    other = served_here("file", extra, "tiny-gqa", *change)
    assert other["hit_tokens"]["storage"] == 0
    alone = served_here("file", {"file_storage_path": str(tmp_path / "own")}, "tiny-gqa", *change)
    assert other["answers_sha256"] == alone["answers_sha256"]

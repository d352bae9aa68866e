"""A server with several ranks: it answers as with one, and says so when a rank is gone."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.config import ConfigError
from refimpl.model.shard import Shard
from refimpl.run import rank_setup
from refimpl.run.live import LiveExecutor
from refimpl.run.model_choice import ModelChoice
from refimpl.run.rank_group import RankGroup
from refimpl.run.rank_process import ProcessFollower
from refimpl.run.rank_setup import MakeRank, RankChoice
from refimpl.run.setup import Simulation
from refimpl.serve.start import start_service
from refimpl.workload.request import Workload
from scenarios.command_line import CommandLine
from scenarios.serve.served import OPTIONS, serving

pytestmark = pytest.mark.live

TEXT = "ranks of one instance answer alike, whatever is cached, and whatever it was cached by. " * 2
PATH = "/hicache/storage-backend"


def ask(client: httpx.Client, number: int = 0, tokens: int = 8) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": f"{number} {TEXT}", "sampling_params": params}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def attach(client: httpx.Client, backend: str, extra: dict[str, Any]) -> httpx.Response:
    body = {
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config_json": json.dumps(extra | {"prefetch_threshold": 16}),
        "hicache_storage_prefetch_policy": "wait_complete",
        "drain": "queue",
    }
    return client.put(PATH, json=body)


def test_two_ranks_answer_as_one_and_attach_together(tmp_path: Path) -> None:
    extra = {"file_storage_path": str(tmp_path)}
    with serving() as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        alone = [ask(client, number)["output_ids"] for number in range(3)]
    options = replace(OPTIONS, tp_size=2)
    with serving(options) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        assert attach(client, "file", extra).status_code == 200
        assert [ask(client, number)["output_ids"] for number in range(3)] == alone
        assert client.post("/flush_cache?timeout=30").status_code == 200
        again = ask(client)
        assert again["output_ids"] == alone[0]
        assert again["meta_info"]["cached_tokens_details"]["storage"] > 0
        assert client.delete(f"{PATH}?drain=queue").status_code == 200
        assert ask(client)["output_ids"] == alone[0]
    suffixes = {path.name.rpartition("_")[0][-2:] for path in tmp_path.rglob("*_2.bin")}
    assert suffixes == {"_0", "_1"}  # each rank has stored its own heads


def test_a_store_that_one_rank_can_not_open_is_open_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refimpl.run.storage_setup import StoreOpener
    from refimpl.storage.backend import StorageError

    opened = StoreOpener.__call__

    def fails(opener: StoreOpener, backend: str, extra: str) -> Any:
        if opener.identity.tp_rank == 1:
            raise StorageError("no route to the store")
        return opened(opener, backend, extra)

    options = replace(OPTIONS, tp_size=2)
    with serving(options) as (url, service), httpx.Client(base_url=url, timeout=60) as client:
        before = ask(client)["output_ids"]
        monkeypatch.setattr(StoreOpener, "__call__", fails)
        answer = attach(client, "file", {"file_storage_path": str(tmp_path)})
        assert answer.status_code == 400
        assert "rank 1" in answer.text
        group = service.bridge._executor
        assert isinstance(group, RankGroup)
        assert not group._own.ledger.is_attached
        monkeypatch.setattr(StoreOpener, "__call__", opened)
        assert attach(client, "file", {"file_storage_path": str(tmp_path)}).status_code == 200
        assert ask(client)["output_ids"] == before


def test_a_rank_that_stops_fails_the_requests_and_the_health() -> None:
    options = replace(OPTIONS, tp_size=2)
    ranks = RankChoice("process", limit_s=4)
    with serving(options, ranks=ranks) as (url, service):
        group = service.bridge._executor
        assert isinstance(group, RankGroup)
        (follower,) = group._followers
        assert isinstance(follower, ProcessFollower)
        with httpx.Client(base_url=url, timeout=60) as client:
            ask(client)
            os.kill(follower.pid or 0, signal.SIGSTOP)
            begun = monotonic()
            answer = client.post("/generate", json={"text": TEXT})
            assert monotonic() - begun < 20
            assert answer.status_code == 503
            assert "rank" in answer.json()["error"]["message"]
            assert client.get("/health").status_code == 503
            later = client.post("/generate", json={"text": TEXT})
            assert later.status_code == 503
            assert "rank" in later.json()["error"]["message"]


@dataclass(frozen=True, slots=True)
class Failing(MakeRank):
    """A rank that can't load its model."""

    def __call__(self, shard: Shard, group: Any) -> LiveExecutor:
        del group
        raise OSError(f"rank {shard.rank} has no such folder")


def test_a_rank_that_does_not_start_is_one_line_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_setup, "MakeRank", Failing)
    refimpl = CommandLine(monkeypatch, capsys)
    words = ("--port", "0", "--tp-size", "2", "--rank-transport", "process")
    done = refimpl("serve", "--model-path", "tiny-gqa", *words)
    assert done.code == 2
    assert done.err == "refimpl: error: rank 1 did not start; its own log says why\n"


def test_a_store_that_no_rank_can_open_is_refused_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = replace(OPTIONS, tp_size=2)
    with serving(options) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        answer = attach(client, "redis", {})
        assert answer.status_code == 400
        assert "unknown storage backend 'redis': choose from memory" in answer.text
    said = [record.getMessage() for record in caplog.records]
    assert {text.partition(":")[0] for text in said if "redis" in text} == {"rank 0", "rank 1"}


def test_a_real_model_is_split_by_its_own_heads_and_not_by_those_of_a_simulated_one() -> None:
    """SmolLM2 has 9 heads, which go over 3 ranks; the 32 of the model that --model names do not."""
    options = replace(OPTIONS, tp_size=3)
    assert Simulation(options, Workload("served", []), page_bytes=4096).engine.cache.l1_pages
    with pytest.raises(ConfigError, match="choose from 1, 2, 4, 8, 16, 32"):
        Simulation(options, Workload("served", []))


@pytest.mark.parametrize(("size", "word"), [(3, "does not divide the 4 heads"), (0, "at least 1")])
def test_a_model_that_can_not_be_split_so_is_refused(size: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        start_service(replace(OPTIONS, tp_size=size), ModelChoice("tiny-gqa", "reference"))

"""Data-parallel ranks over one model: the answers of one rank, pages of all, a store that fails on one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.config import ConfigError
from refimpl.core.check import check_quiescent
from refimpl.memory import pool
from refimpl.run.model_choice import ModelChoice
from refimpl.serve.companions import add_kv_events
from refimpl.serve.kv_events_config import KvEventsConfig
from refimpl.serve.kv_publisher import KvEventPublisher
from refimpl.serve.service import Service
from refimpl.serve.start import start_service
from scenarios.event_reader import EventReader, resident
from scenarios.serve.kv_subscriber import kv_subscriber
from scenarios.serve.served import OPTIONS, serving

pytestmark = pytest.mark.live

PATH = "/hicache/storage-backend"
RANKS = 3
TEXT = "ranks with a cache each answer alike, whoever has computed the pages they were given. " * 2

# Its third object can't connect, whichever rank asks for it.
STORE = """
made = []


class Store:
    values = {}

    def __init__(self, extra):
        made.append(self)
        if len(made) == 3:
            raise OSError("no route to the store")

    def exists(self, name):
        return name in self.values

    def get(self, name):
        return self.values.get(name)

    def set(self, name, value):
        self.values[name] = value
"""


def ask(client: httpx.Client, number: int, rank: int | None = None) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"text": f"{number} {TEXT}", "sampling_params": params, "routed_dp_rank": rank}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def attach(client: httpx.Client, backend: str, extra: str) -> httpx.Response:
    body = {
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config_json": extra,
        "hicache_storage_prefetch_policy": "wait_complete",
        "drain": "queue",
    }
    return client.put(PATH, json=body)


def test_three_ranks_answer_as_one_and_read_what_others_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_store.py").write_text(STORE)
    monkeypatch.syspath_prepend(tmp_path)
    failing = (
        '{"backend_name": "failing", "module_path": "failing_store", "class_name": "Store",'
        ' "prefetch_threshold": 16}'
    )
    with serving() as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        alone = [ask(client, number)["output_ids"] for number in range(4)]
    with (
        serving(replace(OPTIONS, dp_size=RANKS)) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        together = [answer["output_ids"] for answer in threads.map(ask, [client] * 4, range(4))]
        assert together == alone
        refused = attach(client, "dynamic", failing)
        assert refused.status_code == 400
        assert "no route to the store" in refused.text
        assert refused.text.count("taken back") == RANKS - 1
        executors = [rank.bridge._executor for rank in service.ranks.ranks]
        assert not any(each.storage.is_attached for each in executors)  # type: ignore[attr-defined]
        assert ask(client, 0)["output_ids"] == alone[0]
        assert attach(client, "dynamic", failing).status_code == 200
        fresh = ask(client, 4, rank=0)
        assert client.delete(f"{PATH}?drain=queue").status_code == 200  # all is written by then
        assert attach(client, "dynamic", failing).status_code == 200
        for rank in range(1, RANKS):
            read = ask(client, 4, rank=rank)
            assert read["output_ids"] == fresh["output_ids"]
            assert read["meta_info"]["cached_tokens_details"]["storage"] > 0
    for each in service.ranks.ranks:
        check_quiescent(each.bridge.engine)


def test_ranks_of_tensor_parallel_ranks_answer_as_one_rank() -> None:
    with serving() as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        alone = [ask(client, number)["output_ids"] for number in range(2)]
    options = replace(OPTIONS, dp_size=2, tp_size=2)
    with serving(options) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        together = [ask(client, number) for number in range(2)]
    assert [answer["output_ids"] for answer in together] == alone
    assert [answer["meta_info"]["dp_rank"] for answer in together] == [0, 1]


def test_events_of_each_rank_tell_of_its_own_cache_on_the_next_port() -> None:
    made: list[Any] = []
    config = KvEventsConfig(
        publisher="zmq",
        endpoint="tcp://127.0.0.1:*",
        bind=True,
        replay_endpoint="tcp://127.0.0.1:*",
        topic="kv",
    )

    def companions(service: Service) -> list[Any]:
        for _ in range(20):  # until the ports behind a free one are free as well
            try:
                add_kv_events(service, config, made)
                return made
            except ConfigError:
                for each in made:
                    each.stop()
                made.clear()
        raise AssertionError("no two ports in a row are free")

    options = replace(OPTIONS, dp_size=2)
    with (
        serving(options, companions=companions) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        first, second = made
        assert isinstance(first, KvEventPublisher)
        assert (second.port, second.replay_port) == (first.port + 1, first.replay_port + 1)
        told = client.get("/server_info").json()["kv_events"]
        assert (told["endpoint_port_base"], told["dp_size"]) == (first.port, 2)
        for rank, publisher in enumerate(made):
            ask(client, rank, rank=rank)
            wait_idle(service, rank)
            with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
                reader = EventReader(16)
                for number, batch in sorted(subscriber.replay(0).items()):
                    assert batch[2] == rank, number
                    reader.read(batch[1])
            assert reader.held == resident(service.ranks.ranks[rank].bridge.engine.cache)
            assert all(reader.held.values())


def wait_idle(service: Service, rank: int) -> None:
    """And until what made it so is published, which is before the next question is heard."""
    bridge, end = service.ranks.ranks[rank].bridge, monotonic() + 30
    while not bridge.ask(lambda engine: engine.idle).result(30):
        assert monotonic() < end


def test_memory_that_all_ranks_together_can_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Field report N02."""
    choice = ModelChoice("tiny-gqa", "reference")
    room = pool.HOST_RESERVE_BYTES + 6_000_000
    monkeypatch.setattr(pool, "host_bytes_available", lambda: room)
    alone = start_service(replace(OPTIONS, dp_size=1), choice)
    alone.ranks.start()
    alone.ranks.stop()
    with pytest.raises(ConfigError, match="for each of 4 ranks does not fit"):
        start_service(replace(OPTIONS, dp_size=4), choice)

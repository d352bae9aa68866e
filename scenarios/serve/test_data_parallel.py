"""A server with several data-parallel ranks: who answers, what each tells of itself, what all share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from refimpl.config import ConfigError
from refimpl.core.check import check_quiescent
from refimpl.run.faults import Faults
from refimpl.run.options import Options
from refimpl.serve.companions import Sockets, companions_of
from refimpl.serve.kv_events_config import KvEventsConfig, endpoint_of_rank
from refimpl.serve.load_publisher import load_endpoint
from refimpl.serve.service import Service
from refimpl.serve.start_null import start_null_service
from refimpl.serve.zmq_ingress import ZmqIngress
from scenarios.serve.served import OPEN, serving_null
from scenarios.serve.zmq_client import zmq_client

pytestmark = pytest.mark.live

RANKS = 4
OPTIONS = Options(
    page_size=16,
    max_total_tokens=2048,
    enable_hierarchical_cache=True,
    hicache_storage_backend="memory",
    hicache_storage_prefetch_policy="wait_complete",
    hicache_storage_backend_extra_config='{"prefetch_threshold": 16}',
    dp_size=RANKS,
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    with serving_null(OPTIONS) as found:
        yield found
    for rank in found[1].ranks.ranks:
        check_quiescent(rank.bridge.engine)
        assert not rank.bridge._asked
    assert found[1].ranks._router.in_flight == [0] * RANKS


@pytest.fixture(scope="module")
def client(server: tuple[str, Service]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=60) as found:
        yield found


def prompt(number: int, length: int = 100) -> list[int]:
    return [number * 997 + at for at in range(length)]


def ask(
    client: httpx.Client, number: int, tokens: int = 4, headers: Any = None, **more: Any
) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens}
    body = {"input_ids": prompt(number), "sampling_params": params} | more
    answer = client.post("/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_requests_take_turns_on_all_ranks(client: httpx.Client) -> None:
    ranks = [ask(client, number)["meta_info"]["dp_rank"] for number in range(2 * RANKS)]
    assert sorted(ranks) == sorted([*range(RANKS)] * 2)


@pytest.mark.parametrize("how", ["header", "body", "old name", "both"])
def test_a_request_goes_to_the_rank_it_names(client: httpx.Client, how: str) -> None:
    for rank in (3, 3, 0, 2, 2, 1):  # never what taking turns would give
        header = {"X-Data-Parallel-Rank": str(rank)} if how in ("header", "both") else None
        name = {
            "body": "routed_dp_rank",
            "both": "routed_dp_rank",
            "old name": "data_parallel_rank",
        }
        body = {name[how]: rank} if how in name else {}
        assert ask(client, 20, headers=header, **body)["meta_info"]["dp_rank"] == rank


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("rank", ["4", "-1", "one"])
def test_a_rank_that_is_not_there_is_refused(client: httpx.Client, path: str, rank: str) -> None:
    body = {"text": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = client.post(path, json=body, headers={"X-Data-Parallel-Rank": rank})
    assert answer.status_code == 400
    assert "rank" in answer.json()["error"]["message"].lower()


def test_header_and_body_that_differ_are_refused(client: httpx.Client) -> None:
    body = {"text": "a", "routed_dp_rank": 1}
    answer = client.post("/generate", json=body, headers={"X-Data-Parallel-Rank": "2"})
    assert answer.status_code == 400
    assert "send one of them" in answer.json()["error"]["message"]


def test_openai_requests_go_to_the_rank_in_the_header(
    server: tuple[str, Service], client: httpx.Client
) -> None:
    def admitted() -> int:
        return server[1].ranks.ranks[3].metrics.prompt_tokens

    before = admitted()
    body = {"prompt": "of rank three", "max_tokens": 2}
    header = {"X-Data-Parallel-Rank": "3"}
    assert client.post("/v1/completions", json=body, headers=header).status_code == 200
    assert admitted() == before + len("of rank three")


def test_what_one_rank_has_stored_all_others_read(client: httpx.Client) -> None:
    first = ask(client, 30, routed_dp_rank=0)
    at_rest(client)
    for rank in range(1, RANKS):
        other = ask(client, 30, routed_dp_rank=rank)
        assert other["output_ids"] == first["output_ids"]
        assert other["meta_info"]["cached_tokens_details"]["storage"] == 96
    again = ask(client, 30, routed_dp_rank=0)
    assert again["meta_info"]["cached_tokens_details"]["device"] == 96


def at_rest(client: httpx.Client) -> None:
    """Wait until all copies of all ranks are done: an attach that drains is answered after them."""
    path = "/hicache/storage-backend"
    body = {
        "hicache_storage_backend": "memory",
        "hicache_storage_backend_extra_config_json": OPTIONS.hicache_storage_backend_extra_config,
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    assert client.delete(path, params={"drain": "queue"}).status_code == 200
    assert client.put(path, json=body | {"drain": "queue"}).status_code == 200


def test_streams_of_several_ranks_are_told_apart_and_one_is_aborted(client: httpx.Client) -> None:
    def told(number: int) -> dict[str, Any]:
        rid = f"stream {number}"
        return ask(client, number, 2000, rid=rid, routed_dp_rank=number % RANKS)

    with ThreadPoolExecutor(RANKS) as pool:
        answers = [pool.submit(told, number) for number in range(40, 40 + RANKS)]
        while sum(load["num_running_reqs"] for load in loads(client)) < RANKS:
            pass
        for number in range(40, 40 + RANKS):
            client.post("/abort_request", json={"rid": f"stream {number}"})
        done = [answer.result() for answer in answers]
    assert [one["meta_info"]["finish_reason"]["type"] for one in done] == ["abort"] * RANKS
    assert [one["meta_info"]["dp_rank"] for one in done] == [number % RANKS for number in range(4)]


def loads(client: httpx.Client, **params: Any) -> list[dict[str, Any]]:
    return list(client.get("/v1/loads", params=params).json()["loads"])


def test_each_rank_tells_its_own_load(client: httpx.Client) -> None:
    ask(client, 50, routed_dp_rank=2)
    told = loads(client, include="all")
    assert [load["dp_rank"] for load in told] == list(range(RANKS))
    (one,) = loads(client, dp_rank=2)
    assert one["dp_rank"] == 2
    assert one["total_prefill_uncached_tokens"] == told[2]["total_prefill_uncached_tokens"] > 0
    assert client.get("/v1/loads?dp_rank=4").status_code == 400
    text = client.get("/v1/loads?dp_rank=1&format=prometheus").text
    assert 'dp_rank="1"' in text
    assert 'dp_rank="2"' not in text


def test_metrics_have_each_name_once_and_each_rank_in_it(client: httpx.Client) -> None:
    ask(client, 60, routed_dp_rank=1)
    names, prompts = [], {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        names.append(family.name)
        if family.name.startswith(("process_", "python_")):
            continue  # there is one process
        assert {sample.labels["dp_rank"] for sample in family.samples} == set("0123")
        for sample in family.samples:
            if sample.name == "sglang:prompt_tokens_total":
                prompts[sample.labels["dp_rank"]] = sample.value
    assert len(names) == len(set(names))
    assert prompts["1"] >= 100


def test_the_server_describes_every_rank(client: httpx.Client) -> None:
    told = client.get("/server_info").json()
    assert told["dp_size"] == RANKS
    assert [state["dp_rank"] for state in told["internal_states"]] == list(range(RANKS))
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200


def test_requests_over_zmq_name_their_rank_and_are_told_it() -> None:
    made: list[ZmqIngress] = []

    def companions(service: Service) -> list[ZmqIngress]:
        made.append(ZmqIngress(service, OPEN, "127.0.0.1", 0))
        return made

    with serving_null(OPTIONS, companions=companions), zmq_client(made[0].port) as client:
        for name, rank in (("a", 3), ("b", 1)):
            message = {
                "type": "generate",
                "id": name,
                "input_ids": prompt(70),
                "sampling_params": {"max_new_tokens": 2},
                "stream": False,
                "routed_dp_rank": rank,
            }
            client.send(message)
            assert client.receive()["dp_rank"] == rank
        client.send(message | {"id": "c", "routed_dp_rank": RANKS})
        refused = client.receive()
    assert refused["code"] == 400
    assert "ranks 0 to 3" in refused["message"]


def test_a_rank_that_stops_makes_the_server_unwell() -> None:
    with (
        serving_null(replace(OPTIONS, dp_size=2)) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        stop_rank(service, 1)
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        answer = client.post("/generate", json={"text": "a", "routed_dp_rank": 1})
        assert answer.status_code == 503
        assert "the engine has stopped on data-parallel rank 1" in answer.text
        assert ask(client, 80, routed_dp_rank=0)["meta_info"]["dp_rank"] == 0


def test_a_rank_that_stops_takes_no_figures_of_the_others_with_it() -> None:
    """What it has counted stays as well; a load balancer sees the ranks that are left."""
    with (
        serving_null(replace(OPTIONS, dp_size=2)) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for rank in (0, 1):
            ask(client, 90, routed_dp_rank=rank)
        stop_rank(service, 1)
        assert [load["dp_rank"] for load in loads(client)] == [0]
        assert client.get("/v1/loads?dp_rank=1").status_code == 503
        text = client.get("/metrics").text
        for name, ranks in (("prompt_tokens_total", "01"), ("num_running_reqs", "0")):
            lines = [line for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
            assert ['dp_rank="1"' in line for line in lines] == [rank == "1" for rank in ranks]
        stop_rank(service, 0)
        assert client.get("/metrics").status_code == 503


@pytest.mark.parametrize("method", ["round_robin", "shortest_queue", "cache_aware"])
def test_requests_go_to_the_ranks_that_are_left_and_none_is_refused(method: str) -> None:
    options = replace(OPTIONS, load_balance_method=method)
    with serving_null(options) as (url, service), httpx.Client(base_url=url, timeout=60) as client:
        for number in range(2 * RANKS):
            ask(client, number)
        for rank in (1, 3):
            stop_rank(service, rank)
        answered = [ask(client, number % RANKS)["meta_info"]["dp_rank"] for number in range(40)]
        assert set(answered) == {0, 2}
        for rank in (0, 2):
            stop_rank(service, rank)
        answer = client.post("/generate", json={"text": "a"})
        assert answer.status_code == 503
        assert "the engine has stopped; restart the server" in answer.text
        assert service.ranks._router.in_flight == [0] * RANKS


def stop_rank(service: Service, rank: int) -> None:
    """As a rank does whose threads have failed, while nothing is under way on it."""
    broken = service.ranks.ranks[rank].bridge
    broken._executor.check = _fails  # type: ignore[method-assign]
    broken._thread.join(30)
    assert not broken._thread.is_alive()


def _fails() -> None:
    raise RuntimeError("a pump has stopped")


@pytest.mark.parametrize(
    ("endpoint", "rank", "meant"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:5560"),
        ("ipc:///tmp/kv", 2, "ipc:///tmp/kv_dp2"),
    ],
)
def test_the_sockets_of_a_rank_are_so_many_ports_further_on(
    endpoint: str, rank: int, meant: str
) -> None:
    assert endpoint_of_rank(endpoint, rank, 5557) == meant


def test_the_load_of_ranks_goes_behind_all_ports_of_their_events() -> None:
    events = KvEventsConfig(publisher="zmq", endpoint="tcp://*:5557")
    assert load_endpoint("auto", events, RANKS) == "tcp://*:5561"
    events = KvEventsConfig(
        publisher="zmq", endpoint="tcp://*:5557", replay_endpoint="tcp://*:5561"
    )
    assert load_endpoint("auto", events, RANKS) == "tcp://*:5565"
    events = KvEventsConfig(
        publisher="zmq", endpoint="tcp://*:5557", replay_endpoint="tcp://*:5563"
    )
    assert load_endpoint("auto", events, RANKS) == "tcp://*:5567"


def test_a_prompt_goes_to_the_rank_that_has_it() -> None:
    options = replace(OPTIONS, load_balance_method="cache_aware", hicache_storage_backend=None)
    options = replace(options, hicache_storage_prefetch_policy=None)
    options = replace(options, hicache_storage_backend_extra_config=None)
    with serving_null(options) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        first = [ask(client, number)["meta_info"]["dp_rank"] for number in range(RANKS)]
        again = [ask(client, number)["meta_info"] for number in range(RANKS)]
    assert sorted(first) == list(range(RANKS))
    assert [meta["dp_rank"] for meta in again] == first
    assert [meta["cached_tokens"] for meta in again] == [96] * RANKS


def test_a_prompt_goes_where_a_client_once_sent_its_beginning() -> None:
    options = replace(
        OPTIONS,
        load_balance_method="cache_aware",
        hicache_storage_backend=None,
        hicache_storage_prefetch_policy=None,
        hicache_storage_backend_extra_config=None,
    )
    with serving_null(options) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        ask(client, 1, routed_dp_rank=3)
        again = ask(client, 1)["meta_info"]
    assert (again["dp_rank"], again["cached_tokens"]) == (3, 96)


def test_events_and_their_replay_need_ports_as_far_apart_as_there_are_ranks() -> None:
    def events(replay_endpoint: str) -> KvEventsConfig:
        endpoint = "tcp://127.0.0.1:5557"
        return KvEventsConfig("zmq", endpoint, bind=True, replay_endpoint=replay_endpoint)

    near = events("tcp://127.0.0.1:5558")
    near.check_ranks(1)
    with pytest.raises(ConfigError, match=r"at least 4 ports apart, .* 5557 and 5558"):
        near.check_ranks(RANKS)
    events("tcp://127.0.0.1:5561").check_ranks(RANKS)
    events("tcp://127.0.0.2:5558").check_ranks(RANKS)
    sockets = Sockets(kv_events_config=json.dumps(msgspec.to_builtins(near)))
    with pytest.raises(ConfigError, match="at least 4 ports apart"):
        companions_of(start_null_service(OPTIONS), OPEN, sockets)


def test_json_of_one_rank_says_nothing_of_ranks() -> None:
    with (
        serving_null(replace(OPTIONS, dp_size=1)) as (url, _),
        httpx.Client(base_url=url) as client,
    ):
        assert "dp_rank" not in ask(client, 0)["meta_info"]
        assert "dp_rank" not in client.get("/metrics").text
        assert json.loads(client.get("/v1/loads").text)["loads"][0]["dp_rank"] == 0


@pytest.mark.slow
def test_a_tensor_parallel_rank_that_dies_costs_its_data_parallel_rank_and_no_other() -> None:
    """Two by two: what its instance had taken fails after the limit, and the other takes what comes."""
    faults = "rank1.die=300000"
    dies_at = [
        [Faults.parse(faults, seed + rank).of_rank(1).dies(0) for rank in range(2)]
        for seed in range(100)
    ].index([False, True])
    options = replace(OPTIONS, dp_size=2, tp_size=2, faults=faults, fault_seed=dies_at)
    options = replace(options, enable_hierarchical_cache=False, hicache_storage_backend=None)
    options = replace(options, hicache_storage_prefetch_policy=None)
    options = replace(options, hicache_storage_backend_extra_config=None)
    with serving_null(options) as (url, service), httpx.Client(base_url=url, timeout=60) as client:
        params = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": prompt(1), "sampling_params": params, "routed_dp_rank": 1}
        answer = client.post("/generate", json=body)
        assert answer.status_code == 503
        assert "rank 1 did not answer within 5 s" in answer.text
        for rank in service.ranks.ranks:
            for faults_of in rank.bridge._executor.lanes.ranks:  # type: ignore[attr-defined]
                faults_of.lanes.faults.stop()
        assert client.get("/health").status_code == 503
        assert {ask(client, number)["meta_info"]["dp_rank"] for number in range(8)} == {0}

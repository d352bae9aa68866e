"""Attach, detach, clear and flush on several ranks: on all or as before on all, and no request is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.engine import Engine
from refimpl.messages import DetachStorage
from refimpl.run.faults import Faults
from refimpl.run.options import Options
from refimpl.serve.service import Service
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live

PATH = "/hicache/storage-backend"
RANKS = 4
EXTRA = '{"prefetch_threshold": 16}'
OPTIONS = Options(
    page_size=16, max_total_tokens=4096, enable_hierarchical_cache=True, dp_size=RANKS
)
WITH_L3 = replace(
    OPTIONS,
    hicache_storage_backend="memory",
    hicache_storage_backend_extra_config=EXTRA,
    hicache_storage_prefetch_policy="wait_complete",
)


def failing_by(faults: str, are_so: Callable[[list[Faults]], bool]) -> Options:
    """Options whose seed makes the faults of all ranks come as they should."""
    for seed in range(5000):
        if are_so([Faults.parse(faults, seed + rank) for rank in range(RANKS)]):
            options = WITH_L3 if "close_fail" in faults else OPTIONS
            return replace(options, faults=faults, fault_seed=seed)
    raise AssertionError("no seed of five thousand does that")


def failing_at(kind: str, failing: int) -> Options:
    """Options under which that rank alone fails when it is first asked for ``kind``."""
    alone = [rank == failing for rank in range(RANKS)]
    return failing_by(
        f"{kind}=500000", lambda faults: [each.strike(kind) for each in faults] == alone
    )


@contextmanager
def server(options: Options, *, rolls_back: bool = True) -> Iterator[tuple[httpx.Client, Service]]:
    with (
        serving_null(options) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        service.changes.rolls_back = rolls_back
        yield client, service


def attach(client: httpx.Client, **more: str) -> httpx.Response:
    body = {
        "hicache_storage_backend": "memory",
        "hicache_storage_backend_extra_config_json": EXTRA,
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    return client.put(PATH, json=body | more)


def state(engine: Engine) -> tuple[bool, str, str]:
    """(is there an L3, write policy, prefetch policy)"""
    config = engine.cache.config
    return engine.cache.host.generation > 0, config.write_policy, config.prefetch.policy


def states(service: Service) -> list[tuple[bool, str, str]]:
    return [rank.bridge.ask(state).result(30) for rank in service.ranks.ranks]


def ask(client: httpx.Client, number: int, tokens: int = 4, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens}
    ids = [number * 997 + at for at in range(100)]
    answer = client.post("/generate", json={"input_ids": ids, "sampling_params": params} | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_an_attach_that_fails_on_one_rank_leaves_all_as_before() -> None:
    with server(failing_at("open_fail", 2)) as (client, service):
        before = states(service)
        told = client.get(PATH).json()
        answer = attach(client, hicache_write_policy="write_back")
        assert answer.status_code == 400
        assert "rank 2: Reject attach" in answer.text
        assert answer.text.count("taken back") == RANKS - 1
        assert answer.text.count(" | ") == RANKS - 1
        assert states(service) == before
        assert client.get(PATH).json() == told
        assert {ask(client, 1)["meta_info"]["dp_rank"] for _ in range(RANKS)} == set(range(RANKS))


def test_without_rollback_the_ranks_that_could_stay_attached() -> None:
    with server(failing_at("open_fail", 2), rolls_back=False) as (client, service):
        told = client.get(PATH).json()
        assert attach(client).status_code == 400
        assert [has_l3 for has_l3, *_ in states(service)] == [True, True, False, True]
        assert client.get(PATH).json() == told
        assert client.delete(PATH).status_code == 200
        assert not any(has_l3 for has_l3, *_ in states(service))


def test_a_detach_that_fails_on_one_rank_leaves_all_attached() -> None:
    with server(failing_at("close_fail", 1)) as (client, service):
        before = states(service)
        assert all(has_l3 for has_l3, *_ in before)
        answer = client.delete(PATH)
        assert answer.status_code == 400
        assert "rank 1: Reject detach" in answer.text
        assert states(service) == before
        assert client.get(PATH).json()["hicache_storage_backend"] == "memory"


def test_policies_that_one_rank_refuses_are_put_back_on_all() -> None:
    """Rank 3 is detaching, so that it takes no change; a busy rank waits to be idle for that."""
    with server(WITH_L3) as (client, service), ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, client, 1, 3000, rid="long", routed_dp_rank=3)
        wait_until(service, lambda engine: engine.running == 1, rank=3)
        detaching = service.ranks.ranks[3].bridge.change(DetachStorage("queue"))
        before = states(service)
        answer = attach(client, hicache_write_policy="write_back")
        assert answer.status_code == 400
        assert "rank 3: Reject attach: another attach, detach or clear is under way" in answer.text
        assert states(service) == before
        client.post("/abort_request", json={"rid": "long"})
        assert detaching.result(30).ok
        long.result(30)


def wait_until(service: Service, is_so: Any, rank: int) -> None:
    end = monotonic() + 30
    while not service.ranks.ranks[rank].bridge.ask(is_so).result(30):
        assert monotonic() < end


def test_changes_succeed_on_all_ranks_together_and_say_so() -> None:
    with server(OPTIONS) as (client, service):
        answer = attach(client)
        assert answer.status_code == 200
        assert "rank 0: attached | rank 1: attached" in answer.text
        assert client.get(PATH).json()["hicache_storage_backend"] == "memory"
        again = attach(client, hicache_write_policy="write_back")
        assert "policies updated" in again.text
        assert {write for _, write, _ in states(service)} == {"write_back"}
        assert client.delete(PATH).status_code == 200
        assert not any(has_l3 for has_l3, *_ in states(service))


@pytest.mark.parametrize("fails", [False, True])
def test_no_request_is_lost_while_all_ranks_drain_and_change(fails: bool) -> None:
    options = failing_at("open_fail", 2) if fails else OPTIONS
    with server(OPTIONS) as (client, _):
        plain = [ask(client, number, 20)["output_ids"] for number in range(24)]
    with server(options) as (client, service), ThreadPoolExecutor(8) as pool:
        under_way = threading.Barrier(2)
        answers = []

        def told(number: int) -> list[int]:
            if number == 4:
                under_way.wait(30)
            return list(ask(client, number, 20)["output_ids"])

        answers = [pool.submit(told, number) for number in range(24)]
        under_way.wait(30)
        changed = attach(client, drain="queue")
        assert [answer.result(60) for answer in answers] == plain
        assert changed.status_code == (400 if fails else 200), changed.text
        assert [has_l3 for has_l3, *_ in states(service)] == [not fails] * RANKS


def test_a_flush_says_done_only_if_every_rank_has_flushed() -> None:
    """Field report L07."""
    with server(OPTIONS) as (client, service), ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, client, 1, 3000, rid="long", routed_dp_rank=2)
        wait_until(service, lambda engine: engine.running == 1, rank=2)
        answer = client.post("/flush_cache")
        assert answer.status_code == 400
        assert "rank 2: Reject flush: not idle" in answer.text
        assert "rank 1: flushed" in answer.text
        client.post("/abort_request", json={"rid": "long"})
        long.result(30)
        assert client.post("/flush_cache?timeout=30").status_code == 200
        cold = [ask(client, 1, routed_dp_rank=rank) for rank in range(RANKS)]
        assert [one["meta_info"]["cached_tokens"] for one in cold] == [0] * RANKS


def test_a_clear_says_done_only_if_every_rank_has_emptied_its_part_of_the_store() -> None:
    with server(WITH_L3) as (client, service), ThreadPoolExecutor(1) as pool:
        before = generations(service)
        long = pool.submit(ask, client, 1, 3000, rid="long", routed_dp_rank=2)
        wait_until(service, lambda engine: engine.running == 1, rank=2)
        answer = client.post(f"{PATH}/clear")
        assert answer.status_code == 400
        assert "rank 1: cleared | rank 2: Reject clear: scheduler is not idle" in answer.text
        emptied = [now > was for now, was in zip(generations(service), before, strict=True)]
        assert emptied == [True, True, False, True]
        client.post("/abort_request", json={"rid": "long"})
        long.result(30)
        wait_until(service, lambda engine: engine.idle, rank=2)  # its pages are still being written
        assert client.post(f"{PATH}/clear").status_code == 200
        assert min(generations(service)) > max(before)


def generations(service: Service) -> list[int]:
    """How often L3 has begun anew for each rank, so that what was stored counts no more."""
    return [
        rank.bridge.ask(lambda engine: engine.cache.host.generation).result(30)
        for rank in service.ranks.ranks
    ]


def test_a_second_change_is_refused_while_one_is_under_way() -> None:
    with server(OPTIONS) as (client, service), ThreadPoolExecutor(2) as pool:
        long = pool.submit(ask, client, 1, 3000, rid="long", routed_dp_rank=2)
        wait_until(service, lambda engine: engine.running == 1, rank=2)
        first = pool.submit(attach, client, drain="queue")
        wait_until(service, lambda engine: engine.cache.host.generation > 0, rank=0)
        second = client.delete(PATH)
        assert second.status_code == 400
        assert "another attach, detach or clear is under way" in second.text
        client.post("/abort_request", json={"rid": "long"})
        long.result(30)
        assert first.result(30).status_code == 200
        assert all(has_l3 for has_l3, *_ in states(service))


def test_a_store_that_does_not_open_again_is_said_and_can_be_attached_later() -> None:
    """Rank 1 does not close, so that the others open again, which rank 3 fails at first."""

    def are_so(faults: list[Faults]) -> bool:
        closing = [each.strike("close_fail") for each in faults]
        opening = [each.strike("open_fail") for each in faults]
        later = faults[3].strike("open_fail")
        return (closing, opening[0], opening[2:], later) == (
            [False, True, False, False],
            False,
            [False, True],
            False,
        )

    with server(failing_by("close_fail=500000,open_fail=500000", are_so)) as (client, service):
        told = client.get(PATH).json()
        answer = client.delete(PATH)
        assert answer.status_code == 400
        assert answer.text.count("detached, taken back") == 2
        assert "rank 3: detached, NOT TAKEN BACK: Reject attach" in answer.text
        assert [has_l3 for has_l3, *_ in states(service)] == [True, True, True, False]
        assert client.get(PATH).json() == told
        assert attach(client).status_code == 200
        assert all(has_l3 for has_l3, *_ in states(service))


def test_ranks_left_attached_take_no_other_store_until_they_are_detached() -> None:
    """The server as a whole counts as detached then; some of its ranks are not."""
    here, there = (f'{{"prefetch_threshold": 16, "store": "{name}"}}' for name in ("A", "B"))
    key = "hicache_storage_backend_extra_config_json"

    def are_so(faults: list[Faults]) -> bool:
        first, then = ([each.strike("open_fail") for each in faults] for _ in "ab")
        return first == [False, False, True, False] and not any(then)

    options = failing_by("open_fail=500000", are_so)
    with server(options, rolls_back=False) as (client, _):
        assert attach(client, **{key: here}).status_code == 400
        other = attach(client, **{key: there})
        assert other.status_code == 400
        assert "rank 0: storage backend 'memory' is attached with other keys" in other.text
        assert client.delete(PATH).status_code == 200
        assert attach(client, **{key: there}).status_code == 200
        assert client.get(PATH).json()["hicache_storage_backend_extra_config"] == there

"""Many clients at once, some of whom leave: everybody who stays is served, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx
import zmq.asyncio

from refimpl.core.check import check_quiescent
from refimpl.run.live import LiveExecutor
from refimpl.run.null_hands import NullExecutor
from refimpl.serve.service import Service
from refimpl.serve.zmq_ingress import ZmqIngress
from scenarios.serve.mixed_load import ANSWER_S, Load, spend
from scenarios.serve.served import OPEN, OPTIONS, serving, serving_null

pytestmark = pytest.mark.live

STREAMS = 200
ACTS = 120  # of all kinds, by four clients
LEAVES_EVERY = 10  # so many clients, one of them leaves after its first event


def body(number: int) -> dict[str, object]:
    params = {"temperature": 0, "max_new_tokens": 4}
    text = f"client {number % 20} asks something that others ask too"
    return {"text": text, "sampling_params": params, "stream": True}


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """The answer, or nothing for a client that leaves."""
    async with client.stream("POST", "/generate", json=body(number)) as stream:
        assert stream.status_code == 200
        text = ""
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                text = json.loads(line[6:])["text"]
                if number % LEAVES_EVERY == 0:
                    return ""
        return text


def test_two_hundred_streams_at_once_are_all_answered_alike() -> None:
    async def all_at_once(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=url, timeout=90, limits=limits) as client:
            answers = await asyncio.gather(*(ask(client, number) for number in range(STREAMS)))
            assert (await client.post("/flush_cache?timeout=30")).status_code == 200
            return answers

    options = replace(OPTIONS, max_total_tokens=2048)
    with serving(options) as (url, service):
        answers = asyncio.run(all_at_once(url))
    stayed = {at: text for at, text in enumerate(answers) if at % LEAVES_EVERY}
    assert all(stayed.values())
    for group in range(20):
        assert len({text for at, text in stayed.items() if at % 20 == group}) <= 1
    check_quiescent(service.bridge.engine)
    assert left_over(service) == []


def test_more_than_the_queue_holds_is_told_to_come_back() -> None:
    options = replace(OPTIONS, max_queued_requests=2, max_running_requests=1)

    async def flood(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=90) as client:
            asked = {"text": "flood", "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
            posts = (client.post("/generate", json=asked) for _ in range(20))
            return list(await asyncio.gather(*posts))

    with serving(options) as (url, service):
        answers = asyncio.run(flood(url))
    refused = [answer for answer in answers if answer.status_code == 503]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == 20
    assert refused
    assert served
    assert all(answer.headers["retry-after"] for answer in refused)
    assert len({answer.json()["text"] for answer in served}) == 1
    check_quiescent(service.bridge.engine)
    assert left_over(service) == []


@pytest.mark.parametrize(
    "serve", [pytest.param(serving, marks=pytest.mark.slow, id="model"), serving_null]
)
def test_nothing_that_lives_as_long_as_the_server_keeps_anything_of_a_request(
    serve: Callable[..., AbstractContextManager[tuple[str, Service]]], tmp_path: Path
) -> None:
    """By name, where memory of a process says only that something does."""
    made: list[ZmqIngress] = []

    def ingress(service: Service) -> list[ZmqIngress]:
        made.append(ZmqIngress(service, OPEN, "127.0.0.1", 0))
        return made

    threads = threading.active_count()
    options = replace(OPTIONS, max_total_tokens=2048, max_queued_requests=64)
    with serve(options, companions=ingress) as (url, service):
        asyncio.run(mixed(url, made[0].endpoint, tmp_path))
    check_quiescent(service.bridge.engine)
    assert left_over(service) == []
    assert not made[0]._open
    assert threading.active_count() == threads


async def mixed(url: str, zmq_endpoint: str, folder: Path) -> None:
    with zmq.asyncio.Context() as context:
        load = Load(url, zmq_endpoint, folder, context)
        clients = [httpx.AsyncClient(base_url=url, timeout=ANSWER_S) for _ in range(4)]
        await spend(load, clients, seed=7, acts=ACTS)
        await asyncio.gather(*(client.aclose() for client in clients))


def left_over(service: Service) -> list[str]:
    """What is in containers that have an entry a request while it is under way."""
    bridge, metrics, executor = service.bridge, service.metrics, service.bridge._executor
    held: dict[str, Sized] = {
        "asked": bridge._asked,
        "changes": bridge._changes,
        "last tokens": bridge._last_token_ns,
        "rows": bridge._loop.record.rows,
        "metrics: arrived": metrics._arrived,
        "metrics: uncached": metrics._uncached,
        "metrics: copies": metrics.copies._open,
        "changes of L3": service.changes._tasks,
    }
    if isinstance(executor, LiveExecutor):
        held |= {
            "served": executor.hands._served,
            "running": executor.hands._running,
            "followed": executor._followed,
            "outputs": executor.outputs,
            "fetches": executor.storage._fetches,
        }
    else:
        assert isinstance(executor, NullExecutor)
        held |= {
            "served": executor._served,
            "running": executor._running,
            "lanes": executor.lanes._open,
        }
    return [f"{name}: {kept}" for name, kept in held.items() if kept]

"""Far more requests than there is room for: what fits is answered, the rest is told to come again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from refimpl.run.options import Options
from refimpl.serve.service import Service
from refimpl.serve.zmq_ingress import ZmqIngress
from scenarios.serve.served import OPEN, serving_null
from scenarios.serve.zmq_client import zmq_client

pytestmark = pytest.mark.live

WAITING, RUNNING, ASKED = 16, 4, 120
OPTIONS = Options(
    page_size=16,
    max_total_tokens=65_536,
    max_queued_requests=WAITING,
    max_running_requests=RUNNING,
)
LENGTH = 12
LOOK_S = 5  # for the two that must not queue behind anybody
FULL = f"the queue is full at {WAITING} requests; try again later"


@contextmanager
def overloaded() -> Iterator[tuple[str, int, Service]]:
    """(URL, port of ZMQ, service); at the end nothing is left of what came, answered or refused."""
    made: list[ZmqIngress] = []

    def companions(service: Service) -> list[ZmqIngress]:
        made.append(ZmqIngress(service, OPEN, "127.0.0.1", 0))
        return made

    with serving_null(OPTIONS, companions=companions) as (url, service):
        yield url, made[0].port, service
        assert httpx.post(f"{url}/flush_cache?timeout=30", timeout=60).status_code == 200
        assert not service.bridge._asked
        assert not service.bridge._loop.record.rows
        assert not service.running._by_name
        assert not made[0]._open
    check_quiescent(service.bridge.engine)


def looked_at(url: str, flood: Callable[[], None]) -> Counter[int]:
    """What ``/health`` and ``/metrics`` answer, again and again, while the flood lasts."""
    found: Counter[int] = Counter()
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=LOOK_S) as client:
        under_way: Future[None] = pool.submit(flood)
        while not under_way.done():
            found[client.get("/health").status_code] += 1
            found[client.get("/metrics").status_code] += 1
            wait([under_way], timeout=0.02)
        under_way.result()
    return found


def refused_count(service: Service) -> float | None:
    metrics = service.metrics
    return metrics.registry.get_sample_value("hicache:refused_requests_total", metrics.labels)


def body(number: int) -> dict[str, Any]:
    """Every other one a stream."""
    params = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    tokens = [number % 250, number // 250, *range(40)]
    return {"input_ids": tokens, "sampling_params": params, "stream": bool(number % 2)}


def check_answer(answer: httpx.Response) -> None:
    if answer.status_code == 503:
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == FULL
        return
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last, done = [line for line in answer.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        said = json.loads(last.removeprefix("data: "))
    else:
        said = answer.json()
    assert len(said["output_ids"]) == LENGTH
    assert said["meta_info"]["finish_reason"]["type"] == "length"


def test_over_http_what_is_too_much_is_503_and_all_else_is_answered() -> None:
    answers: list[httpx.Response] = []

    async def all_at_once(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            asked = [client.post("/generate", json=body(number)) for number in range(ASKED)]
            answers.extend(await asyncio.gather(*asked))

    with overloaded() as (url, _, service):
        looks = looked_at(url, lambda: asyncio.run(all_at_once(url)))
        for answer in answers:
            check_answer(answer)
        refused = [number for number, answer in enumerate(answers) if answer.status_code == 503]
        assert {number % 2 for number in refused} == {0, 1}  # streams have their status too
        assert WAITING <= len(answers) - len(refused) < ASKED
        assert refused_count(service) == len(refused)
    assert list(looks) == [200]


def test_over_zmq_what_is_too_much_is_503_and_all_else_is_answered() -> None:
    with overloaded() as (url, port, service), zmq_client(port) as client:
        answers: dict[str, dict[str, Any]] = {}

        def all_at_once() -> None:
            for number in range(ASKED):
                client.send(body(number) | {"type": "generate", "id": str(number)})
            answers.update(client.answers(ASKED))

        looks = looked_at(url, all_at_once)
        refused = [one for one in answers.values() if one["type"] == "error"]
        told = {(one["code"], one["retry_after"], one["message"]) for one in refused}
        assert told == {(503, 1, FULL)}
        whole = [one for one in answers.values() if one["type"] == "end"]
        assert {len(one["output_ids"]) for one in whole} == {LENGTH}
        assert {one["finish_reason"]["type"] for one in whole} == {"length"}
        assert WAITING <= len(whole) == ASKED - len(refused)
        assert refused_count(service) == len(refused)
    assert list(looks) == [200]

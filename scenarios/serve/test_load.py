"""Many clients at once, some of whom leave: everybody who stays is served, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from scenarios.serve.served import OPTIONS, serving

pytestmark = pytest.mark.live

STREAMS = 200
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
    assert not service.bridge._asked
    assert not service.bridge._loop.record.rows


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

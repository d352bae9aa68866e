"""A running server says what became of a prompt: what L3 was asked for, had, brought, and why the rest
was computed (field report Y07)."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.run.options import Options
from refimpl.serve.service import Service
from refimpl.serve.zmq_ingress import ZmqIngress
from scenarios.serve.served import OPEN, serving_null
from scenarios.serve.zmq_client import ZmqClient, zmq_client

pytestmark = pytest.mark.live

PAGE = 16
DOCUMENTS, PAGES = 12, 20
# Four documents fit into L1 and five into L2, of which the half may be read ahead: L3 has all of them.
OPTIONS = Options(
    page_size=PAGE,
    max_total_tokens=4 * 21 * PAGE,
    enable_hierarchical_cache=True,
    hicache_ratio="1.2",
    hicache_storage_backend="memory",
    hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 64}),
    hicache_storage_prefetch_policy="wait_complete",
)
STEPS = ("asked_tokens", "found_tokens", "loaded_tokens", "used_tokens")


def document(number: int, tokens: int = PAGES * PAGE + 1) -> list[int]:
    return [number * 700 + at for at in range(tokens)]


def explained(client: httpx.Client, tokens: list[int], **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 2}
    body = {"input_ids": tokens, "sampling_params": params, "explain": True} | more
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return dict(answer.json()["meta_info"])
    *_, last, _ = [line for line in answer.text.split("\n\n") if line]
    return dict(json.loads(last.removeprefix("data: "))["meta_info"])


def settle(client: httpx.Client) -> None:
    """All that is being stored is there, and L1 and L2 hold nothing."""
    assert client.post("/flush_cache?timeout=30").status_code == 200


def test_each_request_of_a_second_pass_says_what_it_had_and_why_no_more() -> None:
    with serving_null(OPTIONS) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        for number in range(DOCUMENTS):
            told = explained(client, document(number))["explanation"]
            assert [told[step] // PAGE for step in STEPS] == [PAGES, 0, 0, 0]
            assert told["lost_tokens"] == {"not_in_storage": PAGES * PAGE}
        for number in range(DOCUMENTS):
            # A second pass with a question of three pages more, which nobody has asked before.
            meta = explained(client, document(number) + document(100 + number, 3 * PAGE))
            told, details = meta["explanation"], meta["cached_tokens_details"]
            assert told["may_hit_tokens"] == 23 * PAGE
            assert told["lost_tokens"] == {"not_in_storage": 3 * PAGE}
            assert told["used_tokens"] == details["storage"] == PAGES * PAGE
            assert [told[step] // PAGE for step in STEPS] == [23, PAGES, PAGES, PAGES]
            assert any("L3 said it has 20 of the pages" in each for each in told["events"])


def test_what_is_too_short_to_ask_for_and_what_l2_has_no_room_for_are_told() -> None:
    with serving_null(OPTIONS) as (url, service), httpx.Client(base_url=url, timeout=60) as client:
        long = document(1, 80 * PAGE + 1)
        for _ in range(
            2
        ):  # writes under way may pin half of L2: what is over goes with the next hit
            explained(client, long)
            while not service.bridge.ask(lambda engine: engine.idle).result(5):
                pass
        settle(client)
        short = explained(client, document(1, 3 * PAGE + 1))["explanation"]
        assert short["lost_tokens"] == {"below_threshold": 3 * PAGE}
        assert [short[step] for step in STEPS] == [0, 0, 0, 0]
        settle(client)
        told = explained(client, long)["explanation"]
        room = told["loaded_tokens"] // PAGE
        assert room == 100 // 2  # half of L2, which has six fifths of L1's 84 pages
        assert told["found_tokens"] > told["loaded_tokens"]
        lost = told["lost_tokens"]
        assert lost["host_capacity"] == told["found_tokens"] - told["loaded_tokens"]
        assert sum(lost.values()) == told["may_hit_tokens"] - told["used_tokens"]


def test_every_way_to_ask_has_the_explanation_and_only_for_who_asks() -> None:
    made: list[ZmqIngress] = []

    def companions(service: Service) -> list[ZmqIngress]:
        made.append(ZmqIngress(service, OPEN, "127.0.0.1", 0))
        return made

    with (
        serving_null(OPTIONS, companions=companions) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
        zmq_client(made[0].port) as peer,
    ):
        tokens = document(0, 65)
        told = [
            explained(client, tokens)["explanation"],
            explained(client, document(1, 65), stream=True)["explanation"],
            _over_openai(client, document(2, 65), stream=False),
            _over_openai(client, document(3, 65), stream=True),
            _over_zmq(peer, document(4, 65)),
        ]
        assert {json.dumps(each["lost_tokens"]) for each in told} == {'{"not_in_storage": 64}'}
        assert "explanation" not in explained(client, tokens, explain=False)
        assert not service.bridge._loop.record._accounts


def _over_openai(client: httpx.Client, tokens: list[int], *, stream: bool) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": 2, "explain": True, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    if not stream:
        return dict(answer.json()["sglext"]["explanation"])
    lines = [line for line in answer.text.split("\n\n") if "sglext" in line]
    assert len(lines) == 1
    return dict(json.loads(lines[0].removeprefix("data: "))["sglext"]["explanation"])


def _over_zmq(peer: ZmqClient, tokens: list[int]) -> dict[str, Any]:
    params = {"max_new_tokens": 2}
    message = {"type": "generate", "id": "a", "input_ids": tokens, "explain": True}
    peer.send(message | {"sampling_params": params})
    return dict(peer.answers(1)["a"]["explanation"])

"""What is said of an answer that ends before its end, and how its client names it (field report V10)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

OPTIONS = Options(page_size=16, max_total_tokens=65_536, max_running_requests=2)
LONG = 20_000  # tokens, which nobody waits for
ASKED = {
    "/v1/completions": {"prompt": "q" * 40},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "q" * 40}]},
}
PATHS = list(ASKED)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    with serving_null(OPTIONS) as found:
        yield found
    check_quiescent(found[1].bridge.engine)


@pytest.fixture
def client(server: tuple[str, Service]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=30) as found:
        yield found
        assert found.post("/flush_cache?timeout=30").status_code == 200  # nothing is left running


@contextmanager
def streaming(
    client: httpx.Client, path: str, **more: Any
) -> Iterator[tuple[dict[str, Any], Iterator[dict[str, Any]]]]:
    """The first chunk with text of a long answer, and all that follow it."""
    body = ASKED[path] | {"max_tokens": LONG, "ignore_eos": True, "stream": True} | more
    with client.stream("POST", path, json=body) as answer:
        lines = answer.iter_lines()
        chunks = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
        yield next(chunk for chunk in chunks if text_of([chunk])), chunks


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    return "".join(text or "" for text in texts)


def abort(client: httpx.Client, **which: Any) -> None:
    assert client.post("/abort_request", json=which).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rid", ["mine", None])
def test_an_aborted_stream_ends_with_the_usage_of_what_it_told(
    path: str, rid: str | None, client: httpx.Client
) -> None:
    """Aborted by the name it was given, or by the id that its chunks have. A token is a byte here."""
    whole = client.post(path, json=ASKED[path] | {"max_tokens": 1}).json()
    options = {"stream_options": {"include_usage": True}} | ({"rid": rid} if rid else {})
    with streaming(client, path, **options) as (first, rest):
        assert rid in (None, first["id"])
        abort(client, rid=first["id"])
        chunks = [first, *rest]
    assert chunks[-2]["choices"][0]["finish_reason"] == "abort"
    usages = [chunk["usage"] for chunk in chunks if chunk["usage"]]
    assert usages == [chunks[-1]["usage"]]
    told = len(text_of(chunks))
    assert 0 < told < LONG
    assert usages[0]["completion_tokens"] == told
    assert usages[0]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert usages[0]["total_tokens"] == usages[0]["prompt_tokens"] + told
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 32 + 16 * ("chat" in path)


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_is_aborted_while_it_waits_has_usage_and_no_tokens(
    path: str, client: httpx.Client, server: tuple[str, Service]
) -> None:
    with ThreadPoolExecutor(1) as pool, streaming(client, path), streaming(client, path):
        body = ASKED[path] | {"rid": "waits", "max_tokens": 5}
        waiting = pool.submit(client.post, path, json=body)
        while not server[1].bridge.ask(lambda engine: engine.waiting).result(5):
            pass
        abort(client, rid="waits")
        answer = waiting.result(30).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert text_of([answer]) == ""
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] >= 40
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("path", PATHS)
def test_who_may_leave_asks_for_usage_with_every_chunk_and_the_server_counts_on(
    path: str, client: httpx.Client, server: tuple[str, Service]
) -> None:
    names = ("prompt_tokens", "generation_tokens", "num_aborted_requests")

    def counted() -> list[float]:
        metrics = server[1].metrics
        values = [
            metrics.registry.get_sample_value(f"sglang:{name}_total", metrics.labels)
            for name in names
        ]
        return [value or 0 for value in values]

    before = counted()
    options = {"stream_options": {"continuous_usage_stats": True}}
    with streaming(client, path, **options) as (first, rest):
        chunks = [first, *(next(rest) for _ in range(5))]
    assert client.post("/flush_cache?timeout=30").status_code == 200
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == len(text_of(chunks))
    prompt, generated, aborted = (now - then for now, then in zip(counted(), before, strict=True))
    assert (prompt, aborted) == (usage["prompt_tokens"], 1)
    assert usage["completion_tokens"] <= generated < LONG


def test_the_name_of_a_request_stands_for_all_of_its_answers(client: httpx.Client) -> None:
    with streaming(client, "/v1/completions", n=2, rid="both") as (first, rest):
        abort(client, rid="both")
        chunks = [first, *rest]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["abort", "abort"]


@pytest.mark.parametrize("which", [{}, {"rid": ""}, {"rid": "job"}, {"rid": "job_"}])
def test_a_name_that_nothing_has_ends_nothing(which: dict[str, str], client: httpx.Client) -> None:
    """Neither what has no name of its own, nor what another client calls nearly so."""
    with (
        streaming(client, "/v1/completions", rid="job_7", max_tokens=100) as (one, rest_of_one),
        streaming(client, "/v1/completions", rid="other", max_tokens=100) as (two, rest_of_two),
    ):
        abort(client, **which)
        ends = [[one, *rest_of_one][-1], [two, *rest_of_two][-1]]
    assert [end["choices"][0]["finish_reason"] for end in ends] == ["length", "length"]


def test_the_name_of_a_request_of_several_answers_is_taken_too(client: httpx.Client) -> None:
    with streaming(client, "/v1/completions", n=2, rid="both"):
        body = {"text": "a", "rid": "both", "sampling_params": {"max_new_tokens": 1}}
        refused = client.post("/generate", json=body)
    assert refused.status_code == 400
    assert "'both' is under way already" in refused.json()["message"]


def test_abort_all_ends_what_came_by_any_way() -> None:
    made: list[ZmqIngress] = []

    def companions(service: Service) -> list[ZmqIngress]:
        made.append(ZmqIngress(service, OPEN, "127.0.0.1", 0))
        return made

    options = Options(page_size=16, max_total_tokens=65_536)
    with (
        serving_null(options, companions=companions) as (url, service),
        httpx.Client(base_url=url, timeout=30) as client,
        zmq_client(made[0].port) as peer,
        ThreadPoolExecutor(1) as pool,
    ):
        params = {"max_new_tokens": LONG, "ignore_eos": True}
        native = pool.submit(
            client.post, "/generate", json={"text": "a", "sampling_params": params}
        )
        peer.ask("z", [1, 2, 3], max_new_tokens=LONG)
        with streaming(client, "/v1/completions") as (first, rest):
            while service.bridge.ask(lambda engine: engine.running).result(5) < 3:
                pass
            abort(client, abort_all=True)
            *_, last = [first, *rest]
        assert last["choices"][0]["finish_reason"] == "abort"
        assert native.result(30).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert peer.answers(1)["z"]["finish_reason"]["type"] == "abort"

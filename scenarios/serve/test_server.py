"""The server over real HTTP: what clients send, what they get, what is left when they go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from refimpl.serve.admin import Keys
from refimpl.serve.service import Service
from scenarios.serve.served import serving

pytestmark = pytest.mark.live

LONG = "a prompt of some length, so that there are full pages of it to be found again. " * 4
GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    with serving() as found:
        yield found
    check_quiescent(found[1].bridge.engine)
    ours = {"engine", "device", "host_down", "l3_read", "l3_write", "l3_change", "load_back"}
    assert not ours & {thread.name for thread in threading.enumerate()}


@pytest.fixture(scope="module")
def client(server: tuple[str, Service]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=60) as found:
        yield found


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_prompt_asked_twice_is_answered_alike_and_found_in_the_cache(
    client: httpx.Client,
) -> None:
    body = {"text": LONG, "sampling_params": GREEDY}
    first, second = (client.post("/generate", json=body).json() for _ in range(2))
    assert second["output_ids"] == first["output_ids"]
    assert len(first["output_ids"]) == 6
    meta = second["meta_info"]
    assert meta["cached_tokens"] == (meta["prompt_tokens"] - 1) // 16 * 16
    assert meta["cached_tokens_details"]["device"] == meta["cached_tokens"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}


def test_a_stream_is_cumulative_and_ends_with_the_whole_answer(client: httpx.Client) -> None:
    body = {"input_ids": list(range(1, 40)), "sampling_params": GREEDY}
    whole = client.post("/generate", json=body).json()
    chunks = events(client.post("/generate", json=body | {"stream": True}).text)
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_batches_come_back_in_their_order(client: httpx.Client) -> None:
    prompts = [list(range(start, start + 20)) for start in (1, 50, 100)]
    alone = [
        client.post("/generate", json={"input_ids": one, "sampling_params": GREEDY}).json()
        for one in prompts
    ]
    together = client.post("/generate", json={"input_ids": prompts, "sampling_params": GREEDY})
    assert [one["output_ids"] for one in together.json()] == [one["output_ids"] for one in alone]


def test_seeds_decide_what_is_drawn_and_n_answers_differ(client: httpx.Client) -> None:
    body = {"prompt": "draw", "max_tokens": 12, "n": 3, "seed": 7}
    one, two = (client.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert [choice["text"] for choice in one] == [choice["text"] for choice in two]
    assert len({choice["text"] for choice in one}) == 3
    other = client.post("/v1/completions", json=body | {"seed": 70}).json()["choices"]
    assert [choice["text"] for choice in other] != [choice["text"] for choice in one]


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_an_answer_before_it(client: httpx.Client, streams: bool) -> None:
    """Also where it spans tokens; what might have become one and did not is not lost."""
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
    body: dict[str, Any] = {"text": "stop", "sampling_params": params}
    plain = client.post("/generate", json=body).json()["text"]
    assert len(plain) > 8
    stop = plain[4:6]
    params["stop"] = [stop, "never there"]
    if streams:
        answer = events(client.post("/generate", json=body | {"stream": True}).text)[-1]
    else:
        answer = client.post("/generate", json=body).json()
    assert answer["text"] == plain[: plain.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    params["stop"] = [plain[-1] + "x"]
    assert client.post("/generate", json=body).json()["text"] == plain


def test_a_stop_token_ends_an_answer_with_it(client: httpx.Client) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8}
    body = {"text": "token", "sampling_params": params}
    plain = client.post("/generate", json=body).json()["output_ids"]
    params["stop_token_ids"] = [plain[3]]
    answer = client.post("/generate", json=body).json()
    assert answer["output_ids"] == plain[: plain.index(plain[3]) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": plain[3]}


def test_a_client_that_leaves_aborts_its_request(
    client: httpx.Client, server: tuple[str, Service]
) -> None:
    body = {
        "text": "leave",
        "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
        "stream": True,
    }
    with client.stream("POST", "/generate", json=body) as stream:
        next(stream.iter_lines())
    for _ in range(600):
        if client.post("/flush_cache?timeout=30").status_code == 200:
            break
    assert server[1].bridge.engine.idle
    assert not server[1].bridge._asked


def test_an_aborted_request_says_so(client: httpx.Client) -> None:
    body = {
        "text": "abort",
        "rid": "mine",
        "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
        "stream": True,
    }
    with client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert client.post("/abort_request", json={"rid": "mine"}).status_code == 200
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert said[-1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_leaves_before_its_answer_aborts_it(
    client: httpx.Client, server: tuple[str, Service], path: str
) -> None:
    key = "text" if path == "/generate" else "prompt"
    long = {"max_tokens": 900, "max_new_tokens": 900, "ignore_eos": True}
    body = {key: "leave", "sampling_params": long} | long
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server[0]) as leaving:
        leaving.post(path, json=body, timeout=0.2)
    assert client.post("/flush_cache?timeout=30").status_code == 200
    row = server[1].metrics
    aborted = row.registry.get_sample_value("sglang:num_aborted_requests_total", row.labels)
    assert aborted is not None
    assert aborted >= 1
    assert not server[1].bridge._asked


def test_a_name_that_is_under_way_is_refused(client: httpx.Client) -> None:
    body = {
        "text": "twice",
        "rid": "one",
        "stream": True,
        "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
    }
    with client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()  # kept: the stream is closed with it
        next(lines)
        again = client.post("/generate", json={"text": "twice", "rid": "one"})
    assert again.status_code == 400
    assert "'one'" in again.json()["error"]["message"]


def test_every_token_of_a_stream_is_an_event(client: httpx.Client) -> None:
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    body = {"text": "stream", "sampling_params": params, "stream": True}
    lengths = [len(one["output_ids"]) for one in events(client.post("/generate", json=body).text)]
    assert sorted(set(lengths)) == list(range(1, 21))


def test_logprobs_are_of_the_chosen_tokens_and_of_the_likeliest(client: httpx.Client) -> None:
    params = {"temperature": 0, "max_new_tokens": 5}
    body = {"text": "sure?", "sampling_params": params}
    asked = body | {"return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    plain, told = (client.post("/generate", json=one).json() for one in (body, asked))
    assert told["output_ids"] == plain["output_ids"]
    meta = told["meta_info"]
    chosen = meta["output_token_logprobs"]
    assert [token for _, token, _ in chosen] == told["output_ids"]
    assert meta["output_token_logprobs_length"] == 5
    for (value, token, _), top in zip(chosen, meta["output_top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[0][:2] == [value, token]  # greedy takes the likeliest
        assert 0 >= top[0][0] >= top[1][0] >= top[2][0]
    assert client.post("/generate", json=asked | {"logprob_start_len": 0}).status_code == 400


def test_logprobs_come_in_the_shapes_of_openai(client: httpx.Client) -> None:
    ask = {"prompt": "sure?", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    found = client.post("/v1/completions", json=ask).json()["choices"][0]
    assert len(found["logprobs"]["token_logprobs"]) == 4
    assert "".join(found["logprobs"]["tokens"]) == found["text"]
    chat = {
        "messages": [{"role": "user", "content": "sure?"}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]
    assert [len(one["top_logprobs"]) for one in whole["content"]] == [2] * 4
    chunks = events(client.post("/v1/chat/completions", json=chat | {"stream": True}).text)
    streamed = [
        one["logprob"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("logprobs")
        for one in choice["logprobs"]["content"]
    ]
    assert streamed == pytest.approx([one["logprob"] for one in whole["content"]])


def test_a_stream_tells_its_usage_once_and_at_its_end(client: httpx.Client) -> None:
    """Field report V10, for both APIs of OpenAI; and hits by tier for those who ask."""
    for path, body in (
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ):
        ask = body | {"max_tokens": 6, "temperature": 0}
        whole = client.post(path, json=ask).json()
        whole = client.post(path, json=ask | {"return_cached_tokens_details": True}).json()
        streamed = ask | {"stream": True}
        silent = events(client.post(path, json=streamed).text)
        assert all(chunk["usage"] is None for chunk in silent)
        options = {"stream_options": {"include_usage": True}, "return_cached_tokens_details": True}
        chunks = events(client.post(path, json=streamed | options).text)
        assert [chunk["usage"] for chunk in chunks if chunk["usage"]] == [whole["usage"]]
        assert chunks[-1]["usage"]
        assert chunks[-1]["choices"] == []
        extensions = [chunk["sglext"] for chunk in chunks if "sglext" in chunk]
        assert extensions == [whole["sglext"]]
        assert whole["sglext"]["cached_tokens_details"]["device"] > 0
        options = {"stream_options": {"continuous_usage_stats": True}}
        counted = events(client.post(path, json=streamed | options).text)
        assert counted[-1]["usage"] == whole["usage"]


BAD: list[tuple[str, Any, str]] = [
    ("/generate", {}, "text or input_ids"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text or input_ids"),
    ("/generate", {"text": ""}, "at least one token"),
    ("/generate", {"input_ids": []}, "at least one token"),
    ("/generate", {"input_ids": [-1]}, "vocabulary"),
    ("/generate", {"input_ids": [10**30]}, ""),
    ("/generate", {"input_ids": [1] * 5000}, "--max-total-tokens"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_tokens"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -(10**20)}}, ""),
    ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": "nan"}}, "temperature"),
    ("/generate", {"text": "a", "sampling_params": {"n": 10**9}}, "n"),
    ("/v1/completions", {"model": "other", "prompt": "a"}, "other"),
    ("/v1/completions", {"prompt": []}, "at least one token"),
    ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": 5}]}, "role"),
    ("/v1/chat/completions", {"messages": "hello"}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "word"), BAD)
@pytest.mark.parametrize("streams", [False, True])
def test_bad_input_is_a_4xx_that_says_what_to_change(
    path: str, body: dict[str, Any], word: str, streams: bool, client: httpx.Client
) -> None:
    answer = client.post(path, json=body | {"stream": streams})
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert word in error["message"] + str(error["param"])


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[]", b"5", b'{"text": "\xff"}'])
def test_a_body_that_is_no_json_is_a_4xx(raw: bytes, client: httpx.Client) -> None:
    header = {"content-type": "application/json"}
    answer = client.post("/generate", content=raw, headers=header)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]


def test_storage_is_attached_used_and_detached_over_http(
    client: httpx.Client, tmp_path: Path
) -> None:
    path, body = "/hicache/storage-backend", {"text": LONG + "l3", "sampling_params": GREEDY}
    extra = json.dumps({"file_storage_path": str(tmp_path), "prefetch_threshold": 16})
    attach = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": extra,
        "hicache_storage_prefetch_policy": "wait_complete",
        "drain": "queue",
    }
    assert client.put(path, json=attach).text.startswith("HiCache storage backend attached.\n")
    assert client.get(path).json()["hicache_storage_backend"] == "file"
    first = client.post("/generate", json=body).json()
    assert client.post("/flush_cache?timeout=30").status_code == 200
    second = client.post("/generate", json=body).json()
    assert second["output_ids"] == first["output_ids"]
    details = second["meta_info"]["cached_tokens_details"]
    assert details["storage"] == (second["meta_info"]["prompt_tokens"] - 1) // 16 * 16
    assert details["storage_backend"] == "file"
    assert client.delete(path, params={"drain": "queue"}).status_code == 200
    assert client.get(path).json()["hicache_storage_backend"] is None
    assert client.delete(path).status_code == 200  # nothing was attached


@pytest.mark.parametrize(
    "change",
    [
        {"hicache_storage_backend": "no-such-store"},
        {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": "{"},
        {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "later"},
        {
            "hicache_storage_backend": "mooncake",
            "hicache_storage_backend_extra_config_json": '{"master_server_address": "127.0.0.1:1"}',
        },
        {},
    ],
)
def test_an_attach_that_can_not_be_changes_nothing(
    change: dict[str, Any], client: httpx.Client
) -> None:
    path = "/hicache/storage-backend"
    before = client.get(path).json()
    answer = client.put(path, json=change)
    assert answer.status_code == 400
    assert answer.text.strip()
    assert client.get(path).json() == before


def test_keys_are_asked_for_where_there_are_some() -> None:
    with serving(keys=Keys("user", "admin", strict=True)) as (url, _):
        admin, path = {"authorization": "Bearer admin"}, f"{url}/hicache/storage-backend"
        user = {"authorization": "Bearer user"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=user).status_code == 200
        assert httpx.get(path, headers=user).status_code == 401
        assert httpx.get(path, headers=admin).status_code == 200
    with serving(keys=Keys(None, None, strict=True)) as (url, _):
        answer = httpx.get(f"{url}/hicache/storage-backend")
        assert answer.status_code == 400
        assert "requires admin API key" in answer.json()["error"]["message"]


def test_the_openai_client_chats_completes_and_streams(server: tuple[str, Service]) -> None:
    openai = pytest.importorskip("openai", reason="the client is not installed")
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "What is the capital of France? " * 3}]
        given = {"model": "tiny-gqa", "messages": messages, "max_tokens": 9, "temperature": 0}
        whole = client.chat.completions.create(**given)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 9
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(**given, stream=True, stream_options=options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
        done = client.completions.create(model="tiny-gqa", prompt="hello", max_tokens=4)
        assert done.choices[0].finish_reason in ("length", "stop")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt-9", prompt="hello")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="tiny-gqa", prompt="hello", max_tokens=-3)

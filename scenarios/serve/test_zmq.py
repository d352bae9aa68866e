"""Requests over ZMQ: the answers of HTTP, the limits of HTTP, and nobody harmed by what somebody sends."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

import httpx
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refimpl.config import ConfigError
from refimpl.core.check import check_quiescent
from refimpl.run.options import Options
from refimpl.serve import zmq_ingress
from refimpl.serve.admin import Keys
from refimpl.serve.companions import Sockets, companions_of
from refimpl.serve.service import Service
from refimpl.serve.zmq_ingress import ZmqIngress
from scenarios.serve.served import OPEN, OPTIONS, serving
from scenarios.serve.zmq_client import SECONDS_MAX, ZmqClient, zmq_client
from scenarios.tidy import ROOT

pytestmark = pytest.mark.live

PROMPT = list(range(1, 60))
STREAMS = 64
FLOOD = 20_000  # refusals that fill the buffers of a peer that does not read


@contextmanager
def listening(
    options: Options = OPTIONS, keys: Keys = OPEN
) -> Iterator[tuple[str, Service, ZmqIngress]]:
    """(URL, service, ingress); at the end all has stopped, at rest."""
    made: list[ZmqIngress] = []

    def companions(service: Service) -> list[ZmqIngress]:
        made.append(ZmqIngress(service, keys, "127.0.0.1", 0))
        return made

    with serving(options, keys=keys, companions=companions) as (url, service):
        yield url, service, made[0]
    assert not made[0]._thread.is_alive()
    assert not made[0]._open
    check_quiescent(service.bridge.engine)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service, ZmqIngress]]:
    with listening() as found:
        yield found
    assert "zmq_ingress" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def client(server: tuple[str, Service, ZmqIngress]) -> Iterator[ZmqClient]:
    with zmq_client(server[2].port) as found:
        yield found


def over_http(url: str, body: dict[str, Any]) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True} | body.pop(
        "sampling_params", {}
    )
    answer = httpx.post(f"{url}/generate", json=body | {"sampling_params": params}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- answers ------------------------------------------------------------------------------------


def test_a_ping_is_answered_at_once(client: ZmqClient) -> None:
    client.ping()


def test_many_streams_at_once_are_the_answers_of_http(
    server: tuple[str, Service, ZmqIngress], client: ZmqClient
) -> None:
    prompts = [[at % 8 + 1] * 20 + list(range(at, at + 10)) for at in range(1, STREAMS + 1)]
    for at, prompt in enumerate(prompts):
        client.ask(str(at), prompt, temperature=0.8, sampling_seed=at)
    answers = client.answers(STREAMS)
    together = {
        "input_ids": prompts,
        "sampling_params": [
            {"temperature": 0.8, "max_new_tokens": 6, "sampling_seed": at, "ignore_eos": True}
            for at in range(STREAMS)
        ],
    }
    by_http = httpx.post(f"{server[0]}/generate", json=together, timeout=60).json()
    for at, one in enumerate(by_http):
        assert answers[str(at)]["output_ids"] == one["output_ids"]
        assert answers[str(at)]["finish_reason"] == one["meta_info"]["finish_reason"]


def test_an_end_says_what_http_says_of_an_answer(
    server: tuple[str, Service, ZmqIngress], client: ZmqClient
) -> None:
    prompt = [7] * 40
    client.whole("first", prompt)
    end = client.whole("second", prompt, stream=False)
    meta = over_http(server[0], {"input_ids": prompt})["meta_info"]
    same = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")
    assert {key: end[key] for key in same} == {key: meta[key] for key in same}
    assert end["cached_tokens"] == 32
    assert end["cached_tokens_details"] == meta["cached_tokens_details"]
    assert 0 < end["first_token_latency"] <= end["e2e_latency"] < 30


def test_tokens_come_as_they_are_made_and_whole_answers_at_the_end(client: ZmqClient) -> None:
    client.ask("stream", PROMPT, max_new_tokens=8)
    said = [client.receive()]
    while said[-1]["type"] == "tokens":
        said.append(client.receive())
    assert len(said) > 2
    assert all(one["output_ids"] for one in said[:-1])
    assert said[-1]["output_ids"] == []
    streamed = [token for one in said for token in one["output_ids"]]
    client.ask("whole", PROMPT, max_new_tokens=8, stream=False)
    only = client.receive()
    assert only["type"] == "end"
    assert only["output_ids"] == streamed
    assert only["completion_tokens"] == len(streamed) == 8


def test_tokens_as_bytes_are_the_tokens_of_the_list(client: ZmqClient) -> None:
    words = array("I", PROMPT).tobytes()
    assert client.whole("a", words)["output_ids"] == client.whole("b", PROMPT)["output_ids"]


def test_an_empty_delimiter_before_the_message_is_tolerated(client: ZmqClient) -> None:
    client.socket.send_multipart([b"", msgspec.msgpack.encode({"type": "ping"})])
    assert client.receive() == {"type": "pong"}


def test_a_stop_token_ends_an_answer_as_over_http(
    server: tuple[str, Service, ZmqIngress], client: ZmqClient
) -> None:
    plain = client.whole("plain", PROMPT, max_new_tokens=8)["output_ids"]
    end = client.whole("stopped", PROMPT, max_new_tokens=8, stop_token_ids=[plain[3]])
    params = {"max_new_tokens": 8, "stop_token_ids": [plain[3]]}
    by_http = over_http(server[0], {"input_ids": PROMPT, "sampling_params": params})
    assert end["output_ids"] == by_http["output_ids"]
    assert end["finish_reason"] == {"type": "stop", "matched": plain[3]}


def test_namespaces_share_no_pages_over_zmq(client: ZmqClient) -> None:
    prompt = [9] * 40
    client.whole("a", prompt, cache_salt="salt")
    assert client.whole("b", prompt, cache_salt="salt")["cached_tokens"] == 32
    for name, space in (("c", {}), ("d", {"extra_key": "salt"}), ("e", {"cache_salt": "other"})):
        assert client.whole(name, prompt, **space)["cached_tokens"] == 0


def test_the_client_of_the_readme_gets_an_answer(
    server: tuple[str, Service, ZmqIngress], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "refimpl/serve/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "30001" in code
    exec(code.replace("30001", str(server[2].port)), {})
    said = capsys.readouterr().out
    by_http = over_http(
        server[0],
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "ignore_eos": False}},
    )
    assert said == f"end {by_http['output_ids']} {by_http['meta_info']['finish_reason']}\n"


# ---- ends that are none -------------------------------------------------------------------------


def test_an_aborted_request_says_so_over_zmq(client: ZmqClient) -> None:
    client.ask("long", PROMPT, max_new_tokens=900)
    assert client.receive()["type"] == "tokens"
    client.send({"type": "abort", "id": "long"})
    end = client.answers(1)["long"]
    assert end["finish_reason"]["type"] == "abort"
    assert end["completion_tokens"] < 900
    client.send({"type": "abort", "id": "long"})  # over
    client.send({"type": "abort", "id": "never there"})
    client.ping()


def test_a_peer_that_vanished_has_its_requests_aborted() -> None:
    with listening() as (url, service, ingress):
        with zmq_client(ingress.port) as client:
            for name in "abc":
                client.ask(name, PROMPT, max_new_tokens=900)
            assert client.receive()["type"] == "tokens"
        # Flushing waits for rest; 900 tokens of three requests take longer than an abort.
        assert httpx.post(f"{url}/flush_cache?timeout=30", timeout=60).status_code == 200
        assert service.bridge.engine.idle
        record = service.bridge._loop.record
        assert record.finished["abort"] == 3, record.finished


def test_a_full_queue_is_a_503_that_says_when_to_come_back() -> None:
    options = replace(OPTIONS, max_queued_requests=1, max_running_requests=1)
    with listening(options) as (_, _, ingress), zmq_client(ingress.port) as client:
        for at in range(20):
            client.ask(str(at), [at + 1] * 20, max_new_tokens=40)
        answers = client.answers(20)
        refused = [one for one in answers.values() if one["type"] == "error"]
        assert refused
        assert len(refused) < 20
        for one in refused:
            assert one["code"] == 503
            assert one["retry_after"] == 1
            assert "queue is full" in one["message"]
        assert all(len(one["output_ids"]) == 40 for one in answers.values() if one not in refused)


def test_one_peer_can_not_open_requests_without_end(
    client: ZmqClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_ingress, "OPEN_MAX", 2)
    for at in range(3):
        client.ask(str(at), PROMPT, max_new_tokens=60)
    answers = client.answers(3)
    assert answers["2"]["code"] == 503
    assert [len(answers[name]["output_ids"]) for name in "01"] == [60, 60]


def test_a_peer_that_stops_reading_has_its_requests_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_ingress, "_SENT_MAX", 1000)
    with listening() as (url, service, ingress), zmq_client(ingress.port, reads=1) as deaf:
        refused = msgspec.msgpack.encode({"type": "generate", "id": "x" * 256, "input_ids": []})
        for _ in range(FLOOD):
            deaf.socket.send(refused)
        deaf.ask("never read", PROMPT, max_new_tokens=900)
        with zmq_client(ingress.port) as other:
            assert len(other.whole("other", PROMPT)["output_ids"]) == 6
        record = service.bridge._loop.record
        wait_for(lambda: record.finished["abort"] == 1)
        assert httpx.post(f"{url}/flush_cache?timeout=30", timeout=60).status_code == 200


def test_what_is_open_is_answered_when_the_server_stops() -> None:
    with contextlib.ExitStack() as stack:
        with listening() as (_, _, ingress):
            client = stack.enter_context(zmq_client(ingress.port))
            for at in range(4):
                client.ask(str(at), PROMPT, max_new_tokens=200)
            client.ping()
        answers = client.answers(4)
    assert [len(answers[str(at)]["output_ids"]) for at in range(4)] == [200] * 4


def test_a_server_that_is_stopping_refuses_what_is_new(
    server: tuple[str, Service, ZmqIngress], client: ZmqClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server[2], "_is_winding_down", True)
    refused = client.whole("late", PROMPT)
    assert (refused["code"], refused["retry_after"]) == (503, 1)


def test_a_key_is_asked_for_where_there_is_one() -> None:
    keys = Keys("user", None, strict=False)
    with listening(keys=keys) as (_, _, ingress), zmq_client(ingress.port) as client:
        client.ping()
        for given in ({}, {"api_key": "wrong"}, {"api_key": "user "}):
            assert client.whole("a", PROMPT, **given)["code"] == 401
        assert len(client.whole("a", PROMPT, api_key="user")["output_ids"]) == 6
        client.send({"type": "abort", "id": "a"})
        assert client.receive()["code"] == 401


def test_an_address_in_use_is_one_line_that_names_the_flag(
    server: tuple[str, Service, ZmqIngress],
) -> None:
    with pytest.raises(ConfigError, match=r"--zmq-port: tcp://127\.0\.0\.1:.* in use"):
        ZmqIngress(server[1], OPEN, "127.0.0.1", server[2].port)
    with pytest.raises(ConfigError, match="--host no-such-host"):
        ZmqIngress(server[1], OPEN, "no-such-host.invalid", 0)


def test_flags_make_the_sockets_and_a_wrong_one_leaves_none_open(
    server: tuple[str, Service, ZmqIngress],
) -> None:
    service = server[1]
    assert companions_of(service, OPEN, Sockets()) == []
    config = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "bind": true}'
    for sockets, said in (
        (Sockets(zmq_port=server[2].port, kv_events_config=config), "--zmq-port"),
        (Sockets(zmq_port=0, kv_events_config="{"), "--kv-events-config"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            companions_of(service, OPEN, sockets)
    (ingress,) = companions_of(service, OPEN, Sockets(zmq_port=0))
    assert re.fullmatch(r"requests over ZMQ on tcp://127\.0\.0\.1:[1-9]\d+", str(ingress))
    ingress.stop()


# ---- what should not be sent ----------------------------------------------------------------------

FINE: dict[str, Any] = {"type": "generate", "id": "bad", "input_ids": [1, 2, 3]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "type"),
    ({"type": "dance"}, "dance"),
    ({"type": 5}, "type"),
    ({"type": "generate", "id": "bad"}, "input_ids"),
    (FINE | {"id": ""}, "id"),
    (FINE | {"id": 5}, "id"),
    (FINE | {"id": "x" * 257}, "id"),
    (FINE | {"input_ids": []}, "at least one token"),
    (FINE | {"input_ids": b""}, "at least one token"),
    (FINE | {"input_ids": b"12345"}, "4 bytes a token"),
    (FINE | {"input_ids": [-1]}, "vocabulary"),
    (FINE | {"input_ids": [1 << 40]}, "vocabulary"),
    (FINE | {"input_ids": [(1 << 64) - 1]}, "vocabulary"),
    (FINE | {"input_ids": b"\xff" * 8}, "vocabulary"),
    (FINE | {"input_ids": [1.5]}, "input_ids"),
    (FINE | {"input_ids": "text"}, "input_ids"),
    (FINE | {"input_ids": [[1]]}, "input_ids"),
    (FINE | {"input_ids": [1] * 5000}, "--max-total-tokens"),
    (FINE | {"input_ids": bytes(1 << 21)}, "1024 tokens"),
    (FINE | {"stream": "yes"}, "stream"),
    (FINE | {"priority": 1 << 40}, "priority"),
    (FINE | {"cache_salt": 5}, "cache_salt"),
    (FINE | {"sampling_params": []}, "sampling_params"),
    (FINE | {"sampling_params": {"max_new_tokens": 0}}, "at least 1"),
    (FINE | {"sampling_params": {"max_new_tokens": -(1 << 63)}}, "at least 1"),
    (FINE | {"sampling_params": {"temperature": -1}}, "temperature"),
    (FINE | {"sampling_params": {"temperature": float("nan")}}, "temperature"),
    (FINE | {"sampling_params": {"temperature": float("inf")}}, "temperature"),
    (FINE | {"sampling_params": {"top_p": 0}}, "top_p"),
    (FINE | {"sampling_params": {"top_p": float("nan")}}, "top_p"),
    (FINE | {"sampling_params": {"top_k": -2}}, "top_k"),
    (FINE | {"sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
    (FINE | {"sampling_params": {"stop": ["a"]}}, "stop_token_ids"),
    (FINE | {"sampling_params": {"n": 2}}, "n requests"),
    ({"type": "abort"}, "id"),
    ({"type": "abort", "id": None}, "id"),
]


@pytest.mark.parametrize(("message", "word"), BAD)
def test_bad_input_over_zmq_is_an_error_that_says_what_to_change(
    message: dict[str, Any], word: str, client: ZmqClient
) -> None:
    client.send(message)
    error = client.receive()
    assert error["type"] == "error"
    assert error["code"] == 400
    assert word in error["message"]
    assert "retry_after" not in error
    named = message.get("id")
    assert error["id"] == (named if isinstance(named, str) else None)
    client.ping()
    assert client.kept == []


def test_a_second_request_of_one_id_leaves_the_first_alone(client: ZmqClient) -> None:
    client.ask("twice", PROMPT, max_new_tokens=60)
    client.ask("twice", PROMPT)
    client.ping()
    (error,) = [said for said in client.kept if said["type"] == "error"]
    client.kept.remove(error)
    assert error["id"] is None
    assert "'twice'" in error["message"]
    assert len(client.answers(1)["twice"]["output_ids"]) == 60


def test_what_is_wrong_with_the_id_of_an_open_request_does_not_seem_to_end_it(
    client: ZmqClient,
) -> None:
    client.ask("open", PROMPT, max_new_tokens=60)
    client.ask("open", "words")
    client.send({"type": "abort", "id": "open", "api_key": 5})
    client.ping()
    errors = [said for said in client.kept if said["type"] == "error"]
    client.kept = [said for said in client.kept if said["type"] != "error"]
    assert [(error["id"], error["code"]) for error in errors] == [(None, 400), (None, 400)]
    assert len(client.answers(1)["open"]["output_ids"]) == 60


def test_two_peers_may_use_the_same_id(
    server: tuple[str, Service, ZmqIngress], client: ZmqClient
) -> None:
    with zmq_client(server[2].port) as other:
        client.ask("same", PROMPT, max_new_tokens=5)
        other.ask("same", PROMPT, max_new_tokens=9)
        assert len(client.answers(1)["same"]["output_ids"]) == 5
        assert len(other.answers(1)["same"]["output_ids"]) == 9


simple = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
anything = st.recursive(
    simple | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)
spoiled = st.builds(
    lambda field, value: FINE | {field: value},
    st.sampled_from(["type", "id", "input_ids", "sampling_params", "stream", "priority"]),
    anything,
)
frames = (
    st.binary(max_size=40)
    | st.builds(msgspec.msgpack.encode, anything | spoiled)
    | st.builds(
        lambda message, cut: msgspec.msgpack.encode(message)[:cut], spoiled, st.integers(0, 60)
    )
    | st.just(b"\x91" * 5000)  # deeper than anybody nests
)


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(frame=frames)
def test_no_frame_whatever_harms_the_server_or_goes_unanswered(
    frame: bytes, client: ZmqClient
) -> None:
    client.kept.clear()
    client.socket.send(frame)
    client.ping()
    kind = kind_of(frame)
    if kind == "generate":
        assert len(client.answers(1)) == 1
    elif kind not in ("ping", "abort"):
        (error,) = client.kept
        client.kept.clear()
        assert (error["type"], error["code"]) == ("error", 400)
        assert error["message"]
    client.ping()
    assert [said for said in client.kept if said["type"] != "error"] == []


def kind_of(frame: bytes) -> object:
    """The type that a frame says it is of."""
    try:
        message = msgspec.msgpack.decode(frame)
    except Exception:
        return None
    return message.get("type") if isinstance(message, dict) else None


def test_bytes_that_are_no_zmq_at_all_disturb_nobody(
    server: tuple[str, Service, ZmqIngress], client: ZmqClient
) -> None:
    with socket.create_connection(("127.0.0.1", server[2].port)) as raw:
        raw.sendall(b"GET /generate HTTP/1.1\r\n\r\n")
        client.ping()
    assert len(client.whole("after", PROMPT)["output_ids"]) == 6


def wait_for(is_so: Callable[[], bool]) -> None:
    end = monotonic() + SECONDS_MAX
    pause = threading.Event()
    while not is_so():
        assert monotonic() < end, "it does not come about"
        pause.wait(0.01)

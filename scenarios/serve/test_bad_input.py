"""Whatever comes in, a client is told what to change, nobody else notices, and the server serves on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.run.options import Options
from refimpl.serve.errors import MESSAGE_MAX
from refimpl.serve.limits import ANSWERS_MAX, BODY_BYTES_MAX, STOPS_MAX
from refimpl.serve.service import Service
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live

OPTIONS = Options(page_size=16, max_total_tokens=1024, enable_hierarchical_cache=True)
JSON = {"content-type": "application/json"}
SECONDS_MAX = 30
STORAGE = "/hicache/storage-backend"
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
TAKING = (*GENERATING, "/tokenize", "/detokenize", "/abort_request", STORAGE)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    with serving_null(OPTIONS) as found:
        yield found


@pytest.fixture
def client(server: tuple[str, Service]) -> Iterator[httpx.Client]:
    """At the end the server still answers."""
    with httpx.Client(base_url=server[0], timeout=SECONDS_MAX) as found:
        yield found
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
        assert found.post("/generate", json=body).status_code == 200
    assert server[1].bridge.is_healthy


def send(client: httpx.Client, path: str, raw: bytes) -> httpx.Response:
    return client.request("PUT" if path == STORAGE else "POST", path, content=raw, headers=JSON)


def refused(answer: httpx.Response, *words: str) -> None:
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    assert "Internal" not in error["type"]
    for word in words:
        assert word in error["message"] + str(error["param"]), error["message"]


UNREADABLE: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "JSON"),
    ("half an object", b'{"text": ', "character 9"),
    ("a list", b"[]", "JSON object"),
    ("null", b"null", "JSON object"),
    ("broken UTF-8", b'{"text": "\xff", "prompt": "\xff"}', "UTF-8"),
    ("deep", b"[" * 100_000 + b"]" * 100_000, "levels deep"),
    ("deep in an object", b'{"x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, "levels deep"),
    ("a long number", b'{"max_tokens": ' + b"9" * 5000 + b"}", "digits"),
]


@pytest.mark.parametrize("path", TAKING)
@pytest.mark.parametrize(("raw", "word"), [(raw, word) for _, raw, word in UNREADABLE],
                         ids=[name for name, _, _ in UNREADABLE])  # fmt: skip
def test_a_body_that_can_not_be_read_is_refused_with_the_reason(
    path: str, raw: bytes, word: str, client: httpx.Client
) -> None:
    refused(send(client, path, raw), word)


def test_a_body_of_another_type_is_told_how_to_be_sent(client: httpx.Client) -> None:
    for header in ({"content-type": "text/plain"}, {}):
        answer = client.post("/generate", content=b'{"text": "a"}', headers=header)
        refused(answer, "Content-Type: application/json")


# Half of a surrogate pair is no character; JSON can carry it all the same.
HALF = "\ud800"
HALVES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": HALF}),
    ("/generate", {"text": ["a", HALF]}),
    ("/generate", {"text": "a", "rid": HALF}),
    ("/generate", {"text": "a", "extra_key": HALF}),
    ("/generate", {"text": "a", "cache_salt": HALF}),
    ("/generate", {"text": "a", "sampling_params": {"stop": HALF}}),
    ("/v1/completions", {"prompt": HALF}),
    ("/v1/completions", {"prompt": "a", "stop": [HALF]}),
    ("/v1/completions", {"prompt": "a", "model": HALF}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}),
    ("/v1/chat/completions", {"messages": [{"role": HALF, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": HALF}]}]}),
    ("/tokenize", {"prompt": HALF}),
    (STORAGE, {"hicache_storage_backend": HALF}),
    (STORAGE, {"hicache_storage_backend": "memory", "drain": HALF}),
    (
        STORAGE,
        {
            "hicache_storage_backend": "memory",
            "hicache_storage_backend_extra_config_json": json.dumps({"storage": 1})[:-1]
            + f', "x": "{HALF}"}}',
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), HALVES)
def test_half_a_surrogate_pair_is_refused_wherever_text_goes(
    path: str, body: dict[str, Any], client: httpx.Client
) -> None:
    refused(send(client, path, json.dumps(body).encode()), "surrogate")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1", '"much"'])
def test_temperatures_that_are_none_are_refused(
    path: str, number: str, client: httpx.Client
) -> None:
    raw = (
        f'{{"text": "a", "prompt": "a", "messages": [{{"role": "user", "content": "a"}}],'
        f' "temperature": {number}, "sampling_params": {{"temperature": {number}}}}}'
    )
    if path != "/generate":
        raw = raw.replace('"text": "a", ', "")
    refused(send(client, path, raw.encode()), "temperature")


def prompt_of(path: str, text: str, **fields: Any) -> bytes:
    """A body for one of the routes that generate; ``fields`` where that route has them."""
    if path == "/generate":
        return json.dumps({"text": text, "sampling_params": fields}).encode()
    if path == "/v1/completions":
        return json.dumps({"prompt": text} | fields).encode()
    return json.dumps({"messages": [{"role": "user", "content": text}]} | fields).encode()


@pytest.mark.parametrize("path", GENERATING)
def test_too_much_of_anything_is_refused(path: str, client: httpx.Client) -> None:
    stops = [f"stop {number}" for number in range(10_000)]
    refused(send(client, path, prompt_of(path, "a", stop=stops)), "stop", str(STOPS_MAX))
    refused(send(client, path, prompt_of(path, "a", stop="x" * 10_000)), "stop")
    refused(send(client, path, prompt_of(path, "a", n=10_000)), "n", "128")
    refused(send(client, path, prompt_of(path, "a" * 2000)), "shorten")
    refused(send(client, path, prompt_of(path, "a" * 10_000_000)), "shorten")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"text": 5}, "text"),
        ({"input_ids": [1, "a"]}, "input_ids.1"),
        ({"input_ids": [[1], [None]]}, "input_ids"),
        ({"text": "a", "sampling_params": {"n": "two"}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop": [1]}}, "sampling_params.stop"),
    ],
)
def test_the_field_that_is_wrong_is_named_as_in_the_body(
    body: dict[str, Any], place: str, client: httpx.Client
) -> None:
    answer = client.post("/generate", json=body)
    refused(answer)
    param = answer.json()["error"]["param"]
    assert param.startswith(place)
    assert not set(param) & set("[(,")


def test_more_answers_than_a_request_may_ask_for_are_refused(client: httpx.Client) -> None:
    prompts = ["a"] * (ANSWERS_MAX // 128 + 1)
    body: dict[str, Any] = {"text": prompts, "sampling_params": {"n": 128}}
    refused(client.post("/generate", json=body), str(ANSWERS_MAX))
    body = {"prompt": prompts, "n": 128}
    refused(client.post("/v1/completions", json=body), str(ANSWERS_MAX))


@pytest.mark.parametrize("tokens", [[-1], [1, 1 << 40], [200_000]])
def test_tokens_that_are_none_have_no_text(tokens: list[int], client: httpx.Client) -> None:
    refused(client.post("/detokenize", json={"tokens": tokens}), "vocabulary")


@pytest.mark.parametrize("path", TAKING)
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_without_measure_is_refused_before_it_is_read(
    path: str, is_declared: bool, client: httpx.Client
) -> None:
    method = "PUT" if path == STORAGE else "POST"
    chunk = b" " * (1 << 20)
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(2 * BODY_BYTES_MAX // len(chunk)):
            sent += len(chunk)
            yield chunk

    headers = JSON | ({"content-length": str(2 * BODY_BYTES_MAX)} if is_declared else {})
    answer = client.request(method, path, content=body(), headers=headers)
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"  # the rest of the body is not read either
    refused(answer, str(BODY_BYTES_MAX))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/generate"),
        ("PATCH", "/v1/completions"),
        ("TRACE", "/health"),
        ("GET", "/nothing"),
        ("POST", "/flush_cache?timeout=soon"),
        ("GET", "/v1/loads?include=all,none"),
        ("GET", "/v1/loads?dp_rank=99999999999999999999999"),
        ("GET", "/v1/models/%ff%fe"),
    ],
)
def test_what_there_is_not_is_refused(method: str, path: str, client: httpx.Client) -> None:
    refused(client.request(method, path))


# ---- below HTTP ---------------------------------------------------------------------------------


@contextmanager
def connected(client: httpx.Client) -> Iterator[socket.socket]:
    place = urlsplit(str(client.base_url))
    with socket.create_connection((place.hostname, place.port), timeout=SECONDS_MAX) as found:
        yield found


def said(connection: socket.socket) -> bytes:
    """All until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


ASKED = b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}'


def request(version: str = "1.1", *headers: str, body: bytes = ASKED) -> bytes:
    lines = [f"POST /generate HTTP/{version}", "Host: x", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nbroken header\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_answered_with_400_and_closed(raw: bytes, client: httpx.Client) -> None:
    with connected(client) as connection:
        connection.sendall(raw)
        try:
            answer = said(connection)
        except ConnectionResetError:  # closed with more of it unread
            return
    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]


def test_a_client_of_http_1_0_is_answered_and_its_connection_closed(client: httpx.Client) -> None:
    with connected(client) as connection:
        connection.sendall(request("1.0"))
        head, _, body = said(connection).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"200"
    assert len(json.loads(body)["output_ids"]) == 2


def test_requests_that_are_sent_together_are_answered_in_their_order(client: httpx.Client) -> None:
    names = [f"pipelined-{number}" for number in range(5)]
    bodies = [ASKED[:-1] + f', "rid": "{name}"}}'.encode() for name in names]
    last = request("1.1", "Connection: close", body=bodies[-1])
    with connected(client) as connection:
        connection.sendall(b"".join(request(body=body) for body in bodies[:-1]) + last)
        answer = said(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 5
    places = [answer.index(f'"{name}"'.encode()) for name in names]
    assert places == sorted(places)


def test_a_request_that_comes_byte_by_byte_is_served_and_holds_up_nobody(
    client: httpx.Client,
) -> None:
    raw = request("1.1", "Connection: close")
    with connected(client) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(raw)):
            connection.sendall(raw[at : at + 1])
            if at % 64 == 0:
                assert client.get("/health").status_code == 200
        assert said(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_goes_in_the_middle_of_its_body_leaves_nothing(
    client: httpx.Client, server: tuple[str, Service]
) -> None:
    with connected(client) as connection:
        connection.sendall(request()[:-10])
    assert client.post(f"/flush_cache?timeout={SECONDS_MAX}").status_code == 200
    assert not server[1].bridge._asked


@pytest.mark.parametrize("token", [True, "65", 66.0])
def test_what_only_looks_like_a_token_is_none(client: httpx.Client, token: Any) -> None:
    refused(client.post("/detokenize", json={"tokens": [token]}), "integer")
    refused(client.post("/generate", json={"input_ids": [token]}), "input_ids")
    refused(client.post("/v1/completions", json={"prompt": [[token]]}), "prompt")
    params = {"stop_token_ids": [token]}
    refused(client.post("/generate", json={"text": "a", "sampling_params": params}), "integer")


def test_a_message_quotes_no_more_of_what_was_asked_than_a_reader_wants(
    client: httpx.Client,
) -> None:
    answer = client.post("/v1/completions", json={"model": "m" * 60_000, "prompt": "x"})
    assert answer.status_code == 404
    assert MESSAGE_MAX < len(answer.json()["error"]["message"]) < MESSAGE_MAX + 10


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_probe_may_ask_without_wanting_a_body(path: str, client: httpx.Client) -> None:
    assert client.head(path).status_code == 200

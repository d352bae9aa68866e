"""Load on the real server: all three APIs and ZMQ, with what its cache had and what it refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")
pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

from refimpl.run.options import Options
from refimpl.serve.service import Service
from refimpl.serve.zmq_ingress import ZmqIngress
from scenarios.perf.load import chats, load
from scenarios.serve.served import OPEN, serving, serving_null

pytestmark = pytest.mark.live

SCENARIO = "multi_turn:clients=2,rounds=3,request_length=20,output_length=16,rate=0,vocab=256"
# Prompts are 20, 56 and 92 tokens, pages are 16. /generate tells token ids, so that real answers are repeated
# and found, all but their last token, which nobody computed. A completion is text: what repeats is the
# prompt alone. A chat's tokens are the server's own.
HITS = {"sglang": {0: 0, 1: 35 // 16 * 16, 2: 71 // 16 * 16}, "openai": {0: 0, 1: 16, 2: 48}}


def check(row: dict[str, Any], api: str) -> None:
    assert (row["error"], row["finish"], row["output_tokens"]) == ("", "length", 16)
    assert row["hit_tokens"] == row["device_tokens"] + row["host_tokens"] + row["storage_tokens"]
    assert row["sent_ns"] <= row["first_token_ns"] <= row["last_token_ns"] <= row["end_ns"]
    if api in HITS:
        assert row["hit_tokens"] == HITS[api][row["turn"]]
    else:
        assert row["hit_tokens"] or row["turn"] == 0


def test_chats_on_the_real_server_find_their_earlier_turns_by_every_api(tmp_path: Path) -> None:
    with serving() as (url, _):
        for api in ("sglang", "openai", "openai-chat"):
            words = ("--api", api, "--scenario", SCENARIO, "--flush-first")
            run = load(tmp_path, "--host", url, *words)
            assert run.code == 0, run.out
            assert len(run.rows) == 6
            for row in run.rows:
                check(row, api)


class ZmqPort:
    """``--zmq-port`` of a server, on a free port of loopback."""

    def __init__(self) -> None:
        self.address = ""

    def __call__(self, service: Service) -> Sequence[ZmqIngress]:
        ingress = ZmqIngress(service, OPEN, "127.0.0.1", 0)
        self.address = ingress.endpoint
        return [ingress]


def test_chats_over_zmq_on_the_real_server_find_their_earlier_turns(tmp_path: Path) -> None:
    port = ZmqPort()
    with serving(companions=port) as (url, _):
        words = ("--host", url, "--flush-first", "--scenario", SCENARIO)
        run = load(tmp_path, "--zmq", port.address, *words, "ChatZmq")
    assert run.code == 0, run.out
    assert [row["transport"] for row in run.rows] == ["zmq"] * 6
    for row in run.rows:
        check(row, "sglang")  # tokens as over that API, so that answers are repeated and found


def test_a_trace_over_zmq_on_the_real_server_hits_its_equal_blocks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 200 * at, "input_length": 512 * len(ids), "output_length": 2, "hash_ids": ids}
        for at, ids in enumerate([[7], [7, 8], [9, 8]])
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    port = ZmqPort()
    with serving_null(Options(page_size=16, max_total_tokens=16_384), companions=port):
        words = ("--zmq", port.address, "--trace", str(trace), "TraceReplayZmq")
        run = load(tmp_path, *words)
    assert run.code == 0, run.out
    assert [row["prompt_tokens"] for row in run.rows] == [512, 1024, 1024]
    assert [row["hit_tokens"] for row in run.rows] == [0, 512, 0]  # a name is that of all before it


def test_what_the_real_server_refuses_over_zmq_are_failed_requests_with_its_reason(
    tmp_path: Path,
) -> None:
    port = ZmqPort()
    options = Options(
        page_size=16, max_total_tokens=4096, max_queued_requests=1, max_running_requests=1
    )
    with serving_null(options, companions=port):
        run = load(tmp_path, "--zmq", port.address, *chats(12), "ChatZmq")
    assert run.code == 1
    errors = Counter(run.errors())
    full = "error 503: the queue is full at 1 requests; try again later"
    assert set(errors) == {"", full}
    answered = [row for row in run.rows if not row["error"]]
    assert {(row["finish"], row["output_tokens"]) for row in answered} == {("length", 3)}
    assert len(run.rows) == 12

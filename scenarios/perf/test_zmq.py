"""Load over ZMQ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")
pytest.importorskip("zmq", reason="the load generator needs pip install -e '.[perf]'")

from scenarios.perf.fixture_zmq import Ingress, listening, prompt_of
from scenarios.perf.load import chats, load

pytestmark = pytest.mark.live


def test_chats_over_zmq_send_tokens_and_hear_tiers(tmp_path: Path) -> None:
    with listening(Ingress()) as ingress:
        run = load(tmp_path, "--zmq", ingress.address, *chats(2, rounds=2), "ChatZmq")
    assert [row["transport"] for row in run.rows] == ["zmq"] * 4
    assert [(row["prompt_tokens"], row["output_tokens"]) for row in run.rows] == [
        (8, 3), (8, 3), (19, 3), (19, 3),
    ]  # fmt: skip
    assert {(row["output_events"], row["hit_tokens"], row["host_tokens"]) for row in run.rows} == {
        (3, 2, 1)
    }
    assert run.code == 0, run.out
    prompts = sorted((prompt_of(message) for message in ingress.heard), key=len)
    for later in prompts[2:]:  # repeats an earlier prompt, and what was answered
        assert later[:8] in prompts[:2]
        assert later[8:11] == [1, 1, 1]


def test_a_trace_is_replayed_over_zmq_at_its_timestamps(tmp_path: Path) -> None:
    lines = [(0, [7]), (250, [7, 8]), (500, [7, 9])]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": at,
                    "input_length": 512 * len(ids),
                    "output_length": 2,
                    "hash_ids": ids,
                }
            )
            + "\n"
            for at, ids in lines
        )
    )
    with listening(Ingress()) as ingress:
        run = load(
            tmp_path,
            "--zmq",
            ingress.address,
            "--trace",
            str(trace),
            "--speed",
            "2",
            "TraceReplayZmq",
        )
    assert [row["intended_ns"] for row in run.rows] == [0, 125_000_000, 250_000_000]
    assert [row["prompt_tokens"] for row in run.rows] == [512, 1024, 1024]
    first, second, third = (prompt_of(message) for message in ingress.heard)
    assert second[:512] == third[:512] == first
    assert second[512:] != third[512:]


def test_a_refusal_over_zmq_is_one_failed_request(tmp_path: Path) -> None:
    with listening(Ingress(refuses=frozenset({1}))) as ingress:
        run = load(tmp_path, "--zmq", ingress.address, *chats(1, rounds=3), "ChatZmq")
    assert run.errors() == ["", "error 503: the inbox is full", ""]
    assert run.code == 1


@pytest.mark.slow
def test_an_address_where_nobody_answers_is_a_reason(tmp_path: Path) -> None:
    with listening(Ingress()) as ingress:
        address = ingress.address
    run = load(tmp_path, "--zmq", address, *chats(2), "ChatZmq")
    assert run.errors() == [f"no server answers at {address}"] * 2

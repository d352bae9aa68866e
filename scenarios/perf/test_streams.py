"""What the load generator makes of streams, good and broken."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")

from scenarios.perf import fixture_server as server
from scenarios.perf.load import chats, load

pytestmark = pytest.mark.live

NS_PER_MS = 1_000_000


def test_time_to_first_token_ends_with_text_and_an_answer_without_any_has_none(
    tmp_path: Path,
) -> None:
    answers = [server.text_after(0.3), server.silent]
    with server.answering(lambda number: answers[number % 2]) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(1, rounds=2))
    slow, mute = run.rows
    assert slow["error"] == ""
    assert 300 * NS_PER_MS <= slow["first_token_ns"] - slow["sent_ns"] < 5000 * NS_PER_MS
    assert slow["output_events"] == 1
    assert (mute["error"], mute["first_token_ns"], mute["output_events"]) == (
        "no first token",
        None,
        0,
    )
    assert "failed 1 times: no first token" in run.out
    assert run.code == 1


def test_output_tokens_are_those_of_the_usage_and_not_the_events(tmp_path: Path) -> None:
    answer = server.chat(events=5, tokens=20, gap_s=0.05)
    with server.answering(lambda _: answer) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(1))
    (row,) = run.rows
    assert (row["output_tokens"], row["output_events"]) == (20, 5)
    spread = row["last_token_ns"] - row["first_token_ns"]
    assert spread >= 150 * NS_PER_MS  # four gaps of 50 ms, the first of which may be seen late
    shown = f"{spread // 19 / NS_PER_MS:.1f}"
    assert f"{shown} / {shown} / {shown}" in run.out
    assert "4.0" in run.out  # tokens an event
    assert "~" not in run.out
    assert run.code == 0, run.out


def test_output_tokens_without_usage_are_marked_as_an_estimate(tmp_path: Path) -> None:
    answer = server.chat(events=5, tokens=20, counts=False)
    with server.answering(lambda _: answer) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(1))
    (row,) = run.rows
    assert (row["output_tokens"], row["output_events"]) == (None, 5)
    assert "~5" in run.out
    assert "~ estimated" in run.out


def test_each_broken_stream_is_one_failed_request_with_its_reason_and_users_go_on(
    tmp_path: Path,
) -> None:
    good = server.chat()
    answers = [good, server.reset, server.error_500, server.malformed, server.cut, good]
    with server.answering(lambda number: answers[number]) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(1, rounds=6))
    assert run.errors() == [
        "",
        "connection reset in mid-stream",
        "HTTP 500: out of memory",
        "malformed event in the stream",
        "the stream ended without a finish reason",
        "",
    ]
    assert run.code == 1
    assert "Traceback" not in run.out


def test_a_refused_port_fails_each_request_and_no_user(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    run = load(tmp_path, "--host", f"http://127.0.0.1:{port}", *chats(2, rounds=2))
    assert run.errors() == ["connection refused"] * 4
    assert run.code == 1
    assert "Traceback" not in run.out


def test_usage_is_asked_for_beside_the_options_of_the_user(tmp_path: Path) -> None:
    given = (
        '{"stream_options": {"include_obfuscation": false}, "temperature": 0.5, "ignore_eos": null}'
    )
    with server.answering(lambda _: server.chat()) as fixture:
        run = load(tmp_path, "--host", fixture.url, "--extra-body", given, *chats(1))
    (body,) = fixture.bodies
    assert body["stream_options"] == {"include_obfuscation": False, "include_usage": True}
    assert body["temperature"] == 0.5
    assert "ignore_eos" not in body
    assert run.rows[0]["output_tokens"] == 3


def test_tiers_are_asked_for_and_heard_beside_the_usage(tmp_path: Path) -> None:
    with server.answering(lambda _: server.tiers_apart) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(1))
    assert fixture.bodies[0]["return_cached_tokens_details"] is True
    (row,) = run.rows
    tiers = [row[f"{tier}_tokens"] for tier in ("device", "host", "storage", "hit", "prompt")]
    assert tiers == [3, 2, 1, 6, 8]
    assert "75.0 %" in run.out


def test_a_later_turn_repeats_what_was_really_answered(tmp_path: Path) -> None:
    with server.answering(lambda _: server.chat()) as fixture:
        run = load(tmp_path, "--host", fixture.url, *chats(1, rounds=3))
    assert run.errors() == [""] * 3
    first, second, third = (body["messages"] for body in fixture.bodies)
    assert [len(message["content"].split()) for message in first] == [8]  # a word a token
    answer = {"role": "assistant", "content": "word word word "}
    assert second[:2] == [*first, answer]
    assert third[:4] == [*second, answer]
    assert [message["role"] for message in third] == ["user", "assistant"] * 2 + ["user"]

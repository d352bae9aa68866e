"""Load on the real server: all three APIs, with what its cache had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")
pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

from scenarios.perf.load import load
from scenarios.serve.served import serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("perf-real-server")]

SCENARIO = "multi_turn:clients=2,rounds=3,request_length=20,output_length=8,rate=0,vocab=256"
PAGE = 16


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as (address, _):
        yield address


@pytest.mark.parametrize("api", ["openai-chat", "openai", "sglang"])
def test_chats_on_the_real_server_find_their_earlier_turns_in_l1(
    api: str, url: str, tmp_path: Path
) -> None:
    run = load(tmp_path, "--host", url, "--api", api, "--scenario", SCENARIO, "--flush-first")
    assert run.code == 0, run.out
    assert {(row["error"], row["finish"], row["output_tokens"]) for row in run.rows} == {
        ("", "length", 8)
    }
    for row in run.rows:
        tiers = row["device_tokens"] + row["host_tokens"] + row["storage_tokens"]
        assert row["hit_tokens"] == tiers
        assert (row["hit_tokens"] > 0) == (row["turn"] > 0) or api == "openai-chat"
        assert row["sent_ns"] <= row["first_token_ns"] <= row["last_token_ns"] <= row["end_ns"]
    if api == "sglang":  # real answers are repeated, so all full pages of an earlier turn are found
        expected = {0: 0, 1: 27 // PAGE * PAGE, 2: 55 // PAGE * PAGE}
        assert all(row["hit_tokens"] == expected[row["turn"]] for row in run.rows)

"""Load on the real server: all three APIs, with what its cache had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")
pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

from scenarios.perf.load import load
from scenarios.serve.served import serving

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

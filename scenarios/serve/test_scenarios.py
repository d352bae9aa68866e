"""The scenarios over real HTTP: the hits that clients are told are those of the cache itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.keys import TokenPrompt
from refimpl.run.options import Options
from refimpl.run.setup import Simulation
from refimpl.workload.request import RequestSpec
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live

OPTIONS = Options(page_size=16, max_total_tokens=65_536)
WORKLOADS = {
    "shared prompt": (
        "shared_prefix:groups=3,prompts_per_group=4,system_length=64,question_length=24,vocab=250"
    ),
    "retrieval": "rag:requests=10,vocab=250",
    "long document": "long_document:documents=2,vocab=250",
}


def ask(client: httpx.Client, spec: RequestSpec) -> dict[str, Any]:
    assert isinstance(spec.prompt, TokenPrompt)
    params = {"temperature": 0, "max_new_tokens": 2}
    body = {"input_ids": spec.prompt.tokens.tolist(), "sampling_params": params}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["meta_info"])


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_hits_over_http_are_those_of_the_cache(name: str) -> None:
    options = replace(OPTIONS, workload=WORKLOADS[name])
    replay = Simulation(replace(options, cache_only=True))
    expected = [row.hit_tokens for row in replay.run().record.rows.values()]
    with serving_null(OPTIONS) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        told = [ask(client, spec)["cached_tokens"] for spec in replay.workload.requests]
    assert sum(expected) > 0
    assert told == expected


def test_chats_find_what_was_said_before() -> None:
    """Each turn repeats the real answer, so that all but the newest message and a part of a page is found."""
    with serving_null(OPTIONS) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        tokens: list[int] = []
        for turn in range(5):
            known = len(tokens)
            tokens += [(turn * 31 + at) % 250 for at in range(40)]
            params = {"temperature": 0, "max_new_tokens": 8}
            body = {"input_ids": tokens, "sampling_params": params}
            said = client.post("/generate", json=body).json()
            # The newest token of an answer has no KV yet when it ends.
            assert said["meta_info"]["cached_tokens"] == max(known - 1, 0) // 16 * 16
            tokens += said["output_ids"]


def test_a_server_that_starts_again_finds_what_the_last_one_stored(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a file holds the bytes of a model")
    from scenarios.serve.served import OPTIONS as SMALL
    from scenarios.serve.served import serving

    extra = json.dumps({"file_storage_path": str(tmp_path), "prefetch_threshold": 16})
    options = replace(
        SMALL,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=extra,
        hicache_storage_prefetch_policy="wait_complete",
    )
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": [at % 250 for at in range(200)], "sampling_params": params}
    answers = []
    for _ in range(2):
        with serving(options) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
            answers.append(client.post("/generate", json=body).json())
    first, second = answers
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens_details"]["storage"] == 192
    assert second["output_ids"] == first["output_ids"]


def test_a_client_that_reads_nothing_holds_up_nobody() -> None:
    with serving_null(OPTIONS) as (url, service), httpx.Client(base_url=url, timeout=30) as client:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2000}, "stream": True}
        with client.stream("POST", "/generate", json=body) as slow:
            for number in range(20):
                quick = {"input_ids": [number, 5], "sampling_params": {"max_new_tokens": 2}}
                assert client.post("/generate", json=quick).status_code == 200
            assert slow.status_code == 200
        assert client.post("/flush_cache?timeout=30").status_code == 200
    assert not service.bridge._asked


def test_a_flush_is_refused_while_busy_and_leaves_nothing_when_it_is_done() -> None:
    """Field report L07, a worker's part: it never says that it was flushed when it was not."""
    body = {"input_ids": list(range(200)), "sampling_params": {"max_new_tokens": 2000}}
    short = body | {"sampling_params": {"max_new_tokens": 2}}
    with serving_null(OPTIONS) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        assert client.post("/generate", json=short).status_code == 200
        with client.stream("POST", "/generate", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = client.post("/flush_cache")
            assert refused.status_code == 400
            assert "#running-req=1" in refused.text
        assert client.post("/flush_cache?timeout=30").status_code == 200
        cold = client.post("/generate", json=short).json()["meta_info"]
        warm = client.post("/generate", json=short).json()["meta_info"]
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] == 192

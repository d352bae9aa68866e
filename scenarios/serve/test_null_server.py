"""A server without a model: the simulator's timing on the wall clock, and answers no cache can change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from refimpl.run.options import Options
from refimpl.serve.service import Service
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live

OPTIONS = Options(
    page_size=16,
    max_total_tokens=2048,
    enable_hierarchical_cache=True,
    hicache_storage_backend="memory",
    hicache_storage_backend_extra_config='{"prefetch_threshold": 16}',
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    with serving_null(OPTIONS) as found:
        yield found
    check_quiescent(found[1].bridge.engine)


@pytest.fixture(scope="module")
def client(server: tuple[str, Service]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=60) as found:
        yield found


def prompt(number: int, length: int = 200) -> list[int]:
    return [number * 997 + at for at in range(length)]


def ask(client: httpx.Client, number: int, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 24, **params}
    answer = client.post(
        "/generate", json={"input_ids": prompt(number), "sampling_params": sampling}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_it_needs_neither_torch_nor_numba() -> None:
    code = (
        "import sys, refimpl.serve.app, refimpl.serve.start_null;"
        " print([name for name in ('torch', 'numba') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_answers_do_not_depend_on_what_is_cached(client: httpx.Client) -> None:
    cold = [ask(client, number) for number in range(16)]  # more than L1 holds
    warm = [ask(client, number) for number in range(16)]
    without = Options(page_size=16, disable_radix_cache=True)
    with serving_null(without) as (url, _), httpx.Client(base_url=url) as other:
        plain = [ask(other, number) for number in range(16)]
    outputs = [[one["output_ids"] for one in answers] for answers in (cold, warm, plain)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) == 16
    hits = [one["meta_info"]["cached_tokens"] for one in warm]
    assert hits == [192] * 16
    tiers = {
        tier
        for one in warm
        for tier, tokens in one["meta_info"]["cached_tokens_details"].items()
        if tier != "storage_backend" and tokens
    }
    assert "host" in tiers


def test_a_stream_brings_one_token_after_another(client: httpx.Client) -> None:
    whole = ask(client, 50)
    body = {
        "input_ids": prompt(50),
        "sampling_params": {"temperature": 0, "max_new_tokens": 24},
        "stream": True,
    }
    lines = client.post("/generate", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths[-1] == 24
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    # A step that ends while the one before is being told may be told together with it.
    assert len(set(lengths)) >= 12


def test_seeds_count_only_where_something_is_drawn(client: httpx.Client) -> None:
    greedy = [ask(client, 60, sampling_seed=seed)["output_ids"] for seed in (1, 2)]
    drawn = [ask(client, 60, temperature=1, sampling_seed=seed)["output_ids"] for seed in (1, 2, 1)]
    assert greedy[0] == greedy[1]
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_stop_token_ends_an_answer_with_it(client: httpx.Client) -> None:
    plain = ask(client, 70)["output_ids"]
    answer = ask(client, 70, stop_token_ids=[plain[9]])
    assert answer["output_ids"] == plain[: plain.index(plain[9]) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": plain[9]}


def test_probabilities_are_refused(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"text": "a", "return_logprob": True})
    assert answer.status_code == 400
    assert "logprobs" in answer.json()["error"]["message"]


def test_storage_is_attached_and_detached(client: httpx.Client) -> None:
    path = "/hicache/storage-backend"
    assert client.delete(f"{path}?drain=queue").status_code == 200
    assert client.get(path).json()["hicache_storage_backend"] is None
    body = {
        "hicache_storage_backend": "mooncake",
        "hicache_storage_backend_extra_config_json": '{"prefetch_threshold": 16}',
        "drain": "queue",
    }
    assert client.put(path, json=body).status_code == 200, client.get(path).text
    assert client.get(path).json()["hicache_storage_backend"] == "mooncake"


def attach(client: httpx.Client, max_size: int) -> httpx.Response:
    extra = json.dumps({"prefetch_threshold": 16, "max_size": max_size})
    asked = {
        "hicache_storage_backend": "memory",
        "hicache_storage_backend_extra_config_json": extra,
        "drain": "queue",
    }
    return client.put("/hicache/storage-backend", json=asked)


def test_an_attached_store_keeps_no_more_pages_than_its_max_size() -> None:
    options = replace(
        OPTIONS, hicache_storage_backend=None, hicache_storage_backend_extra_config=None
    )
    with serving_null(options) as (url, service), httpx.Client(base_url=url, timeout=60) as client:
        refused = attach(client, service.page_bytes - 1)
        assert (refused.status_code, "max_size" in refused.text) == (400, True)
        assert attach(client, 20 * service.page_bytes).status_code == 200
        for number in range(5):
            ask(client, number)
        assert client.post("/flush_cache?timeout=30").status_code == 200
        newest, oldest = (ask(client, number)["meta_info"] for number in (4, 0))
    assert newest["cached_tokens_details"]["storage"] == 12 * 16
    assert newest["cached_tokens"] > oldest["cached_tokens"] == 0


def test_a_request_takes_the_time_the_cost_model_says() -> None:
    options = replace(OPTIONS, hardware="a100", model="llama-3.1-70b", tp_size=4)
    with serving_null(options) as (url, service), httpx.Client(base_url=url) as client:
        meta = ask(client, 0)["meta_info"]
        cost = service.bridge._executor.lanes.cost  # type: ignore[attr-defined]
    prefill_s = cost.prefill_ns([(0, 200)]) / 1e9
    decode_s = cost.decode_ns(1, 200, 23) / 1e9
    assert prefill_s <= meta["first_token_latency"] < 2 * prefill_s + 0.5
    assert prefill_s + decode_s <= meta["e2e_latency"]

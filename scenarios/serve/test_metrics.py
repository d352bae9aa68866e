"""``/metrics`` and ``/v1/loads``: what they count is what happened, and counting costs no answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx
from prometheus_client.parser import text_string_to_metric_families

from refimpl.run.options import Options
from refimpl.serve.metrics import Metrics
from refimpl.serve.service import Wish
from scenarios.serve.served import serving_null
from scenarios.tidy import ROOT

pytestmark = pytest.mark.live

PAGE = 64
OPTIONS = Options(
    page_size=PAGE,
    max_total_tokens=4096,
    enable_hierarchical_cache=True,
    hicache_storage_backend="memory",
    hicache_storage_prefetch_policy="wait_complete",
)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with serving_null(OPTIONS) as (url, _), httpx.Client(base_url=url, timeout=60) as found:
        yield found


def samples(client: httpx.Client) -> dict[str, float]:
    """Every sample by its name and the values of its own labels."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            own = [
                value
                for name, value in sample.labels.items()
                if name not in ("model_name", "engine_type", "le")
            ]
            if "le" not in sample.labels:
                found[" ".join([sample.name, *own])] = sample.value
    return found


def prompt(number: int, pages: int = 10) -> list[int]:
    return [number * 1000 + at for at in range(pages * PAGE + 1)]


def generate(client: httpx.Client, tokens: list[int], output: int = 4) -> None:
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": output}}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text


def test_every_label_set_is_there_with_zero_before_anything_happens(client: httpx.Client) -> None:
    found = samples(client)
    for name in (
        *[f"sglang:cached_tokens_total {tier}" for tier in ("device", "host", "storage")],
        *[f"hicache:hit_rate {tier}" for tier in ("device", "host", "storage")],
        *[
            f"hicache:prefetches_total {outcome}"
            for outcome in ("completed", "stopped", "timed_out", "failed", "revoked")
        ],
        *[
            f"hicache:transfer_bytes_total {way}"
            for way in ("load_back", "backup", "l3_read", "l3_write")
        ],
        "sglang:num_requests_total true",
        "sglang:num_requests_total false",
        "sglang:num_aborted_requests_total",
        "sglang:time_to_first_token_seconds_count true",
        "hicache:time_to_first_token_by_prompt_seconds_count over 65536",
        "hicache:write_queue_pages host",
        "hicache:write_queue_pages storage",
    ):
        assert found[name] == 0, name


def test_a_prompt_that_comes_twice_hits_in_half_of_its_tokens(client: httpx.Client) -> None:
    for number in range(4):
        generate(client, prompt(number, 2))
        generate(client, prompt(number, 2))
    found = samples(client)
    assert found["sglang:prompt_tokens_total"] == 8 * (2 * PAGE + 1)
    assert found["sglang:cached_tokens_total device"] == 4 * 2 * PAGE
    assert found["hicache:prefill_tokens_skipped_total"] == 4 * 2 * PAGE
    assert found["sglang:prefill_effective_tokens_total"] == 8 * (2 * PAGE + 1) - 4 * 2 * PAGE
    assert found["hicache:hit_rate device"] == pytest.approx(PAGE / (2 * PAGE + 1))
    assert found["sglang:cache_hit_rate"] == pytest.approx(2 * PAGE / (2 * PAGE + 1))
    assert found["sglang:num_requests_total false"] == 8
    assert found["sglang:generation_tokens_total"] == 8 * 4


def test_a_host_hit_counts_once_however_long_the_answer(client: httpx.Client) -> None:
    generate(client, prompt(0))
    for number in range(1, 8):  # pushes the first prompt out of L1
        generate(client, prompt(number))
    generate(client, prompt(0), output=100)
    found = samples(client)
    assert found["sglang:cached_tokens_total host"] == 10 * PAGE
    assert found["sglang:load_back_tokens_total kv"] == 10 * PAGE
    assert found["hicache:transfer_bytes_total load_back"] > 0
    assert found["sglang:load_back_duration_seconds_count"] == 1
    assert found["sglang:evicted_tokens_total"] > 0
    assert found["hicache:bandwidth_gb_per_s backup"] > 0


def test_pages_of_l3_are_counted_on_the_way_out_and_back(client: httpx.Client) -> None:
    generate(client, prompt(0))
    assert client.post("/flush_cache?timeout=30").status_code == 200
    generate(client, prompt(0))
    found = samples(client)
    # The answer's own page is not full, so that the prompt's pages are all there is.
    assert found["sglang:backuped_tokens_total"] == 10 * PAGE
    assert found["sglang:prefetched_tokens_total"] == 10 * PAGE
    assert found["sglang:storage_prefetch_hit_tokens_total"] == 10 * PAGE
    assert found["sglang:cached_tokens_total storage"] == 10 * PAGE
    assert found["hicache:prefetches_total completed"] == 1
    assert found["hicache:prefetch_ratio success"] == 0.5  # the first was asked for nothing
    assert found["sglang:prefetch_pgs_sum"] == found["sglang:backup_pgs_sum"] == 10


def test_times_of_requests_fall_into_their_kinds(client: httpx.Client) -> None:
    generate(client, prompt(0, 1))
    body = {
        "input_ids": prompt(1, 20),
        "sampling_params": {"max_new_tokens": 8},
        "stream": True,
    }
    client.post("/generate", json=body)
    found = samples(client)
    assert found["sglang:time_to_first_token_seconds_count true"] == 1
    assert found["sglang:time_to_first_token_seconds_count false"] == 1
    assert found["hicache:time_to_first_token_by_prompt_seconds_count to 1024"] == 1
    assert found["hicache:time_to_first_token_by_prompt_seconds_count to 4096"] == 1
    assert found["sglang:inter_token_latency_seconds_count"] == 7
    assert found["hicache:prefill_latency_seconds_count"] == 2
    assert found["sglang:queue_time_seconds_count"] == 2


def test_a_request_that_is_refused_has_no_time_to_its_first_token() -> None:
    options = replace(OPTIONS, max_queued_requests=1, max_running_requests=1)
    with serving_null(options) as (url, service), httpx.Client(base_url=url) as client:
        wish = Wish(50)
        for number in range(5):
            (asked,) = service.generations(service.check_tokens(prompt(number)), wish)
            service.bridge.submit(asked.asked, lambda _: None)
        assert client.post("/flush_cache?timeout=30").status_code == 200
        found = samples(client)
    refused = found["hicache:refused_requests_total"]
    assert refused >= 1
    assert found["sglang:num_requests_total false"] == 5 - refused
    assert found["sglang:time_to_first_token_seconds_count false"] == 5 - refused


def test_metrics_that_fail_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("counters can only grow")

    for name in ("took", "followed", "ended"):
        monkeypatch.setattr(Metrics, name, broken)
    with serving_null(OPTIONS) as (url, _), httpx.Client(base_url=url) as client:
        generate(client, prompt(0))
        assert client.get("/metrics").status_code == 200


def test_loads_tell_requests_and_memory(client: httpx.Client) -> None:
    generate(client, prompt(0))
    told = client.get("/v1/loads?include=core,memory").json()["loads"][0]
    assert told["num_running_reqs"] == told["num_waiting_reqs"] == 0
    assert told["num_used_tokens"] == 0  # what is kept for a later hit can be had at once
    assert told["max_total_num_tokens"] == told["memory"]["token_capacity"] == 4096
    assert told["total_prefill_uncached_tokens"] == 10 * PAGE + 1
    assert "queues" not in told
    assert "queues" in client.get("/v1/loads?include=all").json()["loads"][0]


def tier(found: dict[str, float], name: str) -> tuple[float, ...]:
    """Tokens that are free, cached and there at all, and pins."""
    kinds = ("free_tokens", "cached_tokens", "total_tokens", "pins")
    return tuple(found[f"hicache:tier_{kind} {name}"] for kind in kinds)


def test_each_tier_is_free_or_cached_at_rest_and_a_request_that_runs_is_seen_to_hold_some() -> None:
    with serving_null(OPTIONS) as (url, service), httpx.Client(base_url=url) as client:
        generate(client, prompt(0))
        assert client.post("/flush_cache?timeout=30").status_code == 200
        assert tier(samples(client), "device") == (4096, 0, 4096, 0)
        generate(client, prompt(0))
        (asked,) = service.generations(
            service.check_tokens(prompt(0)), Wish(1000, is_followed=True)
        )
        begun = Event()
        rid = service.bridge.submit(asked.asked, lambda _: begun.set())
        assert begun.wait(30)
        busy = samples(client)
        service.bridge.abort(rid)
        wait_for_rest(client)
        rest = samples(client)
    free, cached, total, pins = tier(busy, "device")
    assert free + cached < total == 4096  # the page that its answer goes to is in no tree yet
    assert pins == 1
    assert tier(rest, "device") == (4096 - 10 * PAGE, 10 * PAGE, 4096, 0)
    assert tier(rest, "host") == (8192 - 10 * PAGE, 10 * PAGE, 8192, 0)
    kinds = ("back_up", "write_back", "store", "fetch")
    assert [rest[f"hicache:ops_in_flight {kind}"] for kind in kinds] == [0] * 4


def wait_for_rest(client: httpx.Client) -> None:
    """Until nothing runs, waits or is copied, as loads tell it."""
    end = monotonic() + 30
    while True:
        told = client.get("/v1/loads?include=memory").json()["loads"][0]
        counts = [told["num_running_reqs"], told["num_waiting_reqs"]]
        if not any([*counts, *told["memory"]["ops_in_flight"].values()]):
            assert told["memory"]["tiers"]["device"]["pins"] == 0
            return
        assert monotonic() < end, told


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are read from /proc")
def test_the_process_is_told_of_under_its_usual_names(client: httpx.Client) -> None:
    before = samples(client)
    assert before["process_resident_memory_bytes"] > 1 << 20
    assert before["process_open_fds"] > 3
    assert before["process_start_time_seconds"] > 0
    assert before["python_gc_collections_total 2"] >= 0
    end = Event()
    more = [Thread(target=end.wait) for _ in range(5)]
    for thread in more:
        thread.start()
    assert samples(client)["process_threads"] == before["process_threads"] + 5
    end.set()
    for thread in more:
        thread.join()


@pytest.mark.parametrize("query", ["include=everything", "format=xml", "dp_rank=3"])
def test_loads_refuse_what_they_do_not_know(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/v1/loads?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[2] in answer.json()["error"]["message"]


def test_the_dashboard_uses_only_metrics_that_exist(client: httpx.Client) -> None:
    families = text_string_to_metric_families(client.get("/metrics").text)
    known = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads((ROOT / "dashboards" / "hicache.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {
        name for text in asked for name in re.findall(r"(?:sglang:|hicache:|process_)\w+", text)
    }
    assert len(named) > 15
    assert not named - known

"""What a running server tells of itself: its metrics, whether it is at rest, memory by request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TypeAlias

import httpx
from prometheus_client.parser import text_string_to_metric_families

REST_S = 60
LOOK_AGAIN_S = 0.02
OURS = ("model_name", "engine_type", "le")  # labels that all samples of a server share, and bounds

Metrics: TypeAlias = dict[str, float]  # by name and the values of labels, as "name value"


@dataclass(frozen=True)
class Sample:
    """A server at rest."""

    requests: int  # that are over
    resident_bytes: int
    threads: int
    descriptors: int  # open files and sockets


async def metrics_of(client: httpx.AsyncClient) -> Metrics:
    answer = await client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return {
        " ".join(
            [sample.name, *(sample.labels[key] for key in sample.labels if key not in OURS)]
        ): (sample.value)
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def moving(metrics: Metrics) -> dict[str, float]:
    """What runs, waits or is copied."""
    names = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "hicache:ops_in_flight")
    return {name: count for name, count in metrics.items() if count and name.startswith(names)}


def more_than(first: Sample, metrics: Metrics) -> dict[str, float]:
    """What it has more of than it had, of threads and descriptors; both end a little later than requests."""
    then = {"process_threads": first.threads, "process_open_fds": first.descriptors}
    return {name: metrics[name] for name, count in then.items() if metrics[name] > count}


async def without(
    client: httpx.AsyncClient, found: Callable[[Metrics], dict[str, float]]
) -> Metrics:
    """Its metrics once nothing of that kind is found any more."""
    clock = asyncio.get_running_loop().time
    end = clock() + REST_S
    while left := found(metrics := await metrics_of(client)):
        assert clock() < end, f"the server does not come to rest: {left}"
        await asyncio.sleep(LOOK_AGAIN_S)
    return metrics


def check_nothing_is_held(metrics: Metrics) -> None:
    """Of a server at rest: each tier is free or cached, and nobody has a pin on it."""
    assert not moving(metrics)
    for tier in ("device", "host"):
        free, cached, total, pins = (
            metrics[f"hicache:tier_{what} {tier}"]
            for what in ("free_tokens", "cached_tokens", "total_tokens", "pins")
        )
        assert free + cached == total > 0, f"{tier}: {free:g} free + {cached:g} cached of {total:g}"
        assert not pins, f"{tier}: {pins:g} pins"
    assert not metrics["sglang:kv_used_tokens"]


def sample_of(metrics: Metrics) -> Sample:
    over = sum(metrics[f"sglang:num_requests_total {kind}"] for kind in ("true", "false"))
    return Sample(
        int(over + metrics["hicache:refused_requests_total"]),
        int(metrics["process_resident_memory_bytes"]),
        int(metrics["process_threads"]),
        int(metrics["process_open_fds"]),
    )


def bytes_a_request(samples: Sequence[Sample]) -> float:
    """How fast memory grows: the median of the slopes between all samples (Theil and Sen)."""
    return median(
        (late.resident_bytes - early.resident_bytes) / (late.requests - early.requests)
        for early, late in combinations(samples, 2)
    )

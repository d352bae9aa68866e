"""``/metrics`` and ``/v1/loads``: how busy the server is, what it has done and what it holds (spec 11).

Must not know: what is counted. Called by: app.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from refimpl.serve.bridge import StoppedError
from refimpl.serve.errors import RequestError
from refimpl.serve.gauges import Gauges
from refimpl.serve.instruments import Merged
from refimpl.serve.load import Load, ask_load
from refimpl.serve.openapi import EXPOSITION, JSON_OR_EXPOSITION
from refimpl.serve.process_metrics import process_registry
from refimpl.serve.service import Service
from refimpl.units import GB

SECTIONS: Final = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
ANSWER_S: Final = 5  # a batch is no reason to wait: the engine's thread never computes
_PROCESS: Final = process_registry()


_NO_ANSWER: Final = "the engine does not answer; see /health"


def load_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["observability"])

    @router.get("/metrics", responses=EXPOSITION, response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = await _exposition(service, list(range(len(service.ranks))), counted=True)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/loads", responses=JSON_OR_EXPOSITION)
    async def loads(
        include: str = "core",
        form: Annotated[str, Query(alias="format")] = "json",
        dp_rank: int | None = None,
    ) -> Response:
        sections = include.split(",")
        for section in sections:
            if section not in SECTIONS:
                known = ", ".join(SECTIONS)
                raise RequestError(f"include {section!r} is none of {known}", param="include")
        if form not in ("json", "prometheus"):
            raise RequestError(f"format {form!r} is neither json nor prometheus", param="format")
        service.check_dp_rank(dp_rank)
        ranks = list(range(len(service.ranks))) if dp_rank is None else [dp_rank]
        if form == "prometheus":
            text = await _exposition(service, ranks, counted=False)
            return Response(text, media_type=CONTENT_TYPE_LATEST)
        told = {
            "timestamp": _utc_now(),
            "version": version("hicache-refimpl"),
            "accelerator": service.settings.get("device", "none"),
            "num_accelerators": service.settings.get("tp_size", 1) * len(service.ranks),
            "loads": [
                _told(service, rank, load, sections)
                for rank, load in (await _loads(service, ranks)).items()
            ],
        }
        return JSONResponse(told)

    return router


async def _loads(service: Service, ranks: Sequence[int]) -> dict[int, Load]:
    """A snapshot of each rank, without those that have stopped.

    Raises RequestError, 503, when an engine does not answer, or all have stopped.
    """
    asked = [ask_load(service.ranks.ranks[rank]) for rank in ranks]
    together = asyncio.gather(*map(asyncio.wrap_future, asked), return_exceptions=True)
    try:
        answers = zip(ranks, await asyncio.wait_for(together, ANSWER_S), strict=True)
    except TimeoutError:
        raise RequestError(_NO_ANSWER, 503) from None
    found: dict[int, Load] = {}
    for rank, answer in answers:
        if isinstance(answer, Load):
            found[rank] = answer
        elif not isinstance(answer, StoppedError):
            raise answer
    if not found:
        raise RequestError(_NO_ANSWER, 503)
    return found


async def _exposition(service: Service, ranks: Sequence[int], *, counted: bool) -> bytes:
    """Prometheus' text: gauges of these ranks, and what they and the process counted.

    One that has stopped has no gauges any more, and what it counted until then.
    """
    parts: list[Collector] = []
    for number, load in (await _loads(service, ranks)).items():
        rank = service.ranks.ranks[number]
        parts.append(Gauges(rank.metrics, load, rank.bridge.moved))
    if counted:
        parts += [service.ranks.ranks[number].metrics.registry for number in ranks]
        parts.append(_PROCESS)
    registry = CollectorRegistry()
    registry.register(Merged(parts))
    return generate_latest(registry)


def _told(service: Service, rank: int, load: Load, sections: Sequence[str]) -> dict[str, Any]:
    """What was asked for, of one rank."""
    every = "all" in sections
    return (
        _core(service, rank, load)
        | ({"memory": _memory(service, load)} if every or "memory" in sections else {})
        | ({"queues": _queues(load)} if every or "queues" in sections else {})
    )


def _core(service: Service, rank: int, load: Load) -> dict[str, Any]:
    metrics = service.ranks.ranks[rank].metrics
    hits = sum(metrics.hit_tokens.values())
    return {
        "timestamp": _utc_now(),
        "dp_rank": rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens + load.waiting_uncached_tokens,
        "num_active_tokens": load.used_tokens,
        "max_total_num_tokens": load.total_tokens,
        "max_running_requests": service.engine.running_max,
        "token_usage": round(load.usage, 4),
        "gen_throughput": load.generated_per_s,
        "cache_hit_rate": round(hits / max(metrics.prompt_tokens, 1), 4),
        "utilization": round(load.running / service.engine.running_max, 4),
        "total_prefill_uncached_tokens": load.computed_tokens,
        "total_prefill_busy_us": load.prefill_busy_us,
    }


def _memory(service: Service, load: Load) -> dict[str, Any]:
    pages = service.engine.cache.l1_pages or 0
    return {
        "kv_cache_gb": round(pages * service.page_bytes / GB, 3),
        "token_capacity": pages * service.engine.cache.page_size,
        "tiers": {name: asdict(tier) for name, tier in load.tiers.items()},
        "ops_in_flight": load.ops,
    }


def _queues(load: Load) -> dict[str, int]:
    return {"waiting": load.waiting, "grammar": 0, "paused": 0}


def _utc_now() -> str:
    return datetime.now(UTC).isoformat()

"""``/metrics`` and ``/v1/loads``: how busy the server is, and what it has done (spec 11).

Must not know: what is counted. Called by: app.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from refimpl.serve.bridge import StoppedError
from refimpl.serve.errors import RequestError
from refimpl.serve.gauges import Gauges
from refimpl.serve.load import Load, load_of
from refimpl.serve.openapi import EXPOSITION, JSON_OR_EXPOSITION
from refimpl.serve.service import Service
from refimpl.units import GB

SECTIONS: Final = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
ANSWER_S: Final = 5  # a batch is no reason to wait: the engine's thread never computes


def load_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["observability"])

    @router.get("/metrics", responses=EXPOSITION, response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = await _exposition(service, counted=True)
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
        if dp_rank not in (None, 0):
            raise RequestError(f"dp_rank {dp_rank}: this server has rank 0 alone", param="dp_rank")
        if form == "prometheus":
            text = await _exposition(service, counted=False)
            return Response(text, media_type=CONTENT_TYPE_LATEST)
        load = await _load(service)
        every = "all" in sections
        told = {
            "timestamp": _utc_now(),
            "version": version("hicache-refimpl"),
            "accelerator": service.settings.get("device", "none"),
            "num_accelerators": service.settings.get("tp_size", 1),
            "loads": [
                _core(service, load)
                | ({"memory": _memory(service)} if every or "memory" in sections else {})
                | ({"queues": _queues(load)} if every or "queues" in sections else {})
            ],
        }
        return JSONResponse(told)

    return router


async def _load(service: Service) -> Load:
    """A snapshot. Raises RequestError, 503, when the engine does not answer."""
    asked = service.bridge.ask(
        lambda engine: load_of(engine, service.metrics, service.bridge.now())
    )
    try:
        return await asyncio.wait_for(asyncio.wrap_future(asked), ANSWER_S)
    except (StoppedError, TimeoutError):
        raise RequestError("the engine does not answer; see /health", 503) from None


async def _exposition(service: Service, *, counted: bool) -> bytes:
    """Prometheus' text: gauges, and what was counted."""
    registry = CollectorRegistry()
    registry.register(Gauges(service.metrics, await _load(service), service.bridge.moved))
    text = generate_latest(registry)
    return text + generate_latest(service.metrics.registry) if counted else text


def _core(service: Service, load: Load) -> dict[str, Any]:
    metrics = service.metrics
    hits = sum(metrics.hit_tokens.values())
    return {
        "timestamp": _utc_now(),
        "dp_rank": 0,
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


def _memory(service: Service) -> dict[str, Any]:
    pages = service.engine.cache.l1_pages or 0
    return {
        "kv_cache_gb": round(pages * service.page_bytes / GB, 3),
        "token_capacity": pages * service.engine.cache.page_size,
    }


def _queues(load: Load) -> dict[str, int]:
    return {"waiting": load.waiting, "grammar": 0, "paused": 0}


def _utc_now() -> str:
    return datetime.now(UTC).isoformat()

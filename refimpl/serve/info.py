"""What is served and whether it is well, tokens and text, flush: SGLang's small routes (spec 12.1).

Must not know: the engine. Called by: app.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from refimpl.messages import Flush
from refimpl.model.tokenizer import decode
from refimpl.serve.bodies import Token
from refimpl.serve.generation import all_whole
from refimpl.serve.limits import Text
from refimpl.serve.openapi import EMPTY, JSON, TEXT
from refimpl.serve.service import Service, Wish

FLUSH_S_MAX = 600  # a flush waits no longer for idleness
_FLUSH_AGAIN_S = 0.02


class TokenizeBody(BaseModel):
    """The body of ``/tokenize``."""

    prompt: Text | list[Text]


class DetokenizeBody(BaseModel):
    """The body of ``/detokenize``."""

    tokens: list[Token]


def text_routes(service: Service) -> APIRouter:
    """Tokens and text; flush."""
    router = APIRouter(tags=["SGLang"])

    @router.post("/flush_cache", responses=TEXT, response_class=PlainTextResponse)
    @router.get("/flush_cache", include_in_schema=False)
    async def flush_cache(timeout: float = 0) -> Response:
        clock = asyncio.get_running_loop().time
        end = clock() + min(max(timeout, 0), FLUSH_S_MAX)
        answer = await service.changes.change(Flush())
        while not answer.ok and clock() < end:
            await asyncio.sleep(_FLUSH_AGAIN_S)
            answer = await service.changes.change(Flush())
        text = "Cache flushed.\n" if answer.ok else f"Flush cache failed.\n{answer.message}\n"
        return PlainTextResponse(text, 200 if answer.ok else 400)

    @router.post("/tokenize", responses=JSON)
    @router.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        encode = service.model.tokenizer.encode
        if isinstance(body.prompt, str):
            tokens = encode(body.prompt)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": service.context_tokens}
        lists = [encode(text) for text in body.prompt]
        count = [len(tokens) for tokens in lists]
        return {"tokens": lists, "count": count, "max_model_len": service.context_tokens}

    @router.post("/detokenize", responses=JSON)
    @router.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.check_vocabulary(body.tokens)
        return {"text": decode(service.model.tokenizer, body.tokens)}

    return router


def info_routes(service: Service) -> APIRouter:
    """Health and what is served."""
    router = APIRouter(tags=["SGLang"])

    @router.head("/health", include_in_schema=False)  # what some load balancers ask for
    @router.get("/health", responses=EMPTY, response_class=Response)
    async def health() -> Response:
        return Response(status_code=200 if service.ranks.is_healthy else 503)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=EMPTY, response_class=Response)
    async def ready() -> Response:
        return Response(status_code=200 if service.ranks.is_ready else 503)

    @router.get("/health_generate", responses=EMPTY, response_class=Response)
    async def health_generate() -> Response:
        if not service.ranks.is_healthy:
            return Response(status_code=503)
        wishes = [Wish(1, temperature=0, dp_rank=rank) for rank in range(len(service.ranks))]
        await all_whole(
            [each for wish in wishes for each in service.generations(array("I", [0]), wish)]
        )
        return Response()

    @router.get("/model_info", responses=JSON)
    @router.get("/get_model_info", include_in_schema=False)
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": service.settings.get("path", service.name),
            "tokenizer_path": service.settings.get("path", service.name),
            "served_model_name": service.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": service.model.kind,
        }

    @router.get("/server_info", responses=JSON)
    @router.get("/get_server_info", include_in_schema=False)
    async def server_info() -> JSONResponse:
        state = {"effective_max_running_requests_per_dp": service.engine.running_max}
        told = service.settings | {
            "served_model_name": service.name,
            "startup_time": service.started,
            "internal_states": [
                service.settings | state | {"dp_rank": rank} for rank in range(len(service.ranks))
            ],
        }
        return JSONResponse(told)

    return router

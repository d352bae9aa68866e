"""SGLang's own API: generate and abort. Facts in spec 12.1.

Must not know: the engine. Called by: app.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from refimpl.run.record import Row
from refimpl.serve.bodies import Choices, Namespaced
from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Finish, Generation
from refimpl.serve.service import Service, Wish, cached_details
from refimpl.serve.sse import merged, stream


class SamplingParams(Choices):
    """``sampling_params`` of a request."""

    max_new_tokens: int = 128
    sampling_seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)


class GenerateBody(Namespaced):
    """The body of ``/generate``."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: str | list[str] | None = None
    stream: bool = False

    def wish(self, at: int) -> Wish:
        """What is asked for of the prompt number ``at``."""
        given = self.sampling_params
        if isinstance(given, list):
            if at >= len(given):
                raise RequestError("sampling_params is a list: give one for each prompt")
            given = given[at]
        params = given or SamplingParams()  # type: ignore[call-arg]  # all have defaults
        return params.wish_of(params.max_new_tokens, params.sampling_seed, self)


class AbortBody(BaseModel):
    """The body of ``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


def native_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["SGLang"])
    running: dict[str, Generation] = {}

    @router.post("/generate")
    @router.put("/generate", include_in_schema=False)
    async def generate(body: GenerateBody) -> Any:
        prompts, is_batch = _prompts(service, body)
        asked = [
            each
            for at, prompt in enumerate(prompts)
            for each in service.generations(prompt, body.wish(at))
        ]
        named = _names(body.rid, len(asked))
        is_batch = is_batch or len(asked) > 1
        running.update(zip(named, asked, strict=True))
        if body.stream:
            chunks = _chunks(service, asked, named, running, is_batch=is_batch)
            return StreamingResponse(stream(chunks), media_type="text/event-stream")
        try:
            done = await asyncio.gather(*(each.whole() for each in asked))
        finally:
            _forget(running, named)
        answers = [
            _answer(service, name, one.text, one.tokens, one.row, one.finish)
            for name, one in zip(named, done, strict=True)
        ]
        return answers if is_batch else answers[0]

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        chosen = list(running) if body.abort_all else [body.rid]
        for name in chosen:
            if name in running:
                service.bridge.abort(running[name].rid)
        return Response()

    return router


def _prompts(service: Service, body: GenerateBody) -> tuple[list[array[int]], bool]:
    """The prompts in tokens, and whether a list was given."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids")
    given = body.text if body.input_ids is None else body.input_ids
    assert given is not None
    if not given:
        raise RequestError("the prompt is empty: give it at least one token")
    encode = service.model.tokenizer.encode
    if isinstance(given, str):
        return [service.check_tokens(encode(given))], False
    if isinstance(given[0], int):
        return [service.check_tokens(given)], False
    return [
        service.check_tokens(encode(each) if isinstance(each, str) else each) for each in given
    ], True


def _names(given: str | list[str] | None, count: int) -> list[str]:
    if isinstance(given, list):
        if len(given) != count or len(set(given)) != count:
            raise RequestError(f"rid is a list of {len(given)}: give {count} different ones")
        return given
    if given and count == 1:
        return [given]
    return [f"{given or uuid4().hex}_{at}" if count > 1 else uuid4().hex for at in range(count)]


def _forget(running: dict[str, Generation], named: list[str]) -> None:
    for name in named:
        running.pop(name, None)


async def _chunks(
    service: Service,
    asked: list[Generation],
    named: list[str],
    running: dict[str, Generation],
    *,
    is_batch: bool,
) -> AsyncIterator[str]:
    """Cumulative text and tokens of each answer, as upstream streams them."""
    texts, tokens = [""] * len(asked), [[] for _ in asked]  # type: ignore[var-annotated]
    try:
        async for at, piece in merged([each.pieces() for each in asked]):
            texts[at] += piece.text
            tokens[at] += piece.tokens
            said = _answer(service, named[at], texts[at], tokens[at], piece.row, piece.finish)
            yield json.dumps(said | ({"index": at} if is_batch else {}))
    finally:
        _forget(running, named)


def _answer(
    service: Service, name: str, text: str, tokens: list[int], row: Row, finish: Finish | None
) -> dict[str, Any]:
    """One answer so far, with its ``meta_info`` (spec 11.5)."""
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": finish_reason(finish, len(tokens)),
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": len(tokens),
        "cached_tokens": row.hit_tokens,
        "cached_tokens_details": cached_details(row, service.storage.backend),
        "weight_version": "default",
    }
    if finish is not None and row.end_ns >= 0:
        meta["e2e_latency"] = (row.end_ns - row.arrival_ns) / 1e9
        meta["time_to_first_token"] = row.ttft_ns / 1e9
    return {"text": text, "output_ids": tokens, "meta_info": meta}


def finish_reason(finish: Finish | None, length: int) -> dict[str, Any] | None:
    """``finish_reason`` of an answer of ``length`` tokens; None while it goes on (spec 11.5)."""
    match finish:
        case None:
            return None
        case Finish("stop", matched):
            return {"type": "stop", "matched": matched}
        case Finish("length"):
            return {"type": "length", "length": length}
        case _:
            return {"type": "abort", "message": "aborted", "status_code": None, "err_type": None}

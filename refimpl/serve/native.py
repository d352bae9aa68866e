"""SGLang's own API: generate and abort. Facts in spec 12.1.

Must not know: the engine. Called by: app.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from refimpl.model.choice import TOP_LOGPROBS_MAX
from refimpl.model.tokenizer import Tokenizer, decode
from refimpl.serve.bodies import Choices, DataParallelRank, Namespaced, Token
from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Finish, Generation, Whole, all_whole
from refimpl.serve.limits import Text, check_answers
from refimpl.serve.openapi import EMPTY, STREAMS
from refimpl.serve.presence import begun, names_of, unless_gone
from refimpl.serve.service import Given, Service, Wish, cached_details, is_batch
from refimpl.serve.sse import merged, stream
from refimpl.units import NS_PER_S


class SamplingParams(Choices):
    """``sampling_params`` of a request."""

    max_new_tokens: int = 128
    sampling_seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)


class GenerateBody(Namespaced):
    """The body of ``/generate``."""

    text: Text | list[Text] | None = None
    input_ids: list[Token] | list[list[Token]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = Field(0, ge=0, le=TOP_LOGPROBS_MAX)
    return_text_in_logprobs: bool = False

    def wish(self, at: int) -> Wish:
        """What is asked for of the prompt number ``at``."""
        given = self.sampling_params
        if isinstance(given, list):
            if at >= len(given):
                raise RequestError("sampling_params is a list: give one for each prompt")
            given = given[at]
        params = given or SamplingParams()  # type: ignore[call-arg]  # all have defaults
        if self.return_logprob and self.logprob_start_len >= 0:
            raise RequestError(
                "logprobs of prompts are not served: leave logprob_start_len at -1",
                param="logprob_start_len",
            )
        return replace(
            params.wish_of(params.max_new_tokens, params.sampling_seed, self),
            is_followed=self.stream,
            logprobs=self.return_logprob,
            top_logprobs=self.top_logprobs_num if self.return_logprob else 0,
        )


class AbortBody(BaseModel):
    """The body of ``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


def native_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["SGLang"])

    @router.post("/generate", responses=STREAMS)
    @router.put("/generate", include_in_schema=False)
    async def generate(
        body: GenerateBody, request: Request, dp_rank: DataParallelRank = None
    ) -> Any:
        rank = body.rank_with(dp_rank)
        given, param = _given(body)
        prompts = service.prompts(given, param)
        wishes = [replace(body.wish(at), dp_rank=rank) for at in range(len(prompts))]
        check_answers(sum(wish.n for wish in wishes))
        asked = [
            each
            for prompt, wish in zip(prompts, wishes, strict=True)
            for each in service.generations(prompt, wish)
        ]
        named = dict(zip(names_of(body.rid, len(asked)), asked, strict=True))
        in_a_list = is_batch(given) or len(asked) > 1
        if body.stream:
            chunks = await begun(request, _chunks(service, body, named, in_a_list=in_a_list))
            return StreamingResponse(stream(chunks), media_type="text/event-stream")
        with service.running.holding(named, body.rid):
            done = await unless_gone(request, all_whole(asked))
        answers = [_answer(service, body, name, one) for name, one in zip(named, done, strict=True)]
        return Response(
            json.dumps(answers if in_a_list else answers[0]), media_type="application/json"
        )

    @router.post("/abort_request", responses=EMPTY, response_class=Response)
    async def abort_request(body: AbortBody) -> Response:
        if body.abort_all:
            service.ranks.abort_all()
        for each in service.running.found(body.rid):
            service.ranks.abort(each.rid)
        return Response()

    return router


def _given(body: GenerateBody) -> tuple[Given, str]:
    """What was given as prompt, and as what."""
    if body.text is not None and body.input_ids is None:
        return body.text, "text"
    if body.input_ids is not None and body.text is None:
        return body.input_ids, "input_ids"
    raise RequestError("give either text or input_ids")


async def _chunks(
    service: Service,
    body: GenerateBody,
    asked: dict[str, Generation],
    *,
    in_a_list: bool,
) -> AsyncGenerator[str, None]:
    """Cumulative text and tokens of each answer, as upstream streams them."""
    named, wholes = list(asked), dict[int, Whole]()
    with service.running.holding(asked, body.rid):
        async for at, piece in merged([each.pieces() for each in asked.values()]):
            whole = wholes.setdefault(at, Whole(piece.row, None))
            whole.add(piece)
            said = _answer(service, body, named[at], whole)
            yield json.dumps(said | ({"index": at} if in_a_list else {}))


def _answer(service: Service, body: GenerateBody, name: str, so_far: Whole) -> dict[str, Any]:
    """One answer so far, with its ``meta_info`` (spec 11.5)."""
    row, finish = so_far.row, so_far.finish
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": finish_reason(finish, len(so_far.tokens)),
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": len(so_far.tokens),
        "cached_tokens": row.hit_tokens,
        "cached_tokens_details": cached_details(row, service.storage.backend),
        "weight_version": "default",
    }
    if finish is not None and row.account is not None:
        meta["explanation"] = row.account.told()
    if (rank := service.dp_rank_of(row.rid)) is not None:
        meta["dp_rank"] = rank
    if body.return_logprob:
        tokenizer = service.model.tokenizer if body.return_text_in_logprobs else None
        meta |= _logprobs(so_far, body.top_logprobs_num, tokenizer)
    if finish is not None and row.end_ns >= 0:
        meta["e2e_latency"] = (row.end_ns - row.arrival_ns) / NS_PER_S
        meta["first_token_latency"] = row.ttft_ns / NS_PER_S
    return {"text": so_far.text, "output_ids": so_far.tokens, "meta_info": meta}


def _logprobs(so_far: Whole, top: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Each entry is [logprob, token, text or null]."""

    def entry(value: float, token: int) -> list[Any]:
        return [value, token, None if tokenizer is None else decode(tokenizer, [token])]

    chosen = list(zip(so_far.logprobs, so_far.tokens, strict=False))
    told: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": [entry(logprob.value, token) for logprob, token in chosen],
        "output_token_logprobs_length": len(chosen),
    }
    if top:
        told["output_top_logprobs"] = [
            [entry(value, token) for token, value in logprob.top] for logprob, _ in chosen
        ]
    return told


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

"""OpenAI's API: completions, chat completions, models. Facts of upstream in spec 12.2.

Must not know: the engine. Called by: app.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from refimpl.model.chat import ChatError
from refimpl.model.choice import TOP_LOGPROBS_MAX
from refimpl.run.record import Row
from refimpl.serve.bodies import Choices, DataParallelRank, Namespaced, Token
from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Generation, Piece, Whole, all_whole
from refimpl.serve.limits import Text, check_answers
from refimpl.serve.logprobs import Told, chat_logprobs, completion_logprobs
from refimpl.serve.openapi import JSON, STREAMS
from refimpl.serve.presence import begun, names_of, unless_gone
from refimpl.serve.service import Service, Wish, cached_details
from refimpl.serve.sse import merged, stream


class _Body(Choices, Namespaced):
    """What both kinds of completions take."""

    model: Text | None = None
    max_tokens: int | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_cached_tokens_details: bool = False

    def wish_with(self, output_tokens: int, dp_rank: int | None) -> Wish:
        """What is asked for but for probabilities; ``dp_rank`` is the header's."""
        wish = self.wish_of(output_tokens, self.seed, self)
        return replace(wish, dp_rank=self.rank_with(dp_rank), is_followed=self.stream)

    def streams_with(self, option: str) -> bool:
        """Is an option of streams on: include_usage or continuous_usage_stats?"""
        return bool((self.stream_options or {}).get(option))


class CompletionBody(_Body):
    """The body of ``/v1/completions``."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)

    def wish(self, dp_rank: int | None) -> Wish:
        """What is asked for; ``dp_rank`` is the header's."""
        return replace(
            self.wish_with(16 if self.max_tokens is None else self.max_tokens, dp_rank),
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
        )


class Message(BaseModel):
    """One turn of a conversation; of parts, those with text count."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Text | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template wants it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        return {"role": self.role, "content": content or ""}


class ChatBody(_Body):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)

    def wish(self, room: int, dp_rank: int | None) -> Wish:
        """What is asked for: up to ``room`` tokens unless it is said; ``dp_rank`` is the header's."""
        given = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return replace(
            self.wish_with(room if given is None else given, dp_rank),
            logprobs=self.logprobs,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else 0,
        )


def openai_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", responses=JSON)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @router.get("/v1/models/{name:path}", responses=JSON)
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return _model(service)

    @router.post("/v1/completions", responses=STREAMS)
    async def completions(
        body: CompletionBody, request: Request, dp_rank: DataParallelRank = None
    ) -> Any:
        service.check_name(body.model)
        prompts = service.prompts(body.prompt, "prompt")
        wish = body.wish(dp_rank)
        check_answers(len(prompts) * wish.n)
        asked = [each for prompt in prompts for each in service.generations(prompt, wish)]
        answer = _Completions(service, body)
        if body.stream:
            chunks = await begun(request, answer.chunks(asked))
            return StreamingResponse(stream(chunks), media_type="text/event-stream")
        echoes = [body.prompt if body.echo and isinstance(body.prompt, str) else ""] * len(asked)
        return answer.whole(await answer.done(request, asked), echoes)

    @router.post("/v1/chat/completions", responses=STREAMS)
    async def chat_completions(
        body: ChatBody, request: Request, dp_rank: DataParallelRank = None
    ) -> Any:
        service.check_name(body.model)
        if not body.messages:
            raise RequestError("messages is empty: send at least one", param="messages")
        messages = [message.plain() for message in body.messages]
        try:
            text = service.model.tokenizer.chat.render(messages, tools=body.tools)
        except ChatError as error:
            raise RequestError(str(error), param="messages") from None
        tokens = service.check_tokens(service.encode(text))
        room = service.context_tokens - len(tokens)
        asked = service.generations(tokens, body.wish(room, dp_rank))
        answer = _Chat(service, body)
        if body.stream:
            chunks = await begun(request, answer.chunks(asked))
            return StreamingResponse(stream(chunks), media_type="text/event-stream")
        return answer.whole(await answer.done(request, asked), [""] * len(asked))

    return router


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "sglang",  # what gateways look for (spec 13)
        "root": service.name,
        "parent": None,
        "max_model_len": service.context_tokens,
    }


class _Completions:
    """Answers in the shape of text completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, service: Service, body: _Body) -> None:
        self._service, self._body = service, body
        self._tokenizer = service.model.tokenizer
        own = body.rid if isinstance(body.rid, str) else None
        self._name = own or f"{self.prefix}-{uuid4().hex}"
        self._frame = {
            "id": self._name,
            "created": int(time.time()),
            "model": service.name,
        }

    def choice(self, index: int, text: str, finish: str | None, told: Told) -> dict[str, Any]:
        """A choice of a whole answer."""
        logprobs = completion_logprobs(self._tokenizer, told)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: str | None, told: Told) -> dict[str, Any]:
        """A choice of a chunk."""
        return self.choice(index, text, finish, told)

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Choices of the chunks that come before the answer."""
        del index
        return []

    def _holding(self, asked: list[Generation]) -> AbstractContextManager[None]:
        """While this lasts ``/abort_request`` finds the answers."""
        given = self._body.rid if isinstance(self._body.rid, list) else self._name
        named = dict(zip(names_of(given, len(asked)), asked, strict=True))
        return self._service.running.holding(named, given)

    async def done(self, request: Request, asked: list[Generation]) -> list[Whole]:
        """The answers, unless the client leaves before."""
        with self._holding(asked):
            return await unless_gone(request, all_whole(asked))

    def whole(self, done: list[Whole], echoes: list[str]) -> Response:
        """All choices in one answer."""
        choices = [
            self.choice(at, echo + one.text, one.reason, (one.tokens, one.logprobs))
            | {"matched_stop": one.finish.matched if one.finish else None}
            for at, (one, echo) in enumerate(zip(done, echoes, strict=True))
        ]
        rows = [one.row for one in done]
        usage = self._usage(rows, sum(len(one.tokens) for one in done))
        answer = self._frame | {"object": self.kind, "choices": choices, "usage": usage}
        return Response(json.dumps(answer | self._extension(rows)), media_type="application/json")

    async def chunks(self, asked: list[Generation]) -> AsyncGenerator[str, None]:
        """The choices as they come, then the usage if it is wanted."""
        rows: dict[int, Row] = {}
        completion, is_continuous = 0, self._body.streams_with("continuous_usage_stats")
        with self._holding(asked):
            async for at, piece in merged([each.pieces() for each in asked]):
                for opening in [] if rows else self._openings(len(asked)):
                    yield opening
                rows[at] = piece.row
                completion += len(piece.tokens)
                usage = self._usage(list(rows.values()), completion) if is_continuous else None
                if piece.text or piece.logprobs or piece.finish:
                    yield self._piece(at, piece, usage)
        in_order = [rows[at] for at in sorted(rows)]
        if extension := self._extension(in_order):
            yield self._chunk([], extension=extension)
        if self._body.streams_with("include_usage"):
            yield self._chunk([], self._usage(in_order, completion))

    def _openings(self, count: int) -> list[str]:
        return [self._chunk([choice]) for at in range(count) for choice in self.opening(at)]

    def _piece(self, at: int, piece: Piece, usage: dict[str, Any] | None) -> str:
        finish = piece.finish.reason if piece.finish else None
        told = piece.tokens, piece.logprobs
        return self._chunk([self.delta(at, piece.text, finish, told)], usage)

    def _extension(self, rows: list[Row]) -> dict[str, Any]:
        """Hits by tier where upstream has them, for clients that ask (spec 12.2); beside them, losses."""
        told: dict[str, Any] = {}
        if self._body.return_cached_tokens_details:
            details = cached_details(rows[0], self._service.storage.backend)
            told["cached_tokens_details"] = details
        if rows[0].account is not None:
            told["explanation"] = rows[0].account.told()
        return {"sglext": told} if told else {}

    def _usage(self, rows: list[Row], completion: int) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once, however many answers were asked for."""
        firsts = rows[:: self._body.n]
        prompt = sum(row.prompt_tokens for row in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(row.hit_tokens for row in firsts),
                "cached_tokens_details": cached_details(firsts[0], self._service.storage.backend),
            },
        }

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        extension: dict[str, Any] | None = None,
    ) -> str:
        frame = self._frame | {"object": self.chunk_kind, "choices": choices, "usage": usage}
        return json.dumps(frame | (extension or {}))


class _Chat(_Completions):
    """Answers in the shape of chat completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, text: str, finish: str | None, told: Told) -> dict[str, Any]:
        """A choice of a whole answer."""
        message = {"role": "assistant", "content": text, "tool_calls": None}
        logprobs = chat_logprobs(self._tokenizer, told)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: str | None, told: Told) -> dict[str, Any]:
        """A choice of a chunk."""
        logprobs = chat_logprobs(self._tokenizer, told)
        delta = {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The role comes first, with no text."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "finish_reason": None}]

"""What ZMQ clients send and get: one MessagePack map a message. README.md beside this file shows a client.

Names, defaults and limits are those of ``/generate``; what a map holds beyond them is tolerated, like there.
Must not know: sockets, the engine. Called by: zmq_ingress.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from refimpl.serve.errors import RequestError
from refimpl.serve.service import Wish

TOKEN_BYTES: Final = 4
_TYPE: Final = "type"
_I32: Final = 1 << 31


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are chosen, and where an answer ends."""

    max_new_tokens: int = 128
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_I32)] = -1
    sampling_seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    # Known over HTTP and not served here: said, so that nobody waits for what never comes.
    stop: Any = None
    n: int = 1


class Generate(msgspec.Struct, frozen=True, tag_field=_TYPE, tag="generate"):
    """A request. ``input_ids``: a list, or little-endian 32-bit words as bytes."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    input_ids: list[int] | bytes
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = True
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-_I32, lt=_I32)] | None = None
    routed_dp_rank: int | None = None
    explain: bool = False
    api_key: str | None = None

    def tokens(self) -> Sequence[int]:
        """The prompt. Raises RequestError for bytes that are no words."""
        given = self.input_ids
        if isinstance(given, list):
            return given
        if len(given) % TOKEN_BYTES:
            raise RequestError(
                f"input_ids of {len(given)} bytes: give {TOKEN_BYTES} bytes a token, little-endian"
            )
        tokens = array("I", given)
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens

    def wish(self) -> Wish:
        """What is asked for, in the words of the service. Raises RequestError."""
        params = self.sampling_params
        if params.stop or params.n != 1:
            raise RequestError(
                "over ZMQ there are tokens alone and one answer a request:"
                " use stop_token_ids instead of stop, and send n requests"
            )
        return Wish(
            output_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.sampling_seed,
            ignores_eos=params.ignore_eos,
            stop_ids=tuple(params.stop_token_ids or ()),
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
            dp_rank=self.routed_dp_rank,
            explains=self.explain,
            is_followed=self.stream,
        )


class AbortRequest(msgspec.Struct, frozen=True, tag_field=_TYPE, tag="abort"):
    """Nobody waits for ``id`` any more. One that is over, or never was, is aborted in vain."""

    id: str
    api_key: str | None = None


class Ping(msgspec.Struct, frozen=True, tag_field=_TYPE, tag="ping"):
    """Is anybody there?"""


Received: TypeAlias = Generate | AbortRequest | Ping


class NewTokens(msgspec.Struct, frozen=True, tag_field=_TYPE, tag="tokens"):
    """More of a stream: ``output_ids`` are the new ones alone."""

    id: str
    output_ids: list[int]
    cached_tokens: int


class End(msgspec.Struct, frozen=True, tag_field=_TYPE, tag="end", omit_defaults=True):
    """The end of an answer, with all of its tokens unless they were streamed. Times in seconds."""

    id: str
    output_ids: list[int]
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: dict[str, Any] | None
    e2e_latency: float
    first_token_latency: float
    dp_rank: int | None = None  # where there are several
    explanation: dict[str, Any] | None = None  # where it was asked for


class Error(msgspec.Struct, frozen=True, tag_field=_TYPE, tag="error", omit_defaults=True):
    """A request that is not served, and why; without an ``id`` it is about no open request."""

    id: str | None
    code: int
    message: str
    retry_after: int | None = None  # seconds; there when the same request may be served later


class Pong(msgspec.Struct, frozen=True, tag_field=_TYPE, tag="pong"):
    """Somebody is."""


Sent: TypeAlias = NewTokens | End | Error | Pong


class _Named(msgspec.Struct):
    id: str


def named(frame: bytes) -> str | None:
    """The ``id`` of a message that is wrong otherwise, where it has one."""
    try:
        return msgspec.msgpack.decode(frame, type=_Named).id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None

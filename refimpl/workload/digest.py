"""A name for what a workload asks: equal digests, equal requests.

Must not know: files, formats, families. Called by: run and golden, to say what a figure was
measured on.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TypeAlias

import msgspec

from refimpl.keys import Prompt, TokenPrompt
from refimpl.workload.request import Workload

_Packed: TypeAlias = tuple[int, bytes]
_encode = msgspec.msgpack.Encoder().encode


def workload_digest(workload: Workload) -> str:
    """SHA-256, hex, over the requests and limits of ``workload``, its name excepted.

    Each request is one MessagePack array, so no two workloads encode alike. Names stay out: a
    trace that moved is the same trace.
    """
    digest = hashlib.sha256(_encode((workload.parallel_max, workload.block_size)))
    before: tuple[int, ...] = ()
    for request in workload.requests:
        # A barrier makes a whole round wait for the same requests: they are named once.
        after = None if request.after == before else request.after
        before = request.after
        fields = (
            request.rid,
            request.output_tokens,
            request.arrival_ns,
            after,
            request.think_ns,
            request.session,
            request.turn,
            request.extra_key,
            request.cache_salt,
            request.lora_id,
            request.priority,
        )
        digest.update(_encode((fields, _prompt_fields(request.prompt))))
    return digest.hexdigest()


def _prompt_fields(prompt: Prompt) -> tuple[object, ...]:
    match prompt:
        case TokenPrompt(tokens, script):
            return ("tokens", _packed(tokens), None if script is None else _packed(script))
        case _:
            return ("blocks", prompt.length, prompt.block_size, prompt.block_ids)


def _packed(tokens: array[int]) -> _Packed:
    """Width in bytes and the tokens in memory order, which is little-endian (as in page keys)."""
    return tokens.itemsize, tokens.tobytes()

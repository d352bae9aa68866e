"""Log probabilities in OpenAI's two shapes.

Must not know: the engine, routes. Called by: openai.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from refimpl.model.choice import Logprob
from refimpl.model.tokenizer import Tokenizer, decode

Told: TypeAlias = tuple[list[int], list[Logprob]]  # tokens, and what is known of each


def completion_logprobs(tokenizer: Tokenizer, told: Told) -> dict[str, Any] | None:
    """Of a text completion: lists side by side; None where nobody asked."""
    tokens, logprobs = told
    if not logprobs:
        return None
    texts = [decode(tokenizer, [token]) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [logprob.value for logprob in logprobs],
        "top_logprobs": [
            {decode(tokenizer, [token]): value for token, value in logprob.top}
            for logprob in logprobs
        ],
        "text_offset": [sum(map(len, texts[:at])) for at in range(len(texts))],
    }


def chat_logprobs(tokenizer: Tokenizer, told: Told) -> dict[str, Any] | None:
    """Of a chat completion: one object a token; None where nobody asked."""
    tokens, logprobs = told
    if not logprobs:
        return None
    return {
        "content": [
            _entry(tokenizer, token, logprob.value)
            | {"top_logprobs": [_entry(tokenizer, *each) for each in logprob.top]}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
    }


def _entry(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": decode(tokenizer, [token]), "logprob": value, "bytes": list(raw)}

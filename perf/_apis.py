"""How each HTTP API is asked, and what the events of its streams mean.

Must not know: sockets, Locust. Called by: _http_client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from perf._answer import Answer
from perf._questions import Question

Body = dict[str, Any]


class Api(ABC):
    """One API. ``extra`` is merged into every body: what the user gives wins, null removes."""

    path: ClassVar[str]

    def __init__(self, model: str, extra: Mapping[str, Any]) -> None:
        self._model, self._extra = model, extra

    def body(self, question: Question) -> Body:
        """What to post."""
        spec = question.spec
        body = self._asked(question) | {"stream": True}
        if spec.extra_key is not None:
            body["extra_key"] = spec.extra_key
        if spec.cache_salt is not None:
            body["cache_salt"] = spec.cache_salt
        if spec.priority:
            body["priority"] = spec.priority
        return self._finished(merged(body, self._extra))

    @abstractmethod
    def hear(self, event: Mapping[str, Any], answer: Answer, now_ns: int) -> None:
        """Note one event of a stream. Raises KeyError, TypeError or the like for one of no known shape."""

    @abstractmethod
    def _asked(self, question: Question) -> Body:
        """Prompt and limits."""

    def _finished(self, body: Body) -> Body:
        """``body`` with what this program can't do without."""
        return body


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> Body:
    """``extra`` over ``body``: objects are merged, anything else replaces, None removes."""
    both = dict(body)
    for key, value in extra.items():
        mine = both.get(key)
        if value is None:
            both.pop(key, None)
        elif isinstance(value, dict) and isinstance(mine, dict):
            both[key] = merged(mine, value)
        else:
            both[key] = value
    return both


class _OpenAI(Api):
    """What chat and completions have in common."""

    def _limits(self, question: Question) -> Body:
        # The last two are no fields of OpenAI's own. Servers that cache prefixes know ignore_eos, and with
        # it answers are as long as the workload says; SGLang tells tiers to those who ask.
        return {
            "model": self._model,
            "max_tokens": question.spec.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_cached_tokens_details": True,
        }

    def _finished(self, body: Body) -> Body:
        options = body.get("stream_options") or {}
        return body | {"stream_options": options | {"include_usage": True}}

    def hear(self, event: Mapping[str, Any], answer: Answer, now_ns: int) -> None:
        """Text, the reason of the end, or the usage."""
        for choice in event["choices"]:
            text = self._text(choice)
            if text:
                answer.tokens_came(now_ns)
                answer.text += text
            answer.finish = choice.get("finish_reason") or answer.finish
        usage = event.get("usage")
        if usage:
            _note_usage(usage, answer)
        tiers = (event.get("sglext") or {}).get("cached_tokens_details")
        if tiers:
            answer.tiers(tiers)

    @abstractmethod
    def _text(self, choice: Mapping[str, Any]) -> str:
        """The text that a choice adds."""


class OpenAIChat(_OpenAI):
    """``/v1/chat/completions``: messages of text."""

    path = "/v1/chat/completions"

    def _asked(self, question: Question) -> Body:
        return self._limits(question) | {"messages": question.messages}

    def _text(self, choice: Mapping[str, Any]) -> str:
        delta = choice["delta"]
        return (delta.get("content") or "") + (delta.get("reasoning_content") or "")


class OpenAICompletions(_OpenAI):
    """``/v1/completions``: a prompt of token ids."""

    path = "/v1/completions"

    def _asked(self, question: Question) -> Body:
        return self._limits(question) | {"prompt": question.tokens.tolist()}

    def _text(self, choice: Mapping[str, Any]) -> str:
        return choice.get("text") or ""


class SGLangGenerate(Api):
    """``/generate``: token ids in, cumulative token ids out."""

    path = "/generate"

    def _asked(self, question: Question) -> Body:
        return {
            "input_ids": question.tokens.tolist(),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": question.spec.output_tokens,
                "ignore_eos": True,
            },
        }

    def hear(self, event: Mapping[str, Any], answer: Answer, now_ns: int) -> None:
        """All that was produced so far, and what is known of the request."""
        meta = event["meta_info"]
        produced = meta["completion_tokens"]
        if produced > (answer.output_tokens or 0):
            answer.tokens_came(now_ns)
        answer.output_tokens = produced
        answer.prompt_tokens = meta["prompt_tokens"]
        answer.cached(meta.get("cached_tokens"), meta.get("cached_tokens_details"))
        answer.text = event.get("text") or ""
        answer.output_ids = event.get("output_ids") or []
        if meta.get("finish_reason"):
            answer.finish = meta["finish_reason"]["type"]


APIS: dict[str, type[Api]] = {
    "openai-chat": OpenAIChat,
    "openai": OpenAICompletions,
    "sglang": SGLangGenerate,
}


def _note_usage(usage: Mapping[str, Any], answer: Answer) -> None:
    answer.prompt_tokens = usage.get("prompt_tokens")
    answer.output_tokens = usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details") or {}
    answer.cached(details.get("cached_tokens"), details.get("cached_tokens_details"))

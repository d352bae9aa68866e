"""Messages of a conversation to the text a model was trained on, by the model's own template.

Templates come with checkpoints and are run in a sandbox. Must not know: tokens, models.
Called by: tokenizer, and whoever speaks text to a client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from refimpl.config import ConfigError


class ChatError(ConfigError):
    """Messages that can't be rendered. The message is one line."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template; empty when the model has none. ``names`` are the special tokens it may use."""

    source: str
    names: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as one text, up to where the assistant begins to answer.

        A message has ``role`` and ``content``, both text. Raises ChatError when there is no template,
        or when it refuses the messages.
        """
        if not self.source:
            raise ChatError("this model has no chat template: send text instead of messages")
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise ChatError(
                "jinja2 is not installed: pip install 'hicache-refimpl[torch]'"
            ) from None
        # The two trims are what templates are written for.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
        environment.filters["tojson"] = _tojson
        try:
            text = environment.from_string(self.source).render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self.names,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatError(f"the chat template refuses the messages: {error}") from error
        return str(text)


def _refuse(message: str) -> NoReturn:
    raise ChatError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON; the filter that comes with Jinja escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)

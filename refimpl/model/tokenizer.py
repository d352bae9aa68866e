"""Text to tokens and back: what every tokenizer can do, and bytes for the seeded models.

A token is known by the bytes it stands for, so that a stream of tokens becomes text without ever
showing half a character. Must not know: models, caches, requests. Called by: bpe, catalog, and
whoever speaks text to a client.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Final, Protocol

from refimpl.model.chat import ChatTemplate

END_OF_TEXT: Final = 256  # of the byte tokenizer, after the 256 bytes
START_OF_TURN: Final = 257
BYTE_VOCAB: Final = 258
_BYTE_TEMPLATE: Final = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


class Tokenizer(Protocol):
    """What all tokenizers can do."""

    @property
    def chat(self) -> ChatTemplate:
        """How messages become text."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``; special tokens that it spells out are recognised, none are added.

        Half a surrogate pair, which JSON can smuggle in, becomes a question mark.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """What ``token`` adds to a text: nothing for a special or unknown token."""
        ...


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """The text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


class Detokenizer:
    """Text of a stream: what ``push`` returned, joined, and then ``flush``, is ``decode`` of it all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that ``token`` completes; may be empty, never ends within a character."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """What is left at the end of the stream: U+FFFD for a character that was cut off."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token a byte, and two specials: for models that never saw a text."""

    def __init__(self) -> None:
        self.chat = ChatTemplate(_BYTE_TEMPLATE, {})
        self.stop_ids = frozenset({END_OF_TEXT})

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes; ``<|turn|>`` and ``<|end|>`` are one token each."""
        tokens: list[int] = []
        for number, turn in enumerate(text.split("<|turn|>")):
            tokens += [START_OF_TURN] if number else []
            for part, piece in enumerate(turn.split("<|end|>")):
                tokens += [END_OF_TEXT] if part else []
                tokens += piece.encode("utf-8", "replace")
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """The byte; nothing for the specials."""
        return bytes([token]) if 0 <= token < END_OF_TEXT else b""

"""Byte-level byte-pair encodings, run by the ``tokenizers`` library.

The one in a Hugging Face directory is read here, the one in a GGUF file by bpe_gguf.
Must not know: models, caches, requests. Called by: catalog.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from refimpl.model.chat import ChatTemplate
from refimpl.model.checkpoint import NEEDS_EXTRA, CheckpointError, read_json


def _bytes_by_letter() -> dict[str, int]:
    """The letters that byte-level vocabularies spell bytes with.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, take the letters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES: Final = _bytes_by_letter()


@dataclass(frozen=True)
class BpeTokenizer:
    """A byte-level encoding: the library's Tokenizer, and the bytes of each token that is text."""

    library: Any
    pieces: Mapping[int, bytes]
    chat: ChatTemplate
    stop_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``; special tokens are recognised where it spells them out."""
        clean = text.encode("utf-8", "replace").decode()  # the library refuses lone surrogates
        return list(self.library.encode(clean, add_special_tokens=False).ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``; nothing for a special or unknown one."""
        return self.pieces.get(token, b"")


def piece(spelling: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary is spelled for.

    Raises KeyError when a letter stands for no byte.
    """
    return bytes(_BYTES[letter] for letter in spelling)


def load_tokenizer(folder: Path) -> BpeTokenizer:
    """The tokenizer.json of a Hugging Face directory, with the chat template that lies beside it.

    Raises CheckpointError when there is none, when it is damaged, or not byte-level.
    """
    path = folder / "tokenizer.json"
    raw = read_json(path)
    try:
        from tokenizers import Tokenizer as Library
    except ModuleNotFoundError:
        raise CheckpointError(f"{path}: tokenizers {NEEDS_EXTRA}") from None
    if not _is_byte_level(raw.get("decoder") or {}):
        raise CheckpointError(f"{path}: only byte-level encodings are supported")
    added = {each["id"]: each for each in raw.get("added_tokens", [])}
    try:
        library = Library.from_str(json.dumps(raw))
        vocab = library.get_vocab(with_added_tokens=False)
        pieces = {token: piece(text) for text, token in vocab.items() if token not in added}
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path}: no usable tokenizer: {error}") from error
    for token, each in added.items():
        pieces[token] = b"" if each.get("special") else str(each["content"]).encode()
    return BpeTokenizer(library, pieces, _chat_template(folder), _stop_ids(folder))


def _is_byte_level(decoder: Mapping[str, Any]) -> bool:
    parts: Sequence[Mapping[str, Any]] = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _stop_ids(folder: Path) -> frozenset[int]:
    """Of generation_config.json, which chat models correct their config.json with, else of the latter."""
    for name in ("generation_config.json", "config.json"):
        raw = read_json(folder / name) if (folder / name).exists() else {}
        stop = raw.get("eos_token_id")
        if stop is not None:
            return frozenset(stop if isinstance(stop, list) else [stop])
    return frozenset()


def _chat_template(folder: Path) -> ChatTemplate:
    """From chat_template.jinja, else from tokenizer_config.json; without either, no chat."""
    beside, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    raw = read_json(settings) if settings.exists() else {}
    source = beside.read_text(encoding="utf-8") if beside.exists() else raw.get("chat_template")
    names = {name: _spelling(raw.get(name)) for name in ("bos_token", "eos_token")}
    return ChatTemplate(source if isinstance(source, str) else "", names)


def _spelling(token: Any) -> str:
    """A special token stands as a string, or as an object with its content."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")

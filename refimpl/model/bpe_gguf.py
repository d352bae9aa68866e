"""The byte-level encoding that a GGUF file carries in its metadata.

Must not know: tensors, models, caches. Called by: catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from refimpl.model.bpe import BpeTokenizer, piece
from refimpl.model.chat import ChatTemplate
from refimpl.model.checkpoint import NEEDS_EXTRA, CheckpointError
from refimpl.model.gguf_file import Metadata

# Token types of the format.
_CONTROL: Final = 3  # no text
_USER_DEFINED: Final = 4  # text that is one token wherever it stands

# How text is cut into words before pairs are merged, by ``tokenizer.ggml.pre``. A pattern matches one
# word; the empty one stands for the library's own, with which byte-level encodings began.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: Final = {
    "default": "",
    "gpt-2": "",
    "smollm": "",
    "llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"\p{N}" + _REST,
}
_DIGITS_ALONE: Final = frozenset({"smollm"})
_WHOLE_WORDS_FIRST: Final = frozenset({"llama-bpe"})  # a word of the vocabulary is not merged anew

# Tokens that end an answer, beside those the metadata names: files often name one of two.
_ENDS: Final = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>"})


def tokenizer_from_gguf(metadata: Metadata, path: Path) -> BpeTokenizer:
    """Build the tokenizer of a GGUF file. ``path`` is for messages.

    Raises CheckpointError when the file has none, or one of another kind than byte-level BPE.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(f"{path}: tokenizer {kind!r} is not supported, only 'gpt2' is")
    before = metadata.get("tokenizer.ggml.pre", "default")
    if before not in _PATTERNS:
        known = ", ".join(_PATTERNS)
        raise CheckpointError(f"{path}: tokenizer.ggml.pre {before!r} is none of {known}")
    try:
        spellings: list[str] = metadata["tokenizer.ggml.tokens"]
        merges: list[str] = metadata["tokenizer.ggml.merges"]
    except KeyError as error:
        raise CheckpointError(f"{path}: {error.args[0]} is missing") from error
    types = metadata.get("tokenizer.ggml.token_type", [])
    control = {spellings[token] for token, kind in enumerate(types) if kind == _CONTROL}
    literal = {spellings[token] for token, kind in enumerate(types) if kind == _USER_DEFINED}
    try:
        pieces = {
            token: text.encode() if text in literal else piece(text)
            for token, text in enumerate(spellings)
            if text not in control
        }
        library = _library(before, spellings, merges, sorted(control), sorted(literal))
    except ModuleNotFoundError:
        raise CheckpointError(f"{path}: tokenizers {NEEDS_EXTRA}") from None
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path}: no usable tokenizer: {error}") from error
    stop_ids = _stop_ids(metadata, spellings, control)
    return BpeTokenizer(library, pieces, _chat_template(metadata, spellings), stop_ids)


def _library(
    before: str,
    spellings: Sequence[str],
    merges: Sequence[str],
    control: list[str],
    literal: list[str],
) -> Any:
    """The library's Tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    library = Tokenizer(
        models.BPE(
            vocab={text: token for token, text in enumerate(spellings)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=before in _WHOLE_WORDS_FIRST,
        )
    )
    pattern = _PATTERNS[before]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] * (before in _DIGITS_ALONE)
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    library.add_tokens([AddedToken(text, normalized=False) for text in literal])
    return library


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ", 1)
    return left, right


def _stop_ids(metadata: Metadata, spellings: list[str], control: set[str]) -> frozenset[int]:
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    ends = {spellings.index(text) for text in sorted(_ENDS & control)}
    return frozenset(ends | {int(token) for token in named if token is not None})


def _chat_template(metadata: Metadata, spellings: Sequence[str]) -> ChatTemplate:
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_id") for name in ("bos_token", "eos_token")}
    names = {name: spellings[token] for name, token in ids.items() if token is not None}
    return ChatTemplate(metadata.get("tokenizer.chat_template", ""), names)

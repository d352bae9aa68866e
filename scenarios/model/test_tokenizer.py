"""Text to tokens and back, in one piece and as a stream."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install -e '.[torch]'")
pytest.importorskip("tokenizers", reason="no tokenizers: pip install -e '.[torch]'")
pytest.importorskip("jinja2", reason="no jinja2: pip install -e '.[torch]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from refimpl.model.bpe import BpeTokenizer, load_tokenizer
from refimpl.model.bpe_gguf import tokenizer_from_gguf
from refimpl.model.chat import ChatError, ChatTemplate
from refimpl.model.checkpoint import CheckpointError
from refimpl.model.tokenizer import ByteTokenizer, Detokenizer, Tokenizer, decode

TEXT = "The quick brown fox, the lazy dog: it's 3.14, été, 你好 🙂.\n\tdef f(x):\n        return x"

SPECIALS = re.compile(r"<\|(end|turn)\|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as it comes with a model: trained on a line, with two specials."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator([TEXT], trainer)
    library.add_tokens(["naïve"])  # a word of the vocabulary that is spelled in letters, not bytes
    path = tmp_path_factory.mktemp("tokenizer")
    library.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text('{"eos_token_id": 0}')
    settings_ = {"eos_token": {"content": "<|end|>"}, "chat_template": "{{ eos_token }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings_))
    return path


def from_gguf(folder: Path, **changes: object) -> BpeTokenizer:
    """The same tokenizer by way of GGUF metadata."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocab = dict(raw["model"]["vocab"]) | {
        each["content"]: each["id"] for each in raw["added_tokens"]
    }
    special = {each["id"] for each in raw["added_tokens"] if each["special"]}
    added = {each["id"] for each in raw["added_tokens"]} - special
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [3 if i in special else 4 if i in added else 1 for i in range(len(tokens))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ eos_token }}",
    }
    kept = {name: value for name, value in (metadata | changes).items() if value is not None}
    return tokenizer_from_gguf(kept, Path("a.gguf"))


@pytest.fixture(scope="module")
def both(folder: Path) -> list[BpeTokenizer]:
    return [load_tokenizer(folder), from_gguf(folder)]


# ---- tokens and text ----------------------------------------------------------------------------


@given(text=st.text() | st.text(alphabet="the quick <|end|>naïve 12\n"))
def test_text_survives_both_ways(both: list[BpeTokenizer], text: str) -> None:
    left, right = (tokenizer.encode(text) for tokenizer in both)
    assert left == right
    assert decode(both[0], left) == SPECIALS.sub("", text)


@given(text=st.text())
def test_bytes_are_tokens_of_their_own(text: str) -> None:
    tokenizer, text = ByteTokenizer(), re.sub(r"<\|", "", text)
    assert decode(tokenizer, tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text), default=0) < 256


def test_specials_are_one_token_and_no_text(both: list[BpeTokenizer]) -> None:
    for tokenizer in both:
        assert tokenizer.encode("<|turn|>a<|end|>")[::2] == [1, 0]
        assert decode(tokenizer, [1, 0]) == ""
        assert tokenizer.stop_ids == {0}
    assert ByteTokenizer().encode("<|turn|>a<|end|>") == [257, 97, 256]


def test_half_a_surrogate_pair_is_no_reason_to_fail(both: list[BpeTokenizer]) -> None:
    for tokenizer in (*both, ByteTokenizer()):
        assert decode(tokenizer, tokenizer.encode("a\ud83db")) == "a?b"


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*map(stream.push, tokens), stream.flush()]


@settings(max_examples=200)
@given(tokens=st.lists(st.integers(0, 400)))
def test_a_stream_joined_is_the_text_in_one_piece(
    both: list[BpeTokenizer], tokens: list[int]
) -> None:
    for tokenizer in (*both, ByteTokenizer()):
        assert "".join(streamed(tokenizer, tokens)) == decode(tokenizer, tokens)


@given(text=st.text())
def test_a_stream_of_a_text_never_shows_half_a_character(
    both: list[BpeTokenizer], text: str
) -> None:
    clean = text.replace("\ufffd", "")
    for tokenizer in (both[0], ByteTokenizer()):
        assert "\ufffd" not in "".join(streamed(tokenizer, tokenizer.encode(clean)))


def test_the_text_is_what_the_library_makes_of_it(both: list[BpeTokenizer]) -> None:
    tokens = both[0].encode(TEXT)
    assert len(tokens) < len(TEXT.encode()) / 2  # merges took place
    assert both[0].library.decode(tokens) == decode(both[0], tokens) == TEXT


def test_smollm_takes_digits_one_by_one(folder: Path) -> None:
    tokenizer = from_gguf(folder, **{"tokenizer.ggml.pre": "smollm"})
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode("a 314")]
    assert pieces == [b"a", b" ", b"3", b"1", b"4"]


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("llama-bpe", ["It", "'s", " ", "123", "45", " naïve", "?!\n\n", "  ", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " naïve", "?!\n\n", "  ", " x"]),
    ],
)
def test_words_are_cut_as_the_family_cuts_them(before: str, words: list[str], folder: Path) -> None:
    tokenizer = from_gguf(folder, **{"tokenizer.ggml.pre": before})
    cut = tokenizer.library.pre_tokenizer.pre_tokenize_str("It's 12345 naïve?!\n\n   x")
    text = "It's 12345 naïve?!\n\n   x"
    assert [text[start:end] for _, (start, end) in cut] == words


# ---- chat ---------------------------------------------------------------------------------------


def test_a_template_sees_messages_and_special_tokens(both: list[BpeTokenizer]) -> None:
    assert [tokenizer.chat.render([]) for tokenizer in both] == ["<|end|>", "<|end|>"]
    text = ByteTokenizer().chat.render([{"role": "user", "content": "hi"}])
    assert text == "<|turn|>user: hi\n<|turn|>assistant: "


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].__class__.__mro__ }}", "refuses the messages"),
        ("{% if %}", "refuses the messages"),
    ],
)
def test_a_template_that_cannot_be_rendered_says_why(source: str, said: str) -> None:
    with pytest.raises(ChatError, match=said):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


# ---- what can't be used -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama' is not supported"),
        ({"tokenizer.ggml.pre": "other"}, "'other' is none of"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["no such"]}, "no usable tokenizer"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_used_is_named(
    changes: dict[str, object], said: str, folder: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        from_gguf(folder, **changes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("{", "can't be read"),
        ('{"decoder": {"type": "Metaspace"}}', "only byte-level"),
        ('{"decoder": {"type": "ByteLevel"}}', "no usable tokenizer"),
    ],
)
def test_a_tokenizer_file_that_cannot_be_used_is_named(
    content: str | None, said: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=said) as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)

"""What is asked: a request of a workload as tokens and as messages of a chat.

A turn repeats what was really answered where that is known, so that a server finds the pages that
it computed, as the simulator does.
Must not know: servers, APIs, times. Called by: _player, _apis, _zmq_client.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from perf._answer import Answer
from refimpl.keys import BlockPrompt, TokenPrompt
from refimpl.workload.draws import Draws, Purpose
from refimpl.workload.request import RequestSpec

# Words that common tokenizers keep whole, so that a token of the workload becomes about one of the
# server's. Two prompts that differ in their tokens differ in their words almost at once.
# fmt: off
_WORDS: Final = (
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are",
    "as", "with", "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by",
    "word", "but", "not", "what", "all", "were", "we", "when", "your", "can", "said", "there",
    "use", "an", "each", "which", "she", "do", "how", "their", "if", "will", "up", "other",
    "about", "out", "many", "then", "them", "these", "so", "some", "her", "would", "make", "like",
    "time",
)
# fmt: on
_BLOCKS_KEPT: Final = 4096  # of a trace; 512 tokens each are 8 MB

Message = dict[str, str]


@dataclass(slots=True)
class _Piece:
    """What one side said, as text or as tokens that become text when a chat asks for it."""

    role: str
    tokens: array[int]
    text: str = ""

    def message(self) -> Message:
        """As a chat wants it."""
        self.text = self.text or words(self.tokens)
        return {"role": self.role, "content": self.text}


@dataclass(frozen=True, slots=True)
class Question:
    """One request, ready to be sent by any API."""

    spec: RequestSpec
    tokens: array[int]
    pieces: list[_Piece]

    @property
    def messages(self) -> list[Message]:
        """The request as a chat."""
        return [piece.message() for piece in self.pieces]


@dataclass(slots=True)
class _Said:
    """A turn that was asked, and its answer when that has come."""

    question: Question
    answer: Answer | None = None


@dataclass(slots=True)
class Dialogue:
    """The questions of one chain, each built on what was said before."""

    seed: int
    vocabulary: int
    _said: dict[int, _Said] = field(default_factory=dict)  # by rid

    def question(self, spec: RequestSpec) -> Question:
        """What to send for ``spec``."""
        before = self._before(spec)
        if before is None:
            tokens = self._tokens(spec)
            question = Question(spec, tokens, [_Piece("user", tokens)])
        else:
            question = _continued(before, spec)
        self._said[spec.rid] = _Said(question)
        return question

    def answered(self, spec: RequestSpec, answer: Answer) -> None:
        """What came back for ``spec``; failed answers are not repeated."""
        if not answer.error:
            self._said[spec.rid].answer = answer

    def _before(self, spec: RequestSpec) -> _Said | None:
        """The turn whose prompt and answer ``spec`` repeats, if it repeats one."""
        for rid in spec.after:
            said = self._said.get(rid)
            if said is not None and said.question.spec.session == spec.session:
                return said if _repeats(spec, said.question.spec) else None
        return None

    def _tokens(self, spec: RequestSpec) -> array[int]:
        if isinstance(spec.prompt, TokenPrompt):
            return spec.prompt.tokens
        return _block_tokens(spec.prompt, self.seed, self.vocabulary)


def words(tokens: Sequence[int]) -> str:
    """A word for each token."""
    return " ".join([_WORDS[token % len(_WORDS)] for token in tokens])


def _repeats(spec: RequestSpec, before: RequestSpec) -> bool:
    prompt, earlier = spec.prompt, before.prompt
    if not isinstance(prompt, TokenPrompt) or not isinstance(earlier, TokenPrompt):
        return False
    said = earlier.tokens + (earlier.script or array("I"))
    return prompt.tokens[: len(said)] == said


def _continued(before: _Said, spec: RequestSpec) -> Question:
    """``before``, its answer, and what ``spec`` adds to its script."""
    earlier = before.question.spec.prompt
    assert isinstance(spec.prompt, TokenPrompt)
    assert isinstance(earlier, TokenPrompt)
    script = earlier.script or array("I")
    added = spec.prompt.tokens[len(earlier.tokens) + len(script) :]
    answer = before.answer
    reply = array("I", answer.output_ids) if answer and answer.output_ids else script
    text = answer.text if answer else ""
    pieces = [*before.question.pieces, _Piece("assistant", script, text), _Piece("user", added)]
    return Question(spec, before.question.tokens + reply + added, pieces)


def _block_tokens(prompt: BlockPrompt, seed: int, vocabulary: int) -> array[int]:
    """Equal ids of blocks become equal tokens, so that prompts share what the trace says they do."""
    tokens = array("I")
    for block in prompt.block_ids:
        if len(tokens) >= prompt.length:
            break  # ids beyond the prompt name its output
        tokens += _block(seed, vocabulary, prompt.block_size, block)
    return tokens[: prompt.length]


@lru_cache(maxsize=_BLOCKS_KEPT)
def _block(seed: int, vocabulary: int, size: int, block: int) -> array[int]:
    return Draws(seed, vocabulary).tokens(Purpose.DOCUMENT, size, block)

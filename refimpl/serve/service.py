"""What all routes share: a model, the ranks that serve it, limits, and how a request becomes tokens.

Must not know: the shapes of any API. Called by: app, routes.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from refimpl.config import ConfigError, EngineConfig, PrefetchConfig
from refimpl.keys import TokenPrompt
from refimpl.model.choice import Sampling
from refimpl.model.tokenizer import Tokenizer
from refimpl.run.record import Row
from refimpl.serve.bridge import Asked, Bridge
from refimpl.serve.dispatch import Dispatch
from refimpl.serve.errors import RequestError
from refimpl.serve.fan_out import FanOut
from refimpl.serve.generation import Ending, Generation
from refimpl.serve.limits import well_formed
from refimpl.serve.metrics import Metrics
from refimpl.serve.presence import Running
from refimpl.workload.request import RequestSpec

Given: TypeAlias = str | list[str] | list[int] | list[list[int]]  # a prompt, or several

TOKEN_LENGTH_MAX: Final = 256  # characters; longer than the longest token of any vocabulary in use


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client wants of its answers, whatever API it speaks."""

    output_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    n: int = 1
    ignores_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    ending: Ending = field(default_factory=Ending)
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    dp_rank: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    explains: bool = False
    is_followed: bool = False  # tokens are wanted one by one


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: a model, or the shape of one."""

    kind: str  # the model's own name
    tokenizer: Tokenizer
    vocab: int
    positions_max: int
    has_logprobs: bool = True  # what only a model knows
    is_mla: bool = False


@dataclass(slots=True)
class Storage:
    """What the admin API says of L3: a mirror of the last change that succeeded (spec 7)."""

    backend: str | None = None
    extra_config: str | None = None
    prefetch_policy: str | None = None
    write_policy: str | None = None


@dataclass(slots=True)
class Service:
    """One served model. ``settings`` are the resolved flags, for ``/server_info``."""

    model: Served
    ranks: Dispatch
    changes: FanOut
    engine: EngineConfig
    name: str
    settings: dict[str, Any]
    prefetch: PrefetchConfig
    page_bytes: int  # of all tensor-parallel ranks together
    storage: Storage = field(default_factory=Storage)
    running: Running = field(default_factory=Running)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def bridge(self) -> Bridge:
        """That of a server with one data-parallel rank."""
        (only,) = self.ranks.ranks
        return only.bridge

    @property
    def metrics(self) -> Metrics:
        """Those of a server with one data-parallel rank."""
        (only,) = self.ranks.ranks
        return only.metrics

    def dp_rank_of(self, rid: int) -> int | None:
        """Which of several ranks answers ``rid``; None where there is one alone."""
        return self.ranks.rank_of(rid) if len(self.ranks) > 1 else None

    def check_dp_rank(self, rank: int | None) -> None:
        """Raise RequestError for a data-parallel rank that is not there; None is any."""
        last = len(self.ranks) - 1
        if rank is not None and not 0 <= rank <= last:
            known = "rank 0 alone" if not last else f"ranks 0 to {last}"
            raise RequestError(f"dp_rank {rank}: this server has {known}", param="dp_rank")

    @property
    def context_tokens(self) -> int:
        """The longest sequence that can be served: of the model, and of L1."""
        pages = self.engine.cache.l1_pages
        assert pages is not None
        return min(self.model.positions_max, pages * self.engine.cache.page_size)

    def check_name(self, name: str | None) -> None:
        """Raise RequestError, 404, for a model that is not served here."""
        if name not in (None, "", "default", self.name):
            known = f"the model {name!r} does not exist; this server has {self.name!r}"
            raise RequestError(known, 404, "model")

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Raises RequestError, without trying, for what can't fit or can't be."""
        longest = self.context_tokens * TOKEN_LENGTH_MAX
        if len(text) > longest:
            raise RequestError(
                f"the prompt of {len(text)} characters is longer than this server's context of"
                f" {self.context_tokens} tokens; shorten it"
            )
        try:
            return self.model.tokenizer.encode(well_formed(text))
        except ValueError as error:
            raise RequestError(f"the prompt: {error}") from None

    def check_vocabulary(self, tokens: Sequence[int]) -> None:
        """Raise RequestError for a token that the model does not have."""
        if tokens and (min(tokens) < 0 or max(tokens) >= self.model.vocab):
            last = self.model.vocab - 1
            raise RequestError(f"a token lies outside the vocabulary: from 0 to {last}")

    def check_tokens(self, tokens: Sequence[int]) -> array[int]:
        """The tokens of a prompt. Raises RequestError where they are none."""
        if not tokens:
            raise RequestError("the prompt is empty: give it at least one token")
        self.check_vocabulary(tokens)
        if len(tokens) >= self.context_tokens:
            raise RequestError(
                f"the prompt of {len(tokens)} tokens leaves no room for an answer: this server's"
                f" context holds {self.context_tokens}; shorten the prompt or raise --max-total-tokens"
            )
        return array("I", tokens)

    def prompts(self, given: Given, param: str) -> list[array[int]]:
        """The tokens of one prompt or of several, given as text or tokens. Raises RequestError."""
        if not given:
            raise RequestError("the prompt is empty: give it at least one token", param=param)
        several: Sequence[Any] = given if is_batch(given) else [given]
        return [
            self.check_tokens(self.encode(each) if isinstance(each, str) else each)
            for each in several
        ]

    def generations(self, tokens: array[int], wish: Wish) -> list[Generation]:
        """One for each of the ``n`` answers that are asked for. Raises RequestError."""
        return [
            Generation(self.ranks, self.model.tokenizer, asked, wish.ending)
            for asked in self.asked(tokens, wish)
        ]

    def asked(self, tokens: array[int], wish: Wish) -> list[Asked]:
        """What a rank is asked, once for each of the ``n`` answers. Raises RequestError."""
        if wish.output_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, not {wish.output_tokens}", param="max_tokens"
            )
        if wish.logprobs and not self.model.has_logprobs:
            raise RequestError("--hands none knows no probabilities: leave logprobs out", 400)
        self.check_dp_rank(wish.dp_rank)
        seed = secrets.randbits(62) if wish.seed is None else wish.seed
        return [self._ask(tokens, wish, seed + number) for number in range(wish.n)]

    def _ask(self, tokens: array[int], wish: Wish, seed: int) -> Asked:
        try:
            sampling = Sampling(
                wish.temperature,
                wish.top_p,
                max(wish.top_k, 0),
                seed % (1 << 63),
                frozenset(wish.stop_ids),
                wish.ignores_eos,
                wish.logprobs,
                wish.top_logprobs,
            )
        except ConfigError as error:
            raise RequestError(str(error)) from None
        spec = RequestSpec(
            0,
            TokenPrompt(tokens),
            min(wish.output_tokens, self.context_tokens - len(tokens)),
            extra_key=wish.extra_key,
            cache_salt=wish.cache_salt,
            priority=wish.priority,
        )
        is_followed = wish.is_followed or wish.logprobs or bool(wish.ending.stops)
        return Asked(spec, sampling, is_followed, wish.explains, wish.dp_rank)


def is_batch(given: Given) -> bool:
    """Are these several prompts?"""
    return not isinstance(given, str) and not isinstance(given[0], int)


def cached_details(row: Row, storage: str | None) -> dict[str, Any] | None:
    """Cached tokens by tier, None where nothing was cached (spec 11.5)."""
    if not row.hit_tokens:
        return None
    details: dict[str, Any] = {"device": row.device_tokens, "host": row.host_tokens}
    if storage or row.storage_tokens:
        details |= {"storage": row.storage_tokens, "storage_backend": storage}
    return details

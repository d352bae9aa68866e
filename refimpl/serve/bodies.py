"""What the bodies of all APIs that generate have in common.

Fields that are not listed are tolerated: clients send many that concern other servers.
Must not know: routes. Called by: native, openai.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from fastapi import Header
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, Strict

from refimpl.serve.errors import RequestError
from refimpl.serve.generation import Ending
from refimpl.serve.limits import STOP_LENGTH_MAX, STOPS_MAX, Text
from refimpl.serve.service import Wish

Stop = Annotated[Text, Field(max_length=STOP_LENGTH_MAX)]
Token: TypeAlias = Annotated[int, Strict()]  # neither true nor "5" nor 5.0 is one
DataParallelRank: TypeAlias = Annotated[int | None, Header(alias="X-Data-Parallel-Rank")]


class Namespaced(BaseModel):
    """What a request is called, whose pages it may share, how urgent it is, which rank is to answer, and
    whether it is told what became of its prompt.
    """

    model_config = ConfigDict(extra="ignore")

    rid: Text | list[Text] | None = None
    extra_key: Text | None = None
    cache_salt: Text | None = None
    explain: bool = False
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    routed_dp_rank: int | None = Field(
        None, validation_alias=AliasChoices("routed_dp_rank", "data_parallel_rank")
    )

    def rank_with(self, header: int | None) -> int | None:
        """The rank that body and header ask for. Raises RequestError where they differ."""
        asked = self.routed_dp_rank
        if None not in (asked, header) and asked != header:
            raise RequestError(
                f"routed_dp_rank is {asked} and X-Data-Parallel-Rank {header}: send one of them",
                param="routed_dp_rank",
            )
        return header if asked is None else asked


class Choices(BaseModel):
    """How tokens are chosen, and where an answer ends."""

    model_config = ConfigDict(extra="ignore")

    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=1 << 31)
    n: int = Field(1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS_MAX)] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False

    def wish_of(self, output_tokens: int, seed: int | None, whose: Namespaced) -> Wish:
        """What is asked for, in the words of the service."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Wish(
            output_tokens=output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            n=self.n,
            ignores_eos=self.ignore_eos,
            stop_ids=tuple(self.stop_token_ids or ()),
            ending=Ending(tuple(filter(None, stops)), self.no_stop_trim),
            extra_key=whose.extra_key,
            cache_salt=whose.cache_salt,
            priority=whose.priority or 0,
            explains=whose.explain,
        )

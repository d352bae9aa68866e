"""Hits over HTTP do not depend on the size of L2, as long as L3 holds everything (field report Y06)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from refimpl.run.options import Options
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live

PAGE = 16
ROUNDS = 10
# More than L2 can stage, since prefetches may hold half of it: reads wait for each other.
AT_ONCE = 4
ASKED, ANSWERED = 126, 2  # tokens a turn
# The longest prompt has 80 pages: L1 holds four of them, the smallest L2 little more, L3 all of them.
L1_TOKENS = 4 * 80 * PAGE


class Chat:
    """A client that repeats all that was said, and notes what was found of it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._tokens: list[int] = []
        self.hits: list[int] = []  # a round
        self.tiers: list[dict[str, Any]] = []

    def turn(self, client: httpx.Client) -> None:
        told = len(self._tokens)
        self._tokens += [(self._number * 1009 + told + at) % 50_000 for at in range(ASKED)]
        params = {"temperature": 0, "max_new_tokens": ANSWERED, "ignore_eos": True}
        body = {"input_ids": self._tokens, "sampling_params": params}
        answer = client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        self._tokens += said["output_ids"]
        self.hits.append(said["meta_info"]["cached_tokens"])
        self.tiers.append(said["meta_info"]["cached_tokens_details"] or {})


def chats_with(ratio: str, clients: int) -> list[Chat]:
    options = Options(
        page_size=PAGE,
        max_total_tokens=L1_TOKENS,
        enable_hierarchical_cache=True,
        hicache_ratio=ratio,
        hicache_storage_backend="memory",
        hicache_storage_backend_extra_config=f'{{"prefetch_threshold": {PAGE}}}',
        hicache_storage_prefetch_policy="wait_complete",
    )
    chats = [Chat(number) for number in range(clients)]
    with (
        serving_null(options) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for _ in range(ROUNDS):
            list(pool.map(lambda chat: chat.turn(client), chats))
    check_quiescent(service.bridge.engine)
    return chats


@pytest.mark.parametrize(
    ("ratio", "clients"),
    [
        ("1.2", 10),
        ("2", 10),
        *(pytest.param(ratio, 20, marks=pytest.mark.slow) for ratio in ("1.2", "1.6", "2")),
    ],
)
def test_every_round_hits_all_that_was_said_before_whatever_the_size_of_l2(
    ratio: str, clients: int
) -> None:
    """The newest token of an answer has no KV yet when it ends; full pages of the rest are found."""
    chats = chats_with(ratio, clients)
    said = [turn * (ASKED + ANSWERED) for turn in range(ROUNDS)]
    expected = [max(tokens - 1, 0) // PAGE * PAGE for tokens in said]
    assert [chat.hits for chat in chats] == [expected] * clients
    from_l3 = sum(tiers.get("storage", 0) for chat in chats for tiers in chat.tiers)
    assert from_l3 > 0  # it was L3 that made up for the small L2

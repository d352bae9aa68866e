"""What became of a prompt: hits and losses add up to all that may hit, each loss with the right reason."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from refimpl.keys import TokenPrompt
from refimpl.run.account import Account
from refimpl.run.options import Options
from refimpl.run.record import Record, Row
from refimpl.run.setup import Simulation
from refimpl.units import NS_PER_S
from refimpl.workload.request import RequestSpec, Workload

PAGE = 64  # tokens
L2 = {"enable_hierarchical_cache": True}
L3 = {**L2, "hicache_storage_backend": "memory"}
SHARED = "shared_prefix:groups=4,prompts_per_group=8,system_length=2048,rate=50"
CHATS = "multi_turn:clients=12,rounds=6,request_length=700,rate=2,think_ms=1500"


def explained(
    options: Options, monkeypatch: pytest.MonkeyPatch, workload: Workload | None = None
) -> dict[int, Row]:
    """The rows of a simulation that keeps an account of every request."""
    submitted = Record.submitted
    simulation = Simulation(options, workload)

    def with_account(record: Record, spec: RequestSpec, instance: int, now: int) -> None:
        submitted(record, spec, instance, now)
        has_storage = bool(options.hicache_storage_backend)
        account = Account(spec.prompt.length, options.page_size, now, has_storage=has_storage)
        record.explain(spec.rid, account)

    monkeypatch.setattr(Record, "submitted", with_account)
    return simulation.run().record.rows


@pytest.mark.parametrize(
    "settings",
    [
        {},
        L2,
        L3,
        {"disable_radix_cache": True},
        {**L3, "hicache_storage_prefetch_policy": "best_effort"},
        {**L3, "hicache_storage_prefetch_policy": "wait_complete", "hicache_ratio": "1.2"},
        {**L3, "faults": "fetch_fail=200000,probe_fail=200000,store_fail=100000"},
        {**L3, "hicache_storage_backend_extra_config": '{"prefetch_timeout_base": 0.001}'},
        {**L3, "hicache_write_policy": "write_through_selective"},
        {**L3, "workload": SHARED},  # pages that L3 lacks and another request computes meanwhile
    ],
)
def test_hits_and_losses_of_every_request_add_up_to_all_that_may_hit(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"workload": CHATS, "seed": 2, "max_total_tokens": 16_000} | settings
    rows = explained(Options(**told), monkeypatch)
    assert len(rows) > 30
    for row in rows.values():
        assert row.account is not None
        told = row.account.told()
        assert told["may_hit_tokens"] == (row.prompt_tokens - 1) // PAGE * PAGE
        assert sum(told["lost_tokens"].values()) == told["may_hit_tokens"] - row.hit_tokens
        assert min(told["lost_tokens"].values(), default=1) > 0
        order = [told[f"{name}_tokens"] for name in ("asked", "found", "loaded", "used")]
        assert order == sorted(order, reverse=True)
        assert told["used_tokens"] == row.storage_tokens


def prompt(name: int, pages: int) -> TokenPrompt:
    return TokenPrompt(array("I", [name * 1_000_000 + i for i in range(pages * PAGE + 1)]))


def told_of_last(
    monkeypatch: pytest.MonkeyPatch, *prompts: TokenPrompt, gap_ns: int = NS_PER_S, **settings: Any
) -> dict[str, Any]:
    """The account of the last of some requests, one a second.

    The last comes ``gap_ns`` behind the one before it.
    """
    arrivals = [NS_PER_S * rid for rid in range(1, len(prompts))]
    specs = [
        RequestSpec(rid, each, 1, arrival_ns=at)
        for rid, (each, at) in enumerate(
            zip(prompts, [*arrivals, arrivals[-1] + gap_ns], strict=True), 1
        )
    ]
    told = {"max_total_tokens": 40 * PAGE, "num_reserved_decode_tokens": 0} | settings
    rows = explained(Options(**told), monkeypatch, Workload("by hand", specs))
    account = rows[len(prompts)].account
    assert account is not None
    return account.told()


def lost_by_last(*given: Any, **settings: Any) -> dict[str, int]:
    """Pages that it did not find, by reason."""
    told = told_of_last(*given, **settings)
    return {reason: tokens // PAGE for reason, tokens in told["lost_tokens"].items()}


OTHERS = [prompt(name, 30) for name in range(2, 7)]


@pytest.mark.parametrize(
    ("settings", "pages", "lost"),
    [
        ({"disable_radix_cache": True}, 30, {"nothing_is_kept": 30}),
        (L2, 30, {"not_in_l1_or_l2": 30}),
        (L3, 3, {"below_threshold": 3}),
        (L3, 30, {}),
        (
            {**L3, "hicache_storage_backend": "aibrix"}
            | {"hicache_storage_backend_extra_config": '{"prefetch_timeout_base": 0.001}'},
            30,
            {"timed_out": 30},
        ),
        ({**L3, "hicache_storage_prefetch_policy": "best_effort"}, 30, {"not_waited_for": 30}),
        # A store that fails has written its first pages.
        ({**L3, "faults": "store_fail=1000000"}, 30, {"not_in_storage": 12}),
    ],
)
def test_each_loss_has_its_reason(
    settings: dict[str, Any], pages: int, lost: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(1, pages)
    assert lost_by_last(monkeypatch, asked, *OTHERS, asked, **settings) == lost


def test_a_read_that_l2_has_room_for_in_part_is_told() -> None:
    """Prefetches may hold half of L2, 22 pages: of 15 pages each, the second read begins with 7."""
    one, two = prompt(1, 15), prompt(8, 15)
    with pytest.MonkeyPatch.context() as patch:
        settings = {**L3, "hicache_ratio": "1.1", "hicache_storage_backend": "aibrix"}
        lost = lost_by_last(patch, one, two, *OTHERS, one, two, gap_ns=1, **settings)
    assert lost == {"host_capacity": 8}


def test_pages_that_a_read_for_somebody_else_brings_are_asked_found_and_loaded() -> None:
    asked = prompt(1, 30)
    with pytest.MonkeyPatch.context() as patch:
        settings = {**L3, "max_total_tokens": 66 * PAGE, "hicache_ratio": "1.1"}
        told = told_of_last(patch, asked, *OTHERS, asked, asked, gap_ns=1, **settings)
    figures = [told[f"{name}_tokens"] for name in ("asked", "found", "loaded")]
    assert figures == [30 * PAGE] * 3
    assert told["lost_tokens"] == {}
    assert any("joined a read" in sentence for sentence in told["events"])

"""``--explain``: the sentence that says why a request missed is the right one."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from refimpl.keys import TokenPrompt
from refimpl.run.explain import Explanation
from refimpl.run.options import Options
from refimpl.run.setup import Simulation
from refimpl.units import NS_PER_S
from refimpl.workload.request import RequestSpec, Workload

PAGE = 64  # tokens


def prompt(name: int, pages: int, tail: int = 1) -> TokenPrompt:
    """Full pages of a document and a few tokens more."""
    return TokenPrompt(array("I", [name * 1_000_000 + i for i in range(pages * PAGE + tail)]))


def asked(*prompts: TokenPrompt, gap_ns: int = NS_PER_S, **of_last: Any) -> Workload:
    """Requests one after another; ``of_last`` describes the last."""
    last = len(prompts)
    return Workload(
        "by hand",
        [
            RequestSpec(
                rid, each, 1, arrival_ns=(rid - 1) * gap_ns, **(of_last if rid == last else {})
            )
            for rid, each in enumerate(prompts, 1)
        ],
    )


def explained(workload: Workload, rid: int | None = None, **settings: Any) -> str:
    """What is said of the last request, or of ``rid``."""
    options = Options(
        **{"max_total_tokens": 40 * PAGE, "num_reserved_decode_tokens": 0, **settings}
    )
    simulation = Simulation(options, workload)
    explanation = Explanation(simulation, rid or len(workload.requests))
    simulation.run(listener=explanation)
    return "\n".join(explanation.lines())


L2 = {"enable_hierarchical_cache": True}
L3 = {**L2, "hicache_storage_backend": "memory"}


def test_a_first_request_had_nobody_before_it() -> None:
    said = explained(asked(prompt(1, 8)))
    assert "request 1: 513 tokens, 8 full pages of 64, of which 8 may hit" in said
    assert "L2 host: off\nL3 storage: off" in said
    assert "page 1 of 8 was the first to be computed: no request before it had the same" in said


def test_a_repeated_request_hits_every_page() -> None:
    said = explained(asked(prompt(1, 8), prompt(1, 8)))
    assert "L1 device: 8 pages hit" in said
    assert "every page that may hit did" in said


def test_a_prompt_of_whole_pages_leaves_its_last_page_to_compute() -> None:
    said = explained(asked(prompt(1, 8, tail=0), prompt(1, 8, tail=0)))
    assert "8 full pages of 64, of which 7 may hit" in said
    assert "L1 device: 7 pages hit" in said


def test_a_page_that_left_l1_is_said_to_have_been_evicted() -> None:
    said = explained(asked(prompt(1, 30), prompt(2, 30), prompt(1, 30)))
    assert "request 1 computed it at" in said
    assert said.count("evicted from L1") == 1
    assert "and L2" not in said


def test_a_page_that_left_both_tiers_is_said_to_have_left_both() -> None:
    others = [prompt(name, 30) for name in range(2, 7)]
    said = explained(asked(prompt(1, 30), *others, prompt(1, 30)), **L2)
    assert "evicted from L1 and L2" in said


def test_a_page_that_came_back_from_l2_counts_as_a_host_hit() -> None:
    said = explained(asked(prompt(1, 30), prompt(2, 30), prompt(1, 30)), **L2)
    assert "L2 host: " in said
    assert "pages were loaded back from L2" in said


def test_a_page_that_came_back_from_l3_is_told_with_its_read() -> None:
    others = [prompt(name, 30) for name in range(2, 7)]
    said = explained(asked(prompt(1, 30), *others, prompt(1, 30)), **L3)
    assert "L3 storage: 30 pages hit" in said
    assert "L3 said it has 30 of the pages asked for" in said
    assert "every page that may hit did" in said


def test_too_few_pages_to_ask_l3_for_are_told_with_the_threshold() -> None:
    others = [prompt(name, 30) for name in range(2, 7)]
    said = explained(asked(prompt(1, 3), *others, prompt(1, 3)), **L3)
    assert "3 pages were too few to ask L3 for (prefetch_threshold)" in said
    assert "L3 storage: 0 pages hit" in said


def test_l3_that_has_fewer_pages_than_the_threshold_is_told() -> None:
    others = [prompt(name, 30) for name in range(2, 7)]
    said = explained(asked(prompt(1, 3), *others, prompt(1, 8)), **L3)
    assert "L3 had fewer pages than prefetch_threshold asks for" in said


def test_a_page_that_was_never_written_is_told() -> None:
    said = explained(asked(prompt(1, 8)), **L3)
    assert "L3 did not have its next page: it was never written, not written yet, or" in said


def test_pages_that_l3_did_not_deliver_in_time_are_told() -> None:
    others = [prompt(name, 30) for name in range(2, 7)]
    said = explained(
        asked(prompt(1, 30), *others, prompt(1, 30)),
        **{**L3, "hicache_storage_backend": "aibrix", "hicache_storage_prefetch_policy": "timeout"},
        hicache_storage_backend_extra_config='{"prefetch_timeout_base": 0.001}',
    )
    assert "L3 storage: 0 pages hit" in said
    assert "evicted from L1 and L2; L3 had it, and not all of that arrived in time" in said
    assert "it stopped waiting for L3 at its deadline; 0 pages had arrived" in said


def test_a_page_that_a_selective_policy_never_wrote_is_not_said_to_have_left_l2() -> None:
    said = explained(
        asked(prompt(1, 30), prompt(2, 30), prompt(1, 30)),
        **L2,
        hicache_write_policy="write_through_selective",
    )
    assert "L2 has it no more or never had (write_through_selective)" in said


@pytest.mark.parametrize("key", ["extra_key", "cache_salt", "lora_id"])
def test_equal_tokens_of_another_namespace_are_told(key: str) -> None:
    said = explained(asked(prompt(1, 8), prompt(1, 8), **{key: "tenant"}))
    assert "L1 device: 0 pages hit" in said
    assert "had the same tokens in another namespace" in said


def test_pages_still_being_computed_are_told() -> None:
    # The second comes while a batch that the first is part of runs, on the other instance.
    said = explained(
        asked(prompt(1, 30), prompt(1, 30), gap_ns=1),
        instances=2,
        router_policy="round_robin",
    )
    assert "request 1 has the same page and had not finished computing it yet" in said


def test_pages_of_another_instance_are_told() -> None:
    said = explained(asked(prompt(1, 30), prompt(1, 30)), instances=2, router_policy="round_robin")
    assert "request 1 computed it on instance 0" in said
    assert "this one ran on instance 1" in said


def test_without_the_cache_nothing_is_kept() -> None:
    said = explained(asked(prompt(1, 8), prompt(1, 8)), disable_radix_cache=True)
    assert "nothing is kept for later requests (--disable-radix-cache)" in said


def test_a_request_that_never_fits_says_how_it_ended() -> None:
    said = explained(asked(prompt(1, 50)))
    assert "it ended at" in said
    assert "it was never admitted, so it hit nothing" in said


def test_a_replay_without_time_explains_as_well() -> None:
    said = explained(asked(prompt(1, 30), prompt(2, 30), prompt(1, 30)), cache_only=True)
    assert "evicted from L1" in said

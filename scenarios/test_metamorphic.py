"""Relations between runs that must hold whatever the figures are, and oracles that know no cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.cluster.router import POLICIES, RouterConfig
from refimpl.config import EVICTION_POLICIES, WRITE_POLICIES, CacheConfig, EvictionConfig
from refimpl.facts import Admitted
from refimpl.keys import TokenPrompt
from refimpl.run.report import integers
from refimpl.workload.request import RequestSpec
from scenarios.oracles import (
    SCENARIOS,
    PageLru,
    Unlimited,
    family_of,
    hit_tokens,
    replay,
    scenario,
    simulate,
    tiers,
)
from scenarios.tidy import ROOT

TIERS: Final = ((None, 0, False), (40, 0, False), (30, 60, False), (30, 60, True), (20, 30, True))
by_family = pytest.mark.parametrize("text", SCENARIOS, ids=family_of)
by_write_policy = pytest.mark.parametrize("write_policy", WRITE_POLICIES)


# ---- the two audits -----------------------------------------------------------------------------


@by_write_policy
@pytest.mark.parametrize(("l1", "l2", "has_storage"), TIERS)
def test_prompts_that_share_nothing_never_hit(
    l1: int | None, l2: int, has_storage: bool, write_policy: str
) -> None:
    workload = scenario("all_unique:requests=12,request_length=70,output_length=9,rate=90", 4)
    for eviction in EVICTION_POLICIES:
        cache = tiers(4, l1, l2, write_policy, EvictionConfig(eviction, threshold=50))
        record, admissions = simulate(workload, cache, has_storage=has_storage)
        assert len(admissions.facts) == 12
        assert admissions.hit_tokens == 0, eviction
        assert integers(record)["hit_rate_ppm"] == 0


@by_write_policy
@pytest.mark.parametrize(("l1", "l2", "has_storage"), TIERS)
@pytest.mark.parametrize(("length", "page_size"), [(64, 4), (65, 4), (1, 4), (70, 16), (33, 1)])
def test_equal_prompts_hit_all_but_their_last_tokens(
    length: int,
    page_size: int,
    l1: int | None,
    l2: int,
    has_storage: bool,
    write_policy: str,
) -> None:
    text = f"all_equal:requests=6,request_length={length},output_length=3,gap_ms=1000"
    cache = tiers(page_size, max(l1 or 0, 40) if l1 else None, l2, write_policy)
    _, admissions = simulate(scenario(text, page_size), cache, has_storage=has_storage)
    assert admissions.hit_tokens == 5 * ((length - 1) // page_size) * page_size


# ---- no more than a cache without limits --------------------------------------------------------


@by_family
@by_write_policy
def test_no_world_hits_more_than_a_cache_without_limits(text: str, write_policy: str) -> None:
    for page_size, instances in ((1, 1), (4, 2), (16, 3)):
        workload = scenario(text, page_size)
        specs = {spec.rid: spec for spec in workload.requests}
        cache = tiers(page_size, 400 // page_size, 500 // page_size, write_policy)
        _, admissions = simulate(workload, cache, has_storage=True, instances=instances)
        unlimited = Unlimited(page_size)
        for fact in admissions.facts:
            ceiling = unlimited.hits(specs[fact.rid]) * page_size
            assert hit_tokens(fact) <= ceiling, f"request {fact.rid}"


@by_family
def test_a_roomy_cache_comes_to_what_a_cache_without_limits_does_one_at_a_time(text: str) -> None:
    workload = scenario(f"{text},max_parallel=1", 4)
    specs = {spec.rid: spec for spec in workload.requests}
    _, admissions = simulate(workload, tiers(4, None))
    unlimited = Unlimited(4)
    assert [hit_tokens(fact) for fact in admissions.facts] == [
        unlimited.hits(specs[fact.rid]) * 4 for fact in admissions.facts
    ]


# ---- cache-only replay against a page LRU -------------------------------------------------------

# Few tokens and short prompts, so that prompts share beginnings of every length.
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=25)
page_sizes = st.integers(1, 4)
capacities = st.integers(1, 12)
steady = settings(derandomize=True, max_examples=150)


def passed(
    prompts: Sequence[Sequence[int]], cache: CacheConfig, *, has_storage: bool = False
) -> list[Admitted]:
    specs = [
        RequestSpec(rid, TokenPrompt(array("I", tokens)), 0)
        for rid, tokens in enumerate(prompts, 1)
    ]
    return replay(specs, cache, has_storage=has_storage)


def pages_hit(facts: Sequence[Admitted], page_size: int) -> list[int]:
    return [hit_tokens(fact) // page_size for fact in facts]


def lru_hits(prompts: Sequence[Sequence[int]], pages_max: int | None, page_size: int) -> list[int]:
    lru = PageLru(pages_max, page_size)
    return [lru.hits(tokens) for tokens in prompts]


def fitting(prompts: list[list[int]], page_size: int, pages_max: int) -> list[list[int]]:
    return [tokens for tokens in prompts if len(tokens) // page_size <= pages_max]


@steady
@given(prompts, page_sizes, capacities)
def test_l1_alone_is_a_page_lru_even_for_prompts_larger_than_it(
    prompts: list[list[int]], page_size: int, l1: int
) -> None:
    # Of a prompt that does not fit both keep the beginning: first matched, then touched, then cut.
    facts = passed(prompts, tiers(page_size, l1))
    assert pages_hit(facts, page_size) == lru_hits(prompts, l1, page_size)


@steady
@given(prompts, page_sizes, capacities, st.integers(1, 4))
def test_a_larger_l1_never_hits_less(
    prompts: list[list[int]], page_size: int, l1: int, more: int
) -> None:
    small = pages_hit(passed(prompts, tiers(page_size, l1)), page_size)
    large = pages_hit(passed(prompts, tiers(page_size, l1 + more)), page_size)
    assert all(few <= many for few, many in zip(small, large, strict=True))


@steady
@given(prompts, page_sizes, capacities, st.integers(0, 12))
def test_l1_and_l2_together_are_a_page_lru_of_the_size_of_l2(
    prompts: list[list[int]], page_size: int, l1: int, more: int
) -> None:
    prompts = fitting(prompts, page_size, l1)
    facts = passed(prompts, tiers(page_size, l1, l1 + more))
    assert pages_hit(facts, page_size) == lru_hits(prompts, l1 + more, page_size)
    on_device = [fact.device_tokens // page_size for fact in facts]
    assert on_device == lru_hits(prompts, l1, page_size)


@steady
@given(prompts, page_sizes, capacities, st.integers(0, 12))
def test_three_tiers_are_a_cache_without_limits(
    prompts: list[list[int]], page_size: int, l1: int, more: int
) -> None:
    prompts = fitting(prompts, page_size, l1)
    facts = passed(prompts, tiers(page_size, l1, l1 + more), has_storage=True)
    assert pages_hit(facts, page_size) == lru_hits(prompts, None, page_size)


@steady
@given(prompts, page_sizes, capacities, capacities)
def test_write_back_lies_between_l2_alone_and_both_tiers_end_to_end(
    prompts: list[list[int]], page_size: int, l1: int, l2: int
) -> None:
    # A page goes to L2 only when it leaves L1, so the two hold different pages, at best l1 + l2 of
    # them. One that is loaded back stays in L2 as well, at worst all of L1 does: that leaves l2.
    # L1 itself is no LRU then: a page that is being written can't go, and the next in order does.
    prompts = fitting(prompts, page_size, min(l1, l2))
    found = pages_hit(passed(prompts, tiers(page_size, l1, l2, "write_back")), page_size)
    least, most = lru_hits(prompts, l2, page_size), lru_hits(prompts, l1 + l2, page_size)
    assert all(low <= at <= high for low, at, high in zip(least, found, most, strict=True))


@steady
@given(prompts, page_sizes, capacities, capacities)
def test_selective_writing_lies_between_l1_alone_and_a_cache_without_limits(
    prompts: list[list[int]], page_size: int, l1: int, l2: int
) -> None:
    # L2 holds what was hit often, so nothing of it may be of use, or far older pages than an LRU
    # of any size near l2 would still hold.
    prompts = fitting(prompts, page_size, min(l1, l2))
    facts = passed(prompts, tiers(page_size, l1, l2, "write_through_selective"))
    least, most = lru_hits(prompts, l1, page_size), lru_hits(prompts, None, page_size)
    found = pages_hit(facts, page_size)
    assert all(low <= at <= high for low, at, high in zip(least, found, most, strict=True))
    assert [fact.device_tokens // page_size for fact in facts] == least


@steady
@given(prompts, page_sizes, capacities, capacities, st.sampled_from(WRITE_POLICIES), st.booleans())
def test_no_replay_hits_more_than_a_cache_without_limits(
    prompts: list[list[int]], page_size: int, l1: int, l2: int, write_policy: str, has_storage: bool
) -> None:
    facts = passed(prompts, tiers(page_size, l1, l2, write_policy), has_storage=has_storage)
    most = lru_hits(prompts, None, page_size)
    assert all(at <= high for at, high in zip(pages_hit(facts, page_size), most, strict=True))


# ---- tiers and instances ------------------------------------------------------------------------

# Where another tier costs hits, family and write policy. A read or a write of L3 changes when things
# happen, and other times are another order of admissions and of evictions: one page of 40 to 190 in
# all of these. In the last, besides, an L2 no larger than L1 is full of pages that are being written
# to L3 and locked: what leaves L1 then finds no room there.
COSTLY: Final = {
    ("rag", "write_through_selective"),
    ("rag", "write_back"),
    ("agent", "write_back"),
}


@by_family
def test_another_tier_costs_no_hits_or_a_few_where_we_know_why(text: str) -> None:
    costly = set()
    for page_size in (4, 16):
        workload = scenario(text, page_size)
        longest = max(spec.prompt.length + spec.output_tokens for spec in workload.requests)
        for write_policy in WRITE_POLICIES:
            for percent, ratio in ((100, 1), (150, 1), (100, 2), (150, 2), (150, 4)):
                l1 = longest * percent // 100 // page_size + 2
                cache = tiers(page_size, l1, l1 * ratio, write_policy)
                one = simulate(workload, tiers(page_size, l1))[1].hit_tokens
                two = simulate(workload, cache)[1].hit_tokens
                three = simulate(workload, cache, has_storage=True)[1].hit_tokens
                assert one * 95 <= two * 100
                assert two * 95 <= three * 100
                if not one <= two <= three:
                    costly.add((family_of(text), write_policy))
    assert costly <= COSTLY


@by_family
def test_the_router_does_not_matter_where_there_is_one_instance(text: str) -> None:
    workload = scenario(text, 4)
    digests = {
        simulate(workload, tiers(4, 80, 160), has_storage=True, router=RouterConfig(policy))[
            0
        ].digest
        for policy in POLICIES
    }
    assert len(digests) == 1


# ---- equal on every machine ---------------------------------------------------------------------

PROBE: Final = """
import json
from refimpl.run.report import integers
from scenarios.oracles import SCENARIOS, scenario, simulate, tiers
from scenarios.swarm import run_seed
runs = [
    integers(simulate(scenario(text, 4), tiers(4, 80, 120), has_storage=True, instances=2)[0])
    for text in SCENARIOS
]
print(json.dumps([runs, [run_seed(seed).digest for seed in range(8)]], sort_keys=True))
"""


def starts(python: Path) -> bool:
    """A version manager's shim stands for a version that may not be chosen here."""
    return not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode


OTHER_PYTHONS: Final = sorted(
    {
        found.resolve()
        for minor in range(11, 20)
        for found in (
            *Path.home().glob(f".pyenv/versions/*/bin/python3.{minor}"),
            *filter(None, [Path(shutil.which(f"python3.{minor}") or "/")]),
        )
        if found.is_file() and minor != sys.version_info.minor and starts(found)
    }
)


def probed(python: str, **variables: str) -> list[object]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [python, "-c", PROBE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def expected() -> list[object]:
    return probed(sys.executable, PYTHONHASHSEED="0")


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295", "random"])
def test_two_processes_decide_alike_whatever_the_hash_seed(
    hash_seed: str, expected: list[object]
) -> None:
    assert probed(sys.executable, PYTHONHASHSEED=hash_seed) == expected


@pytest.mark.parametrize(
    "python",
    OTHER_PYTHONS or [pytest.param(None, marks=pytest.mark.skip(reason="no other Python is here"))],
    ids=lambda path: path.name if path else "none",
)
def test_every_python_decides_alike(python: Path, expected: list[object], tmp_path: Path) -> None:
    """Packages of another version go to a folder of the test's own; without them it is skipped."""
    path = str(ROOT)
    if subprocess.run(
        [python, "-c", "import msgspec"], capture_output=True, check=False
    ).returncode:
        install = [str(python), "-m", "pip", "install", "-q", "--retries", "0", "--timeout", "5"]
        done = subprocess.run(
            [*install, "--target", str(tmp_path), "msgspec"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(reason=f"{python} has no msgspec and can't get it: {done.stderr[-200:]}")
        path = f"{ROOT}{os.pathsep}{tmp_path}"
    assert probed(str(python), PYTHONPATH=path) == expected

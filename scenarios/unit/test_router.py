"""Facts of the router's policies. Field reports are named where a test answers one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.cluster.router import POLICIES, Router, RouterConfig
from refimpl.config import ConfigError


def prompt(document: int, pages: int = 10) -> list[bytes]:
    """Keys of the first pages of a document."""
    return [f"{document}/{page}".encode().ljust(32) for page in range(pages)]


def router_of(policy: str, workers: int = 4, **limits: int) -> Router:
    return Router(workers, RouterConfig(policy, **limits))


def send(router: Router, keys: list[bytes], session: int = 0) -> int:
    worker = router.choose(keys, session)
    router.started(worker)
    return worker


def load(router: Router, *loads: int) -> None:
    for worker, count in enumerate(loads):
        for _ in range(count):
            router.started(worker)


def test_round_robin_takes_turns() -> None:
    router = router_of("round_robin", 3)
    assert [router.choose([]) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_random_reaches_every_worker_and_repeats_with_its_seed() -> None:
    one, same, other = (router_of("random", seed=seed) for seed in (1, 1, 2))
    chosen = [one.choose([]) for _ in range(100)]
    assert sorted(set(chosen)) == [0, 1, 2, 3]
    assert chosen == [same.choose([]) for _ in range(100)]
    assert chosen != [other.choose([]) for _ in range(100)]


def test_shortest_queue_takes_the_least_loaded() -> None:
    router = router_of("shortest_queue")
    load(router, 3, 1, 2, 2)
    assert router.choose([]) == 1


def test_a_finished_request_frees_its_worker() -> None:
    router = router_of("shortest_queue", 2)
    load(router, 2, 1)
    router.finished(0)
    router.finished(0)
    assert router.choose([]) == 0


def test_idle_workers_take_turns() -> None:
    router = router_of("shortest_queue", 3)
    for _ in range(6):
        worker = send(router, [])
        router.finished(worker)
    assert [router.choose([]) for _ in range(3)] == [0, 1, 2]


def test_power_of_two_never_takes_the_most_loaded() -> None:
    router = router_of("power_of_two", 3)
    load(router, 5, 1, 1)
    chosen = [router.choose([]) for _ in range(200)]
    assert sorted(set(chosen)) == [1, 2]


def test_power_of_two_compares_two_different_workers() -> None:
    router = router_of("power_of_two", 2)
    load(router, 1, 0)
    assert {router.choose([]) for _ in range(50)} == {1}


def test_a_session_stays_with_its_worker() -> None:
    router = router_of("consistent_hashing", 5)
    first = [router.choose([], session) for session in range(100)]
    assert first == [router.choose([], session) for session in range(100)]
    assert sorted(set(first)) == [0, 1, 2, 3, 4]


def test_when_a_worker_leaves_only_its_sessions_move_and_they_come_back() -> None:
    router = router_of("consistent_hashing", 5)
    before = [router.choose([], session) for session in range(500)]
    router.left(2)
    without = [router.choose([], session) for session in range(500)]
    assert 2 not in without
    assert all(now == then for now, then in zip(without, before, strict=True) if then != 2)
    assert len({now for now, then in zip(without, before, strict=True) if then == 2}) > 1
    router.joined(2)
    assert [router.choose([], session) for session in range(500)] == before


def test_sessions_spread_over_the_ring() -> None:
    router = router_of("consistent_hashing", 4)
    chosen = [router.choose([], session) for session in range(4000)]
    assert all(600 < chosen.count(worker) < 1500 for worker in range(4))


def test_a_known_prefix_goes_where_it_was_sent() -> None:
    router = router_of("cache_aware")
    homes = [send(router, prompt(document)) for document in range(4)]
    assert sorted(homes) == [0, 1, 2, 3]
    assert [send(router, prompt(document, 12)) for document in range(4)] == homes


def test_the_longest_prefix_wins() -> None:
    router = router_of("cache_aware", 2, balance_abs=2, balance_rel_percent=100)
    short = send(router, prompt(1, 4))
    load(router, *[5 if worker == short else 0 for worker in range(2)])
    longer = send(router, prompt(1, 9))
    assert longer != short
    load(router, *[4 if worker == longer else 0 for worker in range(2)])
    assert send(router, prompt(1, 10)) == longer


def test_new_prompts_go_to_the_idle_worker_and_not_to_the_small_index() -> None:
    """T01: the busy worker knows little, the idle one much."""
    router = router_of("cache_aware", 2)
    router.left(0)
    assert send(router, prompt(0, 500)) == 1
    router.finished(1)
    router.joined(0)
    load(router, 50, 0)
    chosen = [send(router, prompt(document)) for document in range(1, 51)]
    assert chosen == [1] * 50
    following = [send(router, prompt(document)) for document in range(51, 101)]
    assert sorted(following) == [0] * 25 + [1] * 25


def test_of_two_equally_long_matches_the_less_loaded_worker_is_taken() -> None:
    router = router_of("cache_aware", 2, balance_abs=2, balance_rel_percent=100)
    assert router.choose(prompt(0)) == 0
    load(router, 3, 0)
    assert router.choose(prompt(0)) == 1  # diverted, so that both know it
    router.finished(0)
    router.finished(0)
    assert router.choose(prompt(0)) == 1


def hot_fleet() -> Router:
    """Document 0 is known to worker 0, document 1 to worker 1; loads 60, 5, 4, 3."""
    router = router_of("cache_aware", 4, balance_abs=32)
    assert [send(router, prompt(document)) for document in range(4)] == [0, 1, 2, 3]
    load(router, 59, 4, 3, 2)
    assert router.in_flight == [60, 5, 4, 3]
    return router


def test_a_hot_worker_leaves_the_affinity_of_others_alone() -> None:
    """T02."""
    assert send(hot_fleet(), prompt(1)) == 1


def test_a_prefix_on_a_hot_worker_is_diverted_to_the_least_loaded() -> None:
    """T02."""
    assert send(hot_fleet(), prompt(0)) == 3


def test_a_diverted_prefix_prefers_a_cool_worker_that_knows_some_of_it() -> None:
    """T02: worker 1 gets to know half of document 0 while worker 0 is away."""
    router = hot_fleet()
    router.left(0)
    router.left(2)
    router.left(3)
    assert router.choose(prompt(0, 5)) == 1
    for worker in (0, 2, 3):
        router.joined(worker)
    assert send(router, prompt(0)) == 1


def test_a_worker_is_not_hot_within_the_absolute_threshold() -> None:
    router = router_of("cache_aware", 2, balance_abs=64)
    assert send(router, prompt(0)) == 0
    load(router, 63, 0)
    assert send(router, prompt(0)) == 0
    assert send(router, prompt(0)) == 1  # 65 more than the other


def test_a_worker_is_not_hot_within_the_relative_threshold() -> None:
    router = router_of("cache_aware", 2, balance_abs=10, balance_rel_percent=150)
    assert send(router, prompt(0)) == 0
    load(router, 149, 100)
    assert send(router, prompt(0)) == 0
    assert send(router, prompt(0)) == 1  # 151 are above 1.5 times 100


def test_a_short_shared_beginning_does_not_draw_everything_to_one_worker() -> None:
    """T10: one beginning of a quarter of each prompt, two workers."""
    router = router_of("cache_aware", 2)
    chosen = [send(router, prompt(0, 5) + prompt(n, 20)[5:]) for n in range(1, 41)]
    assert chosen.count(0) == chosen.count(1) == 20


def test_a_request_without_a_full_page_goes_to_the_least_loaded() -> None:
    router = router_of("cache_aware", 2)
    load(router, 1, 0)
    assert router.choose([]) == 1


def test_a_worker_that_comes_back_has_no_affinity_left() -> None:
    """T04: after a restart nothing is cached."""
    router = router_of("cache_aware", 2)
    assert send(router, prompt(0)) == 0
    router.left(0)
    router.joined(0)
    assert router.indexed_pages(0) == 0
    assert send(router, prompt(0)) == 1


def test_the_index_is_bounded_and_forgets_the_coldest_first() -> None:
    router = router_of("cache_aware", 1, index_pages_max=25)
    for document in (0, 1, 0, 2):
        send(router, prompt(document, 10))
    assert router.indexed_pages(0) == 25
    index = router._indexes[0]
    assert [index.match(prompt(document, 10)) for document in range(3)] == [10, 5, 10]


def test_a_prompt_longer_than_the_index_is_remembered_by_its_beginning() -> None:
    router = router_of("cache_aware", 1, index_pages_max=6)
    send(router, prompt(0, 10))
    assert router._indexes[0].match(prompt(0, 10)) == 6


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=40), st.integers(1, 20))
def test_the_index_stays_closed_under_prefixes(sent: list[tuple[int, int]], pages_max: int) -> None:
    router = router_of("cache_aware", 1, index_pages_max=pages_max)
    for document, pages in sent:
        send(router, prompt(document, pages))
    index = router._indexes[0]
    assert len(index) <= pages_max
    for document in range(4):
        keys = prompt(document, 12)
        known = [key in index._keys for key in keys]
        assert known == sorted(known, reverse=True)
        assert index.match(keys) == sum(known)


@given(st.sampled_from(POLICIES), st.integers(1, 5), st.data())
def test_a_request_goes_to_a_present_worker(policy: str, workers: int, data: st.DataObject) -> None:
    router = router_of(policy, workers)
    present = list(range(workers))
    for document in range(30):
        if len(present) > 1 and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(present))
            present.remove(gone)
            router.left(gone)
        assert send(router, prompt(document % 5), session=document) in present


def test_finishing_what_never_started_is_caught() -> None:
    with pytest.raises(AssertionError, match="nothing in flight"):
        router_of("random").finished(0)


def test_an_unknown_policy_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="round_robin, random, shortest_queue"):
        RouterConfig("luckiest")


def test_a_router_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one worker"):
        Router(0)

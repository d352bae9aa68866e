"""Faults of the engine that the swarm found, each told as small as it gets."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from refimpl.config import CacheConfig, EngineConfig, PrefetchConfig
from refimpl.core.cache import HiCache
from refimpl.core.check import check_cache, check_quiescent
from refimpl.core.engine import Engine
from refimpl.core.outbox import Outbox
from refimpl.core.page import Node
from refimpl.core.prefetch import Prefetcher
from refimpl.core.request import Request
from refimpl.keys import TokenPrompt
from refimpl.messages import (
    AttachStorage,
    BackedUp,
    BackUp,
    BatchDone,
    Event,
    OpenStorage,
    Reply,
    RunBatch,
    StorageOpened,
    Store,
    Stored,
    Submit,
)


def request(rid: int, tokens: Sequence[int], output: int = 0) -> Submit:
    return Submit(rid, TokenPrompt(array("I", tokens)), output)


def play(config: EngineConfig, *events: Event) -> list[str]:
    """Send all events at once, complete every order at once; how each request ended, in that order."""
    return play_on(Engine(config), 0, *events)


def play_on(engine: Engine, now: int, *events: Event, loads_fail: bool = False) -> list[str]:
    ends: list[str] = []
    waiting: list[Event] = list(events)
    while waiting:
        now += 1
        step = engine.handle(waiting, now)
        waiting = []
        for command in step.commands:
            match command:
                case RunBatch(steps_max, loads=loads):
                    failed = tuple(load.rid for load in loads if loads_fail)
                    loads_fail &= not failed
                    waiting.append(BatchDone(steps_max, failed))
                case BackUp(op, slots):
                    waiting.append(BackedUp(op, len(slots)))
                case Store(op, keys):
                    waiting.append(Stored(op, len(keys)))
                case OpenStorage():
                    waiting.append(StorageOpened())
                case Reply(rid, _, finish) if finish:
                    ends.append(f"{rid} {finish.partition(':')[0]}")
    check_quiescent(engine)
    return ends


def tiny(l1_pages: int, **settings: int) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(page_size=1, l1_pages=l1_pages, **settings))


def cache_of(l2_pages: int = 0) -> HiCache:
    return HiCache(CacheConfig(page_size=1, l1_pages=20, l2_pages=l2_pages), Outbox())


def names(text: str) -> list[bytes]:
    """Keys of the letters of ``text``, each with its whole prefix."""
    return [text[: end + 1].encode() for end in range(len(text))]


def put(cache: HiCache, text: str) -> Node:
    keys = names(text)
    return cache.insert(None, keys, 0, cache.device.pool.take(len(keys)), None).node


def test_an_insertion_that_splits_a_run_keeps_the_slots_of_the_common_part() -> None:
    cache = cache_of()
    put(cache, "abcd")
    put(cache, "abxy")
    check_cache(cache, [])


def test_a_split_off_beginning_that_alone_is_in_l2_can_be_evicted_from_it() -> None:
    cache = cache_of(l2_pages=4)
    node = put(cache, "abcd")
    cache.writer.write_through(node)
    cache.writer.backed_up(1, 2)
    cache.tree.split(node, 2)
    check_cache(cache, [])
    assert cache.host.make_room(4) == 4


def test_a_match_inside_a_run_keeps_no_more_than_it_matched() -> None:
    # The second shares one page of six, and needs the other five.
    ends = play(tiny(6), request(1, [1, 2, 3, 4, 5, 6]), request(2, [1, 7, 8, 9, 10, 11]))
    assert ends == ["1 length", "2 length"]


def test_when_an_output_outgrows_l1_the_next_request_goes_on() -> None:
    ends = play(tiny(3), request(1, [1, 2], 5), request(2, [3, 4, 5]))
    assert ends == ["1 error", "2 length"]


def test_when_an_output_outgrows_l1_a_waiting_attach_goes_on() -> None:
    config, attach = tiny(3, l2_pages=4), AttachStorage("memory", drain="queue")
    ends = play(config, request(1, [1, 2], 5), attach, request(2, [3, 4, 5]))
    assert ends == ["1 error", "2 length"]


def test_a_failed_load_takes_along_who_hangs_on_it_and_nobody_else() -> None:
    config = tiny(12, l2_pages=24, load_back_threshold_tokens=1)
    engine, shared = Engine(config), list(range(1, 7))
    play_on(engine, 0, request(1, shared))
    play_on(engine, 100, request(2, list(range(20, 32))))  # the first is in L2 alone now
    burst = [request(3, [*shared, 40]), request(4, [*shared, 41]), request(5, [50, 51])]
    ends = play_on(engine, 200, *burst, loads_fail=True)
    assert ends == ["5 length", "3 length", "4 length"]


def test_who_asks_again_does_not_join_a_read_that_has_brought_its_pages_already() -> None:
    prefetch = PrefetchConfig("wait_complete", threshold_tokens=1, capacity_percent=100)
    config = CacheConfig(page_size=1, l1_pages=20, l2_pages=12, prefetch=prefetch)
    cache, out = HiCache(config, Outbox()), Outbox()
    cache.host.generation = 1
    reads = Prefetcher(cache, prefetch, out)
    long, short = (Request(request(rid, range(rid)), 1) for rid in (9, 5))
    reads.begin(long, 0, 1)
    reads.begin(short, 0, 1)
    reads.probed(1, 8)
    reads.landed(1, 4)
    assert not reads.must_wait(short, 2)  # its four pages are there
    assert cache.host.make_room(8) == 8  # and gone, before its turn comes
    assert reads.asks_again(short, 3)
    reads.fetched(1, 8, 4)
    assert reads.must_wait(short, 5)
    assert len(short.fetches) == 1

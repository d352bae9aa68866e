"""What waits to be written, and what never comes back: neither costs what nobody needs.

Field reports L05, Y02 and Y03 as far as they need no clock; `refimpl bench backlog` and `bench unique` take
the times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from refimpl.core.ops import STORE
from refimpl.messages import BatchDone
from refimpl.run.live_loop import LiveLoop
from refimpl.run.options import Options
from refimpl.serve.bridge import Bridge
from refimpl.serve.service import Service
from scenarios.serve.served import serving

pytestmark = pytest.mark.live

SECONDS_MAX = 30
WRITE_S = 0.25  # of 128 pages


def on_l3(**more: Any) -> Options:
    """All tiers, with a store in memory of this test alone."""
    extra = f'{{"store": "{uuid4().hex}", "prefetch_threshold": 16}}'
    return Options(
        enable_hierarchical_cache=True,
        hicache_storage_backend="memory",
        hicache_storage_backend_extra_config=extra,
        hicache_ratio="2",
        **more,
    )


def ask(client: httpx.Client, tokens: list[int], new: int = 1) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    answer = client.post("/generate", json={"input_ids": tokens, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["meta_info"])


def prompt(number: int, length: int) -> list[int]:
    return [(number * 41 + at * (number % 7 + 1)) % 250 for at in range(length)]


@contextmanager
def held_writes(
    service: Service, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0
) -> Iterator[Event]:
    """A store that begins no write before the event is set, which it is at the end.

    Each call takes it so many seconds.
    """
    released = Event()
    backend = service.bridge._executor.storage._attached.store.backend  # type: ignore[attr-defined]
    write = backend.set

    def held(names: Any, pages: Any) -> Any:
        assert released.wait(SECONDS_MAX)
        Event().wait(seconds)
        return write(names, pages)

    monkeypatch.setattr(backend, "set", held)
    try:
        yield released
    finally:
        released.set()


def test_500_queued_writes_drain_beside_an_engine_that_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's thread wakes for what has ended and to look after its threads: it never polls."""
    slept: Counter[str] = Counter()
    wait = LiveLoop.wait

    def counted(loop: LiveLoop, next_due: int | None = None) -> Any:
        events, now = wait(loop, next_due)
        slept["idle" if not events else "event"] += 1
        return events, now

    options = on_l3(page_size=2, max_total_tokens=1100)
    with (
        serving(options) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
        held_writes(service, monkeypatch, WRITE_S) as released,
    ):
        ask(client, prompt(1, 1001))
        while service.bridge.ask(lambda engine: engine.cache.ops.pages_of(STORE)).result(5) < 500:
            pass
        monkeypatch.setattr(LiveLoop, "wait", counted)
        begun = service.bridge.now()
        released.set()
        assert client.post(f"/flush_cache?timeout={SECONDS_MAX}").status_code == 200
        again = ask(client, prompt(1, 1001))
        idle, seconds = slept["idle"], (service.bridge.now() - begun) / 1e9
    assert again["cached_tokens_details"]["storage"] == 1000  # all 500 are there
    assert seconds > 3 * WRITE_S
    assert idle <= seconds + 1  # once a second


def test_a_backlog_of_writes_pins_half_of_l2_and_hits_and_answers_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Field report Y02: slow writes pinned so much of the host that even hits were computed again."""
    options = on_l3(page_size=16, max_total_tokens=1024)  # 64 pages, and 128 in L2
    pinned: list[int] = []
    with (
        serving(options) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
        held_writes(service, monkeypatch),
    ):
        turn = Bridge._turn

        def watched(bridge: Bridge) -> None:
            turn(bridge)
            pinned.append(bridge.engine.cache.ops.pages_of(STORE))

        monkeypatch.setattr(Bridge, "_turn", watched)
        for number in range(10):  # 200 pages that are to be written, of which none is
            ask(client, prompt(number, 20 * 16 + 1))
            assert ask(client, prompt(number, 20 * 16 + 1))["cached_tokens"] == 320
        # The newest but those that L1 still holds are in L2, which has room for them.
        assert ask(client, prompt(7, 20 * 16 + 1))["cached_tokens"] == 320
        assert max(pinned) == 128 // 2
    check_quiescent(service.bridge.engine)


TURNS, PAGES, L1_PAGES = 8, 8, 28  # prompts of so many pages each, of which L1 holds three


@pytest.fixture(scope="module")
def without() -> Counter[str]:
    """What they take where nothing is kept."""
    return unique(Options(page_size=16, max_total_tokens=L1_PAGES * 16, disable_radix_cache=True))


@pytest.mark.parametrize(
    ("policy", "backups"),
    [
        ("write_through", TURNS * PAGES),
        ("write_through_selective", 0),
        (
            "write_back",
            TURNS * PAGES - (L1_PAGES - 1),
        ),  # all but what L1 has; one page was not full
    ],
)
def test_prompts_that_never_repeat_move_no_page_that_nobody_needs(
    policy: str, backups: int, without: Counter[str]
) -> None:
    """Field report Y03: as many steps as without a cache, each page down once or never, none back up."""
    with_cache = unique(
        on_l3(page_size=16, max_total_tokens=L1_PAGES * 16, hicache_write_policy=policy)
    )
    assert with_cache["hits"] == without["hits"] == 0
    assert with_cache["batches"] == without["batches"] == TURNS * 2  # a prompt, and one more token
    assert with_cache["steps"] == without["steps"] == TURNS * 3
    moved = {way: with_cache[way] for way in ("backup", "load_back", "l3_read")}
    assert moved == {"backup": backups, "load_back": 0, "l3_read": 0}
    assert with_cache["l3_write"] <= backups


def unique(options: Options) -> Counter[str]:
    """Batches, steps, hits, and pages moved by way, of prompts one after another."""
    found: Counter[str] = Counter()
    before = Bridge._before

    def watched(bridge: Bridge, event: Any, now: int) -> None:
        if isinstance(event, BatchDone):
            found["batches"] += 1
            found["steps"] += event.steps
        before(bridge, event, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bridge, "_before", watched)
        with serving(options) as (url, service), httpx.Client(base_url=url, timeout=60) as client:
            for number in range(TURNS):
                asked = [number, *prompt(number, PAGES * 16)]
                found["hits"] += ask(client, asked, new=3)["cached_tokens"]
            while not service.bridge.ask(lambda engine: engine.idle).result(5):
                pass
            for way, (amount, _) in service.bridge.moved().items():
                found[way] = amount // service.page_bytes
    return found

"""KV events on the wire: a real subscriber knows what is cached where, also when it came late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.config import ConfigError
from refimpl.run.options import Options
from refimpl.serve.companions import Sockets, companions_of, kv_events_of
from refimpl.serve.kv_events import KvEventRecorder
from refimpl.serve.kv_events_config import KvEventsConfig, read_kv_events_config
from refimpl.serve.kv_publisher import KvEventPublisher
from refimpl.serve.service import Service
from scenarios.event_reader import EventReader, resident
from scenarios.serve.kv_subscriber import KvSubscriber, kv_subscriber
from scenarios.serve.served import OPEN, OPTIONS, SECONDS_MAX, serving

pytestmark = pytest.mark.live

HERE = KvEventsConfig(
    publisher="zmq",
    endpoint="tcp://127.0.0.1:*",
    bind=True,
    replay_endpoint="tcp://127.0.0.1:*",
    topic="kv",
)
TIGHT = replace(OPTIONS, max_total_tokens=256, hicache_ratio="1.5")


@contextmanager
def publishing(
    config: KvEventsConfig = HERE, options: Options = TIGHT
) -> Iterator[tuple[httpx.Client, Service, KvEventPublisher]]:
    made: list[KvEventPublisher] = []

    def companions(service: Service) -> list[KvEventPublisher]:
        made.append(kv_events_of(service, config))
        return made

    with (
        serving(options, companions=companions) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, service, made[0]
    assert not made[0]._thread.is_alive()


def generate(client: httpx.Client, tokens: list[int], **more: Any) -> None:
    params = {"temperature": 0, "max_new_tokens": 18, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": params} | more
    assert client.post("/generate", json=body).status_code == 200


def at_rest(client: httpx.Client, service: Service) -> None:
    """Wait until all copies are done and told of: a change is answered after what came before it."""
    end = monotonic() + SECONDS_MAX
    while not service.bridge.engine.idle:
        assert monotonic() < end, "it does not come to rest"
        assert client.delete("/hicache/storage-backend").status_code == 200
    assert client.delete("/hicache/storage-backend").status_code == 200


def read_all(reader: EventReader, subscriber: KvSubscriber, publisher: KvEventPublisher) -> None:
    """Everything up to the last batch, what was missed included."""
    batches = subscriber.replay(0)
    assert sorted(batches) == list(range(publisher._sequence))
    for number in range(len(batches)):
        ts, events, rank = batches[number]
        assert ts > 1e9
        assert rank == 0
        reader.read(events)


def test_a_subscriber_knows_every_page_of_both_tiers() -> None:
    """Prompts that push each other out of L1 and L2, generated pages, namespaces."""
    reader = EventReader(16, [(None, None, None), (None, "salt", None), ("team", None, None)])
    with publishing() as (client, service, publisher):
        with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
            for number in range(9):
                space = ({}, {"cache_salt": "salt"}, {"extra_key": "team"})[number % 3]
                generate(client, [number % 5 + 1] * 60 + [number] * 20, **space)
            at_rest(client, service)
            read_all(reader, subscriber, publisher)
        there = resident(service.bridge.engine.cache)
        assert reader.held == there
        assert all(there.values())


def first_heard(client: httpx.Client, subscriber: KvSubscriber) -> tuple[int, list[Any]]:
    """Keep the cache busy until the subscription has arrived."""
    while True:
        generate(client, [3] * 40)
        client.post("/flush_cache?timeout=30")
        if subscriber.events.poll(50):
            return subscriber.receive()


def test_what_is_published_and_what_is_replayed_are_the_same() -> None:
    with (
        publishing() as (client, service, publisher),
        kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber,
    ):
        first, batch = first_heard(client, subscriber)
        live = {first: batch}
        generate(client, list(range(1, 80)))
        at_rest(client, service)
        while max(live) < publisher._sequence - 1:
            number, batch = subscriber.receive()
            assert number == max(live) + 1
            live[number] = batch
        assert live == subscriber.replay(first)
        kinds = {event["type"] for batch in live.values() for event in batch[1]}
        assert kinds == {"BlockStored", "AllBlocksCleared"}


def test_a_subscriber_that_came_late_closes_its_gap_by_a_replay() -> None:
    with publishing() as (client, service, publisher):
        generate(client, list(range(1, 60)))
        at_rest(client, service)
        with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
            missed = subscriber.replay(0)
            assert missed
            number, _ = first_heard(client, subscriber)
            assert number >= len(missed)
            again = subscriber.replay(len(missed))
            assert sorted(missed | again)[: number + 1] == list(range(number + 1))


def test_server_info_tells_routers_where_events_are() -> None:
    with publishing() as (client, _, publisher):
        assert client.get("/server_info").json()["kv_events"] == {
            "publisher": "zmq",
            "endpoint_host": "127.0.0.1",
            "endpoint_port_base": publisher.port,
            "topic": "kv",
            "block_size": 16,
            "dp_size": 1,
            "replay_endpoint_port_base": publisher.replay_port,
        }


# ---- the publisher alone --------------------------------------------------------------------------


def filled(config: KvEventsConfig, batches: int) -> KvEventPublisher:
    """A publisher that has been given so many batches before its thread was started."""
    publisher = KvEventPublisher(config, KvEventRecorder(16))
    for _ in range(batches):
        say(publisher)
    return publisher


def say(publisher: KvEventPublisher) -> None:
    publisher._recorder.cleared()
    publisher.publish()


def test_only_the_last_batches_are_kept_for_replay() -> None:
    publisher = filled(with_changes(buffer_steps=3), 10)
    publisher.start()
    try:
        with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
            assert sorted(subscriber.replay(0)) == [7, 8, 9]
            assert sorted(subscriber.replay(8)) == [8, 9]
            assert subscriber.replay(10) == {}
    finally:
        publisher.stop()


def test_the_engine_never_waits_for_who_publishes_and_the_loss_shows_as_a_gap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = filled(with_changes(max_queue_size=2), 5)  # its thread does not even run
    assert publisher.dropped == 3
    assert [record.getMessage()[:21] for record in caplog.records] == ["KV events are lost: 2"]
    publisher.start()
    try:
        with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
            assert sorted(subscriber.replay(0)) == [0, 1]
            say(publisher)
            assert sorted(subscriber.replay(0)) == [0, 1, 5]
    finally:
        publisher.stop()


def test_a_subscriber_that_does_not_read_holds_up_nobody() -> None:
    publisher = filled(with_changes(hwm=1, buffer_steps=10_000), 0)
    publisher.start()
    try:
        with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
            for _ in range(5000):
                say(publisher)
            assert sorted(subscriber.replay(0)) == list(range(5000))
            assert publisher.dropped == 0
    finally:
        publisher.stop()


@pytest.mark.parametrize("frames", [[b""], [b"", b"short"], [b"", b"x" * 9], [b"a", b"b", b"c"]])
def test_a_replay_that_is_asked_for_wrongly_harms_nobody(frames: list[bytes]) -> None:
    publisher = filled(HERE, 2)
    publisher.start()
    try:
        with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
            subscriber.asks.send_multipart(frames)
            assert sorted(subscriber.replay(0)) == [0, 1]
    finally:
        publisher.stop()


def test_what_is_asked_for_wrongly_again_and_again_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = filled(HERE, 1)
    publisher.start()
    try:
        with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
            for _ in range(50):
                subscriber.asks.send_multipart([b"", b"short"])
            assert sorted(subscriber.replay(0)) == [0]
    finally:
        publisher.stop()
    assert len(caplog.records) == 1


def test_new_batches_and_the_end_do_not_wait_for_all_replays_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = filled(HERE, 1)
    replay, answered = publisher._replay, []

    def end_meanwhile(peer: bytes, first: int) -> None:
        answered.append(first)
        publisher._mail.put(None)
        replay(peer, first)

    monkeypatch.setattr(publisher, "_replay", end_meanwhile)
    with kv_subscriber(publisher.port, publisher.replay_port, "kv") as subscriber:
        for _ in range(50):
            subscriber.asks.send_multipart([b"", bytes(8)])
        assert publisher._router is not None
        assert publisher._router.poll(SECONDS_MAX * 1000)
        publisher.start()
        publisher._thread.join(SECONDS_MAX)
    assert not publisher._thread.is_alive()
    assert 1 <= len(answered) <= 2


def test_nothing_happened_is_no_batch() -> None:
    publisher = filled(HERE, 0)
    publisher.publish()
    assert publisher._sequence == 0
    publisher.stop()


# ---- the flag ---------------------------------------------------------------------------------------


def with_changes(**changes: Any) -> KvEventsConfig:
    fields = {name: getattr(HERE, name) for name in HERE.__struct_fields__}
    return KvEventsConfig(**(fields | changes))


def test_the_defaults_of_the_flag_are_upstreams() -> None:
    config = read_kv_events_config('{"publisher": "zmq"}')
    assert (config.endpoint, config.binds) == ("tcp://*:5557", True)
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert (config.topic, config.replay_endpoint) == ("", None)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/kv", True),
        ("tcp://router:5557", False),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_an_endpoint_says_whether_it_is_bound(endpoint: str, binds: bool) -> None:
    config = read_kv_events_config(json.dumps({"publisher": "zmq", "endpoint": endpoint}))
    assert config.binds == binds


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON object with publisher, endpoint"),
        ("[]", "JSON object"),
        ('{"publisher": "kafka"}', "null or zmq"),
        ('{"endpiont": "tcp://*:1"}', "endpiont"),
        ('{"buffer_steps": 0}', "buffer_steps"),
        ('{"hwm": "many"}', "hwm"),
        ('{"format": "dynamo"}', "dynamo"),
        ('{"endpoint": "*:5557"}', "tcp://\\*:5557"),
        ('{"endpoint": "tcp://*:port"}', "endpoint"),
        ('{"replay_endpoint": "udp://*:1"}', "replay_endpoint"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line_that_names_the_key(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-events-config: .*{word}"):
        read_kv_events_config(text)


def test_an_address_that_is_taken_is_one_line_too() -> None:
    publisher = filled(HERE, 0)
    taken = f"tcp://127.0.0.1:{publisher.port}"
    for key in ("endpoint", "replay_endpoint"):
        with pytest.raises(
            ConfigError, match=f"^--kv-events-config: {key}: {taken} can't be bound"
        ):
            KvEventPublisher(with_changes(**{key: taken}), KvEventRecorder(16))
    publisher.stop()


def test_the_publisher_null_publishes_nothing() -> None:
    with serving() as (_, service):
        for text in ("{}", '{"publisher": "null"}'):
            assert companions_of(service, OPEN, Sockets(kv_events_config=text)) == []
        assert service.bridge.after_turn is None

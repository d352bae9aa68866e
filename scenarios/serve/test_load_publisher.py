"""The load on the wire: as it is, again when nothing changes, and where the flag says."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")
pytest.importorskip("zmq", reason="ZMQ is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.config import ConfigError
from refimpl.serve.kv_events_config import KvEventsConfig
from refimpl.serve.load_publisher import LoadPublisher, load_endpoint
from refimpl.serve.service import Service
from scenarios.serve.kv_subscriber import kv_subscriber
from scenarios.serve.served import serving_null

pytestmark = pytest.mark.live


def test_the_load_is_sent_when_it_changes_and_when_it_does_not() -> None:
    made: list[LoadPublisher] = []

    def companions(service: Service) -> list[LoadPublisher]:
        made.append(LoadPublisher(service, "tcp://127.0.0.1:*"))
        return made

    with serving_null(companions=companions) as (url, _), kv_subscriber(made[0].port) as told:
        told.topic = b"load"
        number, idle = told.receive()
        assert idle == ["LoadStat", 0, 0, 0, 1024, 0, 0, 0, 256, 0, 0]
        assert told.receive() == (number + 1, idle)
        body: dict[str, Any] = {"input_ids": list(range(40)), "sampling_params": {}}
        assert httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 200
        computed = 0
        while not computed:
            _, stat = told.receive()
            computed = stat[9]
        assert computed == 40
    assert not made[0]._thread.is_alive()


EVENTS = KvEventsConfig(publisher="zmq", endpoint="tcp://*:5557")


@pytest.mark.parametrize(
    ("asked", "replay", "meant"),
    [
        ("off", None, None),
        ("tcp://*:1", None, "tcp://*:1"),
        ("auto", None, "tcp://*:5558"),
        ("auto", "tcp://*:5558", "tcp://*:5559"),
        ("auto", "tcp://*:6000", "tcp://*:5558"),
    ],
)
def test_the_flag_names_an_endpoint(asked: str, replay: str | None, meant: str | None) -> None:
    events = KvEventsConfig(publisher="zmq", endpoint="tcp://*:5557", replay_endpoint=replay)
    assert load_endpoint(asked, events) == meant


def test_a_flag_that_can_not_be_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--load-publish-endpoint 'on': choose off"):
        load_endpoint("on", EVENTS)
    with pytest.raises(ConfigError, match=r"^--load-publish-endpoint auto goes behind"):
        load_endpoint("auto", KvEventsConfig())

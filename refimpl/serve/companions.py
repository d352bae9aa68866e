"""What runs beside HTTP: ZMQ ingress, KV events and load, where a flag asks for them.

Must not know: what goes over the sockets. Called by: the command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.serve.admin import Keys
from refimpl.serve.app import Companion
from refimpl.serve.kv_events import KvEventRecorder
from refimpl.serve.kv_events_config import (
    KvEventsConfig,
    endpoint_of_rank,
    read_kv_events_config,
)
from refimpl.serve.kv_publisher import KvEventPublisher
from refimpl.serve.load_publisher import TOPIC, LoadPublisher, load_endpoint
from refimpl.serve.service import Service
from refimpl.serve.zmq_ingress import ZmqIngress


@dataclass(frozen=True, slots=True)
class Sockets:
    """Which sockets a server has beside HTTP; None: not that one."""

    host: str = "127.0.0.1"
    zmq_port: int | None = None  # 0: a free one
    kv_events_config: str | None = None
    load_publish_endpoint: str = "off"


def companions_of(service: Service, keys: Keys, sockets: Sockets) -> list[Companion]:
    """Bound and not started. Raises ConfigError for what can't be."""
    made: list[Companion] = []
    try:
        config = read_kv_events_config(sockets.kv_events_config or "{}")
        if config.is_on:
            add_kv_events(service, config, made)
        endpoint = load_endpoint(sockets.load_publish_endpoint, config, len(service.ranks))
        if endpoint is not None:
            add_loads(service, endpoint, made)
        if sockets.zmq_port is not None:
            made.append(ZmqIngress(service, keys, sockets.host, sockets.zmq_port))
    except BaseException:
        for each in made:
            each.stop()
        raise
    return made


def add_kv_events(service: Service, config: KvEventsConfig, made: list[Companion]) -> None:
    """A publisher a rank, appended to ``made`` as it is bound: TCP ports follow that of rank 0."""
    config.check_ranks(len(service.ranks))
    first = kv_events_of(service, config)
    made.append(first)
    for rank in range(1, len(service.ranks)):
        behind = config.of_rank(rank, first.port, first.replay_port)
        made.append(kv_events_of(service, behind, rank))


def kv_events_of(service: Service, config: KvEventsConfig, dp_rank: int = 0) -> KvEventPublisher:
    """A publisher of all that a rank's engine caches, told of in ``/server_info`` for rank 0."""
    page_size = service.engine.cache.page_size
    recorder = KvEventRecorder(page_size)
    publisher = KvEventPublisher(config, recorder, dp_rank)
    bridge = service.ranks.ranks[dp_rank].bridge
    bridge.engine.watch(recorder)
    bridge.after_turn = publisher.publish
    if not dp_rank:
        service.settings["kv_events"] = config.description(
            page_size, len(service.ranks), publisher.port, publisher.replay_port
        )
    return publisher


def add_loads(service: Service, endpoint: str, made: list[Companion]) -> None:
    """A publisher a rank likewise, told of in ``/server_info`` beside KV events."""
    first = LoadPublisher(service, endpoint)
    made.append(first)
    for rank in range(1, len(service.ranks)):
        behind = endpoint_of_rank(endpoint, rank, first.port)
        made.append(LoadPublisher(service, behind, rank))
    told = service.settings.get("kv_events")
    if told:
        told |= {"load_endpoint_port_base": first.port, "load_topic": TOPIC}

"""What runs beside HTTP: ZMQ ingress, KV events and load, where a flag asks for them.

Must not know: what goes over the sockets. Called by: the command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.serve.admin import Keys
from refimpl.serve.app import Companion
from refimpl.serve.kv_events import KvEventRecorder
from refimpl.serve.kv_events_config import KvEventsConfig, read_kv_events_config
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
            made.append(kv_events_of(service, config))
        endpoint = load_endpoint(sockets.load_publish_endpoint, config)
        if endpoint is not None:
            made.append(load_of_service(service, endpoint))
        if sockets.zmq_port is not None:
            made.append(ZmqIngress(service, keys, sockets.host, sockets.zmq_port))
    except BaseException:
        for each in made:
            each.stop()
        raise
    return made


def kv_events_of(service: Service, config: KvEventsConfig) -> KvEventPublisher:
    """A publisher of all that the service's engine caches, told of in ``/server_info``."""
    page_size = service.engine.cache.page_size
    recorder = KvEventRecorder(page_size)
    publisher = KvEventPublisher(config, recorder)
    service.bridge.engine.watch(recorder)
    service.bridge.after_turn = publisher.publish
    service.settings["kv_events"] = config.description(
        page_size, publisher.port, publisher.replay_port
    )
    return publisher


def load_of_service(service: Service, endpoint: str) -> LoadPublisher:
    """A publisher of the service's load, told of in ``/server_info`` beside KV events."""
    publisher = LoadPublisher(service, endpoint)
    told = service.settings.get("kv_events")
    if told:
        told |= {"load_endpoint_port_base": publisher.port, "load_topic": TOPIC}
    return publisher

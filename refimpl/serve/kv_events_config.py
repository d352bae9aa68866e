"""``--kv-events-config``: a JSON object with SGLang's keys (spec 2.12), and what can be wrong with it.

Must not know: sockets, events. Called by: companions, kv_publisher.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from refimpl.config import ConfigError, require

FLAG: Final = "--kv-events-config"
_WILDCARDS: Final = ("*", "0.0.0.0", "::")
_TRANSPORTS: Final = ("tcp://", "ipc://", "inproc://")
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where events go. ``tcp://*:PORT`` binds every interface; ``bind`` None: as the endpoint suggests."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000  # batches kept for replay
    hwm: _Count = 100_000  # batches a slow subscriber may be behind before it loses some
    max_queue_size: _Count = 100_000  # batches waiting to be sent
    topic: str = ""
    format: str = "default"

    @property
    def is_on(self) -> bool:
        """Is anything published?"""
        return self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Bind the socket of events rather than connect it."""
        if self.bind is not None:
            return self.bind
        local = self.endpoint.startswith(("ipc://", "inproc://"))
        return local or any(wildcard in self.endpoint for wildcard in _WILDCARDS)

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError where the ports of events and of their replay would meet."""
        if self.replay_endpoint is None or not self.binds:
            return
        (host, port), (replay_host, replay_port) = (
            (place.rpartition(":")[0], place.rpartition(":")[2])
            for place in (self.endpoint, self.replay_endpoint)
        )
        if host != replay_host or not (port.isdigit() and replay_port.isdigit()):
            return
        require(
            abs(int(port) - int(replay_port)) >= ranks,
            f"{FLAG}: endpoint and replay_endpoint must be at least {ranks} ports apart, one for each"
            f" rank of --dp-size; {port} and {replay_port} are not",
        )

    def of_rank(self, rank: int, port: int, replay_port: int) -> KvEventsConfig:
        """The same for another data-parallel rank than 0, whose ports these are: so many further on."""
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=endpoint_of_rank(self.endpoint, rank, port),
            replay_endpoint=replay and endpoint_of_rank(replay, rank, replay_port),
        )

    def description(
        self, block_size: int, dp_size: int, port: int, replay_port: int
    ) -> dict[str, Any] | None:
        """What ``/server_info`` says for routers; None where they can't come by TCP."""
        if not self.binds or not self.endpoint.startswith("tcp://"):
            return None
        told: dict[str, Any] = {
            "publisher": self.publisher,
            "endpoint_host": self.endpoint.removeprefix("tcp://").rpartition(":")[0],
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": dp_size,
        }
        if replay_port:
            told["replay_endpoint_port_base"] = replay_port
        return told


def endpoint_of_rank(endpoint: str, rank: int, port: int) -> str:
    """The endpoint of a rank, where ``port`` is that of rank 0: TCP by port, what is local by name."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    return f"{endpoint.rpartition(':')[0]}:{port + rank}"


def read_kv_events_config(text: str) -> KvEventsConfig:
    """Parse the flag. Raises ConfigError that names the key at fault."""
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        keys = ", ".join(KvEventsConfig.__struct_fields__)
        raise ConfigError(f"{FLAG}: {error}; a JSON object with {keys}") from None
    require(
        config.publisher in ("null", "zmq"),
        f"{FLAG}: unknown publisher {config.publisher!r}; choose null or zmq",
    )
    require(
        config.format == "default",
        f"{FLAG}: format {config.format!r} is not served; leave it out: hashes depend on the"
        " namespace in the default format too",
    )
    for key in ("endpoint", "replay_endpoint"):
        _check_endpoint(key, getattr(config, key))
    return config


def _check_endpoint(key: str, endpoint: str | None) -> None:
    if endpoint is None:
        return
    is_good = endpoint.startswith(_TRANSPORTS)
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        is_good = bool(host) and (port == "*" or (port.isascii() and port.isdigit()))
    require(is_good, f"{FLAG}: {key} {endpoint!r} is not like tcp://*:5557 or ipc://PATH")

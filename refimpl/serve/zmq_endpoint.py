"""Addresses of ZMQ sockets: from flags to endpoints, and a bind that says what is wrong in one line.

Called by: zmq_ingress, kv_publisher, load_publisher.
"""

from __future__ import annotations

import socket
from typing import Any

import zmq

from refimpl.config import ConfigError


def tcp_endpoint(host: str, port: int) -> str:
    """The endpoint of an address; names are looked up, because libzmq binds numbers alone."""
    if host != "*":
        try:
            host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind(owner: zmq.Socket[Any], endpoint: str, what: str) -> str:
    """Bind and return the endpoint, with the port it got. Raises ConfigError, naming ``what``."""
    owner.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        owner.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{what}: {endpoint} can't be bound: {zmq.strerror(error.errno or 0)}"
        ) from None
    return owner.getsockopt_string(zmq.LAST_ENDPOINT)


def port_of(endpoint: str | None) -> int:
    """The port of a bound endpoint, 0 where the transport has none."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return 0
    return int(endpoint.rpartition(":")[2])


def connect(owner: zmq.Socket[Any], endpoint: str, what: str) -> None:
    """Connect, now or when somebody listens. Raises ConfigError, naming ``what``."""
    owner.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        owner.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{what}: {endpoint} can't be reached: {zmq.strerror(error.errno or 0)}"
        ) from None

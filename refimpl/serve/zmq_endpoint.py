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


def bind(owner: zmq.Socket[Any], endpoint: str, what: str) -> int:
    """Bind and return the port, 0 where the transport has none. Raises ConfigError, naming ``what``."""
    owner.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        owner.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{what}: {endpoint} can't be bound: {error.strerror}") from None
    bound = owner.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(bound.rpartition(":")[2]) if bound.startswith("tcp://") else 0


def connect(owner: zmq.Socket[Any], endpoint: str, what: str) -> None:
    """Connect, now or when somebody listens. Raises ConfigError, naming ``what``."""
    owner.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        owner.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{what}: {endpoint} can't be reached: {error.strerror}") from None

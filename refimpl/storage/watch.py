"""Is a server there? Asked before each call of a client library that would try for seconds.

A connection on which nothing is said: the kernel closes it when the server's process ends, however it
ends, and looking at it costs a microsecond. A server that hangs, or a network that swallows packets,
goes unnoticed here; those take as long as the library gives them.
Called by: mooncake.
"""

from __future__ import annotations

import socket
from threading import Lock


class Watch:
    """Watches whatever listens at ``host:port``, through any number of restarts."""

    def __init__(self, host: str, port: int, timeout_s: float = 1.0) -> None:
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None
        self._lock = Lock()

    def is_up(self) -> bool:
        """Does the process that was there still run, or has another taken its place?"""
        with self._lock:
            if self._connection is None or not _is_open(self._connection):
                self._connect()
            return self._connection is not None

    def _connect(self) -> None:
        self._drop()
        try:
            self._connection = socket.create_connection(self._address, self._timeout_s)
        except OSError:
            return
        self._connection.setblocking(False)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Watch no more."""
        with self._lock:
            self._drop()


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True  # nothing has been said, and nobody has hung up
    except OSError:
        return False

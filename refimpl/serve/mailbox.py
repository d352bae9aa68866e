"""What other threads leave for a thread that waits on sockets: a queue that also wakes it.

ZMQ sockets belong to one thread each, so nobody else may send on them. Others put items here; the owner
has a file descriptor to poll beside its sockets. Must not know: what the items are. Called by:
zmq_ingress, kv_publisher.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Any thread puts, one thread takes. Putting never waits."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._has_rung = False

    def fileno(self) -> int:
        """What becomes readable when something was put in."""
        return self._ear.fileno()

    def put(self, item: Item) -> None:
        """Leave ``item``; after ``close`` it is lost."""
        self._items.append(item)
        if not self._has_rung:
            self._has_rung = True
            with contextlib.suppress(OSError):  # the owner has gone
                self._bell.send(b"\0")

    def take(self) -> list[Item]:
        """All that has been put in, in order; empties the box."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)
        # Cleared before the items are looked at: whoever puts one later rings again.
        self._has_rung = False
        items = self._items
        return [items.popleft() for _ in range(len(items))]

    def close(self) -> None:
        """Let the descriptors go."""
        self._bell.close()
        self._ear.close()

"""How busy the server is, over a PUB socket of its own, for routers (spec 11.7).

A thread reads the load off the engine a few times a second and sends it when it has changed, at least once
a second. Must not know: how a load comes about. Called by: companions.
"""

from __future__ import annotations

import logging
import time
from threading import Event as Flag
from threading import Thread
from typing import Final

import msgspec
import zmq

from refimpl.config import ConfigError
from refimpl.serve.bridge import StoppedError
from refimpl.serve.kv_events_config import KvEventsConfig
from refimpl.serve.load import Load, ask_load
from refimpl.serve.service import Service
from refimpl.serve.zmq_endpoint import bind, port_of

FLAG: Final = "--load-publish-endpoint"
TOPIC: Final = "load"
EVERY_S: Final = 0.1
_AGAIN_S: Final = 1.0  # an unchanged load is sent again, so that who is silent is known to be gone
_BEHIND_MAX: Final = 16  # messages a subscriber may be behind: old loads are worth nothing
_JOIN_S: Final = 10

_log = logging.getLogger(__name__)


class LoadStat(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The load of one rank, an array that begins with its name."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int
    num_waiting_uncached_tokens: int
    num_total_tokens: int
    max_running_requests: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int


class LoadPublisher:
    """Publishes the load of a data-parallel rank from ``start`` to ``stop``.

    Raises ConfigError for an address that can't be bound.
    """

    def __init__(self, service: Service, endpoint: str, dp_rank: int = 0) -> None:
        self._service, self._dp_rank = service, dp_rank
        self._rank = service.ranks.ranks[dp_rank]
        self._stopping = Flag()
        self._sequence = 0
        self._thread = Thread(target=self._run, name="load", daemon=True)
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, _BEHIND_MAX)
        try:
            self.endpoint = bind(self._publisher, endpoint, FLAG)
        except BaseException:
            self._close()
            raise

    def __str__(self) -> str:
        return f"load on {self.endpoint}"

    @property
    def port(self) -> int:
        """Where the load is published."""
        return port_of(self.endpoint)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def wind_down(self) -> None:
        """End: routers are not to count on a server that is stopping."""
        self._stopping.set()

    def stop(self) -> None:
        """Let the socket go."""
        self._stopping.set()
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join(_JOIN_S)

    def _close(self) -> None:
        self._publisher.close(0)
        self._context.term()

    def _run(self) -> None:
        try:
            self._publish()
        except StoppedError:
            pass
        except BaseException:
            _log.exception("the load is not published any more")
        finally:
            self._close()

    def _publish(self) -> None:
        last, sent_at = None, 0.0
        while not self._stopping.wait(EVERY_S):
            stat = self._stat(ask_load(self._rank).result())
            now = time.monotonic()
            if stat != last or now - sent_at >= _AGAIN_S:
                self._send(stat)
                last, sent_at = stat, now

    def _stat(self, load: Load) -> LoadStat:
        return LoadStat(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_tokens=load.used_tokens,
            max_total_num_tokens=load.total_tokens,
            attn_dp_rank=self._dp_rank,
            num_waiting_uncached_tokens=load.waiting_uncached_tokens,
            num_total_tokens=load.used_tokens + load.waiting_uncached_tokens,
            max_running_requests=self._service.engine.running_max,
            total_prefill_uncached_tokens=load.computed_tokens,
            total_prefill_busy_us=load.prefill_busy_us,
        )

    def _send(self, stat: LoadStat) -> None:
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._publisher.send_multipart((TOPIC.encode(), number, msgspec.msgpack.encode(stat)))


def load_endpoint(asked: str, events: KvEventsConfig, ranks: int = 1) -> str | None:
    """The endpoint of rank 0 that the flag means; None: off. ``auto`` is behind the ports of KV events."""
    if asked == "off":
        return None
    if asked != "auto":
        if asked.startswith("tcp://"):
            return asked
        raise ConfigError(f"{FLAG} {asked!r}: choose off, auto or an address like tcp://*:5559")
    host, _, port = events.endpoint.rpartition(":")
    if not events.is_on or not events.binds or not port.isdigit():
        raise ConfigError(
            f"{FLAG} auto goes behind the port of --kv-events-config, which must be bound and a number"
        )
    taken = (events.replay_endpoint or "").rpartition(":")[2]
    behind = int(port) + ranks
    if taken.isdigit() and abs(int(taken) - behind) < ranks:  # some rank's replay is there
        behind = int(taken) + ranks
    return f"{host}:{behind}"

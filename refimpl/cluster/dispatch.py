"""Which data-parallel rank serves a request: a router's policies once more, inside an instance.

Must not know: HTTP, engines. Called by: the simulated world's setup, serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from refimpl.cluster.router import Router, RouterConfig
from refimpl.config import require_choice
from refimpl.keys import PageKey

METHODS: Final = ("round_robin", "shortest_queue", "cache_aware", "auto")


def dispatch_config(method: str, seed: int = 0) -> RouterConfig:
    """The policy of ``--load-balance-method``; upstream's auto is round_robin here. Raises ConfigError."""
    require_choice("--load-balance-method", method, METHODS)
    return RouterConfig("round_robin" if method == "auto" else method, seed=seed)


class RankRouter:
    """``instances`` chooses an instance, that instance's own dispatch one of its ``ranks``.

    Workers are numbered through: those of the first instance first.
    """

    def __init__(self, instances: Router, ranks: int, dispatch: RouterConfig) -> None:
        self._instances, self._ranks = instances, ranks
        self._dispatches = [Router(ranks, dispatch) for _ in instances.in_flight]

    def choose(self, keys: Sequence[PageKey], session: int = 0) -> int:
        """The rank for a request with these pages; call ``started`` when it is sent."""
        instance = self._instances.choose(keys, session)
        return instance * self._ranks + self._dispatches[instance].choose(keys, session)

    @property
    def has_workers(self) -> bool:
        """Some rank of some instance is there."""
        return self._instances.has_workers

    def left(self, worker: int) -> None:
        """A rank has stopped; an instance has left with its last one."""
        instance, rank = divmod(worker, self._ranks)
        self._dispatches[instance].left(rank)
        if not self._dispatches[instance].has_workers:
            self._instances.left(instance)

    def started(self, worker: int) -> None:
        """A request was sent to ``worker``."""
        instance, rank = divmod(worker, self._ranks)
        self._instances.started(instance)
        self._dispatches[instance].started(rank)

    def finished(self, worker: int) -> None:
        """A request of ``worker`` is over, well or not."""
        instance, rank = divmod(worker, self._ranks)
        self._instances.finished(instance)
        self._dispatches[instance].finished(rank)

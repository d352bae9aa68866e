"""The data-parallel ranks of a server behind one object: who gets a request, where it went.

Each rank has an engine, a thread for it, a cache and metrics of its own; what is stored in L3 is for all.
Must not know: HTTP, text, what an engine decides. Called by: settle, service, routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from refimpl.cluster.router import Router, RouterConfig
from refimpl.keys import PageKey, namespace_seed
from refimpl.serve.bridge import Asked, Bridge, Ended, Heard, Tokens
from refimpl.serve.metrics import Metrics
from refimpl.storage.names import Namespace
from refimpl.workload.request import RequestSpec


@dataclass(frozen=True, slots=True)
class DataRank:
    """One rank: what its requests go through, and what counts them."""

    bridge: Bridge
    metrics: Metrics


class Dispatch:
    """Chooses among ``ranks``, which it starts and stops. A rid names its rank, see ``rank_of``."""

    def __init__(self, ranks: Sequence[DataRank], config: RouterConfig, page_size: int) -> None:
        self.ranks = list(ranks)
        self._router = Router(len(ranks), config)
        self._page_size = page_size
        self._needs_keys = config.policy == "cache_aware"
        self._lock = Lock()  # of the router: clients and the engines' threads call

    def __len__(self) -> int:
        return len(self.ranks)

    def start(self) -> None:
        """Begin."""
        for rank in self.ranks:
            rank.bridge.start()

    def stop(self) -> None:
        """Let what is under way end, on all ranks at the same time, then end all threads."""
        for rank in self.ranks:
            rank.bridge.wind_down()
        for rank in self.ranks:
            rank.bridge.stop()

    @property
    def error(self) -> BaseException | None:
        """What has stopped a rank, of the first that something stopped."""
        return next((found for rank in self.ranks if (found := rank.bridge.error)), None)

    @property
    def is_healthy(self) -> bool:
        """All ranks run."""
        return all(rank.bridge.is_healthy for rank in self.ranks)

    @property
    def is_ready(self) -> bool:
        """All ranks run and take new requests."""
        return all(rank.bridge.is_ready for rank in self.ranks)

    def names(self) -> Namespace | None:
        """What pages are called in L3, by any rank: they store under the same names. None without L3."""
        return next((names for rank in self.ranks if (names := rank.bridge.names())), None)

    def rank_of(self, rid: int) -> int:
        """Which rank was asked for ``rid``."""
        return (rid - 1) % len(self.ranks)

    def submit(self, asked: Asked, heard: Heard) -> int:
        """Ask the rank that is asked for, or one of the policy's choice; see Bridge.submit."""
        if len(self.ranks) == 1:
            return self.ranks[0].bridge.submit(asked, heard)
        keys = self._keys(asked.spec) if self._needs_keys else []
        with self._lock:
            rank = self._chosen(asked.dp_rank, keys)
            self._router.started(rank)
        return self.ranks[rank].bridge.submit(asked, self._noting(rank, heard))

    def abort(self, rid: int) -> None:
        """Nobody waits for ``rid`` any more; that it is over already does no harm."""
        self.ranks[self.rank_of(rid)].bridge.abort(rid)

    def abort_all(self) -> None:
        """Nobody waits for anything any more, whichever way it was asked."""
        for rank in self.ranks:
            rank.bridge.abort_all()

    def _chosen(self, named: int | None, keys: list[PageKey]) -> int:
        """The rank that the client names, else one of the policy's choice."""
        if named is None:
            return self._router.choose(keys)
        self._router.told(named, keys)
        return named

    def _keys(self, spec: RequestSpec) -> list[PageKey]:
        seed = namespace_seed(spec.extra_key, spec.cache_salt, spec.lora_id)
        return spec.prompt.page_keys(self._page_size, seed)

    def _noting(self, rank: int, heard: Heard) -> Callable[[Tokens | Ended], None]:
        """Hand on what is said, and tell the router of the end."""

        def told(said: Tokens | Ended) -> None:
            if isinstance(said, Ended):
                with self._lock:
                    self._router.finished(rank)
            heard(said)

        return told

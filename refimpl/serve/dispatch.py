"""The data-parallel ranks of a server behind one object: who gets a request, where it went.

Each rank has an engine, a thread for it, a cache and metrics of its own; what is stored in L3 is for all.
Must not know: HTTP, text, what an engine decides. Called by: settle, service, routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from refimpl.cluster.router import Router, RouterConfig
from refimpl.keys import PageKey, namespace_seed
from refimpl.serve.bridge import Asked, Bridge, Ended, Heard, Tokens
from refimpl.serve.metrics import Metrics
from refimpl.storage.names import Namespace
from refimpl.workload.request import RequestSpec

_STOPPED_RANK: Final = "error: the engine has stopped on data-parallel rank"


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
        """All ranks run.

        With one that has stopped the others go on serving, and it is no less a case for whoever watches: a
        part of capacity and cache is gone, attach and detach succeed no more, and it does not come back but
        by a restart, whose time the operator chooses.
        """
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
        """Ask the rank that is asked for, or one of the policy's choice; see Bridge.submit.

        A rank that has stopped gets no requests, but for those that name it, which fail and say so.
        """
        if len(self.ranks) == 1:
            return self.ranks[0].bridge.submit(asked, heard)
        keys = self._keys(asked.spec) if self._needs_keys else []
        while (rank := self._next(asked.dp_rank, keys)) is not None:
            rid = self.ranks[rank].bridge.offer(asked, self._noting(rank, heard))
            if rid is not None:
                return rid
            self._leave(rank)
        if asked.dp_rank is None:
            return self.ranks[0].bridge.refuse(heard)
        why = f"{_STOPPED_RANK} {asked.dp_rank}: ask another or none in particular, or restart the server"
        return self.ranks[asked.dp_rank].bridge.refuse(heard, why)

    def abort(self, rid: int) -> None:
        """Nobody waits for ``rid`` any more; that it is over already does no harm."""
        self.ranks[self.rank_of(rid)].bridge.abort(rid)

    def abort_all(self) -> None:
        """Nobody waits for anything any more, whichever way it was asked."""
        for rank in self.ranks:
            rank.bridge.abort_all()

    def _next(self, named: int | None, keys: list[PageKey]) -> int | None:
        """The rank that the client names, else one of the policy's choice; None: stopped."""
        with self._lock:
            if named is None:
                if not self._router.has_workers:
                    return None
                rank = self._router.choose(keys)
            elif self._router.is_present(named):
                rank = named
                self._router.told(rank, keys)
            else:
                return None
            self._router.started(rank)
            return rank

    def _leave(self, rank: int) -> None:
        """A rank has turned out to have stopped, with a request that it did not take."""
        with self._lock:
            self._router.finished(rank)
            if self._router.is_present(rank):
                self._router.left(rank)

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

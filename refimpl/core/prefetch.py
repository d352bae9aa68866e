"""L3 -> L2 reads: who asks, who waits, when they stop waiting, what becomes of what landed.

An op has waiters; each leaves by the policy and its own deadline, and the last one out cancels
the read. A request whose next missing page is being read already joins that op and opens a
second one for what the first does not cover.

    PROBING -> READING     L3 has enough of it and L2 has room
    PROBING -> over        revoked: below the threshold, no room, nobody waits any more
    READING -> over        ``Fetched``; what landed is in the tree

Must not know: batches, L1. Called by: scheduler, engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from refimpl.config import PrefetchConfig
from refimpl.core.cache import HiCache
from refimpl.core.ops import FETCH, Op
from refimpl.core.outbox import Outbox
from refimpl.core.page import Page
from refimpl.core.policy import prefetch_pages_min, prefetch_timeout_ns, usable_pages
from refimpl.core.request import Request
from refimpl.facts import Prefetch, Skipped
from refimpl.keys import PageKey
from refimpl.messages import CancelFetch, Fetch, Probe
from refimpl.units import NS_PER_S

# How long a page that L3 said it had and did not deliver is taken for missing. Assumed: longer
# than a burst of requests for one prefix, short against the life of an object.
SUSPECT_NS: Final = 30 * NS_PER_S
_SUSPECTS_MAX: Final = 4096
NEVER: Final = 1 << 62
_ASKS_MAX: Final = 3  # times a request asks L3: at submit, and when what it counted on has left L2


class FetchOp(Op):
    """An L3 read of ``keys[first:]``; its pages are known by slots alone until they land."""

    __slots__ = (
        "cancelled",
        "entered",
        "first",
        "found",
        "keys",
        "landed",
        "request",
        "slots",
        "waiters",
    )

    def __init__(
        self, op_id: int, request: Request, keys: list[PageKey], first: int, anchor: Page | None
    ) -> None:
        super().__init__(op_id, FETCH, request.rid, [], anchor)
        self.request = request  # whose pages the keys name; it may be over
        self.keys = keys  # from the root to the last page it asks for
        self.first = first
        self.slots: list[int] = []  # of the pages being read; empty while probing
        self.found = 0  # pages that L3 said it has; 0 until it has answered
        self.landed = 0  # leading pages that have arrived
        self.entered = 0  # of them, pages that are in the tree
        # rid -> when it began to wait, and the depth up to which the pages are its own too
        self.waiters: dict[int, tuple[int, int]] = {}
        self.cancelled = False


class Prefetcher:
    """The L3 reads of one instance."""

    __slots__ = ("_cache", "_config", "_fetches", "_out", "_parked", "_suspects", "_waiting")

    def __init__(self, cache: HiCache, config: PrefetchConfig, out: Outbox) -> None:
        self._cache = cache
        self._config = config
        self._out = out
        self._fetches: dict[PageKey, FetchOp] = {}  # by each key an open op has yet to bring
        self._waiting: dict[int, Request] = {}
        self._parked: dict[int, FetchOp] = {}  # answered, and no room in L2 yet
        self._suspects: dict[PageKey, int] = {}  # key -> until when it is taken for missing

    def set_config(self, config: PrefetchConfig) -> None:
        """Follow another policy from now on."""
        self._config = config
        for request in self._waiting.values():
            request.waits_until = 0

    # ---- asking ---------------------------------------------------------------------------------

    def begin(self, request: Request, have: int, now: int) -> None:
        """Ask L3 for what ``request`` lacks behind its first ``have`` pages, if it is worth it."""
        page_size = self._cache.config.page_size
        usable = min(usable_pages(request.tokens, page_size), len(request.keys))
        request.expected = have
        last = self._before_suspect(request.keys, have, usable, now)
        while have < last:
            op = self._fetches.get(request.keys[have])
            if op is None or op.cancelled:
                break
            shared = _common_end(op.keys, request.keys, last)
            self._join(op, request, now, shared)
            self._note(request.rid, "joined", shared - have)
            have = shared
        if last - have >= prefetch_pages_min(self._cache.config):
            request.asked += 1
            request.asked_at = now
            self._open(request, have, last, now)
        elif last > have:
            self._out.facts.append(Skipped(request.rid, "prefetch", last - have, "below_threshold"))

    def asks_again(self, request: Request, now: int) -> bool:
        """``request`` is next: is L3 worth another question, since the last one has grown old?

        Nothing is pinned for a request that waits its turn. Under pressure what it counted on may
        have left L2, and what L3 did not have may have come and gone meanwhile; L3 has it either
        way. An answer is old when pages were lost or it is older than the timeout's base.
        """
        if not self._cache.host.generation or self._config.policy == "best_effort":
            return False  # under best_effort nobody would wait for the answer
        if request.asked >= _ASKS_MAX:
            return False
        usable = min(usable_pages(request.tokens, self._cache.config.page_size), len(request.keys))
        have = self._cache.tree.find(request.keys, usable).pages
        is_old = now - request.asked_at >= self._config.timeout_base_ns
        wanted = usable if is_old else request.expected
        if wanted - have < prefetch_pages_min(self._cache.config):
            return False
        self.begin(request, have, now)
        return bool(request.fetches)

    def _open(self, request: Request, first: int, last: int, now: int) -> None:
        match = self._cache.tree.find(request.keys, first)
        anchor = self._cache.page_at(match, first - 1) if match.pages == first and first else None
        op_id = self._cache.ops.next_id()
        op = FetchOp(op_id, request, request.keys[:last], first, anchor)
        self._cache.ops.open(op)
        self._fetches.update(dict.fromkeys(op.keys[first:], op))
        self._join(op, request, now, last)
        self._out.commands.append(Probe(op.id, request.rid, request.keys[first:last]))

    def _join(self, op: FetchOp, request: Request, now: int, last: int) -> None:
        op.waiters[request.rid] = (now, last)
        request.fetches.append(op.id)
        request.waits_until = 0
        self._waiting[request.rid] = request

    def _before_suspect(self, keys: Sequence[PageKey], first: int, last: int, now: int) -> int:
        if not self._suspects:
            return last
        for at in range(first, last):
            until = self._suspects.get(keys[at])
            if until is not None:
                if now < until:
                    return at
                del self._suspects[keys[at]]
        return last

    # ---- answers --------------------------------------------------------------------------------

    def probed(self, op_id: int, hits: int) -> None:
        """L3 has the leading ``hits`` pages of what the op asks for."""
        op = self._get(op_id)
        self._wake(op)
        assert not op.slots and 0 <= hits <= len(op.keys) - op.first
        self._note(op.rid, "probed", hits)
        reason = ""
        if not op.waiters:
            reason = "nobody_waits"
        elif hits < prefetch_pages_min(self._cache.config):
            reason = "below_threshold" if hits else "not_in_storage"
        if reason:
            self._note(op.rid, "revoked", hits, reason)
            self._close(op)
            return
        op.found = hits
        self._parked[op.id] = op
        self._start_parked()

    def _start_parked(self) -> None:
        """Begin the reads that L3 has answered, oldest first, as far as L2 can stage them.

        One that has no room waits for the reads under way to give back theirs; under wait_complete one
        that has room for a part does so too, since whoever waits for it wants all there is.
        """
        for op in list(self._parked.values()):
            others = any(other.slots for other in self._open_ops())
            wants_all = others and self._config.policy == "wait_complete"
            hits = self._room_for(op.found, whole=wants_all)
            if not hits and others:
                return
            del self._parked[op.id]
            if hits < op.found:
                left = op.found - hits
                self._out.facts.append(Skipped(op.rid, "prefetch", left, "host_capacity"))
            if hits:
                self._start(op, hits)
            else:
                self._note(op.rid, "revoked", 0, "host_capacity")
                self._close(op)

    def _start(self, op: FetchOp, hits: int) -> None:
        op.slots = self._cache.host.pool.take(hits)
        self._forget_keys(op, op.first + hits)
        del op.keys[op.first + hits :]
        self._note(op.rid, "started", hits)
        self._out.commands.append(Fetch(op.id, list(op.keys[op.first :]), list(op.slots)))

    def _room_for(self, hits: int, *, whole: bool) -> int:
        """How many of ``hits`` pages L2 can stage now; 0 when these are too few.

        That is below the threshold, or with ``whole`` not all of them.
        """
        pool = self._cache.host.pool
        wanted = hits
        if pool.capacity is not None:
            limit = max(pool.capacity * self._config.capacity_percent // 100, 1)
            held = sum(len(other.slots) for other in self._open_ops())
            wanted = min(hits, max(limit - held, 0))
        least = hits if whole else prefetch_pages_min(self._cache.config)
        room = self._cache.host.make_room(wanted) if wanted >= least else 0
        return room if room >= least else 0

    def landed(self, op_id: int, pages: int) -> None:
        """The leading ``pages`` pages of the op have arrived in L2."""
        op = self._get(op_id)
        assert op.landed <= pages <= len(op.slots)
        op.landed = pages
        self._wake(op)

    def fetched(self, op_id: int, pages: int, now: int) -> None:
        """The read is over; ``pages`` arrived in all. They enter the tree, whoever waits."""
        op = self._get(op_id)
        self.landed(op_id, pages)
        self._enter(op)
        asked = len(op.slots)
        if pages < asked:
            self._cache.host.pool.give_back(op.slots[pages:])
            if not op.cancelled:
                self._suspect(op.keys[op.first + pages], now)
        arrived = "completed" if pages == asked else "failed"
        step = "stopped" if op.cancelled else arrived
        self._note(op.rid, step, pages)
        self._close(op)
        self._start_parked()

    def stored(self, keys: Sequence[PageKey]) -> None:
        """These keys were written: whatever was thought to be missing is there again."""
        if self._suspects:
            for key in keys:
                self._suspects.pop(key, None)

    def _suspect(self, key: PageKey, now: int) -> None:
        if len(self._suspects) >= _SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]  # the oldest
        self._suspects[key] = now + SUSPECT_NS

    def _enter(self, op: FetchOp) -> None:
        """What has landed and is not in the tree yet goes there, and counts for all who wait."""
        if op.landed == op.entered:
            return
        first = op.first + op.entered
        self._cache.tree.residency.naming(op.request, first, op.first + op.landed)
        new, node = self._cache.insert_fetched(op.keys, first, op.slots[op.entered : op.landed])
        self._note(op.rid, "landed", new, "" if node is not None else "parent_missing")
        if node is not None:
            for rid, (_, shared) in op.waiters.items():
                request, last = self._waiting[rid], min(op.first + op.landed, shared)
                if last <= first:
                    continue
                request.fetched.append((first, last))
                if request.expected >= first:
                    request.expected = max(request.expected, last)
        self._forget_keys(op, first, op.first + op.landed)  # they don't come a second time
        op.entered = op.landed

    # ---- waiting --------------------------------------------------------------------------------

    def must_wait(self, request: Request, now: int) -> bool:
        """The device may take ``request``: does it wait on? If not, what landed is in the tree."""
        if not request.fetches:
            return False
        if now < request.waits_until:
            return True
        ops = [self._get(op_id) for op_id in request.fetches]
        if any(self._keeps_waiting(op, request.rid, now) for op in ops):
            request.waits_until = self._wakes_at(ops, request.rid, now)
            return True
        if self._config.policy == "timeout":
            self.leave(request, now=now)
        for op in ops:
            self._enter(op)
        return False

    def _wakes_at(self, ops: list[FetchOp], rid: int, now: int) -> int:
        if self._config.policy != "timeout":
            return NEVER
        return min((at for op in ops if (at := self._deadline(op, rid)) > now), default=0)

    def _wake(self, op: FetchOp) -> None:
        """Something changed about ``op``: its waiters are looked at again."""
        for rid in op.waiters:
            self._waiting[rid].waits_until = 0

    def _has_own_part(self, op: FetchOp, rid: int) -> bool:
        """What ``rid`` waits for in this read has landed, whatever others still wait for."""
        _, last = op.waiters[rid]
        return bool(op.slots) and op.first + op.landed >= min(last, op.first + len(op.slots))

    def _keeps_waiting(self, op: FetchOp, rid: int, now: int) -> bool:
        if self._has_own_part(op, rid):
            return False
        match self._config.policy:
            case "best_effort":
                return False
            case "wait_complete":
                return True
            case _:
                return not self._is_late(op, rid, now)

    def _is_late(self, op: FetchOp, rid: int, now: int) -> bool:
        if self._config.policy != "timeout" or self._has_own_part(op, rid):
            return False
        return now >= self._deadline(op, rid)

    def _deadline(self, op: FetchOp, rid: int) -> int:
        tokens = op.found * self._cache.config.page_size
        return op.waiters[rid][0] + prefetch_timeout_ns(self._config, tokens)

    def deadline(self, now: int) -> int | None:
        """The next time after ``now`` at which a request may stop waiting, or None."""
        if self._config.policy != "timeout" or not self._waiting:
            return None
        deadlines = (self._deadline(op, rid) for op in self._open_ops() for rid in op.waiters)
        return min((at for at in deadlines if at > now), default=None)

    def leave(self, request: Request, now: int | None = None) -> None:
        """``request`` waits no longer. What has landed enters the tree; the last one out cancels.

        With ``now`` given, reads that are past its deadline are noted as timed out.
        """
        gone: list[FetchOp] = []
        for op_id in request.fetches:
            op = self._get(op_id)
            self._enter(op)
            if now is not None and self._is_late(op, request.rid, now):
                self._note(request.rid, "timed_out", op.landed)
                request.asked = _ASKS_MAX  # it has had its budget
            del op.waiters[request.rid]
            if not op.waiters and not op.cancelled:
                op.cancelled = True
                if op.slots:
                    self._out.commands.append(CancelFetch(op.id))
                elif self._parked.pop(op.id, None) is not None:
                    gone.append(op)
        request.fetches.clear()
        self._waiting.pop(request.rid, None)
        for op in gone:
            self._note(op.rid, "revoked", 0, "nobody_waits")
            self._close(op)

    def forget_suspects(self) -> None:
        """Another store is attached: what was missing in the last one says nothing."""
        self._suspects.clear()

    # ---- the table ------------------------------------------------------------------------------

    def _get(self, op_id: int) -> FetchOp:
        op = self._cache.ops.get(op_id)
        assert isinstance(op, FetchOp)
        return op

    def _open_ops(self) -> Iterator[FetchOp]:
        return (op for op in self._cache.ops.of_kind(FETCH) if isinstance(op, FetchOp))

    def _close(self, op: FetchOp) -> None:
        for rid in op.waiters:
            request = self._waiting[rid]
            request.fetches.remove(op.id)
            if not request.fetches:
                del self._waiting[rid]
        self._forget_keys(op, op.first)
        self._cache.ops.finish(op)

    def _forget_keys(self, op: FetchOp, first: int, last: int | None = None) -> None:
        for key in op.keys[first:last]:
            if self._fetches.get(key) is op:
                del self._fetches[key]

    def _note(self, rid: int, step: str, pages: int, reason: str = "") -> None:
        self._out.facts.append(Prefetch(rid, step, pages, reason))


def _common_end(left: Sequence[PageKey], right: Sequence[PageKey], last: int) -> int:
    """Depth behind the last page that both sequences name alike; they share at least one."""
    end = min(len(left), last)
    while left[end - 1] != right[end - 1]:
        end -= 1
    return end

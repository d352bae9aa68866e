"""What runs next: the queue, the chunk under way, the running requests, and how batches end.

Prefill goes first, as upstream: a batch is formed of the chunk under way and then of the queue in
order, up to the token budget; when nothing can be prefilled the running requests decode.
Must not know: time beyond ``now``, what carries a batch out, L3 reads (prefetch does).
Called by: engine.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from refimpl.config import EngineConfig
from refimpl.core.admission import Admission, Batch
from refimpl.core.cache import HiCache
from refimpl.core.decoding import Decoding
from refimpl.core.ops import BACK_UP, WRITE_BACK
from refimpl.core.outbox import Outbox
from refimpl.core.prefetch import Prefetcher
from refimpl.core.request import OVER, QUEUED, Request
from refimpl.facts import Finished, Inserted, Retracted
from refimpl.messages import BatchDone, CutBatch, PageTable, PrefillItem, Reply, RunBatch, Withdraw
from refimpl.units import ceil_div

# Most decode steps in one batch. Slots for that many are taken beforehand, so a longer run would
# evict earlier than decoding step by step does; a shorter one costs a batch more often. Assumed.
DECODE_STEPS_MAX: Final = 64


class Scheduler:
    """All requests of one instance that are not over."""

    __slots__ = (
        "_admission",
        "_cache",
        "_config",
        "_has_aborts",
        "_is_cut",
        "_lacks_room",
        "_out",
        "_over",
        "_page_size",
        "_prefetcher",
        "_tables",
        "_wants_cut",
        "chunked",
        "decoding",
        "in_flight",
        "queue",
    )

    def __init__(
        self, config: EngineConfig, cache: HiCache, prefetcher: Prefetcher, out: Outbox
    ) -> None:
        self._config = config
        self._cache = cache
        self._prefetcher = prefetcher
        self._out = out
        self._page_size = config.cache.page_size
        self._admission = Admission(config, cache, out)
        self._tables: list[PageTable] = []  # changes the next batch must tell
        self._is_cut = False  # the decode in flight was told to end early
        self._wants_cut = False  # it is to be told at the end of this step
        self._lacks_room = False  # the first in the queue was refused for lack of L1
        self._has_aborts = False  # some of its requests are to end with it
        self._over: list[int] = []  # rids that ended since they were last taken
        self.queue: deque[Request] = deque()
        self.chunked: Request | None = None  # admitted, with prompt left to compute
        self.decoding = Decoding(self._page_size)
        self.in_flight: Batch | int | None = None  # a prefill, or decode steps ordered

    # ---- forming --------------------------------------------------------------------------------

    def schedule(self, now: int) -> None:
        """If nothing is in flight, order the next batch, if there is one."""
        if self._wants_cut and isinstance(self.in_flight, int) and self.in_flight > 1:
            if not self._is_cut:
                self._out.commands.append(CutBatch())
            self._is_cut = True
        self._wants_cut = False
        while self.in_flight is None:
            over = len(self._over)
            self._form(now)
            if len(self._over) == over:
                return  # nobody ended for lack of room, so nobody else can go on instead

    def _form(self, now: int) -> None:
        batch = Batch()
        self._lacks_room = False
        if self.chunked is not None:
            self._continue_chunked(batch, self.chunked)
        if self.chunked is None:
            self._admit(batch, now)
        if batch.items:
            batch.tables[:0] = self._tables
            self._tables = []
            self.in_flight = batch
            self._out.commands.append(batch.command())
        elif self.decoding.requests:
            self._decode()

    def _continue_chunked(self, batch: Batch, request: Request) -> None:
        if self._admission.add_chunk(batch, request):
            self._note_chunk(batch)
        elif not self.decoding.requests and not len(self._cache.ops):
            self._finish(request, "error: the prompt does not fit into L1 beside what is locked")

    def _note_chunk(self, batch: Batch) -> None:
        request, item = batch.items[-1]
        self.chunked = None if item.is_last else request

    def _admit(self, batch: Batch, now: int) -> None:
        passed = []
        may_ask = True  # one a pass: whoever comes behind may find what this one brings
        while self.queue and self.chunked is None and self._has_seat(batch):
            request = self.queue.popleft()
            if self._prefetcher.must_wait(request, now):
                passed.append(request)
                continue
            if may_ask and self._asks_again(request, now):
                may_ask = False
                passed.append(request)
                continue
            refusal = self._admission.try_admit(batch, request, self._growth_tokens(batch))
            if not refusal:
                self._prefetcher.leave(request, now=now)
                self._note_chunk(batch)
                continue
            passed.append(request)
            if refusal != "same_batch":
                self._lacks_room = refusal == "room"
                break  # first come, first served: nobody overtakes for lack of room
        self.queue.extendleft(reversed(passed))

    def _asks_again(self, request: Request, now: int) -> bool:
        pages = ceil_div(request.tokens, self._page_size)
        return self._cache.device.available >= pages and self._prefetcher.asks_again(request, now)

    def _has_seat(self, batch: Batch) -> bool:
        if batch.tokens >= self._config.chunked_prefill_tokens:
            return False
        return len(self.decoding.requests) + len(batch.items) < self._config.running_max

    def _growth_tokens(self, batch: Batch) -> int:
        """Room to keep free for those who run: what they still produce, up to the reserve each."""
        reserve = self._config.decode_reserve_tokens
        joining = sum(min(request.remaining, reserve) for request, _ in batch.items)
        running = len(self.decoding.requests)
        return joining + min(self.decoding.remaining_tokens, running * reserve)

    # ---- decoding -------------------------------------------------------------------------------

    def _decode(self) -> None:
        decoding = self.decoding
        steps = min(decoding.steps_to_end(), DECODE_STEPS_MAX)
        if not self._give_slots(steps):
            steps = min(steps, decoding.steps_to_short())
            if not steps:
                steps = self._make_room_for_one_step()
        if not steps:
            return
        tables, self._tables = self._tables, []
        self.in_flight = steps
        self._is_cut = False
        running, context = len(decoding.requests), decoding.context_tokens
        self._out.commands.append(
            RunBatch(steps, tables=tables, running=running, context_tokens=context)
        )

    def _give_slots(self, steps: int) -> bool:
        """Every running request gets the slots for ``steps`` steps, or none does."""
        lacking = self.decoding.short_within(steps)
        wanted = sum(count for _, count in lacking)
        cache = self._cache
        if wanted and (wanted > cache.device.available or not cache.make_room(wanted)):
            return False
        for request, count in lacking:
            slots = self._cache.device.pool.take(count)
            first = request.inserted + len(request.slots)
            self._tables.append(PageTable(request.rid, first, slots))
            self.decoding.add_slots(request, slots)
        return True

    def _make_room_for_one_step(self) -> int:
        """Retract until all others can take a step; 0 when room is on its way or none is left."""
        while self.decoding.requests:
            if self._give_slots(1):
                return 1
            if self._is_room_coming():
                return 0
            running = [request for request, _ in self.decoding.requests.values()]
            if self.chunked is not None:  # the youngest of all
                self._out.facts.append(Retracted(self.chunked.rid))
                self._start_over(self.chunked)
            elif len(running) > 1:
                self._retract(max(running, key=lambda request: request.admitted_at))
            elif len(self._cache.ops):
                return 0  # what they pin may be the room
            else:
                self._finish(running[0], "error: the output has outgrown L1")
        return 0

    def _is_room_coming(self) -> bool:
        """Copies out of L1 are under way; their pages can go when they are done."""
        ops = self._cache.ops
        return ops.pages_of(WRITE_BACK) > 0 or ops.pages_of(BACK_UP) > 0

    def _retract(self, request: Request) -> None:
        self.decoding.settle(request)
        capacity = self._cache.device.pool.capacity
        if capacity is not None and ceil_div(request.tokens, self._page_size) > capacity:
            self._finish(request, "error: the output has outgrown L1")
            return
        self.decoding.leave(request)
        self._let_go(request)
        request.state = QUEUED
        self.queue.appendleft(request)
        self._out.commands.append(Withdraw(request.rid))
        self._out.facts.append(Retracted(request.rid))

    def cut(self) -> None:
        """Something may be better than going on decoding: end the batch at its next step.

        The order goes out with the pass, since the batch may have ended in this very step.
        """
        self._wants_cut = True

    def room_came(self) -> None:
        """Slots of L1 may be had now: whoever was refused for lack of them need not wait."""
        if self._lacks_room or self.chunked is not None:
            self.cut()

    # ---- ends of batches ------------------------------------------------------------------------

    def batch_done(self, event: BatchDone) -> None:
        """What was in flight has finished."""
        done, self.in_flight = self.in_flight, None
        assert done is not None
        if isinstance(done, Batch):
            self._prefill_done(done, event)
        else:
            assert 1 <= event.steps <= done
            self._decode_done(event)

    def _prefill_done(self, batch: Batch, event: BatchDone) -> None:
        void = batch.end_loads(self._cache, event.loads_failed)
        for request, item in batch.items:
            if request.rid not in void:
                request.produced.extend(event.tokens.get(request.rid, ()))
                self._chunk_done(request, item, stops=request.rid in event.ended)
        for request in reversed(list(void.values())):  # back to the head of the queue, in order
            self._start_over(request)

    def _start_over(self, request: Request) -> None:
        if self.chunked is request:
            self.chunked = None
        self._let_go(request)
        request.state = QUEUED
        self._out.commands.append(Withdraw(request.rid))
        if request.aborted:
            self._end(request, "abort")
        else:
            self.queue.appendleft(request)

    def _chunk_done(self, request: Request, item: PrefillItem, *, stops: bool) -> None:
        request.computed += item.tokens
        self._insert_full_pages(request)
        if request.aborted:
            self._finish(request, "abort")
        elif item.is_last:
            self._first_token(request, stops=stops)

    def _first_token(self, request: Request, *, stops: bool) -> None:
        is_first = not request.generated
        if request.remaining:
            request.tokens += 1
        if stops or not request.remaining:
            self._finish(request, "stop" if stops else "length", first=is_first)
            return
        if is_first:
            self._out.commands.append(Reply(request.rid, True))
        self.decoding.join(request)

    def _decode_done(self, event: BatchDone) -> None:
        for rid, tokens in event.tokens.items():
            self.decoding.requests[rid][0].produced.extend(tokens)
        filled, ended = self.decoding.advance(event.steps)
        for request in filled:
            self._insert_full_pages(request)
        for rid in event.ended:
            self._finish(self.decoding.requests[rid][0], "stop")
        for request in ended:
            if request.rid in self.decoding.requests:
                self._finish(request, "length")
        if self._has_aborts:
            self._has_aborts = False
            for request in [r for r, _ in self.decoding.requests.values() if r.aborted]:
                self._finish(request, "abort")

    def _insert_full_pages(self, request: Request) -> None:
        """Pages all of whose KV has been computed get their names and enter the tree."""
        full = request.computed // self._page_size
        first = request.inserted
        if full == first or not self._config.reuse:
            return
        request.key(full - 1, self._page_size)
        slots = request.slots[: full - first]
        del request.slots[: full - first]
        cache = self._cache
        cache.tree.residency.naming(request, first, full)
        result = cache.insert(request.anchor, request.keys[:full], first, slots, request.own)
        for at, theirs in result.moved:
            self._tables.append(PageTable(request.rid, at, theirs))
        node = result.node
        node.priority = max(node.priority, request.priority)
        anchor = node.pages[full - 1 - node.start]
        cache.tree.pin(anchor)
        if request.anchor is not None:
            cache.tree.unpin(request.anchor)
        request.anchor, request.own, request.inserted = anchor, node, full
        self._out.facts.append(Inserted(request.rid, result.new))
        cache.writer.write_through(node, result.new)

    # ---- ends of requests -----------------------------------------------------------------------

    def abort(self, request: Request) -> None:
        """The client is gone. What is in a batch ends with it, everything else at once."""
        request.aborted = True
        if request.state == QUEUED:
            self._prefetcher.leave(request)
            self.queue.remove(request)
            self._end(request, "abort")
        elif request.rid in self.decoding.requests:
            if isinstance(self.in_flight, int):
                self._has_aborts = True
                self.cut()
            else:
                self._finish(request, "abort")
        elif not self._is_in_batch(request):
            self._finish(request, "abort")

    def _is_in_batch(self, request: Request) -> bool:
        batch = self.in_flight
        return isinstance(batch, Batch) and any(other is request for other, _ in batch.items)

    def _finish(self, request: Request, reason: str, *, first: bool = False) -> None:
        """A running request is over."""
        if request.rid in self.decoding.requests:
            self.decoding.leave(request)
        if self.chunked is request:
            self.chunked = None
        self._let_go(request)
        self._end(request, reason, first=first)

    def _let_go(self, request: Request) -> None:
        """Its slots are free, its pages stay in the tree, nothing is pinned for it any more."""
        self._cache.device.pool.give_back(request.slots)
        request.slots = []
        if self._tables:
            self._tables = [table for table in self._tables if table.rid != request.rid]
        if request.anchor is not None:
            self._cache.tree.unpin(request.anchor)
        request.anchor = request.own = None
        request.computed = request.inserted = 0

    def _end(self, request: Request, reason: str, *, first: bool = False) -> None:
        request.state = OVER
        self._over.append(request.rid)
        self._out.commands.append(Reply(request.rid, first, reason))
        self._out.facts.append(Finished(request.rid, request.generated, reason))

    def take_over(self) -> list[int]:
        """Rids of the requests that are over since this was last asked."""
        over, self._over = self._over, []
        return over

    @property
    def awaits_batch(self) -> bool:
        """A batch will end by itself before anything else can be decided."""
        return isinstance(self.in_flight, Batch) or (self.in_flight is not None and self._is_cut)

    @property
    def is_empty(self) -> bool:
        """No request waits or runs."""
        return not (
            self.queue or self.decoding.requests or self.in_flight is not None or self.chunked
        )

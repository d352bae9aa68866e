"""An engine on a table: nothing completes unless it is told to, and every slot says what lies in it.

Hands without bytes, but with names: a slot remembers the key of the page that was last put there,
copies move names, and the KV of a prompt can only be computed when its page table leads to the
names of its prefix. So a slot that is handed out too early, or a page filed under the wrong key,
fails the next check. Time moves when a test says so.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from refimpl.config import EngineConfig
from refimpl.core.check import check_engine, check_quiescent, walk
from refimpl.core.engine import Engine
from refimpl.core.page import READY
from refimpl.core.request import Request
from refimpl.keys import PageKey
from refimpl.messages import (
    Answer,
    AnyEvent,
    BackedUp,
    BackUp,
    BatchDone,
    CancelFetch,
    CloseStorage,
    Command,
    CutBatch,
    EmptyStorage,
    Fact,
    Fetch,
    Fetched,
    Landed,
    OpenStorage,
    PrefillItem,
    Probe,
    Probed,
    Reply,
    RunBatch,
    Step,
    StorageClosed,
    StorageEmptied,
    StorageOpened,
    Store,
    Stored,
    Submit,
    Withdraw,
)

OpCommand: TypeAlias = BackUp | Probe | Fetch | Store
KINDS: Final = {"backups": BackUp, "probes": Probe, "fetches": Fetch, "stores": Store}
_MOVES_MAX: Final = 10_000  # a tiny world that moves longer than this does not come to rest


class Tabletop:
    """One engine, its L3 as a dict, and what lies in which slot."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.page_size = config.cache.page_size
        self.engine = Engine(config)
        self.now = 0
        self.l1: dict[int, PageKey | None] = {}
        self.l2: dict[int, PageKey | None] = {}
        self.storage: dict[PageKey, None] = {}
        self.puts = 0  # pages written to L3 that were not there
        self.ops: dict[int, OpCommand] = {}
        self.cancelled: dict[int, None] = {}
        self.has_landed: dict[int, int] = {}  # pages of a fetch in flight that are in L2
        self.batch: RunBatch | None = None
        self.is_cut = False
        self.change: OpenStorage | CloseStorage | EmptyStorage | None = None
        self.requests: dict[int, Request] = {}  # all ever submitted, for the names of their pages
        self.finish: dict[int, str] = {}
        self.replied: dict[int, None] = {}  # had their first token
        self.computed: dict[int, int] = {}  # tokens with KV, of those that decode
        self.tables: dict[int, list[int]] = {}
        self.answers: list[Answer] = []
        self.facts: list[Fact] = []

    # ---- telling the engine ---------------------------------------------------------------------

    def tell(self, *events: AnyEvent) -> Step:
        """Let the engine handle ``events`` now, take its orders, and check everything."""
        for event in events:
            if isinstance(event, Submit):
                assert event.rid not in self.requests, "a request id is used once"
                self.requests[event.rid] = Request(event, self.page_size)
        step = self.engine.handle(events, self.now)
        for command in step.commands:
            self._accept(command)
        self.facts += step.facts
        check_engine(self.engine)
        self._check_names()
        return step

    def _accept(self, command: Command) -> None:
        match command:
            case RunBatch():
                self._accept_batch(command)
            case BackUp() | Probe() | Store():
                assert command.op not in self.ops
                self.ops[command.op] = command
            case Fetch():
                assert command.op not in self.ops, "a fetch follows the end of its probe"
                self.ops[command.op] = command
            case CancelFetch():
                assert isinstance(self.ops[command.op], Fetch), "only a fetch can be cancelled"
                assert command.op not in self.cancelled, "cancelled twice"
                self.cancelled[command.op] = None
            case CutBatch():
                assert self.batch is not None
                assert self.batch.is_decode
                assert not self.is_cut, "cut twice"
                self.is_cut = True
            case OpenStorage() | CloseStorage() | EmptyStorage():
                assert self.change is None
                self.change = command
            case Reply():
                self._accept_reply(command)
            case Withdraw():
                self._forget(command.rid)
            case Answer():
                self.answers.append(command)

    def _accept_batch(self, batch: RunBatch) -> None:
        assert self.batch is None, "one batch at a time"
        self.batch, self.is_cut = batch, False
        for table in batch.tables:
            assert self._is_alive(table.rid), f"a page table for r{table.rid}, which is over"
            slots = self.tables.setdefault(table.rid, [])
            assert table.first <= len(slots), "a page table with a hole"
            slots[table.first : table.first + len(table.slots)] = table.slots
        assert all(self._is_alive(item.rid) for item in batch.items)
        if batch.is_decode:
            assert batch.running == len(self.computed)
            assert batch.context_tokens == sum(self.computed.values())

    def _accept_reply(self, reply: Reply) -> None:
        assert self._is_alive(reply.rid), "answered already"
        if reply.first:
            assert reply.rid not in self.replied, "two first tokens"
            self.replied[reply.rid] = None
        if reply.finish:
            self.finish[reply.rid] = reply.finish
            self._forget(reply.rid)

    def _is_alive(self, rid: int) -> bool:
        return rid in self.requests and rid not in self.finish

    def _forget(self, rid: int) -> None:
        self.tables.pop(rid, None)
        self.computed.pop(rid, None)

    # ---- what completes -------------------------------------------------------------------------

    def batch_done(self, steps: int | None = None, loads_failed: tuple[int, ...] = ()) -> Step:
        """The batch ends; a decode after ``steps`` steps, by default all, or one if it was cut."""
        batch = self.batch
        assert batch is not None, "no batch is running"
        self.batch = None
        if batch.is_decode:
            steps = steps or (1 if self.is_cut else batch.steps_max)
            for rid in list(self.computed):
                self._decode(rid, steps)
            return self.tell(BatchDone(steps))
        for load in batch.loads:
            for source, target in zip(load.l2_slots, load.l1_slots, strict=True):
                self.l1[target] = None if load.rid in loads_failed else self.l2[source]
        for item in batch.items:
            self._prefill(item, may_be_void=bool(loads_failed))
        return self.tell(BatchDone(1, loads_failed))

    def _prefill(self, item: PrefillItem, *, may_be_void: bool) -> None:
        request, end = self.requests[item.rid], item.start + item.tokens
        has_prefix = self._has_prefix(item.rid, item.start)
        assert has_prefix or may_be_void, f"r{item.rid} reads a wrong page"
        self._write_pages(request, item.start, end)
        if item.is_last and has_prefix:
            self.computed[item.rid] = end

    def _decode(self, rid: int, steps: int) -> None:
        start = self.computed[rid]
        assert self._has_prefix(rid, start), f"r{rid} reads a wrong page"
        self._write_pages(self.requests[rid], start, start + steps)
        self.computed[rid] = start + steps

    def _has_prefix(self, rid: int, tokens: int) -> bool:
        """Does the page table of ``rid`` lead to the pages before that token?"""
        if not self.config.reuse:
            return True  # then pages have no names
        request = self.requests[rid]
        return all(
            self.l1.get(self.tables[rid][index]) == request.key(index, self.page_size)
            for index in range(tokens // self.page_size)
        )

    def _write_pages(self, request: Request, start: int, end: int) -> None:
        size, table = self.page_size, self.tables[request.rid]
        for index in range(start // size, -(-end // size)):
            is_full = (index + 1) * size <= end and self.config.reuse
            self.l1[table[index]] = request.key(index, size) if is_full else None

    def op_done(self, op: int, pages: int | None = None) -> Step:
        """The op ends with its leading ``pages`` pages done: by default all, or what L3 has."""
        command = self.ops.pop(op)
        match command:
            case BackUp():
                done = len(command.l2_slots) if pages is None else pages
                moved = zip(command.l1_slots, command.l2_slots, strict=True)
                for source, target in list(moved)[:done]:
                    self.l2[target] = self.l1[source]
                return self.tell(BackedUp(op, done))
            case Probe():
                return self.tell(Probed(op, self.stored_run(command) if pages is None else pages))
            case Fetch():
                least = self.has_landed.get(op, 0)
                done = max(self.stored_run(command), least) if pages is None else pages
                self._land(command, done)
                self.cancelled.pop(op, None)
                self.has_landed.pop(op, None)
                return self.tell(Fetched(op, done))
            case Store():
                done = len(command.keys) if pages is None else pages
                self._put(command, done)
                return self.tell(Stored(op, done))

    def landed(self, op: int, pages: int) -> Step:
        """The leading ``pages`` pages of a fetch have arrived so far."""
        command = self.ops[op]
        assert isinstance(command, Fetch)
        self._land(command, pages)
        self.has_landed[op] = pages
        return self.tell(Landed(op, pages))

    def _land(self, fetch: Fetch, pages: int) -> None:
        first = self.has_landed.get(fetch.op, 0)
        for key, slot in list(zip(fetch.keys, fetch.l2_slots, strict=True))[first:pages]:
            assert key in self.storage, "L3 delivers what it does not have"
            self.l2[slot] = key

    def _put(self, store: Store, pages: int) -> None:
        for key, slot in list(zip(store.keys, store.l2_slots, strict=True))[:pages]:
            assert self.l2[slot] == key, "a store reads a page that is not there any more"
            self.puts += key not in self.storage
            self.storage[key] = None

    def stored_run(self, command: Probe | Fetch) -> int:
        run = 0
        while run < len(command.keys) and command.keys[run] in self.storage:
            run += 1
        return run

    def change_done(self, error: str = "") -> Step:
        """The attach, detach or clear under way has come to its end."""
        change, self.change = self.change, None
        assert change is not None, "no storage change is under way"
        if isinstance(change, OpenStorage):
            return self.tell(StorageOpened(error))
        if isinstance(change, EmptyStorage):
            if not error:
                self.storage.clear()
            return self.tell(StorageEmptied(error))
        return self.tell(StorageClosed(error))

    # ---- coming to rest -------------------------------------------------------------------------

    def move(self, held: frozenset[str] = frozenset()) -> Step | None:
        """Complete one thing that is not held: the oldest op, else the batch. None: nothing moves."""
        for op, command in self.ops.items():
            if not any(isinstance(command, KINDS[kind]) for kind in held if kind in KINDS):
                return self.op_done(op)
        is_held = "batches" in held or (self.has_load and "loads" in held)
        if self.batch is not None and not is_held:
            return self.batch_done()
        if self.change is not None and "changes" not in held:
            return self.change_done()
        return None

    @property
    def has_load(self) -> bool:
        return self.batch is not None and bool(self.batch.loads)

    def settle(self, held: frozenset[str] = frozenset()) -> list[Step]:
        """Complete everything that is not held until nothing moves."""
        steps = []
        while (step := self.move(held)) is not None:
            steps.append(step)
            assert len(steps) < _MOVES_MAX, "this does not come to rest"
        return steps

    def finish_all(self) -> None:
        """Complete everything; then nothing may be left, and every request has its one answer."""
        self.settle()
        check_quiescent(self.engine)
        unanswered = [rid for rid in self.requests if rid not in self.finish]
        assert not unanswered, f"never answered: {unanswered}"
        assert (self.tables, self.computed, self.cancelled) == ({}, {}, {})

    # ---- checks ---------------------------------------------------------------------------------

    def _check_names(self) -> None:
        """Every READY copy lies where the tree says."""
        for node in walk(self.engine.cache):
            for page in node.pages:
                if page.l1_state == READY:
                    assert self.l1.get(page.l1_slot) == page.key, "a wrong page lies in L1"
                if page.l2_state == READY:
                    assert self.l2.get(page.l2_slot) == page.key, "a wrong page lies in L2"

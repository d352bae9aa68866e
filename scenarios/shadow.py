"""What every slot holds, followed token by token from an engine's events and commands alone.

The shadow carries out each order on names of KV instead of KV: a token's KV is named by all tokens
up to it and by the namespace. So it sees what a real tensor would suffer: a slot that is read before
it is written, written while something reads it, or holds what belongs to another prompt. It believes
neither page keys nor the tree.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from refimpl.facts import Admitted
from refimpl.keys import PageKey, Prompt, TokenPrompt, namespace_seed
from refimpl.messages import (
    AnyEvent,
    BackedUp,
    BackUp,
    BatchDone,
    Command,
    Fact,
    Fetch,
    Fetched,
    Landed,
    Load,
    PageTable,
    Reply,
    RunBatch,
    Step,
    Store,
    Stored,
    Withdraw,
)
from refimpl.workload.request import RequestSpec

Content: TypeAlias = tuple[int, ...]  # the KV of a page: a name for each of its tokens


class Library:
    """What is true of the requests of a world, whatever its engines make of them."""

    def __init__(self, specs: Iterable[RequestSpec], page_size: int) -> None:
        self.page_size = page_size
        self.specs: dict[int, RequestSpec] = {}
        self.chains: dict[int, list[int]] = {}  # rid -> the KV name of each token
        self.named: dict[PageKey, Content] = {}  # what a page key stands for
        self.computed: set[Content] = set()  # pages that some instance has computed
        self.stored: set[PageKey] = set()  # keys that some instance has written to L3
        self.spelled: set[PageKey] = set()  # keys of pages whose tokens are known
        self.hit_tokens = self.ceiling_tokens = (
            0  # of all admissions: counted, and possible at most
        )
        self._namespaces: dict[tuple[str | None, ...], int] = {}
        for spec in specs:
            self.add(spec)

    def add(self, spec: RequestSpec) -> None:
        self.specs[spec.rid] = spec
        name = (spec.extra_key, spec.cache_salt or None, spec.lora_id)
        link = hash((self._namespaces.setdefault(name, len(self._namespaces) + 1), 0))
        chain = self.chains[spec.rid] = []
        for token in _tokens(spec):
            link = hash((link, token))
            chain.append(link)
        seed = namespace_seed(spec.extra_key, spec.cache_salt, spec.lora_id)
        for index, key in enumerate(_keys(spec, self.page_size, seed)):
            page = self.page(spec.rid, index)
            assert self.named.setdefault(key, page) == page, "one key names two different pages"
            if spec.prompt.page_tokens(index, self.page_size, array("I")) is not None:
                self.spelled.add(key)

    def page(self, rid: int, index: int) -> Content:
        return tuple(self.chains[rid][index * self.page_size : (index + 1) * self.page_size])

    def ceiling_pages(self, rid: int) -> int:
        """Pages that a cache without limits would hit: all of this prompt computed anywhere."""
        usable = max(self.specs[rid].prompt.length - 1, 0) // self.page_size
        count = 0
        while count < usable and self.page(rid, count) in self.computed:
            count += 1
        return count


def _tokens(spec: RequestSpec) -> list[object]:
    """Prompt and output as the model sees them; unknown output tokens are the request's own."""
    prompt, total = spec.prompt, spec.prompt.length + spec.output_tokens
    if isinstance(prompt, TokenPrompt):
        known: list[object] = list(prompt.tokens)
        known += list(prompt.script or ())[: spec.output_tokens]
    else:
        reach = len(prompt.block_ids) * prompt.block_size if prompt.output_is_linked else 0
        known = [
            (prompt.block_ids[at // prompt.block_size], at)
            for at in range(min(total, max(prompt.length, reach)))
        ]
    return known + [((1 << 60) + spec.rid, at) for at in range(len(known), total)]


def _keys(spec: RequestSpec, page_size: int, seed: bytes) -> list[PageKey]:
    """Names of all full pages, output included."""
    prompt: Prompt = spec.prompt
    keys = prompt.page_keys(page_size, seed)
    for index in range(len(keys), (prompt.length + spec.output_tokens) // page_size):
        prior = keys[-1] if keys else seed
        keys.append(prompt.output_key(index, page_size, prior, spec.rid, array("I"), seed))
    return keys


@dataclass
class Copy:
    """A copy in flight: what it reads must stay as it was, what it writes is void until it is done."""

    source: dict[int, list[int | None]]
    slots: list[int]
    before: list[list[int | None]]
    targets: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    done: int = 0

    def check(self) -> None:
        now = [self.source[slot] for slot in self.slots]
        assert now == self.before, "a page changed while it was being copied"


class Shadow:
    """The device and host memory of one engine."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.l1: dict[int, list[int | None]] = {}
        self.l2: dict[int, list[int | None]] = {}
        self.here: set[Content] = set()  # pages that were computed or fetched here
        self.replies: Counter[int] = Counter()  # final ones
        self.answers = 0
        self._size = library.page_size
        self._tables: dict[int, dict[int, int]] = {}  # rid -> page index -> L1 slot
        self._computed: dict[int, int] = {}  # rid -> tokens with KV, of those that decode
        self._ops: dict[int, Copy] = {}
        self._loads: list[tuple[Load, Copy]] = []
        self._batch: RunBatch | None = None
        self._firsts: set[int] = set()

    # ---- events ---------------------------------------------------------------------------------

    def hear(self, event: AnyEvent) -> None:
        """A completion, before the engine learns of it."""
        match event:
            case BatchDone():
                self._batch_done(event)
            case BackedUp() | Landed() | Fetched() | Stored():
                self._advance(event)

    def _advance(self, event: BackedUp | Landed | Fetched | Stored) -> None:
        copy = self._ops[event.op]
        copy.check()
        for at in range(copy.done, event.pages):
            if copy.keys and copy.targets:
                assert copy.keys[at] in self.library.stored, "a page landed that nobody stored"
                content = list(self.library.named[copy.keys[at]])
                self.here.add(tuple(content))
            else:
                content = list(copy.before[at])
            if copy.targets:
                self.l2[copy.targets[at]] = content
        copy.done = event.pages
        if not isinstance(event, Landed):
            del self._ops[event.op]

    def _batch_done(self, event: BatchDone) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        for load, copy in self._loads:
            copy.check()
            if load.rid in event.loads_failed:
                self._void(self.l1, load.l1_slots)
        self._loads = []
        for item in batch.items:
            if event.loads_failed and not self._holds(item.rid, item.start):
                self._write(item.rid, item.start, item.tokens, is_void=True)
                continue
            self._compute(item.rid, item.start, item.tokens)
            if item.is_last:
                self._computed[item.rid] = item.start + item.tokens
        if batch.is_decode:
            for rid, computed in self._computed.items():
                self._compute(rid, computed, event.steps)
                self._computed[rid] = computed + event.steps

    def _compute(self, rid: int, start: int, count: int) -> None:
        assert self._holds(rid, start), f"request {rid} attended to KV that is not its own"
        self._write(rid, start, count, is_void=False)
        for index in range(start // self._size, (start + count) // self._size):
            page = self.library.page(rid, index)
            self.library.computed.add(page)
            self.here.add(page)

    def _holds(self, rid: int, count: int) -> bool:
        """The table of ``rid`` leads to its own first ``count`` tokens."""
        size, table = self._size, self._tables.get(rid, {})
        for index in range(-(-count // size)):
            last = min(count - index * size, size)
            held = self.l1.get(table.get(index, -1))
            if held is None or held[:last] != list(self.library.page(rid, index)[:last]):
                return False
        return True

    def _write(self, rid: int, start: int, count: int, *, is_void: bool) -> None:
        table, chain = self._tables[rid], self.library.chains[rid]
        for at in range(start, start + count):
            index, place = divmod(at, self._size)
            held = self.l1.setdefault(table[index], [None] * self._size)
            held[place] = None if is_void else chain[at]

    def _void(self, memory: dict[int, list[int | None]], slots: Sequence[int]) -> None:
        for slot in slots:
            memory[slot] = [None] * self._size

    # ---- orders ---------------------------------------------------------------------------------

    def obey(self, step: Step) -> None:
        """What the engine ordered and said, in order."""
        for command in step.commands:
            self._carry_out(command)
        for fact in step.facts:
            self._note(fact)

    def _carry_out(self, command: Command) -> None:
        match command:
            case RunBatch():
                self._start_batch(command)
            case BackUp(op, sources, targets):
                self._open(op, Copy(self.l1, sources, self._read(self.l1, sources), targets))
            case Store(op, keys, sources):
                self._open(op, Copy(self.l2, sources, self._read(self.l2, sources), [], keys))
                self._check_names(keys, sources)
            case Fetch(op, keys, targets):
                self._open(op, Copy(self.l2, [], [], targets, keys))
            case Withdraw(rid):
                self._let_go(rid)
            case Reply(rid, first, finish):
                self._reply(rid, is_first=first, finish=finish)

    def _reply(self, rid: int, *, is_first: bool, finish: str) -> None:
        assert not self.replies[rid], f"request {rid} was answered after its end"
        assert not (is_first and rid in self._firsts), f"request {rid} has two first tokens"
        if is_first:
            self._firsts.add(rid)
        if finish:
            self.replies[rid] += 1
            self._let_go(rid)
            assert finish != "length" or rid in self._firsts, "an end without a first token"

    def _let_go(self, rid: int) -> None:
        self._tables.pop(rid, None)
        self._computed.pop(rid, None)

    def _read(self, memory: dict[int, list[int | None]], slots: Sequence[int]) -> list[list]:
        pages = [list(memory.get(slot, [None])) for slot in slots]
        assert all(None not in page for page in pages), "a page was copied before it was there"
        return pages

    def _check_names(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            content = self.library.named.get(key)
            assert content is not None, "a key was stored that no request has"
            assert content == tuple(self.l2[slot]), "a key was stored with the KV of another page"
            assert content in self.library.computed, "a page was stored that nobody computed"
            self.library.stored.add(key)

    def _open(self, op: int, copy: Copy) -> None:
        taken = {slot for other in self._ops.values() for slot in other.targets[other.done :]}
        assert not taken & set(copy.targets), "two copies write one slot"
        self._void(self.l2, copy.targets)
        self._ops[op] = copy

    def _start_batch(self, batch: RunBatch) -> None:
        assert self._batch is None, "a batch is in flight already"
        self._batch = batch
        for table in batch.tables:
            self._take_table(table)
        for load in batch.loads:
            pages = self._read(self.l2, load.l2_slots)
            self._loads.append((load, Copy(self.l2, load.l2_slots, pages)))
            for slot, page in zip(load.l1_slots, pages, strict=True):
                self.l1[slot] = list(page)
        for item in batch.items:
            assert self._holds(item.rid, item.start), "a prefix is not the request's own"
        if batch.is_decode:
            assert batch.running == len(self._computed), "who decodes is not agreed"
            assert batch.context_tokens == sum(self._computed.values()), "contexts are not agreed"

    def _take_table(self, table: PageTable) -> None:
        mine = self._tables.setdefault(table.rid, {})
        mine.update(enumerate(table.slots, table.first))

    # ---- what is claimed ------------------------------------------------------------------------

    def _note(self, fact: Fact) -> None:
        if not isinstance(fact, Admitted):
            return
        library, hits = self.library, fact.device_tokens + fact.host_tokens + fact.storage_tokens
        assert hits % self._size == 0
        assert hits < fact.prompt_tokens, "no token is left to compute"
        for index in range(hits // self._size):
            page = library.page(fact.rid, index)
            assert page in library.computed, "a hit of what was never computed in that namespace"
            assert page in self.here, "a hit of what never came to this instance"
        library.hit_tokens += hits
        library.ceiling_tokens += library.ceiling_pages(fact.rid) * self._size
        assert library.hit_tokens <= library.ceiling_tokens, "more hits than a cache without limits"

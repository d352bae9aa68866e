"""The invariants, checked from scratch: what must be true after every step of an engine.

Slow on purpose: nothing is believed that the counters say. Must not know: how a state came about.
Called by: tests after each event, the live server when it shuts down.
"""

from __future__ import annotations

from collections.abc import Iterator

from refimpl.core.cache import HiCache
from refimpl.core.engine import Engine
from refimpl.core.evict import is_l1_leaf, is_l2_leaf
from refimpl.core.ops import STORE
from refimpl.core.page import ABSENT, FILLING, READY, Node, Page
from refimpl.core.prefetch import FetchOp
from refimpl.core.scheduler import Scheduler
from refimpl.core.slots import SlotPool


def check_engine(engine: Engine) -> None:
    """Raise AssertionError, saying what is wrong, unless every invariant of ``engine`` holds."""
    requests = engine.requests()
    owned = [slot for request in requests for slot in request.slots]
    check_cache(engine.cache, owned)
    pins: dict[Page, int] = {}
    l2_pins: dict[Page, int] = {}
    for request in requests:
        if request.anchor is not None:
            pins[request.anchor] = pins.get(request.anchor, 0) + 1
    _check_waiters(engine)
    for op in engine.cache.ops.all():
        if op.anchor is not None:
            kept = l2_pins if op.kind == STORE else pins
            kept[op.anchor] = kept.get(op.anchor, 0) + 1
    for node in walk(engine.cache):
        for page in node.pages:
            assert page.pins == pins.get(page, 0), f"{page.pins} pins, {pins.get(page, 0)} holders"
            assert page.l2_pins == l2_pins.get(page, 0), "pins on an L2 copy and stores differ"
    _check_seats(engine.scheduler)


def check_quiescent(engine: Engine) -> None:
    """When nothing runs, waits or is in flight: no pin, no op, and free + cached = capacity."""
    assert engine.idle, engine.busy
    check_engine(engine)
    tree = engine.cache.tree
    assert not tree.root.locks and not tree.root.l2_locks and not tree.l1_protected
    assert engine.cache.device.pool.used == tree.l1_resident
    assert engine.cache.host.pool.used == tree.l2_resident


def check_cache(cache: HiCache, owned: list[int]) -> None:
    """The tree, both tiers and the ops; ``owned`` are the L1 slots that requests hold."""
    l1_slots, l2_slots = list(owned), []
    for op in cache.ops.all():
        if isinstance(op, FetchOp):
            l2_slots += op.slots[op.entered :]
    l1_pages = l2_pages = protected = 0
    for node in walk(cache):
        _check_node(node)
        l1_slots += [page.l1_slot for page in node.pages if page.l1_state != ABSENT]
        l2_slots += [page.l2_slot for page in node.pages if page.l2_state != ABSENT]
        l1_pages += node.l1_end
        l2_pages += node.l2_count
        protected += node.l1_end if node.locks else 0
        _check_offered(cache, node)
    tree = cache.tree
    assert (tree.l1_resident, tree.l2_resident) == (l1_pages, l2_pages), "resident counts drifted"
    assert tree.l1_protected == protected, "the protected count drifted"
    _check_pool("L1", cache.device.pool, l1_slots)
    _check_pool("L2", cache.host.pool, l2_slots)


def walk(cache: HiCache) -> Iterator[Node]:
    """Every node below the root, parents first."""
    stack = [cache.tree.root]
    while stack:
        node = stack.pop()
        if node.parent is not None:
            yield node
        stack.extend(node.children.values())


def _check_pool(tier: str, pool: SlotPool, owned: list[int]) -> None:
    """Every slot is free or has one owner."""
    assert len(set(owned)) == len(owned), f"an {tier} slot has two owners"
    free = pool.freed()
    assert len(set(free)) == len(free), f"an {tier} slot is free twice"
    assert not set(free) & set(owned), f"an {tier} slot is free and owned"
    assert pool.capacity is None or pool.free == pool.capacity - pool.used
    assert pool.used == len(owned), f"{tier}: {pool.used} slots are out, {len(owned)} have an owner"


def _check_node(node: Node) -> None:
    parent = node.parent
    assert parent is not None and node.pages, "an empty node in the tree"
    assert parent.children[node.keys[0]] is node
    assert node.start == parent.end, "depths do not add up"
    assert node.keys == [page.key for page in node.pages]
    for index, page in enumerate(node.pages):
        assert page.node is node and page.depth == node.start + index
        in_l1 = page.l1_state != ABSENT
        assert in_l1 == (index < node.l1_end), "L1 is not prefix-closed inside a node (I1)"
        assert in_l1 or page.l2_state == READY, "a page without a copy to read (I2)"
        assert page.l1_state != FILLING or page.l2_state == READY, "a load without a source"
        assert page.l2_state != FILLING or page.l1_state == READY, "a backup without a source"
    assert node.l2_count == sum(page.l2_state != ABSENT for page in node.pages)
    if parent.parent is not None and node.l1_end:
        assert parent.l1_end == len(parent.pages), "L1 is not prefix-closed (I1)"
    kids = list(node.children.values())
    assert node.l1_kids == sum(kid.l1_end > 0 for kid in kids)
    assert node.l2_kids == sum(kid.l2_count > 0 or kid.l2_kids > 0 for kid in kids)
    locks = sum(page.pins for page in node.pages) + sum(kid.locks for kid in kids)
    assert node.locks == locks, f"{node.locks} locks, {locks} pins at or below"
    l2_locks = sum(page.l2_pins for page in node.pages) + sum(kid.l2_locks for kid in kids)
    assert node.l2_locks == l2_locks, f"{node.l2_locks} L2 locks, {l2_locks} pins at or below"
    _check_queued(node)


def _check_queued(node: Node) -> None:
    """Whoever could give up a copy has an entry in the queue, else it is never asked."""
    assert node.queued_l1 or not is_l1_leaf(node), "an L1 leaf is not queued"
    assert node.queued_l2 or not is_l2_leaf(node), "an L2 leaf is not queued"


def _check_offered(cache: HiCache, node: Node) -> None:
    generation = cache.host.generation
    if generation and node.stored == generation:
        offered = [page.offered == generation for page in node.pages]
        assert all(offered[: node.stored_end]), "counted as offered to L3, but was not"


def _check_waiters(engine: Engine) -> None:
    """Requests and the L3 reads they wait for name each other."""
    waiting = {(request.rid, op_id) for request in engine.requests() for op_id in request.fetches}
    waited_for = {
        (rid, op.id)
        for op in engine.cache.ops.all()
        if isinstance(op, FetchOp)
        for rid in op.waiters
    }
    assert waiting == waited_for, "an L3 read and who waits for it do not agree"


def _check_seats(scheduler: Scheduler) -> None:
    for request, _ in scheduler.decoding.requests.values():
        assert request.anchor is None or request.anchor.l1_state == READY
        assert not request.loading and not request.fetches
    for request in scheduler.queue:
        assert not request.slots and request.anchor is None, "a waiting request holds L1"

"""The verbs of stories: one short function each, from a line to the lines it prints.

A verb that tells the engine something prints the step: the orders it gave, then what it decided,
each behind a dash. ``serve`` and ``settle`` print less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from refimpl.core.page import ABSENT, READY, Node, Page
from refimpl.facts import Admitted, Readmitted
from refimpl.keys import PageKey, TokenPrompt
from refimpl.messages import (
    Abort,
    AttachStorage,
    ClearStorage,
    DetachStorage,
    Flush,
    RunBatch,
    Submit,
    Tick,
)
from scenarios.labels import command_line, fact_line, ns_of, rid_of, tokens_of
from scenarios.stage import Lines, Stage, config_of, keys_of, words_of
from scenarios.tabletop import KINDS

# ---- set-up -------------------------------------------------------------------------------------


def config(stage: Stage, text: str) -> Lines:
    stage.open(config_of(text))
    return []


def restart(stage: Stage, text: str) -> Lines:
    """Another instance, with empty L1 and L2, on the same L3."""
    stage.table.finish_all()
    stage.reopen(config_of(text))
    return []


def put(stage: Stage, text: str) -> Lines:
    """L3 has the pages of this prompt."""
    stage.table.storage.update(dict.fromkeys(keys_of(stage, text)))
    return []


def lose(stage: Stage, text: str) -> Lines:
    """L3 has the last page of this prompt no more."""
    del stage.table.storage[keys_of(stage, text)[-1]]
    return []


def hold(stage: Stage, text: str) -> Lines:
    """What ``settle`` and ``serve`` leave in flight: backups probes fetches stores batches loads."""
    assert set(text.split()) <= {*KINDS, "batches", "loads", "changes"}, text
    stage.held |= frozenset(text.split())
    return []


def release(stage: Stage, text: str) -> Lines:
    stage.held -= frozenset(text.split() or stage.held)
    return []


def leave(stage: Stage, text: str) -> Lines:
    """The story ends with things in flight."""
    del text
    stage.is_left = True
    return []


# ---- requests -----------------------------------------------------------------------------------


def submit(stage: Stage, text: str) -> Lines:
    """``r1 a*4 [out=1] [script=b*2] [priority=1] [extra=x] [salt=x] [lora=x]``; more behind ``|``."""
    return stage.show(stage.table.tell(*_submits(stage, text)))


def serve(stage: Stage, text: str) -> Lines:
    """Submit, complete all that is not held, and print the hits alone."""
    submits = _submits(stage, text)
    stage.table.tell(*submits)
    stage.table.settle(stage.held)
    return [line for each in submits for line in hits(stage, f"r{each.rid}")]


def _submits(stage: Stage, text: str) -> list[Submit]:
    return [_submit(stage, each.strip()) for each in text.split("|")]


def _submit(stage: Stage, text: str) -> Submit:
    (rid, prompt), given = words_of(text)
    script = tokens_of(given["script"]) if "script" in given else None
    default = len(script) if script is not None else 1
    space = given.get("extra"), given.get("salt"), given.get("lora")
    tokens = tokens_of(prompt)
    stage.labels.learn(tokens + (script or tokens[:0]), *space)
    output, priority = int(given.get("out", default)), int(given.get("priority", 0))
    return Submit(rid_of(rid), TokenPrompt(tokens, script), output, *space, priority)


def abort(stage: Stage, text: str) -> Lines:
    return stage.show(stage.table.tell(Abort(rid_of(text))))


# ---- completions --------------------------------------------------------------------------------


def batch(stage: Stage, text: str) -> Lines:
    """The batch ends; ``failed=r1,r2`` are requests whose loads did not arrive."""
    _, given = words_of(text)
    failed = tuple(map(rid_of, filter(None, given.get("failed", "").split(","))))
    return stage.show(stage.table.batch_done(loads_failed=failed))


def step(stage: Stage, text: str) -> Lines:
    """The decode ends after so many steps."""
    return stage.show(stage.table.batch_done(int(text or 1)))


def _completes(kind: str) -> Callable[[Stage, str], Lines]:
    def verb(stage: Stage, text: str) -> Lines:
        op, pages = stage.op(kind, text.split())
        return stage.show(stage.table.op_done(op, pages))

    return verb


def landed(stage: Stage, text: str) -> Lines:
    op, pages = stage.op("fetches", text.split())
    assert pages is not None
    return stage.show(stage.table.landed(op, pages))


def settle(stage: Stage, text: str) -> Lines:
    """Complete all that is not held; ``loudly`` prints the steps."""
    lines = []
    while (moved := stage.table.move(stage.held)) is not None:
        lines += stage.show(moved) if text == "loudly" else []
    return lines


def advance(stage: Stage, text: str) -> Lines:
    """Time passes, to the given distance from now, and the engine is told."""
    stage.table.now += ns_of(text)
    return tick(stage, "")


def tick(stage: Stage, text: str) -> Lines:
    del text
    return stage.show(stage.table.tell(Tick()))


# ---- L3, flush ----------------------------------------------------------------------------------


def attach(stage: Stage, text: str) -> Lines:
    """``file [prefetch=policy] [write=policy] [drain=queue]``"""
    (backend,), given = words_of(text)
    event = AttachStorage(
        backend, given.get("prefetch"), given.get("write"), given.get("drain", "none")
    )
    return stage.show(stage.table.tell(event))


def detach(stage: Stage, text: str) -> Lines:
    """``[back] [drain=queue]``: ``back`` takes the last attach back."""
    words, given = words_of(text)
    event = DetachStorage(given.get("drain", "none"), "back" in words)
    return stage.show(stage.table.tell(event))


def clear(stage: Stage, text: str) -> Lines:
    """``[drain=queue]``"""
    _, given = words_of(text)
    return stage.show(stage.table.tell(ClearStorage(given.get("drain", "none"))))


def changed(stage: Stage, text: str) -> Lines:
    """The backend was opened, cleared or closed; words are the error."""
    return stage.show(stage.table.change_done(text))


def flush(stage: Stage, text: str) -> Lines:
    del text
    return stage.show(stage.table.tell(Flush()))


# ---- looking ------------------------------------------------------------------------------------


def tree(stage: Stage, text: str) -> Lines:
    """Nodes by depth: pages and the tiers they are in; ``~``: a copy in flight. ``hits``: with hits."""
    root = stage.table.engine.cache.tree.root
    return [line for kid in root.children.values() for line in _node(stage, kid, 0, text)]


def _node(stage: Stage, node: Node, depth: int, text: str) -> Iterator[str]:
    runs: list[tuple[str, list[Page]]] = []
    for page in node.pages:
        tiers = _tiers(page)
        if not runs or runs[-1][0] != tiers:
            runs.append((tiers, []))
        runs[-1][1].append(page)
    parts = [f"{stage.labels.names(p.key for p in pages)} {tiers}" for tiers, pages in runs]
    notes = (
        " locked" * bool(node.locks)
        + " L2 locked" * bool(node.l2_locks)
        + f" hits={node.hits}" * (text == "hits")
    )
    yield "  " * depth + ", ".join(parts) + notes
    for kid in node.children.values():
        yield from _node(stage, kid, depth + 1, text)


def _tiers(page: Page) -> str:
    states = (("L1", page.l1_state), ("L2", page.l2_state))
    return "+".join(t + "~" * (state != READY) for t, state in states if state != ABSENT)


def residency(stage: Stage, text: str) -> Lines:
    """Tiers the pages of a prompt are in, L3 asked."""
    keys = keys_of(stage, text)
    match = stage.table.engine.cache.tree.find(keys)
    pages = match.slice(0, match.pages)
    runs: list[tuple[str, list[PageKey]]] = []
    for index, key in enumerate(keys):
        tiers = [_tiers(pages[index])] if index < len(pages) else []
        tiers += ["L3"] * (key in stage.table.storage)
        where = "+".join(tiers) or "nowhere"
        if not runs or runs[-1][0] != where:
            runs.append((where, []))
        runs[-1][1].append(key)
    return [f"{stage.labels.names(run)} {where}" for where, run in runs]


def hits(stage: Stage, text: str) -> Lines:
    """Tokens of a request by where they came from."""
    rid = rid_of(text)
    lines = []
    for fact in stage.table.facts:
        if isinstance(fact, Admitted) and fact.rid == rid:
            counts = f"{fact.device_tokens} {fact.host_tokens} {fact.storage_tokens}"
            lines.append(f"r{rid} device, host, storage: {counts} of {fact.prompt_tokens}")
        if isinstance(fact, Readmitted) and fact.rid == rid:
            lines.append(f"r{rid} again: {fact.cached_tokens} of {fact.tokens}")
    return lines or [f"r{rid} not admitted"]


def pools(stage: Stage, text: str) -> Lines:
    del text
    cache = stage.table.engine.cache
    tiers = (("L1", cache.device.pool), ("L2", cache.host.pool))
    return [f"{name} {pool.used} of {pool.capacity} used" for name, pool in tiers]


def ops(stage: Stage, text: str) -> Lines:
    del text
    table, labels = stage.table, stage.labels
    lines = [command_line(command, table, labels) for command in table.ops.values()]
    running: list[RunBatch] = [table.batch] if table.batch is not None else []
    return lines + [command_line(each, table, labels) for each in running] or ["none"]


def queue(stage: Stage, text: str) -> Lines:
    del text
    scheduler = stage.table.engine.scheduler
    waiting = [f"r{request.rid}" for request in scheduler.queue]
    running = [f"r{rid}" for rid in scheduler.decoding.requests]
    return [f"queue {' '.join(waiting) or '-'}, decoding {' '.join(running) or '-'}"]


def facts(stage: Stage, text: str) -> Lines:
    """Facts of these kinds since this was last asked, of all kinds if none is named."""
    table = stage.table
    shown, stage.seen = table.facts[stage.seen :], len(table.facts)
    kinds = text.split()
    named = [fact for fact in shown if not kinds or type(fact).__name__ in kinds]
    return [fact_line(fact) for fact in named] or ["none"]


def deadline(stage: Stage, text: str) -> Lines:
    """Nanoseconds from now to the engine's deadline."""
    del text
    at = stage.table.engine.deadline()
    return ["none" if at is None else f"in {at - stage.table.now} ns"]


def storage(stage: Stage, text: str) -> Lines:
    """What L3 has, and how many pages were really written."""
    del text
    table = stage.table
    return [f"{stage.labels.names(table.storage) or 'empty'}, {table.puts} written"]


_BY_NAME: Final = (
    *(config, restart, put, lose, hold, release, leave),
    *(submit, serve, abort, batch, step, landed, settle, advance, tick),
    *(attach, detach, clear, changed, flush),
    *(tree, residency, hits, pools, ops, queue, facts, deadline, storage),
)
VERBS: Final[dict[str, Callable[[Stage, str], Lines]]] = {
    "backed_up": _completes("backups"),
    "probed": _completes("probes"),
    "fetched": _completes("fetches"),
    "stored": _completes("stores"),
    **{verb.__name__: verb for verb in _BY_NAME},
}

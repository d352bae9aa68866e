"""What KV events look like, and what of it is one event; the swarm shows that they are complete."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from refimpl.config import CacheConfig, EngineConfig
from refimpl.core.engine import Engine
from refimpl.keys import TokenPrompt, block_event_hash, namespace_seed, page_keys
from refimpl.messages import BackedUp, BackUp, BatchDone, Flush, RunBatch, Submit
from refimpl.serve.kv_events import KvEventBatch, KvEventRecorder
from scenarios.event_reader import as_maps
from scenarios.swarm import run_seed

PROMPT = array("I", [1, 2, 3, 4, 5, 6])


class Told:
    """An engine on its own, whose commands complete when told, and what it says of its pages."""

    def __init__(self, **cache: Any) -> None:
        config = CacheConfig(page_size=2, **{"l1_pages": 8, "l2_pages": 16, **cache})
        self.engine = Engine(EngineConfig(config))
        self.recorder = KvEventRecorder(2)
        self.engine.watch(self.recorder)
        self.commands: list[Any] = []

    def tell(self, *events: Any) -> list[dict[str, Any]]:
        self.commands += self.engine.handle(events, 0).commands
        return as_maps(self.recorder.take())

    def op(self) -> int:
        (command,) = [each for each in self.commands if isinstance(each, BackUp)]
        return command.op


def hashes(tokens: array[int], *space: str | None) -> list[int]:
    return list(map(block_event_hash, page_keys(tokens, 2, namespace_seed(*space))))


def test_a_prompt_s_pages_are_one_event_with_all_that_upstream_says() -> None:
    told = Told()
    assert told.tell(Submit(1, TokenPrompt(PROMPT), 1)) == []
    assert told.tell(BatchDone(tokens={1: [9]})) == [
        {
            "type": "BlockStored",
            "block_hashes": hashes(PROMPT),
            "parent_block_hash": None,
            "token_ids": list(PROMPT),
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
        }
    ]


def test_a_backup_is_told_of_when_it_is_done() -> None:
    told = Told()
    told.tell(Submit(1, TokenPrompt(PROMPT), 1))
    told.tell(BatchDone(tokens={1: [9]}))
    (stored,) = told.tell(BackedUp(told.op(), 2))
    assert stored["medium"] == "CPU_PINNED"
    assert stored["block_hashes"] == hashes(PROMPT)[:2]
    assert stored["token_ids"] == list(PROMPT)[:4]


def test_generated_tokens_are_in_the_events_of_their_pages() -> None:
    told = Told(l2_pages=0)
    told.tell(Submit(1, TokenPrompt(PROMPT), 4))
    told.tell(BatchDone(tokens={1: [7]}))
    assert any(isinstance(each, RunBatch) and each.is_decode for each in told.commands)
    (stored,) = told.tell(BatchDone(3, tokens={1: [8, 9, 10]}))
    assert stored["token_ids"] == [7, 8]  # the KV of the last token is never computed
    assert stored["parent_block_hash"] == hashes(PROMPT)[-1]
    assert stored["block_hashes"] == hashes(PROMPT + array("I", [7, 8]))[-1:]


def test_a_salt_is_told_and_part_of_the_hash() -> None:
    told = Told(l2_pages=0)
    told.tell(Submit(1, TokenPrompt(PROMPT), 1, cache_salt="s"))
    (stored,) = told.tell(BatchDone(tokens={1: [9]}))
    assert stored["cache_salt"] == "s"
    assert stored["block_hashes"] == hashes(PROMPT, None, "s")


def test_pages_that_leave_are_named_with_the_tier_they_left() -> None:
    told = Told(l1_pages=4, l2_pages=0)
    told.tell(Submit(1, TokenPrompt(PROMPT), 1))
    told.tell(BatchDone(tokens={1: [9]}))
    other = array("I", [21, 22, 23, 24, 25, 26])
    (removed,) = told.tell(Submit(2, TokenPrompt(other), 1))
    assert removed["medium"] == "GPU"
    assert set(removed["block_hashes"]) <= set(hashes(PROMPT))
    assert "token_ids" not in removed


def test_a_flush_is_one_event_whatever_was_there() -> None:
    told = Told()
    told.tell(Submit(1, TokenPrompt(PROMPT), 1))
    told.tell(BatchDone(tokens={1: [9]}))
    told.tell(BackedUp(told.op(), 3))
    assert told.tell(Flush()) == [{"type": "AllBlocksCleared"}]
    assert not len(told.recorder)


def test_a_page_that_is_nowhere_leaves_nothing_behind() -> None:
    told = Told(l1_pages=4, l2_pages=0)
    for rid in range(1, 30):
        tokens = array("I", range(rid * 10, rid * 10 + 6))
        told.tell(Submit(rid, TokenPrompt(tokens), 1))
        told.tell(BatchDone(tokens={rid: [9]}))
    assert len(told.recorder) <= 4


def test_a_batch_is_an_array_of_time_events_and_rank() -> None:
    raw = msgspec.msgpack.encode(KvEventBatch(1.5, [], 0))
    assert msgspec.msgpack.decode(raw) == [1.5, [], 0]


def test_who_watches_changes_no_decision() -> None:
    for seed in range(5):
        assert run_seed(seed).digest == run_seed(seed, is_watched=False).digest

"""Attach and detach again and again under load: nobody's answer is lost or changed, nothing is left."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.core.engine import Engine  # noqa: E402
from refimpl.messages import Answer, AttachStorage, DetachStorage  # noqa: E402
from refimpl.model.config import TINY_GQA  # noqa: E402
from refimpl.run.live import LiveExecutor, run_live  # noqa: E402
from refimpl.run.live_storage import OpenStore  # noqa: E402
from refimpl.storage.backend import HostPage  # noqa: E402
from refimpl.workload.request import Workload, unscripted  # noqa: E402
from refimpl.workload.scenario import parse_scenario  # noqa: E402
from scenarios.bytes.rig import Rig, live_executor, run_bytes, without_cache  # noqa: E402

pytestmark = pytest.mark.live

ROUNDS = 20
CHATS = "multi_turn:clients=4,rounds=28,request_length=6,output_length=3,vocab=256,rate=0"


class Watched:
    """A backend that counts what it is asked, and what after it was closed."""

    def __init__(self, inner: OpenStore) -> None:
        self._inner = inner.backend
        self.calls = 0
        self.late = 0
        self.is_closed = False

    def _asked(self) -> None:
        self.calls += 1
        self.late += self.is_closed

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._asked()
        return self._inner.exists(names)

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        self._asked()
        return self._inner.get(names, pages)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        self._asked()
        return self._inner.set(names, pages)

    def clear(self) -> int:
        return self._inner.clear()

    def close(self) -> None:
        self.is_closed = True
        self._inner.close()


class Operator:
    """Attaches and detaches in turn: the next change is asked for when the last was answered."""

    def __init__(self, executor: LiveExecutor, extra_config: str, drain: str) -> None:
        self.answers: list[Answer] = []
        self._inbox: SimpleQueue[object] = executor.inbox  # type: ignore[assignment]
        self._attach = AttachStorage("file", "wait_complete", None, drain, extra_config)
        self._detach = DetachStorage(drain)

    def next(self) -> None:
        if len(self.answers) < 2 * ROUNDS:
            self._inbox.put(self._detach if len(self.answers) % 2 else self._attach)

    def answered(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.next()


def chats() -> Workload:
    return unscripted(parse_scenario(CHATS, 5, 4))


def watched_opener(
    opener: Callable[[str, str], OpenStore], seen: list[Watched]
) -> Callable[[str, str], OpenStore]:
    def opened(backend: str, extra_config: str) -> OpenStore:
        found = opener(backend, extra_config)
        seen.append(Watched(found))
        return OpenStore(seen[-1], found.namespace)

    return opened


@pytest.mark.parametrize("drain", ["queue", "refuse"])
def test_twenty_rounds_under_load_lose_and_change_nothing(drain: str, tmp_path: Path) -> None:
    """With ``refuse`` requests that come while the engine drains are refused, and told so."""
    rig = Rig(storage="", l1_pages=60, l2_pages=70)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    executor = live_executor(rig, TINY_GQA)
    stores: list[Watched] = []
    executor.storage._opener = watched_opener(executor.storage._opener, stores)
    extra = json.dumps({"file_storage_path": str(tmp_path), "prefetch_threshold": 4})
    operator = Operator(executor, extra, drain)
    operator.next()
    workload = chats()
    record = run_live(Engine(rig.config), executor, workload, answered=operator.answered)

    assert [answer.ok for answer in operator.answers] == [True] * (2 * ROUNDS), operator.answers
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(stores) == ROUNDS
    assert all(store.is_closed and not store.late for store in stores)
    assert sum(store.calls for store in stores)
    assert len(record.rows) == len(workload.requests)
    served = {rid for rid, row in record.rows.items() if row.finish == "length"}
    plain = run_bytes(without_cache(rig), TINY_GQA, chats()).outputs
    assert {rid: executor.outputs[rid] for rid in served} == {rid: plain[rid] for rid in served}
    if drain == "queue":
        assert len(served) == len(workload.requests)

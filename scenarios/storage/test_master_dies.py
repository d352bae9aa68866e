"""The master of a Mooncake store dies while requests run, and comes back: time is lost, nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip(
    "mooncake.store", reason="the extra mooncake is not installed", exc_type=ImportError
)

from refimpl.core.engine import Engine
from refimpl.model.config import TINY_GQA
from refimpl.run.live import LiveExecutor, run_live
from refimpl.storage.servers import MooncakeMaster, free_ports, mooncake_master
from refimpl.workload.request import Workload, unscripted
from refimpl.workload.scenario import parse_scenario
from scenarios.bytes.rig import Rig, live_executor, run_bytes, without_cache

pytestmark = pytest.mark.live

RIG = Rig(storage="mooncake", l1_pages=40, l2_pages=60)
BEFORE, AFTER = 12, 30  # answers: the master is killed after the one, is back after the other
CHATS = "multi_turn:clients=40,rounds=4,request_length=12,output_length=3,vocab=256,rate=15,think_ms=400"


class Master:
    """One that is killed and started again on its ports, in the middle of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ports = folder, free_ports()
        self._running = ExitStack()
        self.answered = 0
        self.start("first")

    def start(self, name: str) -> None:
        log = self._folder / f"{name}.log"
        starting = mooncake_master(log, ports=self._ports)
        self.now: MooncakeMaster = self._running.enter_context(starting)

    def progress(self, ended: int) -> None:
        self.answered += ended
        if self.answered == BEFORE:
            self.now.process.kill()
            self.now.process.wait()
        if self.answered == AFTER:
            self.start("second")

    def close(self) -> None:
        self._running.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    found = Master(tmp_path)
    yield found
    found.close()


def chats() -> Workload:
    return unscripted(parse_scenario(CHATS, 7, 4))


def executor(master: Master) -> LiveExecutor:
    extra = master.now.extra_config | {
        "global_segment_size": "64mb",
        "prefetch_threshold": 4,
        "breaker_pause": 0.2,  # so that it is tried again while the run lasts
    }
    return live_executor(RIG, TINY_GQA, json.dumps(extra))


def test_requests_finish_by_recompute_and_hits_return_without_a_restart_of_ours(
    master: Master,
) -> None:
    threads = threading.active_count()
    plain = run_bytes(without_cache(RIG), TINY_GQA, chats()).outputs
    live = executor(master)
    record = run_live(Engine(RIG.config), live, chats(), master.progress)
    assert {row.finish for row in record.rows.values()} == {"length"}
    assert live.outputs == plain
    back_ns = sorted(row.end_ns for row in record.rows.values())[AFTER - 1]
    late = [row for row in record.rows.values() if row.arrival_ns > back_ns]
    assert sum(row.storage_tokens for row in late), "no hits after the master came back"
    assert threading.active_count() == threads

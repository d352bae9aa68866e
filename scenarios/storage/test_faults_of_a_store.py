"""A store that fails under a live engine: it costs time, and never an answer, a request or a page."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.config import EngineConfig, PrefetchConfig
from refimpl.core.engine import Engine
from refimpl.model.config import TINY_GQA
from refimpl.run import live
from refimpl.run.live import LiveExecutor, run_live
from refimpl.run.live_storage import OpenStore
from refimpl.run.record import Record
from refimpl.run.storage_setup import identity_of
from refimpl.storage.backend import Setting
from refimpl.storage.breaker import Breaker, BreakerOptions
from refimpl.storage.faulty import Fault, FaultPlan, Faulty
from refimpl.storage.integrity import Integrity
from refimpl.storage.memory import MemoryBackend
from refimpl.storage.names import namespace_of
from refimpl.units import NS_PER_MS, PER_MILLION
from refimpl.workload.request import Workload, unscripted
from refimpl.workload.scenario import parse_scenario
from scenarios.bytes.rig import Rig, live_executor, run_bytes, without_cache

pytestmark = pytest.mark.live

RIG = Rig(storage="", l1_pages=40, l2_pages=60)
CHATS = "multi_turn:clients=8,rounds=4,request_length=12,output_length=3,vocab=256,rate=0"
EVERYTHING = {
    Fault.SLOW: PER_MILLION // 20,
    Fault.ERROR: PER_MILLION // 10,
    Fault.VANISHED: PER_MILLION // 10,
    Fault.FULL: PER_MILLION // 10,
    Fault.SHORT: PER_MILLION // 10,
    Fault.CORRUPT: PER_MILLION // 10,
}
BUDGET_NS = 100 * NS_PER_MS


def chats() -> Workload:
    return unscripted(parse_scenario(CHATS, 3, 4))


@pytest.fixture(scope="module")
def answers() -> dict[int, list[int]]:
    return run_bytes(without_cache(RIG), TINY_GQA, chats()).outputs


class Drill:
    """A live engine over a store that fails as planned."""

    def __init__(self, plan: FaultPlan, **breaker: int) -> None:
        self.executor: LiveExecutor = live_executor(RIG, TINY_GQA)
        self._plan, self._breaker = plan, BreakerOptions(**breaker)
        storage, hands = self.executor.storage, self.executor.hands
        identity = identity_of(hands.model, hands.mover.host)
        space = namespace_of("memory", identity)
        self.faulty = Faulty(MemoryBackend(Setting(identity, space, {"store": object()})), plan)
        checked = Integrity(self.faulty, is_required=True)
        self.breaker = Breaker(checked, self._breaker, time.monotonic_ns)
        storage._opener = lambda *_: OpenStore(self.breaker, space)
        storage.open_now("faulty", "")

    @property
    def config(self) -> EngineConfig:
        config = RIG.config
        prefetch = PrefetchConfig("timeout", 4, BUDGET_NS, 0, BUDGET_NS)
        cache = replace(config.cache, prefetch=prefetch)
        return replace(config, cache=cache, storage_backend="faulty")

    def run(self) -> Record:
        return run_live(Engine(self.config), self.executor, chats())


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_store_does_all_requests_end_with_the_right_answer(
    seed: int, answers: dict[int, list[int]]
) -> None:
    threads = threading.active_count()
    plan = FaultPlan(per_million=EVERYTHING, seed=seed, slow_ns=20 * NS_PER_MS)
    drill = Drill(plan, failures=3, pause_ns=20 * NS_PER_MS, pause_max_ns=50 * NS_PER_MS)
    record = drill.run()
    assert {row.finish for row in record.rows.values()} == {"length"}
    assert drill.executor.outputs == answers
    assert drill.faulty.calls("get")
    assert threading.active_count() == threads


def test_a_read_that_hangs_costs_the_budget_of_a_prefetch_and_is_left_behind(
    answers: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All later reads are answered at once: the breaker has opened on the one that hangs."""
    monkeypatch.setattr(live, "DRAIN_S", 0.2)
    drill = Drill(FaultPlan({("get", 0): Fault.HANG}), slow_ns=50 * NS_PER_MS)
    with caplog.at_level(logging.WARNING):
        record = drill.run()
    assert drill.faulty.hanging.is_set()
    assert {row.finish for row in record.rows.values()} == {"length"}
    assert drill.executor.outputs == answers
    assert "left behind" in caplog.text
    drill.faulty.released.set()  # the thread that hangs ends with the test
    for thread in threading.enumerate():
        if thread.name == "l3_read":
            thread.join(20)


def test_a_write_that_hangs_stops_no_request(
    answers: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "DRAIN_S", 0.2)
    drill = Drill(FaultPlan({("set", 1): Fault.HANG}), slow_ns=50 * NS_PER_MS)
    record = drill.run()
    assert drill.faulty.hanging.is_set()
    assert {row.finish for row in record.rows.values()} == {"length"}
    assert drill.executor.outputs == answers
    drill.faulty.released.set()
    for thread in threading.enumerate():
        if thread.name == "l3_write":
            thread.join(20)

"""Several ranks of one instance: they answer as one does, and one that is silent is noticed."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.cluster.ranks import RankError  # noqa: E402
from refimpl.config import ConfigError  # noqa: E402
from refimpl.core.engine import Engine  # noqa: E402
from refimpl.messages import Abort  # noqa: E402
from refimpl.run import rank_setup  # noqa: E402
from refimpl.run.hands import TorchHands  # noqa: E402
from refimpl.run.live import LiveExecutor, run_live  # noqa: E402
from refimpl.run.model_choice import ModelChoice  # noqa: E402
from refimpl.run.options import Options  # noqa: E402
from refimpl.run.rank_group import Minimum, Rank, RankGroup, Step  # noqa: E402
from refimpl.run.rank_process import ProcessFollower  # noqa: E402
from refimpl.run.rank_setup import RankChoice, instance_of  # noqa: E402
from refimpl.run.real import Served, serve  # noqa: E402
from refimpl.run.real_hands import executor_of  # noqa: E402
from refimpl.run.setup import Simulation  # noqa: E402
from refimpl.units import NS_PER_S, Random  # noqa: E402
from refimpl.workload.request import unscripted  # noqa: E402
from refimpl.workload.scenario import parse_scenario  # noqa: E402

pytestmark = pytest.mark.live

CHATS = "multi_turn:clients=3,rounds=3,request_length=40,output_length=5,vocab=256,rate=0"
PAGE_BYTES = 1 << 12  # of no consequence where --hicache-size is not given


def simulation(
    tp_size: int, folder: Path | None = None, layout: str = "page_first", **more: object
) -> Simulation:
    """Chats that fit into L1 and L2 in part; with a folder, L3 has the rest."""
    extra = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 8, **more})
    options = Options(
        hicache_mem_layout=layout,
        page_size=8,
        max_total_tokens=160,
        enable_hierarchical_cache=True,
        hicache_ratio="1.5",
        hicache_storage_backend="file" if folder else None,
        hicache_storage_backend_extra_config=extra if folder else None,
        hicache_storage_prefetch_policy="wait_complete" if folder else None,
        tp_size=tp_size,
    )
    return Simulation(options, unscripted(parse_scenario(CHATS, 1, 8)), PAGE_BYTES)


def served(
    tp_size: int, model: str, folder: Path | None = None, transport: str = "thread"
) -> Served:
    choice = ModelChoice(model, "reference")
    ranks = RankChoice(transport, limit_s=30)
    return serve("ranks", simulation(tp_size, folder), choice, choice.open(0), ranks=ranks)


@pytest.mark.parametrize("model", ["tiny-gqa", "tiny-mla"])
def test_one_two_and_four_ranks_give_equal_tokens(model: str, tmp_path: Path) -> None:
    done = [served(size, model, tmp_path / str(size)) for size in (1, 2, 4)]
    assert done[0].outputs == done[1].outputs == done[2].outputs
    for each in done:
        hits = each.figures["hit_tokens"]
        assert hits["host"] + hits["storage"] > 0
        assert each.figures["pages_moved"]["load_back"] > 0
        assert each.store_failures == 0


def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    alone = served(1, "tiny-gqa", tmp_path / "one")
    pair = served(2, "tiny-gqa", tmp_path / "two", "process")
    assert pair.outputs == alone.outputs
    assert pair.figures["pages_moved"]["load_back"] > 0
    assert pair.figures["hit_tokens"]["storage"] > 0


def test_an_instance_serves_what_one_of_another_tp_has_stored(tmp_path: Path) -> None:
    choice = ModelChoice("tiny-gqa", "reference")

    def run(size: int, folder: str, lcm: int) -> Served:
        shared = simulation(size, tmp_path / folder, "page_head", tp_lcm_size=lcm)
        return serve("ranks", shared, choice, choice.open(0), ranks=RankChoice(limit_s=30))

    run(2, "shared", 4)
    cold, warm = run(4, "own", 4), run(4, "shared", 4)
    alone, apart = run(1, "shared", 4), run(1, "shared", 1)  # the last has no names in common
    assert cold.outputs == warm.outputs == alone.outputs == apart.outputs
    hits = [each.figures["hit_tokens"]["storage"] for each in (cold, apart, warm, alone)]
    assert max(hits[:2]) < min(hits[2:])


# ---- agreement -----------------------------------------------------------------------------------


class Counted:
    """``all_reduce(MIN)`` that counts, and takes its time."""

    def __init__(self, inner: Minimum, delay_s: float = 0) -> None:
        self._inner, self._delay = inner, threading.Event()
        self._delay_s, self.calls = delay_s, 0

    def __call__(self, vector: list[int], patience: float = 1) -> list[int]:
        self.calls += 1
        self._delay.wait(self._delay_s)
        return self._inner(vector, patience)


def group_of(tp_size: int, limit_s: float = 30, transport: str = "thread") -> RankGroup:
    choice = ModelChoice("tiny-gqa", "reference")
    ranks = RankChoice(transport, limit_s)
    group = instance_of(simulation(tp_size), choice, choice.open(0), "", ranks)
    assert isinstance(group, RankGroup)
    return group


def test_there_is_no_agreement_while_nothing_is_in_flight() -> None:
    """Field report A05: decode steps with no copy outstanding wait for nobody."""
    group = group_of(2)
    counted = group._own._minimum = Counted(group._own._minimum, delay_s=0.005)
    steps: list[int] = []
    pulses: list[bool] = []
    take = group._own.take

    def watched(step: Step) -> list[int] | None:
        before = counted.calls
        agreed = take(step)
        assert counted.calls - before == (1 if step.ops else 0) + step.is_pulse, "one, or none"
        steps.append(len(step.ops))
        pulses.append(step.is_pulse)
        return agreed

    group._own.take = watched  # type: ignore[method-assign]
    run_live(Engine(simulation(2).engine), group, simulation(2).workload)
    assert counted.calls == group.agreements + sum(pulses)
    assert group.agreements > sum(pulses)
    assert steps.count(0) > len(steps) / 3  # most steps of a decode are such


def test_ranks_take_the_same_steps_and_agree_on_the_same_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[int, list[tuple[int, ...]]] = {}
    take = Rank.take

    def watched(rank: Rank, step: Step) -> list[int] | None:
        seen.setdefault(rank.ledger.rank, []).append(step.ops)
        return take(rank, step)

    monkeypatch.setattr(Rank, "take", watched)
    run_live(Engine(simulation(4).engine), group_of(4), simulation(4).workload)
    assert set(seen) == {0, 1, 2, 3}
    assert all(each == seen[0] for each in seen.values())


def test_steps_of_a_decode_wait_for_no_agreement() -> None:
    """Field report A05: an agreement of 5 ms, and 200 steps that it adds less than 1 ms to on average."""
    load = "all_equal:requests=2,request_length=16,output_length=200,vocab=256,gap_ms=0"
    options = Options(page_size=8, max_total_tokens=640, tp_size=2)
    simulated = Simulation(options, unscripted(parse_scenario(load, 1, 8)), PAGE_BYTES)
    choice = ModelChoice("tiny-gqa", "reference")
    group = instance_of(simulated, choice, choice.open(0), "", RankChoice(limit_s=30))
    assert isinstance(group, RankGroup)
    counted = group._own._minimum = Counted(group._own._minimum, delay_s=0.005)
    record = run_live(Engine(simulated.engine), group, simulated.workload)
    steps = max(row.output_tokens for row in record.rows.values())
    assert steps == 200
    assert counted.calls * 5 / steps < 1  # ms


def test_ranks_hear_of_the_same_requests_aborts_and_batches_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Field report A07: half of 200 requests are cancelled, and ranks are late by up to 5 ms."""
    load = "multi_turn:clients=100,rounds=2,request_length=12,output_length=6,vocab=256,rate=0"
    simulated = Simulation(simulation(4).options, unscripted(parse_scenario(load, 1, 8)), 1 << 12)
    choice = ModelChoice("tiny-gqa", "reference")
    group = instance_of(simulated, choice, choice.open(0), "", RankChoice(limit_s=30))
    assert isinstance(group, RankGroup)
    random, pause = Random(7), threading.Event()
    did: dict[TorchHands, list[tuple[str, object]]] = {}
    take = Rank.take

    def late(rank: Rank, step: Step) -> list[int] | None:
        if rank.ledger.rank and step.ops:
            pause.wait(Random(len(step.orders) * 4 + rank.ledger.rank).below(5) / 1000)
        return take(rank, step)

    def noted(name: str) -> None:
        method = getattr(TorchHands, name)

        def note(hands: TorchHands, what: object, *more: object) -> object:
            did.setdefault(hands, []).append((name, what))
            return method(hands, what, *more)

        monkeypatch.setattr(TorchHands, name, note)

    def cancel(_: int) -> None:
        for _ in range(2):
            group.inbox.put(Abort(random.between(1, 200)))

    monkeypatch.setattr(Rank, "take", late)
    for name in ("expect", "finished", "prefill", "decode", "withdraw"):
        noted(name)
    engine = Engine(simulated.engine)
    record = run_live(engine, group, simulated.workload, cancel)
    ends = [row.finish for row in record.rows.values()]
    assert len(ends) == 200
    assert 50 < ends.count("abort") < 150
    first, *others = did.values()
    assert len(others) == 3
    assert {name for name, _ in first} >= {"expect", "finished", "prefill", "decode"}
    assert all(each == first for each in others)
    assert not engine.requests()
    assert not any(hands._served or hands._running for hands in did)


# ---- ranks that fail -----------------------------------------------------------------------------


def test_a_thread_that_is_silent_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(2, limit_s=1)
    released = threading.Event()
    take = Rank.take

    def stuck(rank: Rank, step: Step) -> list[int] | None:
        if rank.ledger.rank and step.ops:
            released.wait(20)
        return take(rank, step)

    monkeypatch.setattr(Rank, "take", stuck)
    begun = monotonic()
    try:
        with pytest.raises(RankError, match="rank 1 did not answer within 1 s"):
            run_live(Engine(simulation(2).engine), group, simulation(2).workload)
    finally:
        released.set()
    assert monotonic() - begun < 15


def test_a_rank_that_is_silent_while_nothing_is_asked_of_it_is_noticed_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All meet now and then, although there is nothing to agree on."""
    group = group_of(2, limit_s=1)
    released, has_pulse = threading.Event(), threading.Event()
    take = Rank.take

    def stuck(rank: Rank, step: Step) -> list[int] | None:
        if rank.ledger.rank and has_pulse.is_set():
            released.wait(20)
        agreed = take(rank, step)
        if rank.ledger.rank and step.is_pulse:
            has_pulse.set()
        return agreed

    monkeypatch.setattr(Rank, "take", stuck)
    begun = monotonic()

    def idle() -> None:
        while monotonic() - begun < 15:
            group.pop_due(int((monotonic() - begun) * NS_PER_S))
            released.wait(0.01)

    try:
        with pytest.raises(RankError, match="rank 1 did not answer within 1 s"):
            idle()
    finally:
        released.set()
        group.close()
    assert monotonic() - begun < 10


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_a_process_that_dies_or_stops_is_noticed_in_time(sign: signal.Signals) -> None:
    group = group_of(2, limit_s=4, transport="process")
    (follower,) = group._followers
    assert isinstance(follower, ProcessFollower)
    assert follower.pid is not None
    killed: list[float] = []

    def progress(_: int) -> None:
        if not killed:
            killed.append(monotonic())
            os.kill(follower.pid or 0, sign)

    with pytest.raises(RankError, match="rank"):
        run_live(Engine(simulation(2).engine), group, simulation(2).workload, progress)
    assert monotonic() - killed[0] < 20  # the limit, and what closing takes


def test_a_rank_that_can_not_be_made_leaves_no_thread_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> LiveExecutor:
        if args[3].rank == 1:
            raise ConfigError("no room for rank 1")
        return executor_of(*args)

    before = set(threading.enumerate())
    monkeypatch.setattr(rank_setup, "executor_of", fails)
    with pytest.raises(ConfigError, match="no room for rank 1"):
        group_of(2)
    assert set(threading.enumerate()) <= before


def test_a_rank_that_dies_while_all_connect_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_here = ProcessFollower.wait_here

    def killed(follower: ProcessFollower) -> None:
        wait_here(follower)
        os.kill(follower.pid or 0, signal.SIGKILL)

    monkeypatch.setattr(ProcessFollower, "wait_here", killed)
    begun = monotonic()
    with pytest.raises(RankError, match="rank 1 has died, exit code -9"):
        group_of(2, transport="process")
    assert monotonic() - begun < 30


def test_the_limit_of_a_silent_rank_is_not_one_for_starting() -> None:
    """Loading torch takes a process longer than this, and on a busy machine several seconds."""
    group = group_of(2, limit_s=0.2, transport="process")
    (follower,) = group._followers
    follower.check()  # it has not died
    group.close()
    assert not group._has_failed

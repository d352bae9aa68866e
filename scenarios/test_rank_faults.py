"""Ranks that differ in a simulation: what each kind of fault costs, what the summary says, who dies of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from refimpl.core.check import check_engine, check_quiescent
from refimpl.keys import PageKey, namespace_seed
from refimpl.messages import Reply, Step
from refimpl.run.options import Options
from refimpl.run.report import by_worker, integers
from refimpl.run.setup import Outcome, Simulation
from refimpl.run.store import SharedStore
from refimpl.run.world import Instance
from refimpl.units import NS_PER_MS, NS_PER_S
from scenarios.command_line import CommandLine

ALIKE = "rank1.die=1000000:9999s"  # ranks that may differ, and do not while the run lasts
OPTIONS = Options(
    workload="multi_turn:clients=20,rounds=6",
    max_total_tokens=60_000,
    enable_hierarchical_cache=True,
    hicache_storage_backend="memory",
    tp_size=2,
)


def ran(faults: str | None, **more: Any) -> Outcome:
    return Simulation(replace(OPTIONS, faults=faults, **more)).run()


def figures(faults: str | None, **more: Any) -> dict[str, Any]:
    return integers(ran(faults, **more).record)


@pytest.mark.parametrize(("model", "size"), [("llama-3.1-8b", 4), ("deepseek-r1", 8)])
def test_ranks_that_do_not_differ_decide_as_one(model: str, size: int) -> None:
    alone = figures(None, model=model, tp_size=size)
    ranks = figures(ALIKE, model=model, tp_size=size)
    told = ranks.pop("ranks")
    assert ranks == alone
    assert told["agreements"] > 0
    assert (told["disagreements"], told["died_ns"], told["unanswered"]) == (0, {}, 0)
    assert set(told["pages_lost"].values()) == {0}


def test_faults_of_one_rank_alone_leave_a_run_of_one_rank_as_it_was() -> None:
    faults = "fetch_short=300000,store_fail=300000,delay=100000:50ms"
    alone = figures(faults, tp_size=1)
    assert "ranks" not in alone
    assert figures(faults.replace(",", ",rank0."), tp_size=1) == alone


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        ("rank1.probe_short=500000", "probe"),
        ("rank1.fetch_short=500000", "fetch"),
        ("rank1.slot_less=500000", "backup"),
        ("rank1.backup_fail=500000", "backup"),
        ("rank1.store_fail=500000", "store"),
    ],
)
def test_what_one_rank_lacks_is_lost_for_all_and_counted(fault: str, op: str) -> None:
    """Field reports A03, A06: the surplus of the others goes back, and all requests are answered."""
    told = figures(fault)
    ranks = told["ranks"]
    assert ranks["pages_lost"][op] > 0
    assert ranks["disagreements"] > 0
    assert told["finished"] == {"length": 120}
    if op in ("backup", "store"):
        assert told["pages_lost"][op] >= ranks["pages_lost"][op]
    if op != "store":  # what a rank alone did not store, it may still find in L2
        assert sum(told["hit_tokens"].values()) < sum(figures(None)["hit_tokens"].values())


def test_a_rank_with_a_slot_less_costs_each_copy_its_last_page() -> None:
    """Field report A03: on the rank that has room, the page is given back as well."""
    options = replace(OPTIONS, faults="rank1.slot_less=1000000", hicache_storage_backend=None)
    simulation = Simulation(options)
    world = simulation.world()
    world.run(simulation.workload)
    check_quiescent(world.instances[0].engine)
    told = integers(simulation.run().record)
    ranks = told["ranks"]
    assert ranks["pages_lost"]["backup"] == ranks["disagreements"] == told["pages_lost"]["backup"]
    assert ranks["disagreements"] > 50


class Forgetful(SharedStore):
    """Finds eight pages, and has the first five."""

    def leading_run(self, keys: Sequence[PageKey]) -> int:
        return min(len(keys), 8)


@pytest.mark.parametrize("sees_less", [True, False], ids=["by the probe", "when they are read"])
def test_what_one_rank_has_of_l3_beyond_another_is_not_used_and_takes_no_room(
    sees_less: bool,
) -> None:
    """Field report A06: eight pages on one rank and five on the other are five on both."""
    prompts = "all_equal:requests=1,request_length=600"
    options = replace(OPTIONS, workload=prompts, faults=ALIKE, hicache_write_policy="write_back")
    simulation = Simulation(options)
    (spec,) = simulation.workload.requests
    keys = spec.prompt.page_keys(options.page_size, namespace_seed(None, None, None))
    assert len(keys) == 9
    world = simulation.world()
    (instance,) = world.instances
    stores = [SharedStore(), SharedStore() if sees_less else Forgetful()]
    for rank, store, pages in zip(instance.lanes.ranks, stores, (8, 5), strict=True):  # type: ignore[attr-defined]
        store.put(keys[:pages])
        rank.lanes._site.store = store
    record = world.run(simulation.workload)
    assert record.rows[spec.rid].storage_tokens == 5 * options.page_size
    assert instance.engine.cache.host.pool.used == 5
    check_quiescent(instance.engine)
    op = "probe" if sees_less else "fetch"
    assert instance.lanes.tally.pages_lost == {op: 3}  # type: ignore[attr-defined]


def test_a_load_that_fails_on_one_rank_is_done_on_none() -> None:
    """Field report A03."""
    one, both = (
        figures(f"{which}load_fail=1000000", hicache_storage_backend=None)
        for which in ("rank1.", "")
    )
    assert one == both
    assert one["finished"] == {"length": 120}
    assert one["recomputed_tokens"] > 0
    assert figures(ALIKE, hicache_storage_backend=None)["recomputed_tokens"] == 0


def test_every_rank_draws_faults_of_its_own() -> None:
    """Eight ranks fail more often than two, since whoever fails an op fails it for all."""
    lost = [
        figures("backup_fail=20000", tp_size=size)["pages_lost"]["backup"] for size in (1, 2, 8)
    ]
    assert lost[0] < lost[1] < lost[2]


def test_one_rank_that_answers_late_costs_as_much_time_as_all_of_them() -> None:
    few = {
        "workload": "multi_turn:clients=2,rounds=6",
        "max_total_tokens": 12_000,
        "hicache_ratio": "1.01",
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    kinds = ("rank1.delay=0:1s", "rank1.delay=1000000:400ms", "delay=1000000:400ms")
    quick, late, all_late = (figures(faults, **few) for faults in kinds)
    assert late["hit_tokens"]["storage"] > 0
    assert late["ttft_ns"]["max"] >= quick["ttft_ns"]["max"] + 400 * NS_PER_MS
    for figure in ("hit_tokens", "virtual_ns", "finished"):
        assert late[figure] == all_late[figure]
    assert late["ranks"]["disagreements"] == 0


# ---- a rank that dies ----------------------------------------------------------------------------


def test_a_rank_that_dies_fails_its_requests_within_the_limit_and_keeps_the_slots() -> None:
    simulation = Simulation(replace(OPTIONS, faults="rank1.die=1000000:5s"))
    world = simulation.world()
    (instance,) = world.instances
    ends: list[tuple[int, Step, int]] = []

    def after_turn(stopped: Instance, step: Step) -> None:
        if stopped.error:
            ends.append((world.now, step, len(stopped.engine.cache.ops)))

    world.after_turn = after_turn
    record = world.run(simulation.workload)
    ((at, step, ops),) = ends
    told = instance.lanes.tally  # type: ignore[attr-defined]
    assert at == told.died_ns[1] + 5 * NS_PER_S
    reason = "error: rank 1 did not answer within 5 s: restart the instance"
    assert {reply.finish for reply in step.commands if isinstance(reply, Reply)} == {reason}
    assert ops == told.unanswered == len(instance.engine.cache.ops) > 0
    check_engine(instance.engine)  # the slots of those ops are theirs still
    rows = list(record.rows.values())
    before = [row for row in rows if row.finish == "length"]
    failed = [row for row in rows if row.finish == reason]
    after = [row for row in rows if row.finish == "error: no instance is left that could answer"]
    assert len(before) + len(failed) + len(after) == 120
    assert before
    assert {row.end_ns for row in failed} == {at}
    assert all(row.end_ns == row.arrival_ns >= at for row in after)


@pytest.mark.parametrize("many", [{"dp_size": 2}, {"instances": 2}, {"dp_size": 2, "instances": 2}])
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_where_one_instance_has_died_the_others_take_its_requests(
    many: dict[str, int], policy: str
) -> None:
    """Data-parallel ranks and instances alike: what fails is what it had taken."""
    more = many | {"load_balance_method": policy, "router_policy": policy}
    for seed in range(20):
        record = ran("rank1.die=2000", fault_seed=seed, **more).record
        if len(record.ranks["died_ns"]) == 1:
            break
    (died,) = record.ranks["died_ns"].items()
    name, died_ns = died
    rows = list(record.rows.values())
    assert {row.finish.partition(":")[0] for row in rows} == {"length", "error"}
    for row in rows:
        if f"instance{row.instance}_rank1" != name:
            assert row.finish == "length"
        else:
            assert row.arrival_ns < died_ns + 5 * NS_PER_S


def test_one_seed_gives_one_run_and_another_another() -> None:
    faults = "fetch_short=100000,rank1.probe_short=100000,slot_less=50000,delay=50000:20ms,die=100"
    digests = [ran(faults, fault_seed=seed).record.digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


# ---- what is said --------------------------------------------------------------------------------


def test_the_summary_says_what_became_of_ranks_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refimpl = CommandLine(monkeypatch, capsys)
    words = ["simulate", "--workload", "multi_turn:clients=20,rounds=6", "--tp-size", "2"]
    words += ["--max-total-tokens", "60000", "--enable-hierarchical-cache", "--faults"]
    done = refimpl(*words, "rank1.slot_less=100000,rank1.die=1000000:5s")
    assert done.code == 0
    for said in ("agreements", "pages that some rank lacked: backup", "instance0, rank1 died, s"):
        assert said in done.out
    assert "ops that never end, their slots out of use" in done.out
    assert "rank 1 did not answer within 5 s: restart the instance (" in done.out


def test_the_summary_has_the_hits_of_each_data_parallel_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ran(None, dp_size=2, instances=2).record
    told = by_worker(list(record.rows.values()), 2)
    assert [(each["instance"], each["dp_rank"]) for each in told] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    whole = integers(record)
    for tier, tokens in whole["hit_tokens"].items():
        assert sum(each["hit_tokens"][tier] for each in told) == tokens
    assert sum(each["requests"] for each in told) == whole["requests"]
    refimpl = CommandLine(monkeypatch, capsys)
    words = ("simulate", "--workload", "multi_turn:clients=4,rounds=2", "--dp-size", "2")
    assert "instance 0, DP rank 1" in refimpl(*words).out
    told = json.loads(refimpl(*words, "--json").out)["workers"]
    assert [each["dp_rank"] for each in told] == [0, 1]
    assert "By instance" not in refimpl(*words[:-2]).out


@pytest.mark.parametrize("faults", [None, ALIKE])
def test_data_parallel_ranks_of_several_ranks_share_one_l3(faults: str | None) -> None:
    """What one of them has stored another finds, however many ranks each of them has."""
    prompts = "all_equal:requests=20,request_length=1024,gap_ms=2000"
    record = ran(faults, workload=prompts, dp_size=2, tp_size=4).record
    first = {row.instance: row for row in reversed(record.rows.values())}
    assert first[0].hit_tokens == 0
    assert first[1].storage_tokens == 960  # of 1024, but for the page with the last token


def test_one_capacity_of_l3_has_room_for_as_many_more_pages_as_a_latent_cache_has_ranks() -> None:
    """Field report O04: what is the same on eight ranks is stored once."""
    extra = '{"max_size": "4gb"}'
    pages = [
        Simulation(
            replace(
                OPTIONS,
                model="deepseek-r1",
                tp_size=size,
                mem_fraction_static="1",
                hicache_storage_backend_extra_config=extra,
            )
        ).effective()["l3_pages"]
        for size in (1, 8)
    ]
    assert pages[0] == pages[1] > 0

"""A load test and a simulation of the same traffic send the same requests."""

from __future__ import annotations

import ast
import json
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars
import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")

from perf._options import TrafficOptions, add_options, read_options
from perf._traffic import begins_ns, build_traffic
from refimpl.config import ConfigError
from refimpl.units import PER_MILLION
from scenarios.command_line import CommandLine
from scenarios.perf import fixture_server as server
from scenarios.perf.load import load
from scenarios.tidy import ROOT

pytestmark = pytest.mark.live

FILES = {
    "Chat": "chat", "LongDocument": "long_document", "Rag": "rag", "SharedPrefix": "shared_prefix",
}  # fmt: skip
SPEED = 400  # times as fast as the classes would begin
Counts = list[tuple[int, int, int, int]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def own_scenario(file: str) -> str:
    """What stands in a locustfile, read without running it: to import one is to patch this process."""
    tree = ast.parse((ROOT / "perf" / f"{file}.py").read_text(encoding="utf-8"))
    (text,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SCENARIO"
    )
    return str(text)


def counts(rows: list[dict[str, Any]]) -> Counts:
    names = ("session", "turn", "prompt_tokens", "output_tokens")
    return sorted(tuple(row[name] for name in names) for row in rows)  # type: ignore[misc]


def write_trace(path: Path) -> None:
    lines = [
        {"timestamp": 40 * at, "input_length": 300 + 90 * at, "output_length": 3,
         "hash_ids": list(range(1, 2 + (300 + 90 * at - 1) // 512))}
        for at in range(20)
    ]  # fmt: skip
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_every_class_sends_what_a_simulation_sends(cli: CommandLine, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace)
    with server.answering(lambda _: server.generated) as fixture:
        run = load(
            tmp_path, "--host", fixture.url, "--api", "sglang", "--speed", str(SPEED),
            "--trace", str(trace), "-u", "5", *FILES, "TraceReplay",
        )  # fmt: skip
    assert set(run.errors()) == {""}, run.out
    sources = {own_scenario(file): ["--workload", own_scenario(file)] for file in FILES.values()}
    sources[trace.name] = ["--trace", str(trace), "--trace-format", "mooncake"]
    for scenario, words in sources.items():
        table = tmp_path / "simulated.parquet"
        assert cli("simulate", *words, "--output", str(table)).code == 0
        simulated = counts(polars.read_parquet(table).to_dicts())
        assert counts([row for row in run.rows if row["scenario"] == scenario]) == simulated


OPTIONS = TrafficOptions("", 0, 0, PER_MILLION, "", "mooncake", 0, 0)
SCENARIOS = {
    "multi_turn:clients=5,rounds=3,rate=2": 5,
    "multi_turn:clients=5,rounds=3,round_barrier=true": 1,
    "multi_turn:clients=5,rounds=3,max_parallel=2": 1,
    "shared_prefix:groups=3,prompts_per_group=4": 12,
    "agent:sessions=3,turns=4": 3,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_chains_hold_each_request_once_and_all_that_it_waits_for(scenario: str) -> None:
    traffic = build_traffic(scenario, OPTIONS)
    assert len(traffic.chains) == SCENARIOS[scenario]
    rids = [spec.rid for chain in traffic.chains for spec in chain.requests]
    assert sorted(rids) == list(range(1, traffic.requests + 1))
    for chain in traffic.chains:
        own = {spec.rid for spec in chain.requests}
        assert all(own.issuperset(spec.after) for spec in chain.requests)
    begins = [begins_ns(chain) for chain in traffic.chains]
    assert begins == sorted(begins)


def begins(options: TrafficOptions) -> Iterator[int]:
    yield from map(
        begins_ns, build_traffic("multi_turn:clients=50,rounds=2,rate=4", options).chains
    )


def test_rate_and_speed_move_beginnings_and_nothing_else() -> None:
    own = list(begins(OPTIONS))
    assert list(begins(replace(OPTIONS, speed=4 * PER_MILLION))) == [at // 4 for at in own]
    faster = list(begins(replace(OPTIONS, rate=400 * PER_MILLION)))
    assert len(faster) == len(own)
    assert faster[-1] < own[-1] // 20
    assert faster != list(begins(replace(OPTIONS, rate=400 * PER_MILLION, seed=1)))


class _Parser:
    """Takes options as Locust's parser does, which can't be had without Locust, and all their defaults."""

    def __init__(self, given: Namespace) -> None:
        self._given = given

    def add_argument(self, name: str, *, default: str | bool, **_: str | bool) -> None:
        setattr(self._given, name.removeprefix("--").replace("-", "_"), default)


def test_the_guide_names_every_option() -> None:
    given = Namespace()
    add_options(_Parser(given))
    guide = (ROOT / "perf" / "README.md").read_text(encoding="utf-8")
    options = [f"--{name.replace('_', '-')}" for name in vars(given)]
    assert [option for option in options if option not in guide] == []


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("api", "grpc", "--api 'grpc' is unknown; choose one of openai-chat, openai, sglang"),
        ("loop", "half", "--loop 'half' is unknown; choose one of open, closed"),
        ("seed", "-1", "--seed '-1' is not a whole number from 0 up"),
        ("rate", "fast", "--rate 'fast' is not a decimal number"),
        ("speed", "0", "--speed '0' must be above 0"),
        ("extra_body", "[1]", "--extra-body is not a JSON object"),
        ("expect_hit_rate", "5", "--expect-hit-rate '5' is not LOW-HIGH, as in 0-5"),
        ("lag_limit_ms", "0", "--lag-limit-ms '0' is not a whole number from 1 up"),
    ],
)
def test_an_option_that_can_not_be_used_is_one_line(option: str, text: str, reason: str) -> None:
    given = Namespace()
    add_options(_Parser(given))
    assert read_options(given).api == "openai-chat"
    setattr(given, option, text)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        read_options(given)


def test_a_rate_is_refused_where_sessions_can_not_begin_one_by_one() -> None:
    options = replace(OPTIONS, rate=PER_MILLION)
    with pytest.raises(ConfigError, match="write rate= into the scenario"):
        build_traffic("multi_turn:clients=5,rounds=3,max_parallel=2", options)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"scenario": "chat"}, "scenario 'chat' is unknown"),
        ({"trace": "missing.jsonl"}, "missing.jsonl:0: can't be read"),
        ({}, "TraceReplay replays a trace: name it with --trace FILE"),
    ],
)
def test_traffic_that_can_not_be_built_is_one_line(words: dict[str, str], reason: str) -> None:
    own = "multi_turn" if "scenario" in words else ""
    with pytest.raises(ConfigError, match=re.escape(reason)):
        build_traffic(own, replace(OPTIONS, **words))

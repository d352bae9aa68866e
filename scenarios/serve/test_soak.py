"""A server in a process of its own under mixed load: at rest it holds nothing, and its memory stays flat.

``SOAK_S`` says for how many seconds a model is kept busy: ``pytest -m slow scenarios/serve/test_soak.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx
import zmq.asyncio

from refimpl.units import Random
from scenarios.serve.mixed_load import ANSWER_S, Load, flood, spend
from scenarios.serve.observed import (
    Sample,
    bytes_a_request,
    check_nothing_is_held,
    more_than,
    moving,
    sample_of,
    without,
)
from scenarios.serve.server_process import SERVER, server_process

SOAK_S = float(os.environ.get("SOAK_S", "600"))
NULL_SOAK_S = SOAK_S / 5
CLIENTS = 8
ROUNDS_MIN = 6
# A quarter of what leaky_server.py keeps; up to 250 are seen while the pools of allocators fill up.
GROWTH_BYTES = 512
FLAGS = (
    *("--page-size", "16", "--max-total-tokens", "2048", "--max-queued-requests", "64"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
)
NULL = ("--hands", "none", *FLAGS)
MODEL = ("--model-path", "tiny-gqa", "--arithmetic", "reference", *FLAGS)
LEAKY = (sys.executable, "-m", "scenarios.serve.leaky_server")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="memory is read from /proc"),
]


@dataclass(frozen=True)
class Round:
    """What a server does between two looks at it: acts of all kinds, then many that cost little."""

    acts: int
    floods: int


SHORT = Round(acts=50, floods=900)


@dataclass
class Soaked:
    """A soak so far: its load, and a sample after each round, L3 detached."""

    load: Load
    samples: list[Sample] = field(default_factory=list)

    @property
    def early(self) -> list[Sample]:
        """The first half."""
        return self.samples[: len(self.samples) // 2]

    @property
    def late(self) -> list[Sample]:
        """The second half, when all has been met and each buffer has had its largest content."""
        return self.samples[len(self.samples) // 2 :]

    def __str__(self) -> str:
        told = ", ".join(
            f"{each.requests}: {each.resident_bytes / (1 << 20):.2f}" for each in self.samples
        )
        slope = bytes_a_request(self.late)
        return f"{slope:.0f} bytes a request, MB by requests: {told}, {dict(self.load.outcomes)}"


def client_of(load: Load) -> httpx.AsyncClient:
    """Without certificates, which take longer to load than most requests."""
    return httpx.AsyncClient(base_url=load.url, timeout=ANSWER_S, verify=False)


async def one_round(soaked: Soaked, each: Round) -> None:
    """With clients of its own, so that no connection is left, then a look at the server at rest."""
    load, seed = soaked.load, 1000 * len(soaked.samples)
    clients = [client_of(load) for _ in range(CLIENTS)]
    await spend(load, clients, seed, each.acts)
    await flood(load, Random(seed), each.floods)
    await asyncio.gather(*(client.aclose() for client in clients))
    async with client_of(load) as client:
        detached = await client.delete("/hicache/storage-backend?drain=queue")
        assert detached.status_code == 200, detached.text
        metrics = await without(client, moving)
        check_nothing_is_held(metrics)
        soaked.samples.append(sample_of(metrics))


async def soak(load: Load, each: Round, seconds: float) -> Soaked:
    """Rounds until the time is over and there are enough; then as few threads and sockets as ever."""
    soaked, end = Soaked(load), monotonic() + seconds
    while len(soaked.samples) < ROUNDS_MIN or monotonic() < end:
        await one_round(soaked, each)
    fewest = min(soaked.early, key=lambda sample: (sample.threads, sample.descriptors))
    async with client_of(load) as client:
        await without(client, partial(more_than, fewest))
    return soaked


def soaked_server(
    folder: Path, each: Round, *flags: str, seconds: float = 0, launch: Sequence[str] = SERVER
) -> Soaked:
    """A server that was kept busy, was at rest after each round, and has ended as it should."""
    with server_process(folder / "log", *flags, launch=launch) as server:
        with zmq.asyncio.Context() as context:
            load = Load(server.url, server.zmq_endpoint, folder / "pages", context)
            soaked = asyncio.run(soak(load, each, seconds))
        assert server.stop() == 0
    print(f"\n{soaked}")
    assert "Traceback" not in server.log.read_text(encoding="utf-8")
    return soaked


def check_all_kinds_happened(outcomes: Counter[str]) -> None:
    """A soak in which nobody leaves or attaches proves nothing of it."""
    for kind in ("stream left", "given up", "aborted 200", "zmq left", "zmq abort", "attach 200"):
        assert outcomes[kind], f"no {kind!r} among {dict(outcomes)}"


def test_memory_stays_flat_and_a_server_at_rest_holds_nothing(tmp_path: Path) -> None:
    soaked = soaked_server(tmp_path, SHORT, *NULL)
    assert bytes_a_request(soaked.late) < GROWTH_BYTES, soaked


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_that_keeps_2_kb_of_each_request_is_found(tmp_path: Path) -> None:
    soaked = soaked_server(tmp_path, SHORT, *NULL, launch=LEAKY)
    assert bytes_a_request(soaked.late) > 2 * GROWTH_BYTES, soaked


@pytest.mark.slow
@pytest.mark.timeout(NULL_SOAK_S + 180)
def test_a_server_without_a_model_stands_a_long_soak(tmp_path: Path) -> None:
    soaked = soaked_server(tmp_path, Round(400, 2000), *NULL, seconds=NULL_SOAK_S)
    assert bytes_a_request(soaked.late) < GROWTH_BYTES, soaked
    check_all_kinds_happened(soaked.load.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 240)
def test_a_server_with_a_model_stands_ten_minutes_of_mixed_load(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a model needs torch: pip install -e '.[torch]'")
    pytest.importorskip("numba", reason="io backend kernel needs numba")
    soaked = soaked_server(tmp_path, Round(400, 400), *MODEL, seconds=SOAK_S)
    assert bytes_a_request(soaked.late) < GROWTH_BYTES, soaked
    check_all_kinds_happened(soaked.load.outcomes)


def test_a_server_that_is_told_to_end_finishes_its_answers_and_exits_with_0(tmp_path: Path) -> None:
    asked = {"input_ids": [1, 2, 3], "stream": True}
    asked |= {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    with server_process(tmp_path / "log", *NULL) as server:
        with httpx.stream("POST", f"{server.url}/generate", json=asked, timeout=ANSWER_S) as answer:
            events = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
            first = json.loads(next(events))
            server.process.terminate()
            *_, last = map(json.loads, events)
        assert server.stop() == 0
    assert first["meta_info"]["finish_reason"] is None
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
    assert last["meta_info"]["completion_tokens"] == 200

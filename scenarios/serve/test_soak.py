"""Mixed load with aborts, disconnects, attaches, flushes and nonsense: at the end nothing is left over.

``SOAK_S`` says for how many seconds, ``pytest -m slow scenarios/serve/test_soak.py``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_quiescent
from refimpl.serve.service import Service
from refimpl.units import Random
from scenarios.serve.served import OPTIONS, serving, serving_null

SOAK_S = float(os.environ.get("SOAK_S", "20"))
CLIENTS = 8
SAMPLES = 20  # of memory, over the run
# A leak of one row of the record for each request is some 500 bytes; so is half of it, which must show over
# ten minutes. What the allocator keeps varies by less than this, measured over runs of that length.
GROWTH_BYTES = 24 << 20

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(SOAK_S + 180)]

Client = httpx.AsyncClient
Act = Callable[["Load", Client, Random], Awaitable[None]]


@dataclass
class Load:
    """What clients have done, and what came of it."""

    folder: Path
    statuses: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, answer: httpx.Response, *allowed: int) -> None:
        self.statuses[f"{what} {answer.status_code}"] += 1
        assert answer.status_code in allowed, f"{what}: {answer.status_code} {answer.text[:300]}"


def prompt(random: Random) -> list[int]:
    """One of a few beginnings, and an end of its own."""
    begin = random.below(12)
    body = [(begin * 37 + at) % 250 for at in range(16 * (1 + random.below(12)))]
    return body + [random.below(250) for _ in range(1 + random.below(20))]


def body(random: Random, tokens: int = 24) -> dict[str, Any]:
    params = {
        "max_new_tokens": 1 + random.below(tokens),
        "temperature": random.below(2),
        "ignore_eos": True,
    }
    return {"input_ids": prompt(random), "sampling_params": params}


async def whole(load: Load, client: Client, random: Random) -> None:
    load.note("whole", await client.post("/generate", json=body(random)), 200, 503)


async def batch(load: Load, client: Client, random: Random) -> None:
    asked = {
        "input_ids": [prompt(random) for _ in range(3)],
        "sampling_params": {"max_new_tokens": 4, "n": 2},
    }
    load.note("batch", await client.post("/generate", json=asked), 200, 503)


async def chat(load: Load, client: Client, random: Random) -> None:
    asked = {
        "messages": [{"role": "user", "content": "tell me more " * (1 + random.below(20))}],
        "max_tokens": 8,
        "n": 1 + random.below(3),
        "stop": ["zz"],
    }
    load.note("chat", await client.post("/v1/chat/completions", json=asked), 200, 503)


async def stream(load: Load, client: Client, random: Random) -> None:
    """To its end, or not; quickly, or not."""
    leaves, pause_s = random.below(3) == 0, random.below(3) * 0.002
    async with client.stream("POST", "/generate", json=body(random) | {"stream": True}) as answer:
        assert answer.status_code == 200
        events = 0
        async for line in answer.aiter_lines():
            events += line.startswith("data: {")
            await asyncio.sleep(pause_s)
            if leaves and events > 2:
                load.statuses["stream left"] += 1
                return
    load.statuses["stream read"] += 1


async def gives_up(load: Load, client: Client, random: Random) -> None:
    try:
        await client.post("/generate", json=body(random, 400), timeout=0.05)
        load.statuses["waited for"] += 1
    except httpx.TimeoutException:
        load.statuses["given up"] += 1


async def aborted(load: Load, client: Client, random: Random) -> None:
    rid = f"abort-{random.below(1 << 30)}"
    asked = asyncio.ensure_future(client.post("/generate", json=body(random, 300) | {"rid": rid}))
    await asyncio.sleep(random.below(20) / 1000)
    load.note("abort", await client.post("/abort_request", json={"rid": rid}), 200)
    load.note("aborted", await asked, 200, 503)


async def nonsense(load: Load, client: Client, random: Random) -> None:
    bad: list[tuple[str, bytes]] = [
        ("/generate", b"{"),
        ("/generate", b'{"text": "\xff"}'),
        ("/generate", json.dumps({"input_ids": [1 << 40]}).encode()),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
        ("/v1/chat/completions", b'{"messages": [{"role": 1}]}'),
        ("/hicache/storage-backend", b"[]"),
    ]
    path, raw = bad[random.below(len(bad))]
    header = {"content-type": "application/json"}
    method = "PUT" if path.startswith("/hicache") else "POST"
    answer = await client.request(method, path, content=raw, headers=header)
    load.note("nonsense", answer, 400, 422)


async def change(load: Load, client: Client, random: Random) -> None:
    path = "/hicache/storage-backend"
    if random.below(2):
        load.note("detach", await client.delete(f"{path}?drain=queue"), 200, 400)
        return
    # Bounded, as the index that the backend keeps of its files would grow with them.
    extra = {
        "file_storage_path": str(load.folder),
        "prefetch_threshold": 16,
        "max_size": "4mb",
    }
    asked = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
        "hicache_storage_prefetch_policy": ("best_effort", "wait_complete")[random.below(2)],
        "drain": "queue",
    }
    load.note("attach", await client.put(path, json=asked), 200, 400)


async def looks(load: Load, client: Client, random: Random) -> None:
    paths = ("/metrics", "/v1/loads?include=all", "/server_info", "/health", "/flush_cache")
    path = paths[random.below(len(paths))]
    load.note(path, await client.get(path), 200, 400)


ACTS: tuple[Act, ...] = (whole, whole, batch, chat, stream, stream, gives_up, aborted, nonsense)
RARE: tuple[Act, ...] = (change, looks, looks)


async def client_of(load: Load, url: str, seed: int, end: float) -> None:
    random = Random(seed)
    async with Client(base_url=url, timeout=120) as client:
        while monotonic() < end:
            acts = RARE if random.below(30) == 0 else ACTS
            await acts[random.below(len(acts))](load, client, random)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def memory_of(end: float) -> list[int]:
    found = []
    while monotonic() < end:
        await asyncio.sleep(max(SOAK_S / SAMPLES, 0.1))
        gc.collect()
        found.append(resident_bytes())
    return found


def soak(url: str, load: Load) -> list[int]:
    """Memory over the run, from when everything has been met once."""

    async def everybody() -> list[int]:
        end = monotonic() + SOAK_S
        clients = [client_of(load, url, seed, end) for seed in range(CLIENTS)]
        memory, *_ = await asyncio.gather(memory_of(end), *clients)
        async with Client(base_url=url, timeout=120) as client:
            await client.delete("/hicache/storage-backend?drain=queue")
            load.note("the last flush", await client.post("/flush_cache?timeout=60"), 200)
        return memory

    return asyncio.run(everybody())


def check_nothing_is_left(service: Service) -> None:
    bridge, metrics = service.bridge, service.metrics
    check_quiescent(bridge.engine)
    assert not bridge._asked
    assert not bridge._changes
    assert not bridge._last_token_ns
    assert not bridge._loop.record.rows
    assert not metrics._arrived
    assert not metrics._uncached
    assert not metrics.copies._open


@pytest.mark.parametrize("kind", ["model", "null"])
def test_nothing_is_left_of_mixed_load(kind: str, tmp_path: Path) -> None:
    load = Load(tmp_path)
    threads = threading.active_count()
    options = replace(OPTIONS, max_total_tokens=2048, max_queued_requests=64)
    with (serving if kind == "model" else serving_null)(options) as (url, service):
        memory = soak(url, load)
        assert service.bridge.is_healthy
    check_nothing_is_left(service)
    assert threading.active_count() == threads
    third = len(memory) // 3
    early, late = sorted(memory[third : 2 * third]), sorted(memory[2 * third :])
    growth = late[len(late) // 2] - early[len(early) // 2]
    requests = sum(load.statuses.values())
    megabytes = [each >> 20 for each in memory]
    print(f"\n{kind}: {requests} acts in {SOAK_S:g} s, MB {megabytes}, {dict(load.statuses)}")
    assert growth < GROWTH_BYTES, f"MB over the run: {megabytes}"
    assert load.statuses["given up"] + load.statuses["stream left"] > 0
    assert load.statuses["attach 200"] + load.statuses["detach 200"] > 0

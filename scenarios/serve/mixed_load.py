"""What clients do to a server: chats, streams, batches, aborts, leaving, changes of L3, nonsense, ZMQ.

Clients choose by a seed. Each act notes what came of it, and fails when that is not allowed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx
import msgspec
import zmq
import zmq.asyncio

from refimpl.units import Random

ANSWER_S = 120  # a server that is silent for so long has failed
TOKENS = 250  # ids below this are in every vocabulary
BUSY = 503
FLOODS = 24  # requests of a flood at a time
HEAD = b"POST /generate HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

Client: TypeAlias = httpx.AsyncClient


@dataclass
class Load:
    """Whom clients talk to, what they have done, and what came of it."""

    url: str
    zmq_endpoint: str
    folder: Path  # of the L3 that is attached
    context: zmq.asyncio.Context
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: dict[int, list[int]] = field(default_factory=dict)  # to what is asked again and again

    def note(self, act: str, answer: httpx.Response, *allowed: int) -> None:
        self.outcomes[f"{act} {answer.status_code}"] += 1
        assert answer.status_code in allowed, f"{act}: {answer.status_code} {answer.text[:300]}"

    @property
    def acts(self) -> int:
        return sum(self.outcomes.values())


Act: TypeAlias = Callable[[Load, Client, Random], Awaitable[None]]


def prompt(random: Random) -> list[int]:
    """One of a few beginnings, and an end of its own."""
    begin = random.below(12)
    body = [(begin * 37 + at) % TOKENS for at in range(16 * (1 + random.below(12)))]
    return body + [random.below(TOKENS) for _ in range(1 + random.below(20))]


def params(random: Random, tokens: int) -> dict[str, Any]:
    return {
        "max_new_tokens": 1 + random.below(tokens),
        "temperature": random.below(2),
        "ignore_eos": True,
    }


def body(random: Random, tokens: int = 24) -> dict[str, Any]:
    return {"input_ids": prompt(random), "sampling_params": params(random, tokens)}


# ---- over HTTP ----------------------------------------------------------------------------------


async def whole(load: Load, client: Client, random: Random) -> None:
    load.note("whole", await client.post("/generate", json=body(random)), 200, BUSY)


async def again(load: Load, client: Client, random: Random) -> None:
    """One of a few prompts, whose answer is always the same, wherever its prefix is just then."""
    number = random.below(12)
    tokens = [(number * 37 + at) % TOKENS for at in range(100 + number)]
    greedy = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    asked = {"input_ids": tokens, "sampling_params": greedy}
    answer = await client.post("/generate", json=asked)
    load.note("again", answer, 200, BUSY)
    if answer.status_code == 200:
        told = answer.json()["output_ids"]
        assert load.answers.setdefault(number, told) == told, f"another answer to {number}"


async def batch(load: Load, client: Client, random: Random) -> None:
    asked = {
        "input_ids": [prompt(random) for _ in range(3)],
        "sampling_params": {"max_new_tokens": 4, "n": 2},
    }
    load.note("batch", await client.post("/generate", json=asked), 200, BUSY)


async def completion(load: Load, client: Client, random: Random) -> None:
    asked = {
        "prompt": f"number {random.below(1 << 30)} " * (1 + random.below(8)),
        "max_tokens": 6,
        "n": 1 + random.below(3),
        "stop": ["zz"],
    }
    load.note("completion", await client.post("/v1/completions", json=asked), 200, BUSY)


async def chat(load: Load, client: Client, random: Random) -> None:
    """A few turns, each with all that was said before."""
    said = [{"role": "user", "content": f"tell me about {random.below(1 << 30)}"}]
    for _ in range(2 + random.below(3)):
        asked = {"messages": said, "max_tokens": 8}
        answer = await client.post("/v1/chat/completions", json=asked)
        load.note("chat", answer, 200, BUSY)
        if answer.status_code == BUSY:
            return
        message = answer.json()["choices"][0]["message"]
        said += [message, {"role": "user", "content": "and then?"}]


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
                load.outcomes["stream left"] += 1
                return
    load.outcomes["stream read"] += 1


async def gives_up(load: Load, client: Client, random: Random) -> None:
    try:
        await client.post("/generate", json=body(random, 400), timeout=0.05)
        load.outcomes["waited for"] += 1
    except httpx.TimeoutException:
        load.outcomes["given up"] += 1


async def aborted(load: Load, client: Client, random: Random) -> None:
    rid = f"abort-{random.below(1 << 30)}"
    asked = asyncio.ensure_future(client.post("/generate", json=body(random, 300) | {"rid": rid}))
    await asyncio.sleep(random.below(20) / 1000)
    load.note("abort", await client.post("/abort_request", json={"rid": rid}), 200)
    load.note("aborted", await asked, 200, BUSY)


async def nonsense(load: Load, client: Client, random: Random) -> None:
    bad: list[tuple[str, bytes]] = [
        ("/generate", b"{"),
        ("/generate", b'{"text": "\xff"}'),
        ("/generate", json.dumps({"input_ids": [1 << 40]}).encode()),
        (f"/no/such/path/{random.below(1 << 30)}", b"{}"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
        ("/v1/chat/completions", b'{"messages": [{"role": 1}]}'),
        ("/hicache/storage-backend", b"[]"),
    ]
    path, raw = bad[random.below(len(bad))]
    header = {"content-type": "application/json"}
    method = "PUT" if path.startswith("/hicache") else "POST"
    answer = await client.request(method, path, content=raw, headers=header)
    load.note("nonsense", answer, 400, 404, 422)


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


# ---- over ZMQ -----------------------------------------------------------------------------------


@contextmanager
def dealer(load: Load) -> Iterator[zmq.asyncio.Socket]:
    """A connection; what is open at its end is left behind."""
    with load.context.socket(zmq.DEALER) as server:
        server.linger = 0
        server.connect(load.zmq_endpoint)
        yield server


async def over_zmq(load: Load, _: Client, random: Random) -> None:
    """A connection with a few requests: one is aborted now and then, or all are left behind."""
    count, leaves = 1 + random.below(4), random.below(4) == 0
    with dealer(load) as server:
        for number in range(count):
            tokens = params(random, 300 if leaves else 24)
            is_stream = leaves or random.below(2) == 0
            asked = {"type": "generate", "id": str(number), "stream": is_stream}
            asked |= {"input_ids": prompt(random), "sampling_params": tokens}
            await server.send(msgspec.msgpack.encode(asked))
        if leaves:
            await asyncio.wait_for(server.recv(), ANSWER_S)  # else nothing was sent yet
            load.outcomes["zmq left"] += 1
            return
        if random.below(3) == 0:
            await server.send(msgspec.msgpack.encode({"type": "abort", "id": "0"}))
        for _number in range(count):
            load.outcomes[f"zmq {await end_of_one(server)}"] += 1


async def zmq_nonsense(load: Load, _: Client, random: Random) -> None:
    bad = (b"", b"\xc1", msgspec.msgpack.encode({"type": "generate", "id": "1"}))
    with dealer(load) as server:
        await server.send(bad[random.below(len(bad))])
        assert await end_of_one(server) == "error 400"
        load.outcomes["zmq nonsense"] += 1


async def end_of_one(server: zmq.asyncio.Socket) -> str:
    """How the next request that ends does; what comes of others meanwhile is read."""
    while True:
        frame = await asyncio.wait_for(server.recv(), ANSWER_S)
        told = msgspec.msgpack.decode(frame)
        if told["type"] == "end":
            return str(told["finish_reason"]["type"])
        if told["type"] == "error":
            assert told["code"] in (400, BUSY), told
            return f"error {told['code']}"


# ---- many that cost little ----------------------------------------------------------------------


async def flood(load: Load, random: Random, requests: int) -> None:
    """Small requests, half of them over HTTP and half over ZMQ, a few of each at a time."""
    left = iter(range(requests // 2))
    seeds = [random.below(1 << 30) for _ in range(FLOODS)]
    over_http = (http_flood(load, Random(seed), left) for seed in seeds)
    await asyncio.gather(zmq_flood(load, random, requests // 2), *over_http)


async def zmq_flood(load: Load, random: Random, requests: int) -> None:
    """One connection; a batch at a time."""
    with dealer(load) as server:
        for begun in range(0, requests, FLOODS):
            for number in range(FLOODS):
                asked = {"type": "generate", "id": str(begun + number), "stream": False}
                await server.send(msgspec.msgpack.encode(asked | small(random)))
            for _ in range(FLOODS):
                load.outcomes[f"zmq flood {await end_of_one(server)}"] += 1


async def http_flood(load: Load, random: Random, left: Iterator[int]) -> None:
    """One connection; a client library would take longer than the server."""
    place = urlsplit(load.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    for _ in left:
        asked = json.dumps(small(random)).encode()
        writer.write(HEAD % (place.netloc.encode(), len(asked)) + asked)
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split(maxsplit=2)[1].decode()
        (length,) = re.findall(rb"content-length: (\d+)", head)
        told = await reader.readexactly(int(length))
        assert status in ("200", str(BUSY)), told
        load.outcomes[f"flood {status}"] += 1
    writer.close()
    await writer.wait_closed()


def small(random: Random) -> dict[str, Any]:
    return {
        "input_ids": [random.below(TOKENS) for _ in range(20)],
        "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
    }


# ---- who does what ------------------------------------------------------------------------------

ACTS: tuple[Act, ...] = (
    *(whole, again, batch, completion, chat, stream, stream),
    *(gives_up, aborted, nonsense, over_zmq, over_zmq, zmq_nonsense),
)
RARE: tuple[Act, ...] = (change, looks, looks)
RARE_EVERY = 30  # acts of one client


async def act(load: Load, client: Client, random: Random) -> None:
    acts = RARE if random.below(RARE_EVERY) == 0 else ACTS
    await acts[random.below(len(acts))](load, client, random)


async def spend(load: Load, clients: list[Client], seed: int, acts: int) -> None:
    """So many acts by all clients together."""
    left = iter(range(acts))

    async def one(client: Client, random: Random) -> None:
        for _ in left:
            await act(load, client, random)

    await asyncio.gather(
        *(one(client, Random(seed + number)) for number, client in enumerate(clients))
    )

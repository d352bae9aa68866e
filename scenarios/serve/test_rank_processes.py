"""Ranks as processes, ended or stopped at every point: it is noticed, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("torch", reason="a server needs a model: pip install -e '.[torch]'")
pytest.importorskip("numba", reason="io backend kernel needs numba")
pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

import httpx

from refimpl.core.check import check_engine
from refimpl.messages import BackedUp, StorageOpened, Stored
from refimpl.run.rank_group import RankGroup, Step
from refimpl.run.rank_process import ProcessFollower
from refimpl.run.rank_setup import RankChoice
from refimpl.serve.service import Service
from scenarios.serve.served import OPTIONS, serving

pytestmark = pytest.mark.live

TWO = replace(OPTIONS, tp_size=2)
TEXT = "whoever dies, and whenever, the others say so and end. " * 2
PATH = "/hicache/storage-backend"
PAUSE = Event()  # between two looks at something that has no event of its own
SIGNS = pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])


@contextmanager
def two_ranks(limit_s: float, folder: Path | None = None) -> Iterator[tuple[httpx.Client, Service]]:
    options = TWO
    if folder is not None:
        extra = f'{{"file_storage_path": "{folder}"}}'
        options = replace(options, hicache_storage_backend="file")
        options = replace(options, hicache_storage_backend_extra_config=extra)
    ranks = RankChoice("process", limit_s=limit_s)
    with (
        serving(options, ranks=ranks) as (url, service),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, service


def follower_of(service: Service) -> ProcessFollower:
    group = service.bridge._executor
    assert isinstance(group, RankGroup)
    (follower,) = group._followers
    assert isinstance(follower, ProcessFollower)
    return follower


def generate(client: httpx.Client) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return client.post("/generate", json={"text": TEXT, "sampling_params": params})


def wait_until_unwell(client: httpx.Client, seconds: float) -> float:
    """How long it took."""
    begun = monotonic()
    while client.get("/health").status_code == 200:
        assert monotonic() - begun < seconds, "nobody notices"
        PAUSE.wait(0.05)
    return monotonic() - begun


@pytest.mark.slow
@SIGNS
def test_a_rank_that_is_gone_is_noticed_in_time_though_nobody_needs_it(
    sign: signal.Signals,
) -> None:
    limit_s = 4
    with two_ranks(limit_s) as (client, service):
        assert generate(client).status_code == 200
        os.kill(follower_of(service).pid or 0, sign)
        took = wait_until_unwell(client, 30)
        assert took < limit_s + 3  # for a machine that has other things to do
        answer = generate(client)
        assert answer.status_code == 503
        assert "rank" in str(service.bridge.error)


@pytest.mark.slow
@SIGNS
@pytest.mark.parametrize("ending", [BackedUp, Stored, StorageOpened])
def test_a_rank_that_is_gone_while_it_is_needed_fails_what_is_under_way(
    sign: signal.Signals, ending: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a copy, of a write to L3, of an attach: what the op holds stays out of use."""
    is_attach = ending is StorageOpened
    with two_ranks(4, None if is_attach else tmp_path) as (client, service):
        follower, group = follower_of(service), service.bridge._executor
        send, gone = follower.send, list[float]()

        def send_and_end(step: Step) -> None:
            agreement = group._agreement  # type: ignore[attr-defined]
            if not gone and any(agreement.ending(op) is ending for op in step.ops):
                gone.append(monotonic())
                os.kill(follower.pid or 0, sign)
            send(step)

        monkeypatch.setattr(follower, "send", send_and_end)
        if is_attach:
            extra = f'{{"file_storage_path": "{tmp_path}"}}'
            key = "hicache_storage_backend_extra_config_json"
            answer = client.put(PATH, json={"hicache_storage_backend": "file", key: extra})
            assert answer.status_code in (400, 503)
            assert "the engine has stopped" in answer.text
        else:
            answer = generate(client)  # 200 where the copy goes on beside the answer's end
            assert answer.status_code in (200, 503)
        wait_until_unwell(client, 30)
        assert gone
        assert monotonic() - gone[0] < 12
        assert generate(client).status_code == 503
        engine = service.bridge.engine
        check_engine(engine)
        if not is_attach:
            assert len(engine.cache.ops) > 0


# ---- by the command line -------------------------------------------------------------------------


class Instance:
    """A command with ranks as processes, and what it says."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "refimpl", *words, "--rank-transport", "process"]
        self.process = subprocess.Popen(
            [*command, "--model-path", "tiny-gqa"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a group of its own, as a shell gives it: Ctrl-C is for all of it
        )

    def ranks(self) -> list[int]:
        """Process ids of the ranks there are, rank 1 first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [int(word) for word in children.read_text().split()]
        return [pid for pid in sorted(pids) if b"spawn_main" in command_line(pid)]

    def wait_for_ranks(self, count: int) -> list[int]:
        begun = monotonic()
        while len(pids := self.ranks()) < count:
            assert self.process.poll() is None, self.said()
            assert monotonic() - begun < 60
            PAUSE.wait(0.01)
        return pids

    def wait_until_serving(self) -> None:
        assert self.process.stdout is not None
        found = (re.search("serving .* on (http:.*)", line) for line in self.process.stdout)
        place = next((match for match in found if match), None)
        assert place is not None, "it never served"
        begun = monotonic()
        while not _is_well(place[1]):
            assert monotonic() - begun < 30
            PAUSE.wait(0.05)

    def said(self) -> str:
        return self.process.communicate(timeout=60)[0]


def _is_well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def wait_until_ended(pids: list[int], seconds: float = 30) -> None:
    begun = monotonic()
    while left := [pid for pid in pids if b"spawn_main" in command_line(pid)]:
        assert monotonic() - begun < seconds, f"{left} are left"
        PAUSE.wait(0.05)


@contextmanager
def instance(*words: str) -> Iterator[Instance]:
    if sys.platform != "linux":
        pytest.skip("finds the processes of ranks in /proc")
    made = Instance(*words)
    pids: list[int] = []
    try:
        yield made
        pids = made.ranks() if made.process.poll() is None else []
    finally:
        made.process.kill()
        made.process.communicate()
        for pid in pids:
            if b"spawn_main" in command_line(pid):
                os.kill(pid, signal.SIGKILL)


SERVE = ("serve", "--port", "0")


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_starts_is_one_line_and_leaves_no_other() -> None:
    with instance(*SERVE, "--tp-size", "4") as made:
        pids = made.wait_for_ranks(3)
        begun = monotonic()
        os.kill(pids[0], signal.SIGKILL)
        said = made.said()
        assert made.process.returncode == 2
        assert "rank 1 did not start; signal 9 has ended it\n" in said
        assert monotonic() - begun < 30
        wait_until_ended(pids)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "serving"])
def test_no_rank_outlives_rank_0(when: str) -> None:
    with instance(*SERVE, "--tp-size", "4") as made:
        pids = made.wait_for_ranks(3)
        if when == "serving":
            made.wait_until_serving()
        os.kill(made.process.pid, signal.SIGKILL)
        wait_until_ended(pids)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1", "4"])
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_with_ranks_ends_as_one_without(
    sign: signal.Signals, code: int, size: str
) -> None:
    with instance(*SERVE, "--tp-size", size) as made:
        made.wait_until_serving()
        pids = made.ranks()
        assert len(pids) == int(size) - 1
        os.killpg(made.process.pid, sign)
        said = made.said()
        assert made.process.returncode == code, said
        assert "Traceback" not in said
        wait_until_ended(pids)


@pytest.mark.slow
def test_a_server_that_can_not_listen_ends_its_ranks() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        instance("serve", "--port", str(taken.getsockname()[1]), "--tp-size", "2") as made,
    ):
        pids = made.wait_for_ranks(1)
        said = made.said()
        assert made.process.returncode == 2
        assert said.startswith("refimpl: error: --host 127.0.0.1 --port ")
        assert len(said.splitlines()) == 1
        wait_until_ended(pids)

"""What Locust makes of the folder: its classes, who runs unasked, several processes, the web interface."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import httpx
import polars
import pytest

pytest.importorskip("gevent", reason="the load generator needs pip install -e '.[perf]'")

from scenarios.perf import fixture_server as server
from scenarios.perf.load import PATIENT, SECONDS_MAX, chats, load, locust
from scenarios.tidy import ROOT

pytestmark = pytest.mark.live

CLASSES = {
    f"{name}{transport}"
    for name in ("Chat", "LongDocument", "Rag", "SharedPrefix", "TraceReplay")
    for transport in ("", "Zmq")
}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_the_folder_holds_each_kind_of_traffic_over_both_transports() -> None:
    done = locust("-f", "perf/", "--list")
    names = done.stdout.partition("Available Users:")[2].split()
    assert sorted(names) == sorted(CLASSES)


def test_chats_over_http_run_when_no_class_is_named(tmp_path: Path) -> None:
    with server.answering(lambda _: server.chat()) as fixture:
        run = load(tmp_path, "--host", fixture.url, "-u", "4", limit="2s")
    assert run.rows
    assert {row["transport"] for row in run.rows} == {"http"}
    assert all(row["scenario"].startswith("multi_turn") for row in run.rows)
    assert "of the traffic not sent" in run.out
    assert run.code == 0, run.out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rate", "fast"], "--rate 'fast' is not a decimal number"),
        (["--host", "127.0.0.1:1"], "--host '127.0.0.1:1' is no URL: write http://NAME:PORT"),
        (["-u", "2", "Chat", "ChatZmq"], "would send the same requests"),
        (["Chat", "Rag"], "1 users can't be of 2 classes"),
    ],
)
def test_what_can_not_be_run_is_one_line_that_says_why(
    words: list[str], reason: str, tmp_path: Path
) -> None:
    run = load(tmp_path, *words)
    assert reason in run.out
    assert "Traceback" not in run.out
    assert "no request was sent" not in run.out  # one reason is enough
    assert (run.code, run.rows) == (1, [])


def test_processes_divide_the_sessions_and_their_rows_come_together(tmp_path: Path) -> None:
    port = free_port()
    bound = ("--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port)
    with server.answering(lambda _: server.chat(gap_s=0.01)) as fixture:
        run = load(
            tmp_path, "--host", fixture.url, *chats(10, rounds=2), "--loop", "closed",
            "--processes", "2", *bound, "-u", "2",
        )  # fmt: skip
    assert run.code == 0, run.out
    assert sorted((row["session"], row["turn"]) for row in run.rows) == [
        (session, turn) for session in range(10) for turn in range(2)
    ]
    assert set(run.errors()) == {""}
    assert len(fixture.ports) == 2  # one connection a process: each has one user, who waits
    assert "20 requests sent" in run.out


@pytest.mark.slow
def test_a_worker_that_is_killed_makes_the_run_invalid(tmp_path: Path) -> None:
    port = free_port()
    bound = ("--master-bind-host", "127.0.0.1", "--master-bind-port", port)
    worker = [sys.executable, "-m", "locust", "-f", "perf/", "--worker", "--master-port", port]
    with server.answering(lambda number: killing if number == 5 else server.chat()) as fixture:
        started = [
            subprocess.Popen(worker, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]

        def killing(exchange: server.Exchange) -> None:
            started[0].kill()
            server.chat()(exchange)

        try:
            run = load(
                tmp_path, "--host", fixture.url, *chats(40, rate=20), "-u", "2", "--master",
                "--expect-workers", "2", *bound, limit="6s",
            )  # fmt: skip
        finally:
            for process in started:
                process.kill()
                process.wait(SECONDS_MAX)
    assert "ended without a report: its last requests are missing" in run.out
    assert run.code == 1


@contextmanager
def web_interface(*words: str) -> Iterator[str]:
    """Its address; at the end the process has stopped."""
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", "perf/", "--web-port", port, *PATIENT, *words]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(SECONDS_MAX)


def page(url: str) -> str:
    end = monotonic() + SECONDS_MAX
    while True:
        try:
            return httpx.get(url).text
        except httpx.TransportError:
            assert monotonic() < end, "the web interface does not come up"


def written(results: Path) -> polars.DataFrame:
    """What a run has written, taken away so that the next one can be told from it."""
    end = monotonic() + SECONDS_MAX
    while True:
        try:
            table = polars.read_parquet(results)
        except (OSError, polars.exceptions.PolarsError):
            assert monotonic() < end, "the results are not written"
        else:
            results.unlink()
            return table


def test_the_web_interface_shows_the_classes_and_runs_those_picked(tmp_path: Path) -> None:
    results = tmp_path / "results.parquet"
    form = {"user_count": "10", "spawn_rate": "10"}
    with (
        server.answering(lambda _: server.chat()) as fixture,
        web_interface("--results", str(results), "--host", fixture.url, *chats(3)) as url,
    ):
        shown = page(url)
        assert re.search(r'"show_userclass_picker": true', shown)
        assert all(f'"{name}"' in shown for name in CLASSES)
        # The form comes with all of them picked, which nobody who sends it as it is can mean.
        httpx.post(f"{url}/swarm", data={**form, "user_classes": sorted(CLASSES)})
        assert set(written(results)["scenario"]) == {chats(3)[1]}
        picked = {**form, "user_classes": "Rag", "scenario": "rag:requests=2,chunk_length=8"}
        httpx.post(f"{url}/swarm", data=picked)
        assert written(results)["scenario"].to_list() == [picked["scenario"]] * 2
        httpx.post(f"{url}/swarm", data={**form, "user_classes": "TraceReplay"})
        assert "name it with --trace FILE" in refusal(url)


def refusal(url: str) -> str:
    """What the interface shows where it shows what went wrong."""
    end = monotonic() + SECONDS_MAX
    while not (shown := httpx.get(f"{url}/exceptions").json()["exceptions"]):
        assert monotonic() < end, "nothing is shown"
    return str(shown[0]["msg"])

"""Launch commands as SGLang's users write them: they parse, and what has no effect is said."""

from __future__ import annotations

import shlex
import sys

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install -e '.[serve]'")

from refimpl.cli.upstream import ALONE, WITH_VALUE, without_effect
from refimpl.run.options import option_names
from refimpl.serve.service import Service
from scenarios.command_line import CommandLine

# Of mission M4, M6 and M10, with the launcher replaced. The last flag is ours: there is no such model here.
COMMANDS = [
    (
        "--model-path M --page-size 64 --enable-hierarchical-cache --hicache-ratio 2"
        " --hicache-io-backend kernel --hicache-mem-layout page_first"
        " --hicache-write-policy write_through"
    ),
    (
        "--model-path M --tp 8 --page-size 64 --mem-fraction-static 0.85 --enable-hierarchical-cache"
        " --hicache-ratio 2 --hicache-mem-layout page_first_direct --hicache-io-backend direct"
        " --hicache-write-policy write_through --hicache-storage-backend hf3fs"
        " --hicache-storage-prefetch-policy wait_complete"
    ),
    (
        "--model-path M --enable-hierarchical-cache --hicache-storage-backend mooncake"
        " --hicache-storage-prefetch-policy timeout --hicache-storage-backend-extra-config"
        """ '{"prefetch_threshold": 512, "prefetch_timeout_base": 0.5}'"""
    ),
    (
        "--model-path M --enable-hierarchical-cache --hicache-storage-backend mooncake"
        """ --hicache-storage-backend-extra-config '{"tp_lcm_size": 8}' --tp 4"""
    ),
    (
        "--model-path M --port 0 --base-gpu-id 1 --disaggregation-ib-device mlx5_roce0"
        " --trust-remote-code --enable-metrics --enable-cache-report --disaggregation-mode null"
    ),
    (
        "--model-path M --tensor-parallel-size 2 --data-parallel-size=2 --random-seed 7 --log-level info"
        " --context-length 4096 --ep-size 2 --pipeline-parallel-size 1"
    ),
    (
        "--model-path M --disaggregation-bootstrap-port=8190 --disaggregation-transfer-backend nixl"
        " --attention-backend fa3 --max-running-requests 64 --chunked-prefill-size 4096"
    ),
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was served; nothing listens."""
    names: list[str] = []

    def listen(app: object, _: object, place: str) -> None:
        names.append(str(app))
        print(place, file=sys.stderr)

    monkeypatch.setattr("refimpl.serve.app.serve", listen)
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_launch_commands_parse(
    command: str,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command)
    said = CommandLine(monkeypatch, capsys)("serve", *words, "--port", "0", "--hands", "none")
    assert said.code == 0, said.err
    assert len(started) == 1
    assert "serving M on http://127.0.0.1:" in said.err
    assert "the timing is that of --model llama-3.1-8b" in said.err
    for flag in ("base-gpu-id", "disaggregation-ib-device", "attention-backend"):
        assert (f"--{flag} has no effect: " in said.err) == (f"--{flag}" in words)


def test_what_has_no_effect_is_taken_out_with_its_value() -> None:
    words = ["--page-size", "16", "--base-gpu-id", "1", "--quantization=fp8", "--enable-metrics"]
    kept, notices = without_effect(words)
    assert kept == ["--page-size", "16"]
    assert [notice.partition(" ")[0] for notice in notices] == [
        "--base-gpu-id",
        "--quantization",
        "--enable-metrics",
    ]


def test_other_names_of_flags_mean_the_flags() -> None:
    words = ["--tensor-parallel-size", "2", "--data-parallel-size=4", "--random-seed", "7"]
    kept, notices = without_effect(words)
    assert kept == ["--tp-size", "2", "--dp-size=4", "--seed", "7"]
    assert not notices


def test_a_flag_that_has_an_effect_is_not_called_without_one() -> None:
    assert not set(option_names()) & (set(WITH_VALUE) | set(ALONE))
    assert not set(WITH_VALUE) & set(ALONE)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--disaggregation-mode", "prefill"), "leave it out"),
        (("--disaggregation-mode=decode",), "leave it out"),
        (("--pp-size", "2"), "leave it at 1"),
        (("--nnodes", "2"), "leave it at 1"),
        (("--pipeline-parallel-size", "2"), "leave it at 1"),
        (("--config", "flags.yaml"), "--config: give the flags"),
        (("--model", "smollm2"), "name it with --model-path"),
        (("--hicache-host-memory-mode", "buffer_only"), "leave it at cache"),
        (("--encoder-only",), "leave it out"),
        (("--base-gpu-id",), "--base-gpu-id requires an argument"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--hands", "both"), "--hands 'both' is unknown"),
        (("--port", "70000", "--hands", "none"), "--port 70000"),
        (("--instances", "2", "--hands", "none"), "--instances"),
        (("--cache-only", "--hands", "none"), "--cache-only"),
    ],
)
def test_what_would_be_another_server_is_refused(
    words: tuple[str, ...],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = CommandLine(monkeypatch, capsys)("serve", *words)
    assert said.code == 2
    assert wanted in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(("words", "rolls_back"), [([], True), (["--no-attach-rollback"], False)])
def test_ranks_take_back_an_attach_unless_the_flag_says_no(
    words: list[str],
    rolls_back: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served: list[Service] = []

    def build(service: Service, *_: object) -> str:
        served.append(service)
        return "app"

    monkeypatch.setattr("refimpl.serve.app.build_app", build)
    monkeypatch.setattr("refimpl.serve.app.serve", lambda *_: None)
    launch = ["serve", "--hands", "none", "--port", "0", "--dp", "3", *words]
    said = CommandLine(monkeypatch, capsys)(*launch)
    assert said.code == 0, said.err
    (service,) = served
    assert len(service.ranks) == 3
    assert service.changes.rolls_back is rolls_back


def test_a_server_whose_engine_has_failed_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(service: Service, *_: object) -> None:
        service.ranks.ranks[1].bridge.error = OSError("gone")

    monkeypatch.setattr("refimpl.serve.app.build_app", lambda service, *_: service)
    monkeypatch.setattr("refimpl.serve.app.serve", fail)
    said = CommandLine(monkeypatch, capsys)("serve", "--hands", "none", "--port", "0", "--dp", "2")
    assert said.code == 1

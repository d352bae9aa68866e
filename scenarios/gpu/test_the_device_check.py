"""What check.py does without a device: its arguments, its cases, its summary, its refusal."""

from __future__ import annotations

import py_compile
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")

from cuda_numba import Tuning, grid
from cuda_numba.checks import is_paired
from cuda_numba.fold import fold
from scenarios.gpu import check
from scenarios.kernels.case import seeded_case
from scenarios.tidy import ROOT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCRIPT = ROOT / "scenarios" / "gpu" / "check.py"


def test_the_check_compiles_and_describes_itself(tmp_path: Path) -> None:
    py_compile.compile(str(SCRIPT), cfile=str(tmp_path / "check.pyc"), doraise=True)
    done = subprocess.run(
        [sys.executable, "-m", "scenarios.gpu.check", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--megabytes" in done.stdout


def test_arguments_have_defaults_that_fit_one_short_run() -> None:
    options = check.arguments(["--out", "result.json", "--seeds", "3"])
    assert options.out == Path("result.json")
    assert (options.seeds, options.only) == (3, "")
    assert options.repeats * options.megabytes <= 2000


def test_every_measured_point_is_a_legal_launch() -> None:
    for row_bytes, blocks, threads in check.grid_of_measurements():
        case = check.timed_case(row_bytes, 64)
        nest = fold(case.shape, *case.strides)
        assert is_paired(nest, 0, 0)
        form = grid.for_copy(nest, 2, len(case.dst_pages), blocks=blocks, threads=threads)
        assert form.grid[0] <= blocks


def test_a_timed_case_has_the_payload_that_was_asked_for() -> None:
    case = check.timed_case(384, 64)
    assert 60e6 <= 8 * case.shape.total * len(case.dst_pages) <= 64e6
    assert case.shape.words * 8 == 384


@pytest.mark.parametrize("seed", range(40))
def test_the_seeds_of_the_check_pass_on_the_cpu(seed: int) -> None:
    case = seeded_case(seed, 40_000)
    case.check(Tuning(), seed)
    case.check_checksums(Tuning(), seed)


def test_a_part_that_fails_leaves_its_error_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: Any, torch: Any) -> dict[str, Any]:
        raise OSError(f"no {torch} for {options.only!r}")

    parts = {"equality": fails, "peak": lambda *_: {"device->pinned": 50.0}}
    monkeypatch.setattr(check, "PARTS", parts)
    result = check.run(SimpleNamespace(only=""), "device")  # type: ignore[arg-type]
    assert "no device" in result["equality"]["error"]
    assert result["peak"] == {"device->pinned": 50.0}
    assert "OSError" in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_and_answers_are_right_end_to_end(device: str) -> None:
    """On the CPU with its twin of the kernels; on a GPU with the kernels, where there is one."""
    torch = pytest.importorskip("torch", reason="pools are tensors: pip install -e '.[torch]'")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from scenarios.gpu.end_to_end import wrong_answers, wrong_bytes

    assert wrong_bytes(device) == []
    assert wrong_answers(device) == []


def test_the_summary_names_errors_wrong_words_and_ratios() -> None:
    lines = check.summary(
        {
            "versions": {},
            "direct": {"error": "boom"},
            "equality": {"checked": 4, "wrong": [[7, "device", "pinned"]]},
            "peak": {"device->pinned": 50.0},
            "rates": {"rows": [{"path": "device->pinned", "GB/s": 45.0}]},
        }
    )
    text = "\n".join(lines)
    assert "direct: boom" in text
    assert "4 checked, [[7, 'device', 'pinned']] wrong" in text
    assert "ratio 0.90" in text

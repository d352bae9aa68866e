"""Every kernel compiled for three generations of devices, with no device: what the code promises."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")
pytest.importorskip(
    "numba_cuda", reason="the compiler is not installed: pip install -e '.[kernels]'"
)

from numba import config, cuda, typeof, types

from cuda_numba import Shape, grid, index
from cuda_numba.fold import compact, fold
from scenarios.tidy import ROOT, dotted

if config.ENABLE_CUDASIM:
    pytest.skip("this process simulates, and cannot compile as well", allow_module_level=True)

from cuda_numba import kernels, launch

DEVICES = [(8, 0), (9, 0), (10, 0)]
SIGNATURES = {"copy": kernels.COPY_SIGNATURE, "checksum": kernels.CHECKSUM_SIGNATURE}
KERNELS = {"copy": kernels.COPIES, "checksum": kernels.CHECKSUMS}
VARIANTS = [(name, width) for name in KERNELS for width in (2, 1)]
# Measured with ptxas 12.9; the most is for sm_100.
REGISTERS_MAX = {("copy", 2): 80, ("copy", 1): 80, ("checksum", 2): 40, ("checksum", 1): 40}
PTX_OF_CUDA = {"12.4": "8.4", "12.5": "8.5", "12.6": "8.5", "12.8": "8.7", "12.9": "8.8"}
NVCC = "nvidia-cuda-nvcc-cu12"

every_variant = pytest.mark.parametrize(("name", "width"), VARIANTS)
every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")


@functools.cache
def ptx(name: str, width: int, device: tuple[int, int]) -> str:
    text, _ = cuda.compile_ptx(KERNELS[name][width], SIGNATURES[name], cc=device)
    return str(text)


@functools.cache
def compiler() -> tuple[str, Path]:
    """CUDA version of the installed wheel, and its own ptxas: one on PATH may be of another."""
    try:
        wheel = distribution(NVCC)
    except PackageNotFoundError:
        pytest.skip(f"{NVCC} is not installed: pip install -e '.[kernels]'")
    (path,) = (file for file in wheel.files or [] if file.name == "ptxas")
    return ".".join(wheel.version.split(".")[:2]), Path(str(wheel.locate_file(path)))


def assembled(name: str, width: int, device: tuple[int, int], folder: Path) -> str:
    """What ptxas reports of a variant."""
    source = folder / "kernel.ptx"
    source.write_text(ptx(name, width, device), encoding="utf-8")
    command = [str(compiler()[1]), "-v", f"-arch=sm_{device[0]}{device[1]}", str(source)]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.cubin")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def accesses(text: str) -> list[str]:
    """Loads and stores through the caches' streaming hint, in order."""
    return re.findall(r"\b(?:ld|st)\.global\.cs\S+", text)


@every_device
@every_variant
def test_each_variant_assembles_without_spills_or_stack(
    name: str, width: int, device: tuple[int, int], tmp_path: Path
) -> None:
    report = assembled(name, width, device, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    (registers,) = re.findall(r"Used (\d+) registers", report)
    assert int(registers) <= REGISTERS_MAX[name, width]
    assert int(registers) * grid.BLOCK_THREADS_MAX <= 65536
    assert ".local" not in ptx(name, width, device)


@every_device
def test_a_wide_copy_reads_four_times_16_bytes_before_it_writes(device: tuple[int, int]) -> None:
    load, store = "ld.global.cs.v2.u64", "st.global.cs.v2.u64"
    four = grid.IN_FLIGHT
    assert accesses(ptx("copy", 2, device)) == [load] * four + [store] * four + [load, store] * 3


@every_device
def test_a_narrow_copy_reads_four_words_before_it_writes(device: tuple[int, int]) -> None:
    load, store = "ld.global.cs.u64", "st.global.cs.u64"
    four = grid.IN_FLIGHT
    assert accesses(ptx("copy", 1, device)) == [load] * four + [store] * four + [load, store] * 3


@every_device
@pytest.mark.parametrize(("width", "load"), [(2, "ld.global.cs.v2.u64"), (1, "ld.global.cs.u64")])
def test_a_checksum_reads_as_wide_as_it_promises(
    width: int, load: str, device: tuple[int, int]
) -> None:
    text = ptx("checksum", width, device)
    assert set(accesses(text)) == {load}
    assert len(re.findall(r"\b(?:atom|red)\.\S*xor", text)) == 1


@every_variant
def test_page_numbers_are_the_only_plain_reads(name: str, width: int) -> None:
    plain = re.findall(r"\bld\.global\.u64", ptx(name, width, (9, 0)))
    assert len(plain) == {"copy": 2, "checksum": 1}[name]


@every_variant
def test_no_division_is_wider_than_32_bits_and_no_number_becomes_a_float(
    name: str, width: int
) -> None:
    text = ptx(name, width, (9, 0))
    assert set(re.findall(r"\b(?:div|rem)\.\S+", text)) <= {"div.u32", "rem.u32"}
    assert not re.findall(r"\S*\.f(?:16|32|64)\b", text)


def test_offsets_are_computed_in_64_bits() -> None:
    steps = types.UniTuple(types.int64, 6)
    four = [types.int64] * 4
    text, _ = cuda.compile(
        index.row_offset, types.int64(steps, *four), cc=(9, 0), device=True, abi="c"
    )
    products = re.findall(r"\b(?:mul|mad)\.\S+", text)
    assert len(products) == 4
    assert set(products) <= {"mul.lo.s64", "mad.lo.s64"}
    assert not re.findall(r"\b(?:cvt|ld\.param)\.\S*32\b", text)


def test_a_launch_passes_the_types_that_are_compiled_here() -> None:
    shape = Shape(layers=2, kvs=2, heads=1, tokens=4, words=8)
    nest = fold(shape, compact(shape), compact(shape))
    assert str(typeof(nest.to)) == str(kernels.COPY_SIGNATURE.args[4])
    assert str(typeof(launch._counts(nest, 2))) == str(kernels.COPY_SIGNATURE.args[6])


def test_the_compiler_is_that_of_the_wheel_and_not_of_the_system() -> None:
    version, _ = compiler()
    assert version in PTX_OF_CUDA, f"add the PTX version of CUDA {version}"
    for device in DEVICES:
        assert f".version {PTX_OF_CUDA[version]}\n" in ptx("copy", 2, device)


# ---- what the simulator would let pass (field reports Z01, Z03, Z04) ------------------------------


def kernel_nodes() -> list[ast.AST]:
    text = (ROOT / "cuda_numba" / "kernels.py").read_text(encoding="utf-8")
    return list(ast.walk(ast.parse(text)))


def test_no_kernel_uses_what_an_atomic_returns() -> None:
    calls = [node for node in kernel_nodes() if isinstance(node, ast.Call)]
    atomics = [node for node in calls if dotted(node.func).startswith("cuda.atomic.")]
    dropped = [node.value for node in kernel_nodes() if isinstance(node, ast.Expr)]
    assert len(atomics) == 1
    assert [ast.dump(node) for node in atomics if ast.dump(node) in map(ast.dump, dropped)]


def test_no_kernel_waits_for_others_or_shares_memory() -> None:
    names = {dotted(node) for node in kernel_nodes() if isinstance(node, ast.Attribute)}
    assert "cuda.threadIdx.x" in names
    parts = ("sync", "shared", "shfl", "vote", "cg", "local", "barrier")
    assert [n for n in names if n.startswith("cuda.") and any(p in n for p in parts)] == []


def test_everything_a_kernel_calls_is_a_device_function() -> None:
    helpers = ("_split_row", "_row_offset", "_mix", "_signed", "_mix_pair", "_mix_word")
    for name in helpers:
        assert getattr(kernels, name).targetoptions["device"], name

"""One short run on a CUDA machine: `python -m scenarios.gpu.check --out result.json`.

Are the kernels right on a device, and how fast are they beside what the copy engine reaches? Needs
torch, numba-cuda and NumPy. Everything that is measured goes into one JSON object; a part that fails
is recorded there and does not stop the others. Ends with 1 if any word was wrong.

pytest does not collect this file; test_the_device_check.py runs what runs without a device.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from cuda_numba import DeviceView, Shape, Tuning, bench, copy_pages, page_checksums, page_list
from scenarios.kernels.case import Case, seeded_case

BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
THREADS = (128, 256, 512, 768)
ROW_BYTES = (64, 128, 384, 1024, 2048, 8192)
PATHS = (("device", "pinned"), ("pinned", "device"), ("device", "device"))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="kernels against oracle and copy engine")
    parser.add_argument("--out", type=Path, help="file for the JSON object; stdout without it")
    parser.add_argument("--seeds", type=int, default=120, help="drawn copies to compare")
    parser.add_argument("--megabytes", type=int, default=256, help="payload of a timed copy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="parts whose name contains this")
    return parser.parse_args(given)


# ---- pure parts ---------------------------------------------------------------------------------


def timed_case(row_bytes: int, megabytes: int) -> Case:
    """Half the pages of two pools, scattered, from layer_first to page_first in the given runs."""
    shape = Shape(layers=32, kvs=2, heads=1, tokens=64, words=row_bytes // 8)
    pages = max(1, megabytes * 1_000_000 // (8 * shape.total))
    draw = np.random.default_rng(1)
    to, fro = (tuple(draw.permutation(2 * pages)[:pages].tolist()) for _ in range(2))
    return Case(shape, "layer_first", "page_first", 2 * pages, to, fro)


def grid_of_measurements() -> list[tuple[int, int, int]]:
    """(row bytes, blocks, threads): blocks and threads at one row size, then all row sizes."""
    shapes = [(384, blocks, 512) for blocks in BLOCKS]
    shapes += [(384, 8, threads) for threads in THREADS if threads != 512]
    shapes += [(row, blocks, 512) for row in ROW_BYTES if row != 384 for blocks in (8, 32)]
    return shapes


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "numba", "numba-cuda", "numpy", "cuda-core", "cuda-bindings"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def summary(result: dict[str, Any]) -> list[str]:
    """Lines for people: what was wrong, then the best rate of each path beside the engine's."""
    lines = [f"{name}: {part['error']}" for name, part in result.items() if "error" in part]
    equality = result.get("equality", {})
    lines.append(
        f"equality: {equality.get('checked', 0)} checked, {equality.get('wrong', [])} wrong"
    )
    lines.append(f"end to end: {result.get('end_to_end', {}).get('wrong', 'not run')} wrong")
    peak = result.get("peak", {})
    rates = result.get("rates", {}).get("rows", [])
    for path, engine in peak.items():
        ours = [row for row in rates if row["path"] == path]
        if ours:
            best = max(ours, key=lambda row: row["GB/s"])
            share = best["GB/s"] / engine
            lines.append(f"{path}: best {best}, engine {engine:.1f} GB/s, ratio {share:.2f}")
    return lines


# ---- on the device ------------------------------------------------------------------------------


def on(place: str, words: np.ndarray, torch: Any) -> tuple[Any, Any]:
    """The array in pinned memory or on the device: a tensor, and what the kernels take."""
    tensor = torch.from_numpy(words.view(np.int64))
    tensor = tensor.pin_memory() if place == "pinned" else tensor.cuda()
    return tensor, DeviceView(tensor.data_ptr(), tensor.numel(), tensor)


def is_equal_on_device(case: Case, seed: int, path: tuple[str, str], torch: Any) -> bool:
    """Copy and checksums of one case, on a stream that is not the default one."""
    dst, src = case.pools(seed)
    source, far_src = on(path[0], src, torch)
    target, far_dst = on(path[1], dst, torch)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    copy_pages(
        *(far_dst, far_src, case.dst_pages, case.src_pages, *case.strides, case.shape),
        layer=case.layer,
        stream=stream,
    )
    stream.synchronize()
    right = case.expected(seed)
    found = target.cpu().numpy().view(np.uint64)
    pages = case.src_pages
    ours = page_checksums(far_src, pages, case.strides[1], case.shape, stream=stream)
    cpu = page_checksums(src, pages, case.strides[1], case.shape)
    del source
    return bool((found == right).all() and (ours == cpu).all())


def equality(options: argparse.Namespace, torch: Any) -> dict[str, Any]:
    """Small pools of every form, and a large one, over all three paths."""
    wrong = []
    checked = 0
    cases = [(seed, seeded_case(seed, 40_000)) for seed in range(options.seeds)]
    cases += [(-1 - at, timed_case(row, 64)) for at, row in enumerate((384, 1024))]
    for seed, case in cases:
        for path in PATHS:
            checked += 1
            if not is_equal_on_device(case, abs(seed), path, torch):
                wrong.append([seed, *path])
    return {"checked": checked, "wrong": wrong}


def milliseconds(work: Callable[[], None], repeats: int, stream: Any, torch: Any) -> float:
    """Median time between two events around ``work`` on a stream; the first run is not counted."""
    taken = []
    for turn in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        if turn:
            taken.append(begin.elapsed_time(end))
    return median(taken)


def peak(options: argparse.Namespace, torch: Any) -> dict[str, float]:
    """GB/s of one contiguous cudaMemcpyAsync over each path, each byte counted once."""
    words = options.megabytes * 1_000_000 // 8
    rates = {}
    stream = torch.cuda.Stream()
    for path in PATHS:
        src, _ = on(path[0], np.ones(words, np.uint64), torch)
        dst, _ = on(path[1], np.zeros(words, np.uint64), torch)
        with torch.cuda.stream(stream):
            taken = milliseconds(
                lambda d=dst, s=src: d.copy_(s, non_blocking=True),  # type: ignore[misc]
                *(options.repeats, stream, torch),
            )
        rates["->".join(path)] = 8 * words / taken / 1e6
    return rates


def rates(options: argparse.Namespace, torch: Any) -> dict[str, Any]:
    """GB/s of the kernel by row size, blocks and threads; whole pages of all layers."""
    stream = torch.cuda.Stream()
    rows: list[dict[str, Any]] = []
    for path, (row_bytes, group) in _products(PATHS, _by_row(grid_of_measurements())):
        case = timed_case(row_bytes, options.megabytes)
        dst, src = case.pools(0)
        (_s, far_src), (_d, far_dst) = on(path[0], src, torch), on(path[1], dst, torch)
        pages = page_list(case.dst_pages), page_list(case.src_pages)
        size = 8 * case.shape.total * len(case.dst_pages)
        for blocks, threads in group:
            tuning = Tuning(blocks=blocks, block_threads=threads)
            taken = milliseconds(
                lambda d=far_dst, s=far_src, p=pages, c=case, t=tuning: copy_pages(  # type: ignore[misc]
                    d, s, *p, *c.strides, c.shape, stream=stream, tuning=t
                ),
                *(options.repeats, stream, torch),
            )
            rows.append(
                {
                    "path": "->".join(path),
                    "row_bytes": row_bytes,
                    "blocks": blocks,
                    "threads": threads,
                    "GB/s": size / taken / 1e6,
                }
            )
    return {"rows": rows}


def direct(options: argparse.Namespace, torch: Any) -> dict[str, Any]:
    """GB/s of plain copies, one a page, layer and K or V: layer_first to page_first_direct."""
    stream = torch.cuda.Stream()
    found: dict[str, Any] = {}
    for path in PATHS:
        case = timed_case(384, min(64, options.megabytes))
        shape, count = case.shape, len(case.dst_pages)
        piece = shape.tokens * shape.words
        src, _ = on(path[0], case.pools(0)[1], torch)
        dst, _ = on(path[1], case.pools(0)[0], torch)
        to, fro = dst.view(-1, piece), src.view(-1, piece)
        draw = np.random.default_rng(2)
        scattered = (draw.permutation(len(to))[: 2 * shape.layers * count] for _ in range(2))
        pairs = [(to[i], fro[j]) for i, j in zip(*scattered, strict=True)]

        def work(pairs: list[tuple[Any, Any]] = pairs) -> None:
            for one, other in pairs:
                one.copy_(other, non_blocking=True)

        with torch.cuda.stream(stream):
            taken = milliseconds(work, options.repeats, stream, torch)
        found["->".join(path)] = {
            "pieces": len(pairs),
            "GB/s": 8 * piece * len(pairs) / taken / 1e6,
        }
    return found


def launch_cost(options: argparse.Namespace, torch: Any) -> dict[str, float]:
    """Microseconds a caller spends on one small copy, page list ready, and until it has landed."""
    shape = Shape(layers=1, kvs=2, heads=1, tokens=16, words=48)
    strides = bench.layouts(shape, 4)["layer_first"]
    _src, far_src = on("device", np.ones(4 * shape.total, np.uint64), torch)
    _dst, far_dst = on("device", np.zeros(4 * shape.total, np.uint64), torch)
    pages, stream = page_list([2]), torch.cuda.Stream()
    asked, landed = [], []
    for _ in range(20 * options.repeats):
        began = perf_counter()
        copy_pages(far_dst, far_src, pages, pages, strides, strides, shape, stream=stream)
        asked.append(perf_counter() - began)
        stream.synchronize()
        landed.append(perf_counter() - began)
    return {"call_us": 1e6 * median(asked), "landed_us": 1e6 * median(landed)}


def _by_row(points: Iterable[tuple[int, int, int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    groups: dict[int, list[tuple[int, int]]] = {}
    for row, blocks, threads in points:
        groups.setdefault(row, []).append((blocks, threads))
    return list(groups.items())


def _products(one: Iterable[Any], two: list[Any]) -> list[tuple[Any, Any]]:
    return [(a, b) for a in one for b in two]


def end_to_end(_: argparse.Namespace, __: Any) -> dict[str, Any]:
    """Pages and answers through pools and both io backends, loads beside the computation."""
    from scenarios.gpu.end_to_end import wrong_answers, wrong_bytes

    return {"wrong": [*wrong_bytes("cuda"), *wrong_answers("cuda")]}


PARTS = {
    "equality": equality,
    "end_to_end": end_to_end,
    "peak": peak,
    "launch_cost": launch_cost,
    "rates": rates,
    "direct": direct,
}


def run(options: argparse.Namespace, torch: Any) -> dict[str, Any]:
    """All parts; one that raises leaves its error in its place."""
    result: dict[str, Any] = {"versions": versions()}
    for name, part in PARTS.items():
        if options.only not in name:
            continue
        try:
            result[name] = part(options, torch)
        except Exception as error:
            traceback.print_exc()
            result[name] = {"error": repr(error)}
        print(name, "done", file=sys.stderr, flush=True)
    return result


def main() -> int:
    options = arguments()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: this check is for a machine that has one", file=sys.stderr)
        return 2
    result = run(options, torch)
    result["device"] = {"name": torch.cuda.get_device_name()}
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    print("\n".join(summary(result)), file=sys.stderr)
    failed = any("error" in part for part in result.values())
    return int(failed or any(part.get("wrong") for part in result.values()))


if __name__ == "__main__":
    sys.exit(main())

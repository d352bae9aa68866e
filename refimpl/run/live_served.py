"""A live case served by a real model in this process, repetition by repetition beside its reference.

Both serve the same load right after each other, each of them first in turn, so that whatever else the
machine does slows both. Beside them, floors of the same moment: the model alone, and a plain copy.
Must not know: baselines, verdicts. Called by: the command line, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import numpy as np

from cuda_numba.bench import plain_copy, take_turns
from cuda_numba.native import CORES, line_aligned
from refimpl.keys import TokenPrompt
from refimpl.model.catalog import accelerator
from refimpl.model.paged import Chunk, KvView
from refimpl.run.baselines import machine_class
from refimpl.run.golden_case import digest_of
from refimpl.run.live_case import LiveCase
from refimpl.run.live_figures import Figures, Measured, compared, failure_problems, percentiles_of
from refimpl.run.real import ModelChoice, RealRun, Served, answers_equal
from refimpl.run.results import from_rows
from refimpl.run.setup import Simulation
from refimpl.workload.digest import workload_digest

_OWN: Final = ("workload", "max_total_tokens", "page_size")  # a case has no defaults of ``run``
_BASELINE_FACTOR: Final = 2  # quartiles of a few samples are luck, so a baseline has twice as many
_COPY_BYTES: Final = 8 << 20
_FLOOR_TURNS: Final = 3


class ServedCase:
    """One live case as what is measured. ``model_path`` replaces the model that the case names.

    ``progress`` hears of each repetition that is over. Raises ConfigError for flags that can't work.
    """

    progress: Callable[[int], None] | None = None

    def __init__(self, case: LiveCase, model_path: str | None = None, device: str = "auto") -> None:
        path = model_path or case.model
        model = Path(path).name  # where a model lies is nobody's business in a baseline
        self.name = case.name if model == case.model else f"{case.name} ({model})"
        self.machine = machine_class(accelerator(device))
        self.gate = case.gate
        self._case = case
        self._choice = ModelChoice(path, case.arithmetic, "auto", device)
        plan = Simulation(case.options)
        self.provenance: Mapping[str, str] = {
            "model": model,
            "arithmetic": case.arithmetic,
            "reference": case.reference,
            "config_sha256": digest_of(plan.configuration()),
            "workload_sha256": workload_digest(plan.workload),
        }

    def repetitions(self, *, is_baseline: bool) -> int:
        """How many there will be, with the one that warms up."""
        return self._case.repeats * (_BASELINE_FACTOR if is_baseline else 1) + 1

    def measure(self, *, is_baseline: bool) -> Measured:
        """Serve it. The first repetition compiles kernels and finds cold caches, and does not count."""
        case, measured = self._case, Measured()
        run = RealRun(case.options, self._choice, compare=True, given=_OWN)
        for turn in range(self.repetitions(is_baseline=is_baseline)):
            order = (case.reference, case.tiers) if turn % 2 else (case.tiers, case.reference)
            served = {name: run.serve_afresh(name) for name in order}
            subject, reference = served[case.tiers], served[case.reference]
            measured.problems += _problems(case, subject, reference)
            if measured.problems:
                break
            if turn:
                self._add(measured, run, subject, reference)
            if self.progress is not None:
                self.progress(1)
        return measured

    def _add(self, measured: Measured, run: RealRun, subject: Served, reference: Served) -> None:
        ours, theirs = from_rows(subject.rows), from_rows(reference.rows)
        figures = compared(ours, theirs)
        floor_ns = _bare_model_ns(run, self._case.options.page_size)
        for name, ns in percentiles_of(ours, lambda each: each.ttft_ns).items():
            figures[f"ttft_to_bare_model.{name}"] = ns / floor_ns
        rates = {way: moved["gb_per_s"] for way, moved in subject.moved.items()}
        measured.add(figures | _bytes(run, subject), ours, theirs)
        for way, rate in rates.items():
            measured.rates.setdefault(way, []).append(rate)


def _problems(case: LiveCase, subject: Served, reference: Served) -> list[str]:
    found = failure_problems(from_rows(subject.rows), from_rows(reference.rows))
    if case.arithmetic == "reference" and not answers_equal([subject, reference]):
        found.append(f"{case.tiers} and {case.reference} do not give the same answers")
    return found


def _bytes(run: RealRun, subject: Served) -> Figures:
    """Bytes moved by way, and rates beside a plain copy where the processor makes the copies."""
    figures: Figures = {
        f"moved_bytes.{way}": moved["bytes"] for way, moved in subject.moved.items()
    }
    if run.model.transformer.device.type == "cpu":
        plain = _plain_copy_rate()
        figures |= {
            f"bandwidth_to_plain_copy.{way}": moved["gb_per_s"] / plain
            for way, moved in subject.moved.items()
            if moved["bytes"]
        }
    return figures


def _plain_copy_rate() -> float:
    """GB/s of copying memory as it lies, by as many threads as copy pages."""
    words = _COPY_BYTES // 8
    source, target = np.ones(words, np.uint64), line_aligned(words)
    (seconds,) = take_turns(_FLOOR_TURNS, partial(plain_copy, target, source, words, CORES))
    return _COPY_BYTES / seconds / 1e9


def _bare_model_ns(run: RealRun, page_size: int) -> int:
    """How long the model alone computes the load's prompt of median length: no engine, no cache."""
    prompts = [
        spec.prompt.tokens for spec in run.workload.requests if isinstance(spec.prompt, TokenPrompt)
    ]
    tokens = sorted(prompts, key=len)[len(prompts) // 2]
    slots = range(-(-len(tokens) // page_size))
    model = run.model.transformer
    kv = KvView.zeros(model.config, len(slots), page_size, model.device.type)
    times = []
    for _ in range(_FLOOR_TURNS):
        begun = perf_counter_ns()
        model.forward([Chunk(tokens, 0, slots)], kv).tolist()  # which waits for a GPU
        times.append(perf_counter_ns() - begun)
    return min(times)

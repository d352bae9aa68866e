"""A live case served by a real model in this process, repetition by repetition beside its reference.

Both serve the same load right after each other, each of them first in turn, so that whatever else the
machine does slows both; of a few such runs the best counts, because other work only ever adds time.
Beside them, floors of the same moment: the model alone, and a plain copy.
Must not know: baselines, verdicts. Called by: the command line, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Final

import numpy as np

from cuda_numba.bench import plain_copy, take_turns
from cuda_numba.native import CORES, line_aligned
from refimpl.keys import TokenPrompt
from refimpl.model.catalog import accelerator
from refimpl.model.paged import Chunk, KvView
from refimpl.model.threads import computing_with
from refimpl.run.baselines import machine_class
from refimpl.run.golden_case import digest_of
from refimpl.run.live_case import LiveCase
from refimpl.run.live_figures import Figures, Measured, best_times, compared, failure_problems
from refimpl.run.model_choice import ModelChoice
from refimpl.run.real import RealRun, Served, answers_equal
from refimpl.run.results import from_rows
from refimpl.run.setup import Simulation
from refimpl.workload.digest import workload_digest

_OWN: Final = ("workload", "max_total_tokens", "page_size")  # a case has no defaults of ``run``
_BASELINE_FACTOR: Final = 2  # quartiles of a few samples are luck, so a baseline has twice as many
_ROUNDS: Final = 3  # pairs of runs in a repetition, of whose times the best counts
_COPY_BYTES: Final = 8 << 20
_FLOOR_TURNS: Final = 2


class ServedCase:
    """One live case as what is measured. ``model_path`` replaces the model that the case names.

    ``progress`` hears of each repetition that is over. Raises ConfigError for flags that can't work.
    """

    progress: Callable[[int], None] | None = None

    def __init__(self, case: LiveCase, model_path: str | None = None, device: str = "auto") -> None:
        path = model_path or case.model
        model = Path(path).name  # where a model lies is nobody's business in a baseline
        self.name = case.name if model == case.model else f"{case.name} ({model})"
        self.arguments = " ".join(
            [case.name, *(["--model-path", model_path] if model_path else [])]
        )
        self.machine = machine_class(accelerator(device))
        self.gate = case.gate
        self._case = case
        self._choice = ModelChoice(path, case.arithmetic, "auto", device)
        plan = Simulation(case.options)
        self.provenance: Mapping[str, str] = {
            "model": model,
            "arithmetic": case.arithmetic,
            "threads": str(case.threads),
            "reference": case.reference,
            "config_sha256": digest_of(plan.configuration()),
            "workload_sha256": workload_digest(plan.workload),
        }

    def repetitions(self, *, is_baseline: bool) -> int:
        """How many there will be, with the one that warms up."""
        return self._case.repeats * (_BASELINE_FACTOR if is_baseline else 1) + 1

    def measure(self, *, is_baseline: bool) -> Measured:
        """Serve it. The first repetition compiles kernels and finds cold caches, and does not count."""
        with computing_with(self._case.threads):
            return self._measured(self.repetitions(is_baseline=is_baseline))

    def _measured(self, repetitions: int) -> Measured:
        measured, counted = Measured(), list[_Round]()
        run = RealRun(self._case.options, self._choice, compare=True, given=_OWN)
        for turn in range(repetitions):
            rounds = [self._round(run, is_swapped=bool(number % 2)) for number in range(_ROUNDS)]
            measured.problems += [each for one in rounds for each in _problems(self._case, one)]
            if measured.problems:
                return measured
            if turn:
                counted += rounds
                measured.add(_figures(rounds))
            if self.progress is not None:
                self.progress(1)
        measured.best = _figures(counted)
        measured.rates = {way: rate for way, (_, rate) in _best_moved(counted).items()}
        for one in counted:
            measured.subject += from_rows(one.subject.rows)
            measured.reference += from_rows(one.reference.rows)
        return measured

    def _round(self, run: RealRun, *, is_swapped: bool) -> _Round:
        names = (self._case.tiers, self._case.reference)
        served = {name: run.serve_afresh(name) for name in (names[::-1] if is_swapped else names)}
        return _Round(
            served[names[0]],
            served[names[1]],
            _bare_model_ns(run, self._case.options.page_size),
            _plain_copy_rate() if run.model.transformer.device.type == "cpu" else 0.0,
        )


@dataclass(frozen=True, slots=True)
class _Round:
    """A run beside its reference, and floors of the moment after them.

    ``bare_model_ns`` is what the model alone takes, ``plain_copy`` GB/s; 0 where a GPU makes the copies.
    """

    subject: Served
    reference: Served
    bare_model_ns: int
    plain_copy: float


def _figures(rounds: list[_Round]) -> Figures:
    ours = [from_rows(each.subject.rows) for each in rounds]
    theirs = [from_rows(each.reference.rows) for each in rounds]
    bare_model_ns = min(each.bare_model_ns for each in rounds)
    to_bare_model = {
        name.replace("ttft.", "ttft_to_bare_model."): ns / bare_model_ns
        for name, ns in best_times(ours).items()
        if name.startswith("ttft.")
    }
    return compared(ours, theirs) | to_bare_model | _bytes(rounds)


def _problems(case: LiveCase, served: _Round) -> list[str]:
    subject, reference = served.subject, served.reference
    found = failure_problems(from_rows(subject.rows), from_rows(reference.rows))
    if case.arithmetic == "reference" and not answers_equal([subject, reference]):
        found.append(f"{case.tiers} and {case.reference} do not give the same answers")
    return found


def _bytes(rounds: list[_Round]) -> Figures:
    """Bytes moved by way, and rates beside a plain copy where there is one."""
    figures: Figures = {}
    plain = max(each.plain_copy for each in rounds)
    for way, (count, rate) in _best_moved(rounds).items():
        figures[f"moved_bytes.{way}"] = count
        if plain:
            figures[f"bandwidth_to_plain_copy.{way}"] = rate / plain
    return figures


def _best_moved(rounds: list[_Round]) -> dict[str, tuple[float, float]]:
    """By way on which anything moved: bytes of the median run, GB/s of the fastest."""
    moved = [each.subject.moved for each in rounds]
    return {
        way: (median(each[way]["bytes"] for each in moved), rate)
        for way in moved[0]
        if (rate := max(each[way]["gb_per_s"] for each in moved))
    }


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

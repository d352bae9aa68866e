"""``refimpl run --model-path``: a real model serves the load on the wall clock, tier set by tier set.

Each tier set answers the same prompts; that the answers are equal is checked, since the cache may
never change one. Must not know: the terminal. Called by: the command line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import uuid4

from refimpl.config import require
from refimpl.core.engine import Engine
from refimpl.keys import TokenPrompt
from refimpl.model.catalog import Model
from refimpl.model.shard import Shard
from refimpl.run.dynamic import with_floats
from refimpl.run.extra_config import parse_extra_config
from refimpl.run.hands import geometry_of
from refimpl.run.live import run_live
from refimpl.run.model_choice import ModelChoice
from refimpl.run.options import Options
from refimpl.run.rank_setup import ONE_PROCESS, RankChoice, instance_of
from refimpl.run.record import Row
from refimpl.run.report import integers
from refimpl.run.setup import Simulation
from refimpl.run.tier_sets import tier_sets
from refimpl.storage.memory import forget
from refimpl.units import NS_PER_S
from refimpl.workload.request import Workload, unscripted
from refimpl.workload.scenario import parse_scenario

# Small enough for a CPU: four chats of four turns, whose KV does not fit into L1 together.
WORKLOAD: Final = "multi_turn:clients=4,rounds=4,request_length=64,output_length=8,rate=0,vocab=256"
L1_TOKENS: Final = 768
PAGE_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Served:
    """One tier set: its figures, requests, answers, and how fast bytes moved."""

    name: str
    figures: dict[str, Any]
    rows: list[Row]
    outputs: dict[int, list[int]]
    moved: dict[str, dict[str, float]]
    store_failures: int  # calls of L3 that raised or answered nonsense


class RealRun:
    """A load that can be served: everything has been checked and the model is loaded.

    With ``compare`` it is served with no cache, L1, L1 + L2 and L1 + L2 + L3, one after another,
    else with all tiers alone. ``given`` are the options that somebody chose; the others have defaults
    of this run's own. Raises ConfigError for what can't work.
    """

    def __init__(
        self,
        options: Options,
        choice: ModelChoice,
        *,
        compare: bool,
        given: Collection[str] = (),
        ranks: RankChoice = ONE_PROCESS,
    ) -> None:
        ranks.check()
        options = _with_own_defaults(options, given)
        scenario = parse_scenario(options.workload or WORKLOAD, options.seed, options.page_size)
        workload = unscripted(scenario)
        self._choice, self.model = choice, choice.open(options.seed)
        self._ranks = ranks
        Shard(0, options.tp_size).check(self.model.config)
        geometry = geometry_of(self.model.config, options.page_size, options.tp_size)
        self._page_bytes = geometry.page_bytes
        sets = {
            name: Simulation(each, workload, self._page_bytes)
            for name, each in tier_sets(options).items()
        }
        self._sets = sets if compare else dict(list(sets.items())[-1:])
        _check_tokens(workload, self.model)
        where = self.model.transformer.device.type
        kind = self.model.config.dtype
        self.notices = [note for each in self._sets.values() for note in each.notices]
        self.page_size = options.page_size
        self.effective = list(self._sets.values())[-1].effective()
        self.served_by = f"{choice.path} on {where}, {kind}, {choice.arithmetic} arithmetic,"
        self.workload = workload
        self.requests = len(workload.requests) * len(self._sets)

    def run(self, progress: Callable[[int], None] | None = None) -> list[Served]:
        """Serve it; ``progress`` hears of each request that is over."""
        return [
            serve(name, each, self._choice, self.model, progress, self._ranks)
            for name, each in self._sets.items()
        ]

    def serve_afresh(self, name: str) -> Served:
        """Serve it with one tier set, whose L3 in memory holds nothing yet and is gone afterwards."""
        simulation = self._sets[name]
        store = uuid4().hex
        extra = json.loads(simulation.options.hicache_storage_backend_extra_config or "{}")
        told = json.dumps(extra | {"store": store}) if simulation.engine.storage_backend else None
        options = replace(simulation.options, hicache_storage_backend_extra_config=told)
        fresh = Simulation(options, simulation.workload, self._page_bytes)
        try:
            return serve(name, fresh, self._choice, self.model)
        finally:
            forget(store)


def answers_equal(done: list[Served]) -> bool:
    """Did every tier set answer every request alike?"""
    return all(served.outputs == done[0].outputs for served in done)


def for_json(done: list[Served]) -> dict[str, Any]:
    """The comparison as one JSON object."""
    return {
        "clock": "wall",
        "answers_equal": answers_equal(done),
        "tier_sets": [
            {
                "tiers": each.name,
                "moved": each.moved,
                "store_failures": each.store_failures,
                "answers_sha256": _digest(each.outputs),
            }
            | each.figures
            for each in done
        ],
    }


def _digest(outputs: dict[int, list[int]]) -> str:
    """Of all answers: equal where two processes gave the same ones."""
    return hashlib.sha256(json.dumps(sorted(outputs.items())).encode()).hexdigest()


def _with_own_defaults(options: Options, given: Collection[str]) -> Options:
    require(options.trace is None, "a trace names blocks, and a model needs tokens: use --workload")
    require(options.instances == 1, "--model-path serves one instance: leave --instances at 1")
    require(options.dp_size == 1, "--model-path runs one data-parallel rank: use serve --dp-size")
    require(options.faults is None, "--faults are injected on the virtual clock: use simulate")
    own = {"workload": WORKLOAD, "max_total_tokens": L1_TOKENS, "page_size": PAGE_SIZE}
    changes = {name: value for name, value in own.items() if name not in given}
    options = replace(options, **changes)  # type: ignore[arg-type]  # names and types as in own
    backend = options.hicache_storage_backend or "memory"
    extra = _extra_config(backend, options.hicache_storage_backend_extra_config, options.page_size)
    return replace(
        options,
        hicache_storage_backend=backend,
        hicache_storage_backend_extra_config=extra,
    )


def _extra_config(backend: str, text: str | None, page_size: int) -> str:
    """What was given, with a threshold of one page where it says none: these prompts are short.

    A store in memory that has no name is of this run alone.
    """
    extra = {} if text is None else with_floats(parse_extra_config(text))
    extra.setdefault("prefetch_threshold", page_size)
    if backend == "memory":
        extra.setdefault("store", uuid4().hex)
    return json.dumps(extra)


def _check_tokens(workload: Workload, model: Model) -> None:
    vocab = model.config.vocab
    prompts = [spec.prompt for spec in workload.requests if isinstance(spec.prompt, TokenPrompt)]
    highest = max(max(prompt.tokens) for prompt in prompts)
    require(
        highest < vocab,
        f"the workload has token {highest}, {model.config.name} knows {vocab}:"
        f" say vocab={vocab} in --workload",
    )


def serve(
    name: str,
    simulation: Simulation,
    choice: ModelChoice,
    model: Model,
    progress: Callable[[int], None] | None = None,
    ranks: RankChoice = ONE_PROCESS,
) -> Served:
    """Serve one checked configuration with ``model``, to the end."""
    executor = instance_of(simulation, choice, model, "", ranks)
    record = run_live(Engine(simulation.engine), executor, simulation.workload, progress)
    moved = {
        way: {
            "bytes": float(amount),
            "gb_per_s": amount / ns if ns else 0.0,  # bytes a ns are GB/s
            "seconds": ns / NS_PER_S,
        }
        for way, (amount, ns) in executor.moved().items()
    }
    rows = list(record.rows.values())
    return Served(name, integers(record), rows, executor.outputs, moved, executor.store_failures)

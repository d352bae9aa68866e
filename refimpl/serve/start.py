"""A service over a real model: it is loaded, pools are made, storage is open, nothing runs yet.

Called by: the command line, scenarios.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict

from refimpl.config import require
from refimpl.model.catalog import Model
from refimpl.model.shard import Shard
from refimpl.run.hands import geometry_of
from refimpl.run.live import LiveExecutor
from refimpl.run.model_choice import ModelChoice
from refimpl.run.options import Options
from refimpl.run.rank_group import RankGroup
from refimpl.run.rank_setup import ONE_PROCESS, RankChoice, instance_of
from refimpl.run.real_hands import check_pools
from refimpl.run.setup import Simulation
from refimpl.serve.service import Served, Service
from refimpl.serve.settle import check_server, service_of, simulation_of, with_l1

L1_TOKENS_DEFAULT = 16_384  # on a CPU, where a share of device memory means nothing


def start_service(
    options: Options,
    choice: ModelChoice,
    served_name: str | None = None,
    ranks: RankChoice = ONE_PROCESS,
) -> Service:
    """Everything but the engine's thread. Raises ConfigError or StorageError for what can't work."""
    check_server(options)
    require(options.faults is None, "--faults are injected by --hands none and by simulate")
    options = with_l1(options, L1_TOKENS_DEFAULT)
    model = choice.open(options.seed)
    Shard(0, options.tp_size).check(model.config)
    geometry = geometry_of(model.config, options.page_size, options.tp_size)
    resolved = simulation_of(options, geometry.page_bytes)
    # Memory that nobody has written to yet counts as free: all ranks are asked for at once.
    check_pools(resolved.engine, model, geometry, options.dp_size * options.tp_size)
    name = served_name or choice.path
    executors = _executors(resolved, choice, model, name, ranks)
    config = model.config
    served = Served(
        config.name,
        model.tokenizer,
        config.vocab,
        config.positions_max,
        is_mla=config.mla is not None,
    )
    return service_of(resolved, served, executors, name, asdict(options) | asdict(choice))


def _executors(
    resolved: Simulation, choice: ModelChoice, model: Model, name: str, ranks: RankChoice
) -> list[LiveExecutor | RankGroup]:
    """One a data-parallel rank, over the same weights, which nobody changes."""
    made: list[LiveExecutor | RankGroup] = []
    with ExitStack() as undo:
        for _ in range(resolved.options.dp_size):
            made.append(instance_of(resolved, choice, model, name, ranks))
            undo.callback(made[-1].close)
            made[-1].keeps_outputs = False
        undo.pop_all()
    return made

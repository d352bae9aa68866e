"""A service over a real model: it is loaded, pools are made, storage is open, nothing runs yet.

Called by: the command line, scenarios.
"""

from __future__ import annotations

from dataclasses import asdict

from refimpl.config import require
from refimpl.model.shard import Shard
from refimpl.run.hands import geometry_of
from refimpl.run.live import LiveExecutor
from refimpl.run.model_choice import ModelChoice
from refimpl.run.options import Options
from refimpl.run.rank_group import RankGroup
from refimpl.run.rank_setup import ONE_PROCESS, RankChoice, instance_of
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
    page_bytes = geometry_of(model.config, options.page_size, options.tp_size).page_bytes
    resolved = simulation_of(options, page_bytes)
    name = served_name or choice.path
    executors: list[LiveExecutor | RankGroup] = []
    try:
        for _ in range(options.dp_size):  # over the same weights, which nobody changes
            executors.append(instance_of(resolved, choice, model, name, ranks))
            executors[-1].keeps_outputs = False
    except BaseException:
        for executor in executors:
            executor.close()
        raise
    config = model.config
    served = Served(config.name, model.tokenizer, config.vocab, config.positions_max)
    return service_of(resolved, served, executors, name, asdict(options) | asdict(choice))

"""A service without a model: the simulator's timing on the wall clock, made-up answers.

It takes the tokens of the model that it imitates; text goes through as bytes. Must not know: tensors.
Called by: the command line, scenarios.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from refimpl.model.tokenizer import ByteTokenizer
from refimpl.run.hardware import model_named
from refimpl.run.null_hands import NullExecutor
from refimpl.run.options import Options
from refimpl.serve.service import Served, Service
from refimpl.serve.settle import check_server, service_of, simulation_of

POSITIONS_MAX: Final = 131_072  # of the context of the models that are imitated


def start_null_service(options: Options, served_name: str | None = None) -> Service:
    """Everything but the engine's thread. Raises ConfigError for what can't work."""
    check_server(options)
    resolved = simulation_of(options)
    executors = [NullExecutor(lanes) for lanes in resolved.lanes()]
    shape = model_named(options.model)
    served = Served(
        shape.name,
        ByteTokenizer(),
        shape.vocab,
        POSITIONS_MAX,
        has_logprobs=False,
        is_mla=shape.is_mla,
    )
    settings = asdict(options) | {"hands": "none"}
    return service_of(resolved, served, executors, served_name or shape.name, settings)

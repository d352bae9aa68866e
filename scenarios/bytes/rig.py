"""An engine with real bytes on the virtual clock, small enough to run by the dozen.

The L1 and L2 pools begin full of poison, so that a page read before it was written shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import count

import torch

from refimpl.cluster.router import Router
from refimpl.config import CacheConfig, EngineConfig, PrefetchConfig, Transfer
from refimpl.core.check import check_engine, check_quiescent
from refimpl.core.engine import Engine
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Mover
from refimpl.model.config import ModelConfig
from refimpl.model.reference import Reference
from refimpl.model.transformer import Transformer
from refimpl.model.weights import random_weights
from refimpl.run.cost import Cost
from refimpl.run.faults import Faults
from refimpl.run.hands import PageStore, TorchHands, geometry_of
from refimpl.run.hardware import hardware_named, model_named
from refimpl.run.lanes import LaneExecutor
from refimpl.run.live import LiveExecutor
from refimpl.run.record import Record
from refimpl.run.storage_setup import StoreOpener, identity_of
from refimpl.run.store import SharedStore
from refimpl.run.virtual import VirtualHands
from refimpl.run.world import Instance, World
from refimpl.workload.request import Workload

_numbers = count()


@dataclass(frozen=True)
class Rig:
    """A configuration; the defaults are too small for the workloads they meet, on purpose."""

    page_size: int = 4
    l1_pages: int = 30
    l2_pages: int = 45
    layout: str = "page_first"
    io_backend: str = "kernel"
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    chunk_tokens: int = 16
    hardware: str = "h200"
    storage: str = "memory"
    reuse: bool = True
    faults: str = ""

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        cache = CacheConfig(
            page_size=self.page_size,
            l1_pages=self.l1_pages,
            l2_pages=self.l2_pages,
            write_policy=self.write_policy,
            load_back_threshold_tokens=1,
            prefetch=PrefetchConfig(self.prefetch_policy, threshold_tokens=self.page_size),
        )
        return EngineConfig(
            cache,
            storage_backend=self.storage,
            reuse=self.reuse,
            chunked_prefill_tokens=self.chunk_tokens,
            decode_reserve_tokens=4,
        )

    def lanes(self) -> LaneExecutor:
        """Lanes of this configuration, with a store of their own."""
        transfer = Transfer(self.layout, self.io_backend)
        hardware, model = hardware_named(self.hardware), model_named("llama-3.1-8b")
        cost = Cost(hardware, model, 1, transfer, self.page_size)
        return LaneExecutor(cost, SharedStore(), Faults.parse(self.faults, 1))


@dataclass(frozen=True)
class Outcome:
    """What a run decided and answered, and the pools it left."""

    record: Record
    outputs: dict[int, list[int]]
    engine: Engine
    hands: TorchHands


def without_cache(rig: Rig) -> Rig:
    """The same with room for everything and nothing kept for later requests."""
    return replace(
        rig, l1_pages=600, l2_pages=0, storage="", reuse=False, chunk_tokens=4096, faults=""
    )


def torch_hands(rig: Rig, model: ModelConfig, seed: int = 1) -> TorchHands:
    """Hands over poisoned pools."""
    geometry = geometry_of(model, rig.page_size)
    device = Pool(geometry, "layer_first", rig.l1_pages)
    host = Pool(geometry, rig.layout, max(rig.l2_pages, 1))
    for pool in (device, host):
        pool.tensor.fill_(float("nan"))
    transformer = Transformer(model, random_weights(model, seed), Reference())
    return TorchHands(transformer, Mover(device, host, rig.io_backend))


def live_executor(rig: Rig, model: ModelConfig, extra_config: str = "") -> LiveExecutor:
    """Pumps over fresh hands, with the storage of ``rig`` open; a store in memory is its own."""
    hands = torch_hands(rig, model)
    host = hands.mover.host
    executor = LiveExecutor(hands, StoreOpener(identity_of(hands.model, host), host))
    if rig.storage:
        own = json.dumps({"store": f"rig {next(_numbers)}"}) if rig.storage == "memory" else ""
        executor.storage.open_now(rig.storage, extra_config or own)
    return executor


def run_bytes(rig: Rig, model: ModelConfig, workload: Workload) -> Outcome:
    """Run ``workload`` through a model, checking the engine after every step."""
    hands = torch_hands(rig, model)
    executor = VirtualHands(rig.lanes(), hands, PageStore())
    engine = Engine(rig.config)
    record = _run(engine, executor, rig, workload)
    return Outcome(record, executor.outputs, engine, hands)


def run_null(rig: Rig, workload: Workload) -> Record:
    """The same decisions without bytes."""
    return _run(Engine(rig.config), rig.lanes(), rig, workload)


def _run(
    engine: Engine, executor: VirtualHands | LaneExecutor, rig: Rig, workload: Workload
) -> Record:
    world = World([Instance(engine, executor)], Router(1), rig.page_size)
    world.after_turn = lambda instance, _: check_engine(instance.engine)
    record = world.run(workload)
    check_quiescent(engine)
    return record


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, for which NaN and -0 are like everything else."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(kind)

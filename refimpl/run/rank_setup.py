"""From a checked configuration to the executor of an instance: one rank, or several that work together.

Ranks are threads over one copy of the weights, or processes with a copy each.
Must not know: what an engine decides, the terminal. Called by: real, the server.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import torch

from refimpl.cluster.ranks import LIMIT_S
from refimpl.config import require, require_choice
from refimpl.model.catalog import Model
from refimpl.model.shard import Shard
from refimpl.run.live import LiveExecutor
from refimpl.run.live_loop import Inbox
from refimpl.run.meeting import Meeting
from refimpl.run.model_choice import ModelChoice
from refimpl.run.rank_group import Rank, RankGroup, ThreadFollower, WakingInbox
from refimpl.run.rank_process import Groups, ProcessFollower, Start, gather_of
from refimpl.run.real_hands import executor_of
from refimpl.run.setup import Simulation

TRANSPORTS = ("thread", "process")
_LIMIT_MAX_S: Final = 86_400  # a day: nobody waits that long on purpose


@dataclass(frozen=True, slots=True)
class RankChoice:
    """How the ranks of an instance run, and how long one may be silent."""

    transport: str = "thread"
    limit_s: float = LIMIT_S

    def check(self) -> None:
        """Raise ConfigError for what can't be."""
        require_choice("--rank-transport", self.transport, TRANSPORTS)
        require(
            0 < self.limit_s <= _LIMIT_MAX_S,
            f"--rank-timeout {self.limit_s:g} must be above 0 seconds and at most {_LIMIT_MAX_S}",
        )


ONE_PROCESS: Final = RankChoice()


@dataclass(frozen=True, slots=True)
class MakeRank:
    """Builds the hands of a rank in its own process, from what can be sent there."""

    simulation: Simulation
    choice: ModelChoice
    name: str

    def __call__(self, shard: Shard, group: Any) -> LiveExecutor:
        """Load the model and make the pools."""
        model = self.choice.open(self.simulation.options.seed)
        part = model.of_rank(shard, gather_of(group, shard))
        return executor_of(self.simulation, part, self.name, shard)


def instance_of(
    simulation: Simulation, choice: ModelChoice, model: Model, name: str, ranks: RankChoice
) -> LiveExecutor | RankGroup:
    """The executor of one instance with ``--tp-size`` ranks. Raises ConfigError, StorageError, RankError."""
    ranks.check()
    size = simulation.options.tp_size
    if size == 1:
        return executor_of(simulation, model, name)
    if ranks.transport == "thread":
        return _threads(simulation, model, name, size, ranks.limit_s)
    return _processes(MakeRank(simulation, choice, name), model, size, ranks.limit_s)


def _threads(
    simulation: Simulation, model: Model, name: str, size: int, limit_s: float
) -> RankGroup:
    compute, agree = Meeting(size, limit_s), Meeting(size, limit_s)
    inbox: Inbox = SimpleQueue()

    def rank_of(number: int) -> Rank:
        shard = Shard(number, size)
        part = model.of_rank(shard, partial(_gathered, compute, number))
        own = WakingInbox(inbox) if number == 0 else None
        executor = executor_of(simulation, part, name, shard, own)
        return Rank(number, executor, agree.minimum_of(number))

    def end() -> None:
        compute.end()
        agree.end()

    ranks: list[Rank] = []
    with ExitStack() as undo:
        for number in range(size):
            ranks.append(rank_of(number))
            undo.callback(ranks[-1].executor.close)
        undo.pop_all()
    followers = [ThreadFollower(rank, end) for rank in ranks[1:]]
    return RankGroup(inbox, ranks[0], followers, limit_s)


def _gathered(meeting: Meeting, rank: int, part: torch.Tensor, width: int) -> torch.Tensor:
    del width  # each part has its own
    return torch.cat(meeting.exchange(rank, part), dim=-1)


def _processes(make: MakeRank, model: Model, size: int, limit_s: float) -> RankGroup:
    groups = Groups(Shard(0, size), 0, limit_s)
    starts = [Start(Shard(rank, size), groups.port, limit_s, make) for rank in range(1, size)]
    followers: list[ProcessFollower] = []
    with ExitStack() as undo:
        for start in starts:
            followers.append(ProcessFollower(start))
            undo.callback(followers[-1].kill)
        for follower in followers:
            follower.wait_here()
        groups.join(followers)
        inbox: Inbox = SimpleQueue()
        part = model.of_rank(groups.shard, gather_of(groups.compute, groups.shard))
        executor = executor_of(make.simulation, part, make.name, groups.shard, WakingInbox(inbox))
        undo.callback(executor.close)
        for follower in followers:
            follower.wait_ready()
        undo.pop_all()
    return RankGroup(inbox, Rank(0, executor, groups.minimum), followers, limit_s)

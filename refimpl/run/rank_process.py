"""Ranks as processes of their own: orders through pipes, agreement and computing over ``torch.distributed``.

Rank 0 is the process that starts the others. A rank ends when its pipe does, so none outlives rank 0.
Must not know: what an engine decides, HTTP. Called by: rank_setup.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.cluster.ranks import RankError, Vector
from refimpl.model.shard import Gather, Shard
from refimpl.run.pump import JOIN_S
from refimpl.run.rank_group import Rank, Step, follow

START_S: Final = 120  # for a rank to load torch, to connect, and to load its model
_LOOK_S: Final = 0.1  # how often to look whether a rank has died while all connect
_HERE, _READY = "here", "ready"  # what a rank says when it can connect, and when it can work
ORPHAN_S: Final = 5  # for a rank to end in good order when rank 0 has gone
HOST: Final = "127.0.0.1"


class Groups:
    """The two process groups of a rank: one to agree in, one to compute in, each used by one thread."""

    def __init__(self, shard: Shard, port: int, limit_s: float) -> None:
        self.shard = shard
        self._start = timedelta(seconds=START_S)
        self.store = dist.TCPStore(  # type: ignore[attr-defined]  # torch types it in part
            HOST, port, shard.size, shard.rank == 0, self._start, wait_for_workers=False
        )
        self._limit = timedelta(seconds=limit_s)
        self._limit_s = limit_s
        self._error: RankError | None = None  # why they did not connect

    @property
    def port(self) -> int:
        """Where the others find the store."""
        return int(self.store.port)

    def join(self, followers: Sequence[ProcessFollower] = ()) -> None:
        """Wait for all ranks, and connect. Raises RankError, at once when one of ``followers`` has died.

        That takes as long as the slowest needs to start; the limit is for those that have.
        """
        joining = Thread(target=self._try_to_join, name="joining ranks", daemon=True)
        joining.start()
        while joining.is_alive():
            joining.join(_LOOK_S)
            for follower in followers:
                follower.check()
        if self._error is not None:
            raise self._error from None

    def _try_to_join(self) -> None:
        try:
            self._agree, self.compute = (self._group(name) for name in ("agree", "compute"))
        except RuntimeError as error:  # DistStoreError is one
            self._error = RankError(f"the ranks did not connect ({error})")

    def _group(self, name: str) -> Any:
        rank, size = self.shard.rank, self.shard.size
        store = dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]
        group = dist.ProcessGroupGloo(store, rank, size, self._start)
        group._set_default_timeout(self._limit)
        return group

    def minimum(self, vector: Vector, patience: float = 1) -> Vector:
        """``all_reduce(MIN)``. Raises RankError when a rank does not come in that part of the limit."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.timeout = self._limit * patience
        tensor = torch.tensor(vector, dtype=torch.int64)
        try:
            self._agree.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise RankError(
                f"a rank did not answer within {self._limit_s:g} s: restart the instance ({error})"
            ) from None
        return [int(entry) for entry in tensor]


def gather_of(group: Any, shard: Shard) -> Gather:
    """Parts put together over a process group; they travel padded to the widest. Raises RankError."""

    def gather(part: Tensor, width: int) -> Tensor:
        widths = shard.widths(width)
        wide = torch.zeros(*part.shape[:-1], max(widths), dtype=part.dtype)
        wide[..., : part.shape[-1]] = part
        parts = [torch.empty_like(wide) for _ in widths]
        try:
            group.allgather([parts], [wide]).wait()
        except RuntimeError as error:
            raise RankError(f"a rank did not take part in computing ({error})") from None
        cut = [each[..., :own] for each, own in zip(parts, widths, strict=True)]
        return torch.cat(cut, dim=-1).to(part.device)

    return gather


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank needs to begin. ``make`` builds its hands, and can be pickled."""

    shard: Shard
    port: int
    limit_s: float
    make: Callable[[Shard, Any], Any]  # (shard, process group to compute in) -> LiveExecutor


def _work(start: Start, pipe: Connection) -> None:
    """The main function of a rank that is a process."""
    torch.set_num_threads(1)
    Thread(target=_end_with_rank_0, name="end with rank 0", daemon=True).start()
    try:
        _live(start, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has gone
    except RankError as error:
        print(f"rank {start.shard.rank}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _end_with_rank_0() -> None:
    """Wherever this process is then, connecting or waiting for a store, it is not for long."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "rank 0 starts the others"
    parent.join()
    Event().wait(ORPHAN_S)
    os._exit(1)


def _live(start: Start, pipe: Connection) -> None:
    groups = Groups(start.shard, start.port, start.limit_s)
    pipe.send(_HERE)
    groups.join()
    executor = start.make(start.shard, groups.compute)
    pipe.send(_READY)
    follow(Rank(start.shard.rank, executor, groups.minimum), pipe.recv)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started meanwhile hear of no Ctrl-C and no SIGTERM, which terminals and service managers send
    to all: rank 0 ends in good order, and ends them."""
    resource_tracker.ensure_running()  # the first process would start it, and that unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessFollower:
    """A rank in a process of its own."""

    def __init__(self, start: Start) -> None:
        context = multiprocessing.get_context("spawn")
        self._rank = start.shard.rank
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_work, args=(start, theirs), name=f"rank {self._rank}", daemon=True
        )
        with _deaf():
            self._process.start()
        atexit.register(self._process.kill)  # multiprocessing would ask in vain, with SIGTERM
        theirs.close()
        self._steps: SimpleQueue[Step | None] = SimpleQueue()
        # A rank that reads nothing must not hold up rank 0, so a thread waits for it.
        self._sender = Thread(target=self._send, name=f"to rank {self._rank}", daemon=True)

    def wait_here(self) -> None:
        """Until it can connect to the others. Raises RankError."""
        self._wait_for(_HERE)

    def wait_ready(self) -> None:
        """Until its model is loaded. Raises RankError."""
        self._wait_for(_READY)
        self._sender.start()

    def _wait_for(self, word: str) -> None:
        try:
            has_come = self._pipe.poll(START_S) and self._pipe.recv() == word
        except (EOFError, OSError):  # it has died
            has_come = False
        if not has_come:
            self._process.join(JOIN_S)
            code = self._process.exitcode or 0
            why = f"signal {-code} has ended it" if code < 0 else "its own log says why"
            raise RankError(f"rank {self._rank} did not start; {why}")

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    def _send(self) -> None:
        with suppress(OSError):  # it has died, which ``check`` says
            while (step := self._steps.get()) is not None:
                self._pipe.send(step)

    def send(self, step: Step) -> None:
        """Give it a step."""
        self._steps.put(step)

    def check(self, patience_s: float = 0) -> None:
        """Raise RankError if it has died, or does so within ``patience_s``."""
        self._process.join(patience_s)
        if self._process.exitcode is not None:
            raise RankError(
                f"rank {self._rank} has died, exit code {self._process.exitcode}:"
                " restart the instance"
            )

    def kill(self) -> None:
        """End it at once."""
        atexit.unregister(self._process.kill)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def join(self, patience_s: float) -> None:
        """Wait for its end; one that does not come to it is killed."""
        self._steps.put(None)
        self._process.join(patience_s)
        self.kill()

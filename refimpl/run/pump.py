"""A thread, or a few, that do what they are given in order.

Must not know: what the jobs are. Called by: live, live_storage.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Final

JOIN_S: Final = 30  # how long a pump may take to finish what it is doing when all is over


class Pump:
    """Jobs begin in the order in which they were put; what a job raises comes out of ``check``."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Have ``job`` done after all that was put before has begun."""
        self._jobs.put(job)

    def check(self) -> None:
        """Raise what stopped it, if something did."""
        if self._error is not None:
            raise self._error

    def close(self, patience_s: float = JOIN_S) -> bool:
        """Finish what was put and end the threads.

        False when one of them did not end within ``patience_s``: it hangs in what it is doing. What
        stopped it comes out of ``check``.
        """
        for _ in self._threads:
            self._jobs.put(None)
        end = perf_counter() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, end - perf_counter()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # it is raised again where it can be seen
                self._error = error
                return

"""A limit of time for what a backend does, and a wall around what it raises.

A store that hangs or a class that exits must end its rule and not the command. What hangs goes on in a
thread that nobody waits for. Ctrl-C stays Ctrl-C: a KeyboardInterrupt that comes out of such a thread is
the backend's own.
Must not know: rules, backends. Called by: verdict, kit, the process on the other side, show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

SECONDS_MAX: Final = 60.0  # for what should take one
_NAME: Final = "conform: "
_Answer = TypeVar("_Answer")


class StoppedError(Exception):
    """There is no answer to expect; the message says why."""


def within(
    seconds: float, call: Callable[[], _Answer], since: Callable[[], float] | None = None
) -> _Answer:
    """What ``call`` answers or raises, on a thread of its own.

    The time counts from the start, or from the moment that ``since`` tells, where that is later. Raises
    StoppedError when it is up, and for a SystemExit and its like.
    """
    answers: list[_Answer] = []
    faults: list[BaseException] = []
    started = monotonic()

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=run, name=f"{_NAME}{call!r}", daemon=True)
    thread.start()
    while thread.is_alive():
        left = max(started, since() if since else started) + seconds - monotonic()
        if left <= 0:
            raise StoppedError(f"no answer within {seconds:g} s")
        thread.join(left)
    for fault in faults:
        if isinstance(fault, Exception):
            raise fault
        raise StoppedError(f"it raised {fault!r}") from fault
    return answers[0]


def is_something_left() -> bool:
    """Whether a call hangs still, which may hold up the end of the process."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())

"""A limit of time for what a backend does, and a wall around what it raises.

A store that hangs or a class that exits must end its rule and not the command. What hangs goes on in a
thread that nobody waits for. Ctrl-C stays Ctrl-C: a KeyboardInterrupt that comes out of such a thread is
the backend's own.
Must not know: rules, backends. Called by: verdict, kit, the process on the other side, show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from refimpl.run import patience

SECONDS_MAX: Final = 60.0  # for what should take one
_NAME: Final = "conform: "
_Answer = TypeVar("_Answer")


class StoppedError(Exception):
    """There is no answer to expect; the message says why."""


def within(
    seconds: float, call: Callable[[], _Answer], since: Callable[[], float] | None = None
) -> _Answer:
    """What ``call`` answers or raises; ``since`` as for ``patience.within``.

    Raises StoppedError when the time is up, and for a SystemExit and its like.
    """

    def walled() -> _Answer:
        try:
            return call()
        except Exception:
            raise
        except BaseException as fault:
            raise StoppedError(f"it raised {fault!r}") from fault

    try:
        return patience.within(seconds, walled, since=since, name=f"{_NAME}{call!r}")
    except patience.TooLateError as error:
        raise StoppedError(str(error)) from None


def is_something_left() -> bool:
    """Whether a call hangs still, which may hold up the end of the process."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())

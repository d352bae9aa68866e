"""Waiting for somebody else's code, but not for ever.

Must not know: whose code it is. Called by: live_storage, the conformance kit.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from time import monotonic
from typing import Generic, TypeVar

Result = TypeVar("Result")


class TooLateError(Exception):
    """A call has not ended in its time. It goes on, and nobody waits for it."""


def within(
    limit_s: float,
    call: Callable[[], Result],
    *,
    late: Callable[[Result], object] | None = None,
    since: Callable[[], float] | None = None,
    name: str = "others_code",
) -> Result:
    """The result of ``call``, which runs on a thread of its own, ``name``, for as long as it likes.

    The time counts from the start, or from the moment (of ``time.monotonic``) that ``since`` tells where
    that is later. Raises what ``call`` raises, whatever that is, or TooLateError after ``limit_s``; a
    result that comes after all is given to ``late``.
    """
    waiting = _Call(call, late)
    started = monotonic()
    thread = Thread(target=waiting.run, name=name, daemon=True)
    thread.start()
    left = limit_s
    while thread.is_alive() and left > 0:
        thread.join(left)
        left = max(started, since() if since else started) + limit_s - monotonic()
    return waiting.result(limit_s)


class _Call(Generic[Result]):
    def __init__(self, call: Callable[[], Result], late: Callable[[Result], object] | None) -> None:
        self._call, self._late = call, late
        self._lock = Lock()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._is_given_up = False

    def run(self) -> None:
        try:
            result = self._call()
        except BaseException as error:  # it is raised again where somebody waits
            self._error = error
            return
        with self._lock:
            self._results.append(result)
            is_late = self._is_given_up
        if is_late and self._late is not None:
            self._late(result)

    def result(self, limit_s: float) -> Result:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._results:
                return self._results[0]
            self._is_given_up = True
        raise TooLateError(f"no answer within {limit_s:g} s")

"""A store as the engine uses it: a backend, its pages checked, a breaker in front.

Must not know: how any of them works. Called by: the storage pumps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from refimpl.storage.backend import Backend, Setting
from refimpl.storage.breaker import Breaker, BreakerOptions
from refimpl.storage.extra import choice, switch, time_ns, whole
from refimpl.storage.factory import open_backend
from refimpl.storage.integrity import Integrity

STACK_KEYS: Final = (
    "integrity",
    "breaker",
    "breaker_failures",
    "breaker_slow",
    "breaker_pause",
    "breaker_pause_max",
)


def open_storage(
    name: str, setting: Setting, clock: Callable[[], int] = time.monotonic_ns
) -> Backend:
    """Open backend ``name`` with what the extra config puts around it.

    ``integrity`` is off, verify or require; ``breaker`` is true unless told otherwise, opens after
    ``breaker_failures`` calls or one of ``breaker_slow`` seconds, and pauses for ``breaker_pause`` to
    ``breaker_pause_max`` seconds. Raises what open_backend raises.
    """
    extra = setting.extra
    integrity = choice(extra, "integrity", ("off", "verify", "require"), "off")
    options = _breaker_options(extra)
    has_breaker = switch(extra, "breaker", default=True)
    theirs = {key: value for key, value in extra.items() if key not in STACK_KEYS}
    store = open_backend(name, replace(setting, extra=theirs))
    if integrity != "off":
        store = Integrity(store, is_required=integrity == "require")
    return Breaker(store, options, clock) if has_breaker else store


def _breaker_options(extra: Mapping[str, Any]) -> BreakerOptions:
    told = {
        "failures": whole(extra, "breaker_failures"),
        "slow_ns": time_ns(extra, "breaker_slow"),
        "pause_ns": time_ns(extra, "breaker_pause"),
        "pause_max_ns": time_ns(extra, "breaker_pause_max"),
    }
    return BreakerOptions(**{key: value for key, value in told.items() if value is not None})

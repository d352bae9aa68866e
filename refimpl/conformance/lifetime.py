"""How long values live, which decides what a backend can be asked for.

Must not know: rules. Called by: subject.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from refimpl.conformance.shapes import SMALL
from refimpl.storage.backend import Setting
from refimpl.storage.mooncake_config import read_mooncake_config
from refimpl.storage.names import namespace_of

# With the object that stored them, with the process, or in a store outside.
LIFETIMES: Final = ("object", "process", "store")
_AIBRIX_STORE: Final = "AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND"


def lifetime_of(backend: str, extra: Mapping[str, Any]) -> str:
    """What is known of a backend that is set up with these keys. Raises ConfigError if they can't be."""
    if backend == "memory":
        return "process"
    if backend == "mooncake" and _lends_memory(extra):
        return "object"  # pages may lie in what it lends, which goes when it closes
    if backend == "aibrix" and os.environ.get(_AIBRIX_STORE, "").upper() == "ROCKSDB":
        return "process"  # which locks its folder
    return "store"


def _lends_memory(extra: Mapping[str, Any]) -> bool:
    identity = SMALL.identity("any")
    setting = Setting(identity, namespace_of("mooncake", identity), extra)
    return read_mooncake_config(setting).segment_bytes > 0

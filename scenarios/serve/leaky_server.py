"""A server that keeps 2 KB of each request, so that the soak can be seen to find it."""

from __future__ import annotations

import os
from typing import Final

from refimpl.__main__ import main
from refimpl.serve.bridge import Bridge

KEPT_BYTES: Final = 2048
_kept: list[bytes] = []
_end = Bridge._end


def _keeping_end(bridge: Bridge, rid: int, reason: str) -> None:
    _kept.append(os.urandom(KEPT_BYTES))
    _end(bridge, rid, reason)


if __name__ == "__main__":
    Bridge._end = _keeping_end  # type: ignore[assignment,method-assign]
    main()

"""What a store did and what went wrong, counted by kind; each kind of trouble is logged once.

Must not know: what the kinds mean. Called by: backends and what wraps them.
"""

from __future__ import annotations

import logging
from collections import Counter
from threading import Lock


class Tally:
    """Counts that several threads add to. A kind that never happened has the count 0."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, kind: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[kind] += count

    def trouble(self, kind: str, what: str) -> None:
        """Count something that an operator should hear about; ``what`` is logged the first time."""
        with self._lock:
            self._counts[kind] += 1
            is_first = self._counts[kind] == 1
        if is_first:
            self._log.warning("%s (logged once, counted as %s)", what, kind)

    def __getitem__(self, kind: str) -> int:
        return self._counts[kind]

    def snapshot(self) -> dict[str, int]:
        """All counts."""
        with self._lock:
            return dict(sorted(self._counts.items()))

"""L3 without bytes: which pages an external store holds, shared by all instances of a world.

A page stands for the parts of all ranks together: it is there when every rank's part is.
Must not know: time, lanes, requests; whoever writes here has already let the time pass.
Called by: storage_lanes, world, tests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from refimpl.config import require
from refimpl.keys import PageKey


class SharedStore:
    """Keys in the order of their last use; beyond ``capacity_pages`` the coldest is dropped.

    Reading a page, writing it, and finding it before a write are uses; asking for it is not, so
    that a request which only probes keeps nothing alive. ConfigError when the capacity is below 1.
    """

    def __init__(self, capacity_pages: int | None = None) -> None:
        require(
            capacity_pages is None or capacity_pages >= 1,
            f"an L3 of {capacity_pages} pages holds nothing; give it at least 1, or no limit",
        )
        self.capacity_pages = capacity_pages
        self.puts = 0  # pages that were sent
        self.puts_existing = 0  # of them, sent although another had written them meanwhile
        self.puts_skipped = 0  # pages that were found before sending
        self.gets = 0  # pages that were asked for
        self.gets_missed = 0  # of them, not there
        self.evicted = 0  # pages dropped for lack of room
        # In order of use, the oldest first; without a limit nobody asks for the order.
        self._keys: dict[PageKey, None] = {} if capacity_pages is None else OrderedDict()

    def limit(self, capacity_pages: int | None) -> None:
        """Hold so many pages from now on, None: any number; how cold each one is, is kept."""
        self.capacity_pages = capacity_pages
        self._keys = dict(self._keys) if capacity_pages is None else OrderedDict(self._keys)
        self._drop_coldest()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._keys

    def leading_run(self, keys: Sequence[PageKey]) -> int:
        """How many of ``keys`` are there up to the first that isn't."""
        present = self._keys
        for count, key in enumerate(keys):
            if key not in present:
                return count
        return len(keys)

    def missing(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """Those of ``keys`` that a write has to send. The others count as skipped, and as used."""
        present = self._keys
        absent = [key for key in keys if key not in present]
        if len(absent) < len(keys):
            self.puts_skipped += len(keys) - len(absent)
            self._use(key for key in keys if key in present)
        return absent

    def put(self, keys: Sequence[PageKey]) -> None:
        """Make pages readable; one that is there already is kept, not replaced."""
        self.puts += len(keys)
        present = [key for key in keys if key in self._keys]
        if present:
            self.puts_existing += len(present)
            self._use(present)
        self._keys.update(dict.fromkeys(keys))
        self._drop_coldest()

    def _drop_coldest(self) -> None:
        while self.capacity_pages is not None and len(self._keys) > self.capacity_pages:
            del self._keys[next(iter(self._keys))]
            self.evicted += 1

    def _use(self, keys: Iterable[PageKey]) -> None:
        if isinstance(self._keys, OrderedDict):
            for key in keys:
                self._keys.move_to_end(key)

    def get(self, key: PageKey) -> bool:
        """Read a page. False when it isn't there, or no longer."""
        self.gets += 1
        if key in self._keys:
            self._use((key,))
            return True
        self.gets_missed += 1
        return False

    def clear(self) -> None:
        """Forget all pages; the counters stay."""
        self._keys.clear()

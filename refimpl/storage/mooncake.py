"""A Mooncake store: memory of many hosts as one, found through a master (package mooncake).

K and V are two objects (see objects). An object may vanish at any time, since the store evicts as it needs
room: a miss.
Must not know: pools, policies. Called by: factory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from refimpl.config import ConfigError, require
from refimpl.storage.backend import HostPage, Setting, StorageError
from refimpl.storage.extra import switch
from refimpl.storage.mooncake_client import ReplicateConfig, lease_of
from refimpl.storage.mooncake_config import MooncakeConfig, read_mooncake_config
from refimpl.storage.objects import (
    HALVES,
    Placed,
    Regions,
    address_of,
    object_names,
    objects_expected,
)

# Return codes, as seen in runs of 0.3.13.
_NO_ROOM: Final = -200
_MISSING: Final = -704
_TOO_LONG: Final = -600  # for its page; of one that is too short, the code is its length
_UNREACHABLE: Final = (-900, -901)  # no master; no answer in time


class MooncakeBackend:
    """Extra config: see mooncake_config; beside it ``enable_group_semantics``, which asks the store to
    evict K and V of a page together."""

    def __init__(self, setting: Setting) -> None:
        _check_layout(setting)
        self._setting = setting
        self._config = read_mooncake_config(setting)
        self._grouped = switch(setting.extra, "enable_group_semantics", default=False)
        self._misfits: set[str] = set()  # objects read in vain for their size
        self._client = lease_of(self._config, Regions.of(setting.memory))

    # ---- asking -----------------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend. What is found can't be evicted for the time of a lease (10 s by default)."""
        wanted = [objects_expected(self._setting, name) for name in names]
        there = self._are_there([each for objects in wanted for each in objects])
        fits = {each for each, is_there in there.items() if is_there} - self._misfits
        return [fits.issuperset(objects) for objects in wanted]

    def _are_there(self, objects: list[str]) -> dict[str, bool]:
        if not objects:
            return {}
        codes = self._client.call(lambda store: store.batch_is_exist(objects))
        _raise_if_unreachable(codes, self._config)
        return {name: code == 1 for name, code in zip(objects, codes, strict=True)}

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        return _in_rounds(self._get, names, pages)

    def _get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        objects, pieces, owners = _spread(names, pages)
        filled = [bool(page.pieces) for page in pages]
        if not objects:
            return filled
        placed = Placed(pieces, self._client.regions)
        codes = self._with_staging(
            placed,
            lambda store: store.batch_get_into(objects, placed.addresses, placed.sizes),
        )
        _raise_if_unreachable(codes, self._config)
        for at, (code, owner) in enumerate(zip(codes, owners, strict=True)):
            if code == placed.sizes[at]:
                placed.give_back(at)
                self._misfits.discard(objects[at])
                continue
            filled[owner] = False
            if code > 0 or code == _TOO_LONG:
                self._misfits.add(objects[at])  # not there, for whoever asks before writing
        return filled

    # ---- storing ----------------------------------------------------------------------------------

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend. Asks first what is there, so that nothing is sent twice."""
        return _in_rounds(self._set, names, pages)

    def _set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        objects, pieces, owners = _spread(names, pages)
        there = self._are_there(objects)
        self._make_way([name for name in objects if name in self._misfits], there)
        new = [at for at, name in enumerate(objects) if not there[name]]
        stored = [bool(page.pieces) for page in pages]
        if not new:
            return stored
        placed = Placed([pieces[at] for at in new], self._client.regions)
        arguments: list[Any] = [[objects[at] for at in new], placed.addresses, placed.sizes]
        if self._grouped:
            arguments.append(_groups([names[owners[at]] for at in new]))
        codes = self._with_staging(placed, lambda store: store.batch_put_from(*arguments))
        if all(code < 0 and code != _NO_ROOM for code in codes):
            raise StorageError(f"mooncake at {self._config.master} refuses all puts: {codes[0]}")
        for at, code in zip(new, codes, strict=True):
            if code:
                stored[owners[at]] = False
        return stored

    def _make_way(self, misfits: list[str], there: dict[str, bool]) -> None:
        """Remove objects of another size than their pages, and note that they are not ``there``."""
        if not misfits:
            return
        codes = self._client.call(lambda store: store.batch_remove(misfits, True))
        for name, code in zip(misfits, codes, strict=True):
            if code in (0, _MISSING):
                there[name] = False
                self._misfits.discard(name)

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Drop values, whoever reads them, [name]: True where there is none now."""
        objects = [each for name in names for each in object_names(name, len(HALVES))]
        codes = (
            self._client.call(lambda store: store.batch_remove(objects, True)) if objects else []
        )
        _raise_if_unreachable(codes, self._config)
        gone = [code in (0, _MISSING) for code in codes]
        return [all(gone[at : at + len(HALVES)]) for at in range(0, len(gone), len(HALVES))]

    def clear(self) -> int:
        """See Backend. Upstream empties the whole store, whoever's; this leaves others alone."""
        namespace = self._setting.namespace
        ours = f"^{re.escape(namespace.prefix)}[0-9a-f]{{64}}{re.escape(namespace.suffix)}([.][a-z0-9]+)?"
        counts = [self._remove(f"{ours}{half}$") for half in HALVES]
        _raise_if_unreachable([count for count in counts if count < 0], self._config)
        return max(counts)

    def _remove(self, pattern: str) -> int:
        count: int = self._client.call(lambda store: store.remove_by_regex(pattern, True))
        return count

    # ---- the client -------------------------------------------------------------------------------

    def _with_staging(self, placed: Placed, call: Callable[[Any], list[int]]) -> list[int]:
        """A call for pieces of which some may stand in memory that the store does not know yet."""
        codes: list[int]
        if not placed.staging:
            codes = self._client.call(call)
            return codes
        start, size = address_of(memoryview(placed.staging)), len(placed.staging)

        def known(store: Any) -> list[int]:
            store.register_buffer(start, size)
            try:
                return call(store)
            finally:
                store.unregister_buffer(start)

        codes = self._client.call(known)
        return codes

    def close(self) -> None:
        """See Backend. What this process lent to the store goes with its last client."""
        self._client.close()


def _check_layout(setting: Setting) -> None:
    """An object is contiguous, so K and V of a page must be."""
    require(
        setting.identity.layout != "layer_first",
        "mooncake needs pages that lie in one piece: --hicache-mem-layout layer_first has one a layer;"
        " choose page_first (kernel) or page_first_direct (direct)",
    )


def _spread(
    names: Sequence[str], pages: Sequence[HostPage]
) -> tuple[list[str], list[memoryview], list[int]]:
    """Objects, their bytes, and the position of the value each is part of."""
    objects: list[str] = []
    pieces: list[memoryview] = []
    owners: list[int] = []
    for at, (name, page) in enumerate(zip(names, pages, strict=True)):
        if len(page.pieces) > len(HALVES):
            raise ConfigError(f"mooncake stores pages of one or two pieces, not {len(page.pieces)}")
        objects += object_names(name, len(page.pieces))
        pieces += page.pieces
        owners += [at] * len(page.pieces)
    return objects, pieces, owners


def _in_rounds(
    call: Callable[[Sequence[str], Sequence[HostPage]], list[bool]],
    names: Sequence[str],
    pages: Sequence[HostPage],
) -> list[bool]:
    """One call, or more where a name comes more than once: the library fills one page of a name only."""
    if len(set(names)) == len(names):
        return call(names, pages)
    rounds: list[list[int]] = []
    seen: Counter[str] = Counter()
    for at, name in enumerate(names):
        if seen[name] == len(rounds):
            rounds.append([])
        rounds[seen[name]].append(at)
        seen[name] += 1
    done = [False] * len(names)
    for places in rounds:
        answers = call([names[at] for at in places], [pages[at] for at in places])
        for at, answer in zip(places, answers, strict=True):
            done[at] = answer
    return done


def _groups(names: Sequence[str]) -> ReplicateConfig:
    config = ReplicateConfig()
    config.group_ids = [f"sglang-hicache:{name}" for name in names]
    return config


def _raise_if_unreachable(codes: Sequence[int], config: MooncakeConfig) -> None:
    """Raise StorageError when nothing was answered; a part that failed is told by its place."""
    if codes and all(code in _UNREACHABLE for code in codes):
        raise StorageError(f"the mooncake master at {config.master} does not answer: {codes[0]}")

"""An unmodified class written for SGLang's ``HiCacheStorage`` as a storage backend.

It is called as SGLang's controller calls it (spec 5.1, 6.3, 6.5): pages go through the v1 calls, which
take token indices of the host pool, or, unless ``interface_v1`` asks for those, through ``batch_get``
with pages to fill and ``batch_set`` with flat pages. Values that are no page of the pool go through
``get`` and ``set``. Must not know: tensors, which ``host`` makes and reads. Called by: dynamic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Final, Protocol, runtime_checkable

from refimpl.config import require
from refimpl.run import sglang_stand_in as stand_in
from refimpl.run.answers import count_of, is_list, list_of
from refimpl.run.plain_class import REQUIRED, check_methods, delete_each, takes
from refimpl.storage.backend import Backend, HostPage, StorageError

V1: Final = ("batch_get_v1", "batch_set_v1")
_log = logging.getLogger(__name__)


@runtime_checkable
class HostPool(Protocol):
    """What is needed of the pool that the class is registered with; see host_pool_view."""

    def indices(self, slots: Sequence[int]) -> Any:
        """Token slots of pages."""
        ...

    def copy_of(self, page: HostPage) -> Any:
        """A payload as a tensor."""
        ...

    def empty_for(self, page: HostPage) -> Any:
        """A tensor to fill."""
        ...

    def fill(self, page: HostPage, value: Any) -> bool:
        """Copy a tensor into a page; False unless it fits exactly."""
        ...


# ---- the class ----------------------------------------------------------------------------------


def is_sglang_class(cls: type) -> bool:
    """Whether it is derived from ``HiCacheStorage``, SGLang's or the stand-in's."""
    return issubclass(cls, stand_in.interface().HiCacheStorage)


def complete(cls: type, what: str, *, uses_v1: bool) -> type:
    """The class, with defaults for abstract methods that are rarely written.

    Raises ConfigError naming what is missing otherwise.
    """
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    lacks = [name for name in REQUIRED if name in abstract]
    require(not lacks, f"{what} lacks {', '.join(lacks)}: write what HiCacheStorage declares")
    check_methods(cls, what)
    if uses_v1:
        base = stand_in.interface().HiCacheStorage
        absent = [
            name for name in V1 if getattr(cls, name, None) in (None, getattr(base, name, None))
        ]
        require(
            not absent, f"{what} lacks {', '.join(absent)}: leave interface_v1 out or write them"
        )
    if not abstract:
        return cls
    defaults = {name: _DEFAULTS.get(name, _do_nothing) for name in abstract}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **defaults})


def _batch_get(self: Any, keys: list[str], target_locations: Any = None, _sizes: Any = None) -> Any:
    return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]


def _batch_set(self: Any, keys: list[str], values: Any = None, *_rest: Any) -> bool:
    return all(self.set(key, value) for key, value in zip(keys, values, strict=True))


def _do_nothing(_self: Any, *_arguments: Any, **_named: Any) -> None:
    return None


_DEFAULTS: Final[dict[str, Callable[..., Any]]] = {
    "batch_get": _batch_get,
    "batch_set": _batch_set,
}


# ---- the object ---------------------------------------------------------------------------------


class SGLangBackend(Backend):
    """``thing``, an object of such a class; ``let_go`` is called once, when it is closed."""

    def __init__(
        self, thing: Any, host: HostPool, what: str, *, uses_v1: bool, let_go: Callable[[], None]
    ) -> None:
        self._thing, self._host, self._what = thing, host, what
        self._uses_v1 = uses_v1
        self._let_go = let_go
        self._is_closed = False
        interface = stand_in.interface()
        self._info = interface.HiCacheStorageExtraInfo()
        clear = getattr(type(thing), "clear", None)
        base = getattr(interface.HiCacheStorage, "clear", None)
        self.can_clear = callable(clear) and clear not in (base, _do_nothing)
        if hasattr(thing, "register_mem_pool_host"):
            thing.register_mem_pool_host(host)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend. The class tells how many leading names it has, so each gap is one more call."""
        self._check_open()
        found: list[bool] = []
        while len(found) < len(names):
            rest = list(names[len(found) :])
            count = self._leading(rest)
            found += [True] * count
            if count < len(rest):
                found.append(False)
        return found

    def _leading(self, names: list[str]) -> int:
        method = getattr(self._thing, "batch_exists", None)
        if method is None:
            return next(
                (at for at, name in enumerate(names) if not self._thing.exists(name)), len(names)
            )
        return count_of(self._call(method, names), len(names), f"batch_exists of {self._what}")

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        return self._apart(names, pages, self._get_pages, self._get_value)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        return self._apart(names, pages, self._set_pages, self._set_value)

    def clear(self) -> int:
        """Call the class's own clear, which deletes what the class takes for its own."""
        self._check_open()
        count = self._thing.clear() if self.can_clear else 0
        return count if type(count) is int else 0  # upstream's returns nothing

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Make names writable again, where the class can: True where there is no value now."""
        self._check_open()
        return delete_each(self._thing, names)

    def close(self) -> None:
        """See Backend."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            close = getattr(self._thing, "close", None)
            if callable(close):
                close()
        finally:
            self._let_go()

    # ---- pages of the pool --------------------------------------------------------------------------

    def _get_pages(self, names: list[str], pages: list[HostPage]) -> list[bool]:
        if self._uses_v1:
            return self._v1("batch_get_v1", names, pages)
        targets = [self._host.empty_for(page) for page in pages]
        values = self._thing.batch_get(names, targets)
        if values is None:
            return [False] * len(names)
        method = f"batch_get of {self._what}"
        if is_list(values):
            given = list_of(values, len(names), method)
        else:  # how many leading targets it filled
            count = count_of(values, len(names), method)
            given = [*targets[:count], *[None] * (len(names) - count)]
        return [self._host.fill(page, value) for page, value in zip(pages, given, strict=True)]

    def _set_pages(self, names: list[str], pages: list[HostPage]) -> list[bool]:
        if self._uses_v1:
            return self._v1("batch_set_v1", names, pages)
        done = self._thing.batch_set(names, [self._host.copy_of(page) for page in pages])
        if is_list(done):
            return [bool(each) for each in list_of(done, len(names), f"batch_set of {self._what}")]
        # "Not all" is the only other answer there is: ask which.
        return [True] * len(names) if done else self.exists(names)

    def _v1(self, method: str, names: list[str], pages: list[HostPage]) -> list[bool]:
        indices = self._host.indices([page.slot for page in pages if page.slot is not None])
        answers = self._call(getattr(self._thing, method), names, indices)
        return [bool(each) for each in list_of(answers, len(names), f"{method} of {self._what}")]

    # ---- other values -------------------------------------------------------------------------------

    def _get_value(self, name: str, page: HostPage) -> bool:
        target = self._host.empty_for(page)
        return self._host.fill(page, self._thing.get(name, target))

    def _set_value(self, name: str, page: HostPage) -> bool:
        return bool(self._thing.set(name, self._host.copy_of(page)))

    def _apart(
        self,
        names: Sequence[str],
        pages: Sequence[HostPage],
        do_pages: Callable[[list[str], list[HostPage]], list[bool]],
        do_value: Callable[[str, HostPage], bool],
    ) -> list[bool]:
        """Pages in one call, other values one by one; answers in the order asked."""
        self._check_open()
        assert len(names) == len(pages)
        in_pool = [page.slot is not None for page in pages]
        ours = list(compress(names, in_pool))
        done = iter(do_pages(ours, list(compress(pages, in_pool))) if ours else [])
        return [
            next(done) if is_page else self._alone(do_value, name, page)
            for name, page, is_page in zip(names, pages, in_pool, strict=True)
        ]

    def _alone(self, do_value: Callable[[str, HostPage], bool], name: str, page: HostPage) -> bool:
        try:
            return do_value(name, page)
        except Exception as error:  # such values are extras: classes may know pages alone
            _log.warning("%s: a value of %d bytes failed: %r", self._what, page.nbytes, error)
            return False

    # ---- what a class may answer --------------------------------------------------------------------

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """With the extra info that newer versions of the interface pass, where the class takes it."""
        if takes(method, *arguments, self._info):
            return method(*arguments, self._info)
        return method(*arguments)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError(f"{self._what} is closed")

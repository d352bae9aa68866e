"""Rules about values: what is stored comes back as it was, and what is not there is a miss.

Called by: kit.
"""

from __future__ import annotations

from typing import Final

from refimpl.conformance.room import poison, read, value, write
from refimpl.conformance.shapes import MEDIUM, SHAPES, SMALL, VALUE_BYTES, Shape
from refimpl.conformance.subject import Opened, RefusedError, Subject, demand
from refimpl.conformance.verdict import InapplicableError
from refimpl.storage.backend import BATCH_NAMES, HostPage, StorageError

_NO_WORD: Final = "set says False"
_MANY: Final = 3 * BATCH_NAMES  # pages of one run of calls


def come_back(store: Opened, names: list[str], slots: range, contents: list[bytes]) -> None:
    """Read pages and compare each with what was stored."""
    pages = store.pages(slots)
    for page in pages:
        poison(page)
    got = store.get(names, pages)
    for at, (page, content) in enumerate(zip(pages, contents, strict=True)):
        where = f"page {at + 1} of {len(names)}"
        demand(got[at], f"{where} was stored and get calls it a miss")
        demand(read(page) == content, f"{where} came back with {_difference(read(page), content)}")


def _difference(found: bytes, wanted: bytes) -> str:
    wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
    untouched = found.count(poison(value(1))[0])
    if untouched == len(found):
        return "no byte written, though get says True"
    return f"{wrong} of {len(wanted)} bytes wrong"


def store_pages(store: Opened, names: list[str], slots: range) -> list[bytes]:
    """Fill pages with bytes of their own and store them, 128 a call."""
    pages = store.pages(slots)
    contents = [write(page, name) for name, page in zip(names, pages, strict=True)]
    for start in range(0, len(names), BATCH_NAMES):
        some = slice(start, start + BATCH_NAMES)
        done = store.set(names[some], pages[some])
        demand(all(done), f"set refused {done.count(False)} of {len(done)} pages")
    return contents


# ---- rules --------------------------------------------------------------------------------------


def round_trip(subject: Subject) -> str:
    """Pages of every layout come back byte for byte, into other slots, and touch nothing else."""
    kept: list[int] = []
    refused: dict[str, list[str]] = {}  # by reason
    for shape in SHAPES:
        try:
            _round_trip(subject, shape)
        except RefusedError as refusal:
            demand(bool(str(refusal)), f"{shape.label}: it is refused without a word")
            refused.setdefault(str(refusal), []).append(shape.label)
        except AssertionError as broken:
            raise type(broken)(f"{shape.label}: {broken}") from broken
        else:
            kept.append(shape.page_bytes)
    reasons = [f"{'; '.join(labels)} ({reason})" for reason, labels in refused.items()]
    demand(bool(kept), f"it refuses pages of every shape: {', '.join(reasons)}")
    sizes = f"pages of {len(kept)} shapes, {min(kept):,} to {max(kept):,} bytes"
    told = f"{sizes}, came back byte for byte"
    return f"{told}; it refuses {', '.join(reasons)}" if reasons else told


def _round_trip(subject: Subject, shape: Shape) -> None:
    with subject.opened(shape, slots=8) as store:
        names = store.names("round", 3)
        contents = store_pages(store, names, range(3))
        around = store.pages(range(3, 8, 4))  # the slots before and after those that are read into
        margin = [poison(page) for page in around]
        come_back(store, names, range(4, 7), contents)
        demand([read(page) for page in around] == margin, "get wrote into pages beside its own")


def other_values(subject: Subject) -> str:
    """Values that are no page of a pool, such as checksums, of any size that the backend takes."""
    refused: dict[int, str] = {}
    with subject.opened(SMALL, slots=1) as store:
        for nbytes in VALUE_BYTES:
            name, page = store.name(f"value-{nbytes}"), value(nbytes)
            content = write(page, name)
            if refusal := _refusal(store, name, page):
                refused[nbytes] = refusal
                continue
            poison(page)
            demand(store.get([name], [page]) == [True], f"{nbytes} bytes were stored and missed")
            demand(read(page) == content, f"{nbytes} bytes came back changed")
    return _which_sizes(refused)


def _refusal(store: Opened, name: str, page: HostPage) -> str:
    """Why a value is not stored; empty where it is."""
    try:
        if store.set([name], [page]) == [True]:
            return ""
        why = _NO_WORD
    except StorageError as error:
        why = str(error) or repr(error)
    demand(store.exists([name]) == [False], "set refuses a value that exists says is there")
    return why


def _which_sizes(refused: dict[int, str]) -> str:
    kept = [nbytes for nbytes in VALUE_BYTES if nbytes not in refused]
    if not kept and set(refused.values()) == {_NO_WORD}:
        raise InapplicableError("it stores pages of the pool alone, and says so")
    last = next(reversed(refused.values()), "")
    demand(bool(kept), f"it refuses values of every size: {last}")
    told = f"{len(kept)} sizes, {min(kept):,} to {max(kept):,} bytes, came back"
    return f"{told}; it refuses {', '.join(map(str, refused))} bytes: {last}" if refused else told


def batches(subject: Subject) -> str:
    """Calls with one name, with 128, and many of them in a row."""
    with subject.opened(SMALL, slots=2 * _MANY) as store:
        for count in (1, 2, 17, BATCH_NAMES - 1, BATCH_NAMES):
            names = store.names(f"batch-of-{count}", count)
            contents = store_pages(store, names, range(count))
            come_back(store, names, range(_MANY, _MANY + count), contents)
        names = store.names("many", _MANY)
        contents = store_pages(store, names, range(_MANY))
        for start in range(0, _MANY, BATCH_NAMES):
            some = slice(start, start + BATCH_NAMES)
            slots = range(_MANY + start, _MANY + start + BATCH_NAMES)
            come_back(store, names[some], slots, contents[some])
    return f"1 to {BATCH_NAMES} names a call, and {_MANY} in calls of {BATCH_NAMES}"


def overwriting(subject: Subject) -> str:
    """A name that is there keeps its value, or takes the new one whole."""
    with subject.opened(MEDIUM, slots=3) as store:
        name = store.name("twice")
        first = store_pages(store, [name], range(1))[0]
        second = write(store.room.page(1), "other bytes")
        said = store.set([name], [store.room.page(1)])[0]
        page = store.room.page(2)
        poison(page)
        demand(store.get([name], [page]) == [True], "after a second set the value is gone")
        found = read(page)
        demand(found in (first, second), "after a second set the value is neither of the two")
        demand(said or found == first, "the second set answered False and replaced the value")
    if found == first:
        return "the first value stayed"
    return "the second value replaced the first, which is harmless while a name has one value"


def absent_names(subject: Subject) -> str:
    """What nobody stored is not there."""
    with subject.opened(SMALL, slots=4) as store:
        names = store.names("absent", 4)
        demand(not any(store.exists(names)), "exists says True of names that nobody stored")
        demand(not any(store.get(names, store.pages(range(4)))), "get found what nobody stored")
    return "names that nobody stored are misses"


def wrong_lengths(subject: Subject) -> str:
    """A value of another length than the page is a miss, not an error, and stays what it was."""
    seen = []
    # Two objects of such a class share nothing.
    if subject.lifetime != "object" and _has_pages_of_two_lengths(subject):
        _pages_of_other_lengths(subject)
        seen.append("pages of 1 and 64 KiB miss each other")
    with subject.opened(SMALL, slots=1) as store:
        for nbytes in (1000, 100):  # the second for who takes small values alone
            name, page = store.name(f"length-{nbytes}"), value(nbytes)
            content = write(page, name)
            if not _refusal(store, name, page):
                others = _other_lengths(store, name, content)
                seen.append(f"a value of {nbytes} bytes is a miss for {others}")
                break
    if not seen:
        raise InapplicableError("its pages have one length, and it stores pages alone")
    return "; ".join(seen)


def _has_pages_of_two_lengths(subject: Subject) -> bool:
    """Whether it takes pages of a size that its identity does not suggest."""
    with subject.opened(MEDIUM, slots=1, identity=subject.identity(SMALL)) as store:
        name, page = store.name("two-lengths"), store.room.page(0)
        write(page, name)
        return not _refusal(store, name, page)


def _pages_of_other_lengths(subject: Subject) -> None:
    with (
        subject.opened(SMALL, slots=1) as small,
        subject.opened(MEDIUM, slots=1, identity=subject.identity(SMALL)) as large,
    ):
        for ours, theirs in ((small, large), (large, small)):
            name = ours.name(f"page-{ours.room.page(0).nbytes}")
            store_pages(ours, [name], range(1))
            got = theirs.get([name], [theirs.room.page(0)])
            sizes = f"{ours.room.page(0).nbytes} bytes filled one of {theirs.room.page(0).nbytes}"
            demand(got == [False], f"a page of {sizes}")


def _other_lengths(store: Opened, name: str, content: bytes) -> str:
    """Read a value into pages of other lengths; which."""
    length = len(content)
    others = (1, length - 1, length + 1, 2 * length)
    for nbytes in others:
        got = store.get([name], [value(nbytes)])
        demand(got == [False], f"a value of {length} bytes filled a page of {nbytes}")
    page = value(len(content))
    demand(store.get([name], [page]) == [True], "after that the right length is a miss too")
    demand(read(page) == content, "after that the value is another")
    return ", ".join(map(str, others))


def partial_batches(subject: Subject) -> str:
    """Hits and misses mixed in one call, each answered in its place; a set of what is half there."""
    with subject.opened(SMALL, slots=24) as store:
        names = store.names("part", 12)
        contents = store_pages(store, names[::3], range(4))
        is_there = [at % 3 == 0 for at in range(12)]
        demand(store.exists(names) == is_there, "exists mixes up which names are there")
        pages = store.pages(range(12, 24))
        for page in pages:
            poison(page)
        demand(store.get(names, pages) == is_there, "get mixes up which names are there")
        found = [read(page) for page in pages[::3]]
        demand(found == contents, "in a call with misses, hits came back wrong")
        whole = store_pages(store, names, range(12))
        come_back(store, names, range(12, 24), whole)
    return "4 hits among 8 misses, each in its place"


def exists_agrees(subject: Subject) -> str:
    """exists and get say the same, of one name and of many, in any order."""
    with subject.opened(SMALL, slots=40) as store:
        names = store.names("agree", 20)
        store_pages(store, names[:10], range(10))
        for asked in (names, names[::-1], names[5:15], *([name] for name in names)):
            there = store.exists(asked)
            got = store.get(asked, store.pages(range(20, 20 + len(asked))))
            differ = sum(a != b for a, b in zip(there, got, strict=True))
            demand(not differ, f"exists and get disagree on {differ} of {len(asked)} names")
    return "asked of 20 names together, in parts and alone"


def odd_requests(subject: Subject) -> str:
    """Empty calls, one name twice in a call; set only reads the pages it is given."""
    with subject.opened(SMALL, slots=4) as store:
        answers = [store.exists([]), store.get([], []), store.set([], [])]
        demand(answers == [[], [], []], f"calls without names answer {answers}")
        name = store.name("double")
        content = write(store.room.page(0), name)
        write(store.room.page(1), name)
        demand(store.set([name, name], store.pages(range(2))) == [True, True], "set refused a pair")
        demand(read(store.room.page(0)) == content, "set changed the page it was given")
        come_back(store, [name, name], range(2, 4), [content, content])
    return "empty calls and a name twice in one call"

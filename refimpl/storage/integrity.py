"""Pages whose bytes are checked: a wrong page is a miss, never an answer.

A page stays byte for byte what it is; its checksum is a value of its own beside it, named from the
page's name and written after it. It covers bytes, length and name, so a page that stands under
another's name is found too. Between the two writes, or after a crash between them, a page has no
checksum: ``verify`` takes such a page as it is, since other engines write no checksums; ``require``
takes it for missing, and writing it again repairs it.

One checksum for many pages would save writes, but a reader knows names of pages only, and the batches
it asks for are not those that were written: it could not find them. Two that write one page at the
same moment with different bits may leave the checksum of one beside the page of the other: a miss,
after which it is written again. That needs a store that can delete (see backend.delete_values); in
one that can't, a bad page stays a miss until the store drops it.
Must not know: what a store is. Called by: stack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from refimpl.storage.backend import BATCH_NAMES, Backend, HostPage, delete_values
from refimpl.storage.names import sidecar
from refimpl.storage.tally import Tally

_LOG: Final = logging.getLogger(__name__)
CHECKSUM_BYTES: Final = 32


def checksum(name: str, page: HostPage) -> bytes:
    """XXH3-128 of the payload, its length, XXH3-64 of the name: 32 bytes."""
    payload = xxhash.xxh3_128()
    for piece in page.pieces:
        payload.update(piece)
    length = page.nbytes.to_bytes(8, "little")
    return payload.digest() + length + xxhash.xxh3_64_digest(name.encode())


class Integrity:
    """Any backend, with checksums. ``is_required``: a page without one is a miss."""

    def __init__(self, base: Backend, *, is_required: bool) -> None:
        self._base = base
        self._is_required = is_required
        self.tally = Tally(_LOG)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend. Where checksums are required, a page is there when both are."""
        if not self._is_required:
            return self._base.exists(names)
        pages, sums = self._have(names)
        return [page and its for page, its in zip(pages, sums, strict=True)]

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend. Only what was read and is wrong is dropped: a read may fail once."""
        done = list(self._base.get(names, pages))
        read = [at for at, is_read in enumerate(done) if is_read]
        found = self._checksums([names[at] for at in read])
        bad: list[str] = []
        for at, value in zip(read, found, strict=True):
            if value is not None and not value:
                self.tally.trouble(
                    "unreadable", f"the checksum of {names[at]} can't be read: a miss"
                )
                done[at] = False
                continue
            done[at] = self._is_right(names[at], pages[at], value)
            if not done[at] and value is not None:
                bad.append(names[at])
        if bad:
            self._drop(bad)
        return done

    def _checksums(self, names: Sequence[str]) -> list[bytes | None]:
        """The checksum of each page, [name]: None where there is none, empty where it can't be read.

        Which are there is asked first: one that is written meanwhile must not count as unreadable.
        """
        if not names:
            return []
        sums = [sidecar(name) for name in names]
        there = self._base.exists(sums)
        values = [bytearray(CHECKSUM_BYTES) for _ in names]
        is_read = self._base.get(sums, [HostPage((memoryview(value),)) for value in values])
        return [
            bytes(value) if done else b"" if is_there else None
            for value, done, is_there in zip(values, is_read, there, strict=True)
        ]

    def _is_right(self, name: str, page: HostPage, found: bytes | None) -> bool:
        if found is None:
            if self._is_required:
                self.tally.trouble("unchecked", f"page {name} has no checksum: a miss")
            else:
                self.tally.add("accepted_unchecked")
            return not self._is_required
        if found == checksum(name, page):
            self.tally.add("verified")
            return True
        self.tally.trouble("mismatches", f"page {name} is not what was written: a miss")
        return False

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend. A page counts as stored, where checksums are required, when both are."""
        there, summed = self._have(names)
        done = [
            page and (its or not self._is_required) for page, its in zip(there, summed, strict=True)
        ]
        new = [at for at, is_done in enumerate(done) if not is_done]
        # Half of a pair is left of a crash or an eviction, and may not fit what is written now.
        stale = [names[at] for at in new if there[at] or summed[at]]
        if stale:
            self._drop(stale)
        for at, is_stored in zip(
            new, self._write([names[at] for at in new], [pages[at] for at in new]), strict=True
        ):
            done[at] = is_stored
        return done

    def _write(self, names: list[str], pages: list[HostPage]) -> list[bool]:
        if not names:
            return []
        done = list(self._base.set(names, pages))
        stored = [at for at, is_stored in enumerate(done) if is_stored]
        if not stored:
            return done
        values = [HostPage((memoryview(checksum(names[at], pages[at])),)) for at in stored]
        is_summed = self._base.set([sidecar(names[at]) for at in stored], values)
        for at, its in zip(stored, is_summed, strict=True):
            if not its:
                self.tally.add("checksums_refused")
                done[at] = not self._is_required
        return done

    def delete(self, names: Sequence[str]) -> list[bool]:
        """See backend.delete_values. Checksums go first: a page without one is the smaller evil."""
        _in_batches(lambda part: delete_values(self._base, part), [sidecar(name) for name in names])
        return delete_values(self._base, names)

    def _drop(self, names: Sequence[str]) -> None:
        """Make way for the pages to be written again, if the store can."""
        kept = self.delete(names).count(False)
        if kept:
            self.tally.trouble(
                "undeletable",
                f"a bad page can't be deleted from this store: {names[0]} stays a miss",
            )
            self.tally.add("undeletable", kept - 1)

    def _have(self, names: Sequence[str]) -> tuple[list[bool], list[bool]]:
        """Which pages are there, and which checksums, [name]."""
        both = [*names, *(sidecar(name) for name in names)]
        there = _in_batches(self._base.exists, both)
        return there[: len(names)], there[len(names) :]

    def clear(self) -> int:
        """See Backend. Checksums are among what the namespace owns, and are counted."""
        return self._base.clear()

    def close(self) -> None:
        """See Backend."""
        self._base.close()


def _in_batches(ask: Callable[[Sequence[str]], list[bool]], names: Sequence[str]) -> list[bool]:
    answers: list[bool] = []
    for first in range(0, len(names), BATCH_NAMES):
        answers += ask(names[first : first + BATCH_NAMES])
    return answers

"""Backends that are wrong in one way each, around the honest store in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import ClassVar, Final

from refimpl.storage.backend import HostPage, Setting, StorageError
from refimpl.storage.memory import MemoryBackend


class Honest(MemoryBackend):
    """A shelf of its own, so that liars do not meet."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(
            Setting(setting.identity, setting.namespace, {"store": type(self).__name__})
        )
        self.setting = setting


class DropsWhatItAccepts(Honest):
    def set(self, names: Sequence[str], _pages: Sequence[HostPage]) -> list[bool]:
        return [True] * len(names)


class SaysThatAllExists(Honest):
    def exists(self, names: Sequence[str]) -> list[bool]:
        return [True] * len(names)


class SaysThatNothingExists(Honest):
    def exists(self, names: Sequence[str]) -> list[bool]:
        return [False] * len(names)


class FindsWhatIsAbsent(Honest):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        super().get(names, pages)
        return [True] * len(names)


class RaisesOnAMiss(Honest):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        if not all(super().exists(names)):
            raise KeyError(names[0])
        return super().get(names, pages)


class GivesAnotherPage(Honest):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return super().get([*names[1:], *names[:1]], pages)


class FillsNothing(Honest):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        del pages
        return self.exists(names)


class FillsHalf(Honest):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        before = [[bytes(piece) for piece in page.pieces] for page in pages]
        got = super().get(names, pages)
        for page, old in zip(pages, before, strict=True):
            page.pieces[-1][page.pieces[-1].nbytes // 2 :] = old[-1][len(old[-1]) // 2 :]
        return got


class FillsOnePieceOnly(Honest):
    """Right for MLA, wrong for K and V."""

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        before = [[bytes(piece) for piece in page.pieces] for page in pages]
        got = super().get(names, pages)
        for page, old in zip(pages, before, strict=True):
            for piece, bytes_ in zip(page.pieces[1:], old[1:], strict=True):
                piece[:] = bytes_
        return got


class WritesBesideThePage(Honest):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        memory = self.setting.memory[0]
        got = super().get(names, pages)
        memory[-1] = 0
        return got


class AnswersWithNumbers(Honest):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return [int(each) for each in super().get(names, pages)]  # type: ignore[misc]


class AnswersTooLittle(Honest):
    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return super().set(names, pages)[:1]


class RoundsLengthsDown(Honest):
    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        cut = [HostPage((memoryview(_payload(page))[: page.nbytes // 8 * 8],)) for page in pages]
        return super().set(names, cut)


class RefusesAndStores(Honest):
    """Says False of values that are no page, and keeps them."""

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        done = super().set(names, pages)
        return [page.slot is not None and each for page, each in zip(pages, done, strict=True)]


class TakesAHundredAtMost(Honest):
    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return [*super().set(names[:100], pages[:100]), *[False] * (len(names) - 100)][: len(names)]


class MixesValues(Honest):
    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        for name, page in zip(names, pages, strict=True):
            old = self._shelf.values.get(name)
            new = _payload(page)
            if old is not None and old != new:
                self._shelf.values[name] = new[: len(new) // 2] + old[len(new) // 2 :]
        return super().set(names, pages)


class RefusesAndReplaces(Honest):
    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        done = []
        for name, page in zip(names, pages, strict=True):
            done.append(name not in self._shelf.values)
            self._shelf.values[name] = _payload(page)
        return done


class CutsLongValues(Honest):
    """Fills a page from a longer value, as reading a file into a buffer does."""

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        got = super().get(names, pages)
        for at, (name, page) in enumerate(zip(names, pages, strict=True)):
            value = self._shelf.values.get(name, b"")
            if len(value) > page.nbytes:
                page.pieces[0][:] = value[: page.pieces[0].nbytes]
                got[at] = True
        return got


class CutsLongValuesThatAreNoPages(CutsLongValues):
    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        are_pages = [page.slot is not None for page in pages]
        honest = Honest.get(self, names, pages)
        return honest if any(are_pages) else super().get(names, pages)


class AnswersHitsFirst(Honest):
    def exists(self, names: Sequence[str]) -> list[bool]:
        return sorted(super().exists(names), reverse=True)


class ChangesWhatItIsGiven(Honest):
    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        done = super().set(names, pages)
        for page in pages:
            page.pieces[0][0] ^= 1
        return done


class LosesWhatComesTogether(Honest):
    """Whoever stores while another is storing stores nothing."""

    _busy: ClassVar[Lock] = Lock()

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        if not self._busy.acquire(blocking=False):
            return [True] * len(names)
        try:
            Event().wait(0.01)  # nobody sets it: it makes the calls overlap
            return super().set(names, pages)
        finally:
            self._busy.release()


class ShowsHalfAPage(Honest):
    """A value is readable while it is being written."""

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        for name, page in zip(names, pages, strict=True):
            value = _payload(page)
            if name not in self._shelf.values:
                half = len(value) // 2
                self._shelf.values[name] = value[:half] + bytes(len(value) - half)
                Event().wait(0.01)
            self._shelf.values[name] = value
        return [True] * len(names)


class SharesNames(Honest):
    """Knows pages by their key alone."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        return super().exists([name[:64] for name in names])

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return super().get([name[:64] for name in names], pages)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        return super().set([name[:64] for name in names], pages)


class ClearsEverything(Honest):
    def clear(self) -> int:
        count = super().clear()
        self._shelf.values.clear()
        return count


class ClearsNothing(Honest):
    def clear(self) -> int:
        return 4


class Miscounts(Honest):
    def clear(self) -> int:
        return super().clear() + 1


class ForgetsOnClose(Honest):
    def close(self) -> None:
        self._shelf.values.clear()
        super().close()


class GoesOnAfterClose(Honest):
    def close(self) -> None:
        return


class ClosesOnceOnly(Honest):
    def close(self) -> None:
        if self._is_closed:
            raise StorageError("closed already")
        super().close()


class FailsWithoutAWord(Honest):
    def exists(self, names: Sequence[str]) -> list[bool]:
        if self._is_closed:
            raise StorageError
        return super().exists(names)


class LeavesAThread(Honest):
    ends: ClassVar[Event] = Event()

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        Thread(target=self.ends.wait, name="left behind", daemon=True).start()


class LeavesAFile(Honest):
    files: ClassVar[list[int]] = []

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.files.append(os.open(Path(__file__), os.O_RDONLY))


def _payload(page: HostPage) -> bytes:
    return b"".join(page.pieces)


# The liar, the rule that finds it, a word of the reason.
CAUGHT: Final[tuple[tuple[type[Honest], str, str], ...]] = (
    (DropsWhatItAccepts, "round_trip", "was stored and get calls it a miss"),
    (GivesAnotherPage, "round_trip", "bytes wrong"),
    (FillsNothing, "round_trip", "no byte written"),
    (FillsHalf, "round_trip", "bytes wrong"),
    (FillsOnePieceOnly, "round_trip", "bytes wrong"),
    (WritesBesideThePage, "round_trip", "beside its own"),
    (AnswersWithNumbers, "round_trip", "a list of bools"),
    (AnswersTooLittle, "round_trip", "1 answers for 3 names"),
    (RoundsLengthsDown, "other_values", "were stored and missed"),
    (RefusesAndStores, "other_values", "exists says is there"),
    (TakesAHundredAtMost, "batches", "set refused"),
    (MixesValues, "overwriting", "neither of the two"),
    (RefusesAndReplaces, "overwriting", "answered False and replaced"),
    (SaysThatAllExists, "absent_names", "exists says True"),
    (FindsWhatIsAbsent, "absent_names", "get found"),
    (RaisesOnAMiss, "absent_names", "it raised KeyError"),
    (CutsLongValues, "wrong_lengths", "a page of 65536 bytes filled one of 1024"),
    (CutsLongValuesThatAreNoPages, "wrong_lengths", "filled a page of 1"),
    (AnswersHitsFirst, "partial_batches", "exists mixes up"),
    (SaysThatNothingExists, "exists_agrees", "disagree"),
    (ChangesWhatItIsGiven, "odd_requests", "set changed the page"),
    (LosesWhatComesTogether, "threads", ""),
    (ShowsHalfAPage, "threads", "half of it was written"),
    (ForgetsOnClose, "restart", "exists finds less"),
    (SharesNames, "namespaces", "not its own"),
    (ClearsEverything, "clearing", "of another model"),
    (ClearsNothing, "clearing", "are there after clear"),
    (Miscounts, "clearing", "says 5"),
    (GoesOnAfterClose, "closing", "as if nothing had happened"),
    (ClosesOnceOnly, "closing", "closed already"),
    (FailsWithoutAWord, "closing", "exists goes on"),
    (LeavesAThread, "leftovers", "left behind"),
    (LeavesAFile, "leftovers", "left open"),
)

"""A process of its own that uses a directory of pages: ``python -m scenarios.storage.file_process``
``fill DIRECTORY CAP FIRST COUNT`` or ``churn DIRECTORY CAP SEED`` or ``slowly DIRECTORY NUMBER``.

``fill`` writes pages in batches and prints how many; ``churn`` writes, reads, evicts and clears;
``slowly`` writes one page of 64 KiB in steps of 4 KiB, each when it is sent a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from refimpl.units import Random
from scenarios.storage.pages import names, open_file, pages, payload, read_pages

FILL_BATCH: Final = 8
CHURNS: Final = 60
STEP: Final = 4096
SLOW_NBYTES: Final = 16 * STEP


def say(what: object) -> None:
    print(what, flush=True)


def fill(folder: Path, cap: int, first: int, count: int) -> None:
    store = open_file(folder, max_size=cap)
    say("ready")
    for start in range(first, first + count, FILL_BATCH):
        numbers = range(start, start + FILL_BATCH)
        store.set(names(*numbers), pages(*numbers))
        say(start + FILL_BATCH)


def churn(folder: Path, cap: int, seed: int) -> None:
    store = open_file(folder, max_size=cap)
    random = Random(seed)
    say("ready")
    sys.stdin.readline()
    for round_ in range(CHURNS):
        numbers = [random.below(100) for _ in range(8)]
        store.set(names(*numbers), pages(*numbers))
        for number, found in zip(numbers, read_pages(store, *numbers), strict=True):
            assert found in (None, payload(number)), f"page {number} is wrong"
        if round_ % 10 == seed:
            store.clear()
    store.close()
    say("done")


def slowly(folder: Path, number: int) -> None:
    write = os.pwritev

    def in_steps(handle: int, pieces: Sequence[memoryview], at: int) -> int:
        sys.stdin.readline()
        moved = write(handle, [pieces[0][:STEP]], at)
        say(at + moved)
        return moved

    os.pwritev = in_steps
    store = open_file(folder)
    say("ready")
    store.set(names(number), pages(number, nbytes=SLOW_NBYTES))
    say("stored")


if __name__ == "__main__":
    what, told, *numbers = sys.argv[1:]
    {"fill": fill, "churn": churn, "slowly": slowly}[what](Path(told), *map(int, numbers))

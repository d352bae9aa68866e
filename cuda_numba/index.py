"""The index arithmetic of every kernel, once.

Plain functions over integers: Python runs them in the simulator and in the oracle, and `native` and
`kernels` compile the same text for CPU and GPU. They must not use what only one of the three has.

A nest is what is left of a page's axes after `fold`: four loops (the last one is the one a thread
keeps several accesses of in flight) around a run of words without gaps. A side of a copy is then
six strides in words: base, page, and one for each loop.
"""

from __future__ import annotations

from typing import TypeAlias

Sizes: TypeAlias = tuple[int, int, int, int, int]  # four loops, and what a run holds
Steps: TypeAlias = tuple[int, int, int, int, int, int]  # base, page, four loops; words

# SplitMix64: the increment and the two multipliers of Steele, Lea and Flood (2014).
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
MASK = 0xFFFFFFFFFFFFFFFF


def split_row(row: int, sizes: Sizes) -> tuple[int, int, int, int]:
    """Position in the page list, then in the three outer loops, of row number ``row``.

    A kernel calls it with 32-bit numbers, because a GPU has no instruction for wider divisions.
    """
    third = row % sizes[2]
    rest = row // sizes[2]
    second = rest % sizes[1]
    rest = rest // sizes[1]
    return rest // sizes[0], rest % sizes[0], second, third


def row_offset(steps: Steps, page: int, first: int, second: int, third: int) -> int:
    """Word at which a row begins: 64-bit throughout, pools of terabytes included."""
    return steps[0] + page * steps[1] + first * steps[2] + second * steps[3] + third * steps[4]


def mix(word: int, position: int) -> int:
    """64 bits that depend on every bit of a word and of its position in the page.

    For a fixed position it is a bijection of the word. Masks do nothing to 64-bit integers; they
    make Python's integers wrap as well.
    """
    x = (word + position * STEP + STEP) & MASK
    x = ((x ^ (x >> 30)) * FIRST) & MASK
    x = ((x ^ (x >> 27)) * SECOND) & MASK
    return x ^ (x >> 31)

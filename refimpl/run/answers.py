"""What a class written for SGLang's interface may answer to a call of many keys: a count, or a list.

NumPy's and torch's numbers and arrays are as good as Python's own. A bool is no count: it says
"worked" in one class and "the first one" in another, and a page that is taken for read but is not
would be KV of zeros.
Must not know: backends, tensors. Called by: sglang_class.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from refimpl.storage.backend import StorageError


def count_of(answer: Any, keys_count: int, method: str) -> int:
    """How many leading keys; ``method`` is what messages call the method, with its class.

    Raises StorageError for what is no number from 0 to ``keys_count``.
    """
    number = None if _is_truth(answer) or is_list(answer) else _whole(answer)
    if number is None or not 0 <= number <= keys_count:
        raise StorageError(
            f"{method} returned {answer!r} for {keys_count} keys;"
            " it must return how many leading keys, from none to all"
        )
    return number


def list_of(answer: Any, keys_count: int, method: str) -> list[Any]:
    """One entry a key, in their order. Raises StorageError for anything else."""
    entries = list(answer) if is_list(answer) else None
    if entries is None or len(entries) != keys_count:
        had = type(answer).__name__ if entries is None else f"{len(entries)} entries"
        raise StorageError(
            f"{method} returned {had};"
            f" it must return a list with one entry for each of {keys_count} keys"
        )
    return entries


def is_list(answer: Any) -> bool:
    """Whether it has entries in an order: a list, a tuple, an array with an axis."""
    if isinstance(answer, str | bytes | bytearray | memoryview | Mapping | AbstractSet):
        return False
    try:
        len(answer)
        iter(answer)
    except TypeError:  # arrays without an axis have the methods and refuse
        return False
    return True


def _is_truth(answer: Any) -> bool:
    """A bool, or an array library's."""
    return isinstance(answer, bool) or str(getattr(answer, "dtype", "")).endswith("bool")


def _whole(answer: Any) -> int | None:
    try:
        return operator.index(answer)
    except TypeError:
        return None

"""What classes written for SGLang answer to many keys: NumPy is as good as Python, lies are failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.run.answers import count_of, list_of
from refimpl.run.host_pool_view import HostPoolView
from refimpl.run.sglang_class import SGLangBackend
from refimpl.storage.backend import HostPage, StorageError

NAMES = ["a", "b", "c"]


class Says:
    """A class of SGLang's kind that answers every call of many keys with ``answer``."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def batch_exists(self, keys: list[str]) -> Any:
        del keys
        return self.answer

    def batch_get(self, keys: list[str], targets: list[torch.Tensor]) -> Any:
        del keys
        for target in targets[:2]:
            target.fill_(1)
        return self.answer

    def batch_set(self, keys: list[str], values: list[torch.Tensor]) -> Any:
        del keys, values
        return self.answer

    def batch_get_v1(self, keys: list[str], indices: torch.Tensor) -> Any:
        del keys, indices
        return self.answer

    batch_set_v1 = batch_get_v1


def opened(answer: Any, *, uses_v1: bool = False) -> tuple[SGLangBackend, list[HostPage]]:
    pool = Pool(Geometry(layers=2, kvs=2, heads=2, dim=8, page_size=4), "page_first", 3)
    backend = SGLangBackend(
        Says(answer), HostPoolView(pool), "class Says", uses_v1=uses_v1, let_go=lambda: None
    )
    return backend, [HostPage(pool.pieces(slot), slot) for slot in range(3)]


@pytest.mark.parametrize(
    "answer",
    [4, -1, True, 384, np.int64(4), np.True_, torch.tensor(True), 2.0, "2", {0: 1}],
    ids=repr,
)
def test_pages_are_no_hits_where_the_count_can_not_be_true(answer: Any) -> None:
    backend, pages = opened(answer)
    with pytest.raises(StorageError, match="batch_get of class Says returned"):
        backend.get(NAMES, pages)
    assert all(bytes(piece) == bytes(len(piece)) for page in pages for piece in page.pieces)
    with pytest.raises(StorageError, match="batch_exists of class Says returned"):
        backend.exists(NAMES)


@pytest.mark.parametrize("answer", [2, np.int64(2), np.array(2), torch.tensor(2)], ids=repr)
def test_a_count_of_numpy_is_a_count(answer: Any) -> None:
    backend, pages = opened(answer)
    assert backend.get(NAMES, pages) == [True, True, False]
    backend, _ = opened(answer)
    assert backend._leading(NAMES) == 2


@pytest.mark.parametrize(
    "answer",
    [[True, False, True], (1, 0, 1), np.array([True, False, True]), torch.tensor([1, 0, 1])],
    ids=repr,
)
def test_answers_of_each_key_may_be_an_array(answer: Any) -> None:
    backend, pages = opened(answer)
    assert backend.set(NAMES, pages) == [True, False, True]
    backend, pages = opened(answer, uses_v1=True)
    assert backend.get(NAMES, pages) == [True, False, True]
    assert backend.set(NAMES, pages) == [True, False, True]


@pytest.mark.parametrize("answer", [np.ones(2, bool), [True] * 4, np.True_, True, 3], ids=repr)
def test_a_list_of_another_length_or_none_at_all_is_a_failure(answer: Any) -> None:
    backend, pages = opened(answer, uses_v1=True)
    for call in (backend.get, backend.set):
        with pytest.raises(StorageError, match="one entry for each of 3 keys"):
            call(NAMES, pages)


def test_no_keys_and_all_keys_are_counts() -> None:
    assert [count_of(each, 2, "any") for each in (0, 2)] == [0, 2]
    assert list_of(np.zeros(0), 0, "any") == []

"""What a backend refuses in words is noted, and it passes by the rest; values live as their memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from refimpl.config import ConfigError
from refimpl.conformance.kit import RULES, certify
from refimpl.conformance.subject import Subject, subject_of
from refimpl.conformance.verdict import Verdict, judge
from refimpl.storage import factory
from refimpl.storage.backend import HostPage, Setting, StorageError
from scenarios.conformance.liars import Honest

MASTER = '"master_server_address": "127.0.0.1:1", "protocol": "tcp"'


class KeepsPagesOfItsIdentity(Honest):
    """No MLA, no ``layer_first``, no value that is neither a page of its size nor small."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        identity = setting.identity
        if identity.is_mla or identity.layout == "layer_first":
            raise ConfigError("it stores contiguous GQA pages alone")
        heads = identity.kv_heads // identity.tp_size
        self.page_bytes = 4 * identity.layers * heads * identity.head_dim * identity.page_size

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        self.check(pages)
        return super().get(names, pages)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        self.check(pages)
        return super().set(names, pages)

    def check(self, pages: Sequence[HostPage]) -> None:
        for page in pages:
            if page.nbytes > 254 and page.nbytes != self.page_bytes:
                raise StorageError(f"it takes no {page.nbytes} bytes")


class TakesNoOtherValue(Honest):
    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        if any(page.slot is None for page in pages):
            raise StorageError("pages alone")
        return super().set(names, pages)


class KeepsOneShape(Honest):
    """It can be opened for the first rules and for none of the shapes of the round trip."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        raise ConfigError("nothing fits")


class RefusesAndKeeps(Honest):
    """It raises, and has stored the value."""

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        stored = super().set(names, pages)
        if any(page.slot is None for page in pages):
            raise StorageError("pages alone")
        return stored


def subject(patch: pytest.MonkeyPatch, backend: type[Honest]) -> Subject:
    patch.setitem(factory._MAKERS, "choosy", backend)
    return Subject("choosy", lifetime="process")


def verdict_of(patch: pytest.MonkeyPatch, backend: type[Honest], rule: str) -> Verdict:
    return judge(rule, RULES[rule], subject(patch, backend))


def test_who_refuses_in_words_passes_by_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {each.rule: each for each in certify(subject(monkeypatch, KeepsPagesOfItsIdentity))}
    assert [each for each in verdicts.values() if each.outcome == "failed"] == []
    shapes = verdicts["round_trip"].reason
    assert shapes.startswith("pages of 4 shapes, 4,800 to 2,097,152 bytes, came back")
    assert "it refuses GQA layer_first" in shapes
    assert "(it stores contiguous GQA pages alone)" in shapes
    assert verdicts["other_values"].reason == (
        "2 sizes, 1 to 7 bytes, came back;"
        " it refuses 4095, 4096, 4097, 1048577 bytes: it takes no 1048577 bytes"
    )
    assert verdicts["wrong_lengths"].reason == "a value of 100 bytes is a miss for 1, 99, 101, 200"


@pytest.mark.parametrize(
    ("backend", "rule", "reason"),
    [
        (KeepsOneShape, "round_trip", "it refuses pages of every shape: GQA layer_first"),
        (TakesNoOtherValue, "other_values", "it refuses values of every size: pages alone"),
        (RefusesAndKeeps, "other_values", "set refuses a value that exists says is there"),
    ],
)
def test_who_takes_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, backend: type[Honest], rule: str, reason: str
) -> None:
    verdict = verdict_of(monkeypatch, backend, rule)
    assert (verdict.outcome, reason in verdict.reason) == ("failed", True), verdict


@pytest.mark.parametrize(
    ("backend", "extra", "lifetime"),
    [
        ("memory", None, "process"),
        ("file", '{"file_storage_path": "/any"}', "store"),
        ("mooncake", f"{{{MASTER}}}", "object"),
        ("mooncake", f'{{{MASTER}, "global_segment_size": "64mb"}}', "object"),
        ("mooncake", f'{{{MASTER}, "global_segment_size": 0}}', "store"),
    ],
)
def test_values_live_as_long_as_the_memory_they_lie_in(
    backend: str, extra: str | None, lifetime: str
) -> None:
    assert subject_of(backend, extra).lifetime == lifetime
    assert subject_of(backend, extra, "process").lifetime == "process"


@pytest.mark.parametrize(("store", "lifetime"), [("ROCKSDB", "process"), ("SHFS", "store")])
def test_a_store_that_locks_its_folder_is_one_process(
    monkeypatch: pytest.MonkeyPatch, store: str, lifetime: str
) -> None:
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND", store)
    assert subject_of("aibrix").lifetime == lifetime

"""What the extra config puts around a backend."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from refimpl.config import ConfigError
from refimpl.run.extra_config import read_extra_config
from refimpl.run.storage_setup import StoreOpener
from refimpl.storage import factory
from refimpl.storage.breaker import Breaker, State
from refimpl.storage.factory import backend_names, open_backend, register_backend
from refimpl.storage.faulty import Fault, FaultPlan, Faulty
from refimpl.storage.integrity import Integrity
from refimpl.storage.stack import open_storage
from scenarios.storage.host_pages import GQA, HostPages, identity_of
from scenarios.storage.pages import Clock, file_of, names, pages, payload, read_pages, setting

_shelves = count()


def test_a_store_stands_behind_a_breaker_and_unchecked_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    store = open_storage("file", setting(tmp_path))
    assert isinstance(store, Breaker)
    store.set(names(1), pages(1))
    assert [path.name for path in tmp_path.iterdir()] == [file_of(tmp_path, 1).name]
    assert type(open_storage("file", setting(tmp_path, breaker=False))).__name__ == "FileBackend"


@pytest.mark.parametrize("word", ["verify", "require"])
def test_checks_are_what_the_extra_config_says(tmp_path: Path, word: str) -> None:
    text = f'{{"file_storage_path": "{tmp_path}", "integrity": "{word}", "breaker": false}}'
    extra = read_extra_config(text, "file").backend
    store = open_storage("file", setting(tmp_path, **extra))
    assert isinstance(store, Integrity)
    store.set(names(1, 2), pages(1, 2))
    assert len(list(tmp_path.iterdir())) == 4
    file_of(tmp_path, 1).write_bytes(payload(3))
    (tmp_path / f"{names(2)[0]}.xxh3.bin").unlink()
    assert read_pages(store, 1, 2) == [None, payload(2) if word == "verify" else None]


def test_the_breaker_opens_and_pauses_as_the_extra_config_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = f"failing {next(_shelves)}"
    monkeypatch.setattr(factory, "_MAKERS", dict(factory._MAKERS))
    script = {("exists", number): Fault.ERROR for number in range(9)}
    register_backend(
        told, lambda setting: Faulty(open_backend("memory", setting), FaultPlan(script))
    )
    assert told in backend_names()
    text = '{"breaker_failures": 2, "breaker_slow": 0.5, "breaker_pause": 1.5}'
    extra = read_extra_config(text, "memory").backend
    clock = Clock()
    store = open_storage(told, setting(Path(), **extra, store=told), clock)
    assert isinstance(store, Breaker)
    for _ in range(2):
        assert store.state is State.CLOSED
        with pytest.raises(Exception, match="as planned"):
            store.exists(names(1))
    assert store.exists(names(1)) == [False]
    clock.now_ns += 1_500_000_000
    with pytest.raises(Exception, match="as planned"):
        store.exists(names(1))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"integrity": "sometimes"}, "integrity must be one of off, verify, require"),
        ({"breaker": 3}, "breaker must be true or false"),
        ({"breaker_failures": 0}, "breaker_failures must be a whole number"),
        ({"breaker_pause": 100}, "at most breaker_pause_max"),
    ],
)
def test_a_key_of_the_stack_that_cant_be_is_one_clear_error(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_storage("file", setting(tmp_path, **extra))


def test_an_unknown_key_is_an_error_and_the_known_ones_are_not() -> None:
    with pytest.raises(ConfigError, match="did you mean max_size"):
        read_extra_config('{"max_sise": 1}', "file")
    keys = '{"ttl": 1, "fsync": true, "io_threads": 2, "breaker_pause_max": 3, "integrity": "off"}'
    assert set(read_extra_config(keys, "file").backend) == {
        "ttl",
        "fsync",
        "io_threads",
        "breaker_pause_max",
        "integrity",
    }


@pytest.mark.parametrize("backend", ["memory", "file", "mooncake", "nixl"])
def test_a_key_that_is_null_is_absent(backend: str) -> None:
    names_of = {
        "memory": "max_size",
        "file": "min_free_space",
        "mooncake": "extra_backend_tag",
        "nixl": "plugin",
    }
    text = json.dumps(
        dict.fromkeys(
            (names_of[backend], "compat", "integrity", "breaker", "prefetch_threshold", "ttl")[
                : 6 if backend == "file" else 5
            ]
        )
    )
    assert read_extra_config(text, backend) == read_extra_config("{}", backend)


def test_a_null_that_a_class_of_ones_own_is_told_stays_and_its_own_name_must_be_said() -> None:
    told = {"backend_name": "b", "module_path": "m", "class_name": "C", "mine": None, "ttl": None}
    extra = read_extra_config(json.dumps(told | {"integrity": None}), "dynamic")
    assert extra.backend == told
    with pytest.raises(ConfigError, match="dynamic needs the key class_name"):
        read_extra_config(json.dumps(told | {"class_name": None}), "dynamic")


@pytest.mark.parametrize("tag", [5, True, ["a"]])
def test_a_tag_that_is_no_string_is_refused(tag: Any) -> None:
    host = HostPages.of("mooncake", GQA, "page_first")
    opener = StoreOpener(identity_of(GQA, "page_first"), host.pool)
    with pytest.raises(ConfigError, match="extra_backend_tag must be a string"):
        opener("mooncake", json.dumps({"extra_backend_tag": tag}))

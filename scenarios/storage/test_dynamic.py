"""The backend dynamic: which classes it takes, how they are called, what it says of others."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from importlib import invalidate_caches
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from refimpl.config import ConfigError
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.run.dynamic import find_class, open_dynamic
from refimpl.run.host_pool_view import HostPoolView
from refimpl.run.sglang_stand_in import INTERFACE, hold_stand_in, release_stand_in
from refimpl.storage.backend import Backend, HostPage, Setting, StorageError
from refimpl.storage.factory import open_backend
from refimpl.storage.names import Identity, namespace_of

IDENTITY = Identity(
    model="org/Model", layout="page_first", page_size=4, layers=2, kv_heads=2, head_dim=8, tp_size=2
)
GEOMETRY = Geometry(layers=2, kvs=2, heads=2, dim=8, page_size=4)
NAMES = ["a", "b", "c", "d"]

DICT = """
    class Store:
        def __init__(self): self.values = {}
        def exists(self, name): return name in self.values
        def get(self, name): return self.values.get(name)
        def set(self, name, value): self.values[name] = value
"""
SGLANG = """
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    class Store(HiCacheStorage):
        def __init__(self, storage_config, kwargs):
            self.config, self.kwargs, self.values, self.calls = storage_config, kwargs, {}, []
        def exists(self, key): return key in self.values
        def get(self, key, target_location=None, target_sizes=None): return self.values.get(key)
        def set(self, key, value=None, target_location=None, target_sizes=None):
            self.values[key] = value
            return True
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Write a module; the extra config that names ``Store`` in it."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(text: str) -> dict[str, Any]:
        name = f"users_{tmp_path.name}_{len(made)}"
        made.append(name)
        (tmp_path / f"{name}.py").write_text(dedent(text), encoding="utf-8")
        invalidate_caches()  # it may be younger than the last look at the folder by less than a tick
        return {"backend_name": "mine", "module_path": name, "class_name": "Store"}

    return make


def setting(extra: dict[str, Any], host: HostPoolView | None = None) -> Setting:
    return Setting(IDENTITY, namespace_of("dynamic", IDENTITY), extra, host=host)


def values(*texts: bytes) -> list[HostPage]:
    return [HostPage((memoryview(bytearray(text)),)) for text in texts]


def room(layout: str = "page_first") -> tuple[Pool, HostPoolView, list[HostPage]]:
    pool = Pool(GEOMETRY, layout, 4)
    pool.words()[:] = range(pool.words().size)
    return pool, HostPoolView(pool), [HostPage(pool.pieces(slot), slot) for slot in range(4)]


def thing(backend: Backend) -> Any:
    return backend._thing


# ---- plain classes ------------------------------------------------------------------------------


def test_three_methods_and_no_base_are_enough(module: Any) -> None:
    backend = open_backend("dynamic", setting(module(DICT)))
    assert backend.set(["a"], values(b"12345")) == [True]
    assert backend.exists(["a", "b"]) == [True, False]
    page = values(b".....")
    assert backend.get(["a"], page) == [True]
    assert bytes(page[0].pieces[0]) == b"12345"
    assert backend.get(["a", "b"], values(b"....", b".....")) == [False, False]
    assert backend.clear() == 0
    backend.close()
    backend.close()
    with pytest.raises(
        StorageError, match=r"class users_\S+ of the dynamic backend 'mine' is closed"
    ):
        backend.exists(["a"])


def test_a_class_with_more_methods_works_and_is_closed(module: Any) -> None:
    more = "\n        def close(self): self.values = None\n        def stats(self): return 1\n"
    backend = open_dynamic(setting(module(DICT + more)))
    backend.set(["a"], values(b"1"))
    backend.close()
    assert thing(backend).values is None


def test_a_class_that_keeps_what_it_gets_does_not_see_the_page_change(module: Any) -> None:
    backend = open_dynamic(setting(module(DICT)))
    page = values(b"before")
    backend.set(["a"], page)
    page[0].pieces[0][:] = b"after!"
    assert backend.get(["a"], page) == [True]
    assert bytes(page[0].pieces[0]) == b"before"


@pytest.mark.parametrize("missing", ["exists", "get", "set"])
def test_a_class_without_a_method_is_refused_naming_it(module: Any, missing: str) -> None:
    extra = module(DICT.replace(f"def {missing}(", "def other("))
    with pytest.raises(ConfigError, match=f"lacks {missing}: a backend has get, exists and set"):
        open_dynamic(setting(extra))


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("self, storage_config, extra", "(storage_config.tp_size, extra)"),
        ("self, extra", "(2, extra)"),
        ("self", "(2, {'port': 1.5})"),
        ("self, *all", "(all[0].tp_size, all[1])"),
    ],
)
def test_a_constructor_gets_as_much_as_it_takes(module: Any, parameters: str, given: str) -> None:
    text = DICT.replace("(self): self.values", f"({parameters}): self.given = {given}; self.values")
    backend = open_dynamic(setting({**module(text), "port": Decimal("1.5")}))
    assert repr(thing(backend).given) == "(2, {'port': 1.5})"  # no decimal


def test_only_a_clear_that_asks_whose_names_they_are_is_called(module: Any) -> None:
    wild = "\n        def clear(self): self.values.clear()\n"
    tame = (
        "\n        def clear(self, owns):\n"
        "            ours = [name for name in self.values if owns(name)]\n"
        "            for name in ours: del self.values[name]\n"
        "            return len(ours)\n"
    )
    own = setting({}).namespace.name(bytes(32))
    for text, count, left in ((wild, 0, {own, "other"}), (tame, 1, {"other"})):
        backend = open_dynamic(setting(module(DICT + text)))
        backend.set([own, "other"], values(b"1", b"2"))
        assert backend.clear() == count
        assert set(thing(backend).values) == left


def test_a_get_that_gives_no_bytes_is_told_so(module: Any) -> None:
    text = DICT.replace("return self.values.get(name)", "return 'text'")
    backend = open_dynamic(setting(module(text)))
    with pytest.raises(StorageError, match="returned a str; it must return bytes-like or None"):
        backend.get(["a"], values(b"1"))


# ---- what can be wrong with the configuration ---------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (DICT, {"module_path": "no_such.module"}, "there is no module 'no_such.module'"),
        (DICT, {"class_name": "Stor"}, "has no 'Stor'; did you mean Store"),
        (DICT, {"class_name": None}, "needs the key class_name"),
        (DICT, {"backend_name": 3}, "backend_name must be a string, not 3"),
        ("Store = 3", {}, "Store is a int, not a class"),
        ("class Store: pass", {}, "lacks get, exists, set"),
        ("import no_such_client", {}, "can't be imported: No module named 'no_such_client'"),
        ("1 / 0", {}, "raised ZeroDivisionError"),
        ("raise SystemExit(0)", {}, r"raised SystemExit\(0\)"),
        ("class Store(", {}, "raised SyntaxError"),
        (DICT.replace("(self)", "(self, a, b, c)"), {}, r"must take \(storage_config, extra\)"),
        (DICT, {"interface_v1": True}, "lacks batch_get_v1, batch_set_v1"),
        (SGLANG, {"interface_v1": True}, "lacks batch_get_v1, batch_set_v1"),
        (SGLANG.replace("def exists", "def other"), {}, "lacks exists"),
        (
            SGLANG.replace("storage_config, kwargs)", "a, b, c)"),
            {},
            r"take \(storage_config, kwargs\)",
        ),
        (
            "from sglang.srt.mem_cache.hicache_storage import HiCacheFile",
            {},
            "wants more of SGLang than its storage interface .* install sglang",
        ),
        ("import sglang.srt.utils", {}, "wants more of SGLang than its storage interface"),
    ],
)
def test_each_mistake_has_its_own_line(
    module: Any, text: str, changes: dict[str, Any], message: str
) -> None:
    extra = {**module(text), **changes}
    with pytest.raises(ConfigError, match=message) as said:
        open_dynamic(setting(extra, room()[1]))
    assert "\n" not in str(said.value)
    assert INTERFACE not in sys.modules


def test_a_constructor_that_fails_is_a_store_that_is_not_there(module: Any) -> None:
    fails = "\n        def __init__(self, *_): raise OSError('no route')\n"
    for text in (DICT, SGLANG):
        with pytest.raises(
            StorageError, match=r"constructor of class .* raised OSError\('no route'"
        ):
            open_dynamic(setting(module(text + fails), room()[1]))
        assert INTERFACE not in sys.modules


def test_a_constructor_that_exits_is_a_store_that_is_not_there(module: Any) -> None:
    exits = "\n        def __init__(self, *_): raise SystemExit(3)\n"
    for text in (DICT, SGLANG):
        with pytest.raises(StorageError, match=r"constructor of class .* raised SystemExit\(3\)"):
            open_dynamic(setting(module(text + exits), room()[1]))


@pytest.mark.parametrize("what", ["RuntimeError('no')", "SystemExit(4)"])
def test_a_class_that_refuses_the_pool_is_closed(module: Any, what: str) -> None:
    refuses = f"""
        def register_mem_pool_host(self, pool): raise {what}
        closed = []
        def close(self):
            self.closed.append(True)
            raise SystemExit(5)
    """
    extra = module(SGLANG + refuses)
    with pytest.raises(StorageError, match="refused the host pool: " + re.escape(what)):
        open_dynamic(setting(extra, room()[1]))
    assert sys.modules[extra["module_path"]].Store.closed == [True]
    assert INTERFACE not in sys.modules


def test_ctrl_c_in_a_class_is_ctrl_c(module: Any) -> None:
    stops = "\n        def __init__(self, *_): raise KeyboardInterrupt\n"
    for text in ("raise KeyboardInterrupt", DICT + stops):
        with pytest.raises(KeyboardInterrupt):
            open_dynamic(setting(module(text)))


def test_a_class_of_sglangs_kind_without_a_host_pool_is_refused(module: Any) -> None:
    with pytest.raises(ConfigError, match="needs a host pool"):
        open_dynamic(setting(module(SGLANG)))


# ---- classes written for SGLang -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_a_class_of_sglangs_kind_runs_as_it_is(module: Any, layout: str) -> None:
    pool, view, pages = room(layout)
    backend = open_dynamic(setting(module(SGLANG), view))
    kept = b"".join(pool.pieces(0))
    assert backend.set(NAMES[:2], pages[:2]) == [True, True]
    pool.words()[:] = 0  # the class kept what it was given
    assert backend.get(NAMES[:3], [pages[2], pages[3], pages[1]]) == [True, True, False]
    assert b"".join(pool.pieces(2)) == kept
    assert thing(backend).values["a"].dtype == pool.tensor.dtype
    backend.close()


def test_it_is_constructed_as_sglang_constructs_it(module: Any) -> None:
    extra = {**module(SGLANG), "port": Decimal("0.5")}
    backend = open_dynamic(setting(extra, room()[1]))
    config = thing(backend).config
    assert (config.tp_rank, config.tp_size, config.model_name) == (0, 2, "org/Model")
    assert (config.is_mla_model, config.is_page_first_layout) == (False, True)
    assert repr(config.extra_config["port"]) == "0.5"  # no decimal
    assert thing(backend).kwargs == {}
    assert thing(backend).mem_pool_host.get_ksize_per_token() == GEOMETRY.token_bytes // 2
    backend.close()


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("storage_config", "3"),
        ("storage_config, mem_pool_host=None", "mem_pool_host.page_size"),
        ("hicache_config, memory_pool_host", "memory_pool_host.page_size"),
        ("storage_config, file_path='.'", "file_path"),
    ],
)
def test_classes_of_sglang_itself_get_the_pool_they_ask_for(
    module: Any, parameters: str, given: str
) -> None:
    own = f"\n        def __init__(self, {parameters}): self.given = {given}\n"
    backend = open_dynamic(setting(module(SGLANG + own), room()[1]))
    assert thing(backend).given == {"3": 3, "file_path": {}}.get(given, 4)
    backend.close()


def test_names_are_freed_where_the_class_can(module: Any) -> None:
    plain, upstreams = module(DICT), module(SGLANG)
    for extra in (plain, upstreams):
        backend = open_dynamic(setting(extra, room()[1]))
        assert backend.delete(["a", "b"]) == [False, False]
        backend.close()
    able = "\n        def delete(self, name): return name != 'b'\n"
    for text in (DICT + able, SGLANG + able):
        backend = open_dynamic(setting(module(text), room()[1]))
        assert backend.delete(["a", "b"]) == [True, False]
        backend.close()


def test_pages_and_other_values_of_one_call_keep_their_places(module: Any) -> None:
    _, view, pages = room()
    backend = open_dynamic(setting(module(SGLANG), view))
    mixed = [values(b"sum a")[0], pages[0], values(b"sum b")[0], pages[1]]
    assert backend.set(NAMES, mixed) == [True] * 4
    found = [values(b".....")[0], pages[2], values(b"......")[0], pages[3]]
    assert backend.get(NAMES, found) == [True, True, False, True]
    assert bytes(found[0].pieces[0]) == b"sum a"
    assert [bytes(piece) for piece in pages[3].pieces] == [
        bytes(piece) for piece in pages[1].pieces
    ]
    backend.close()


def test_a_page_of_another_length_is_a_miss_and_the_others_are_not(module: Any) -> None:
    shorter = """
        def batch_get(self, keys, target_locations=None, target_sizes=None):
            return [self.values["a"][:-1], self.values["a"], "no tensor"]
    """
    _, view, pages = room()
    backend = open_dynamic(setting(module(SGLANG + shorter), view))
    backend.set(["a"], pages[:1])
    assert backend.get(["a", "b", "c"], pages[1:]) == [False, True, False]
    backend.close()


def test_gaps_are_found_by_a_call_that_counts_leading_names(module: Any) -> None:
    _, view, pages = room()
    backend = open_dynamic(setting(module(SGLANG), view))
    backend.set(["a", "c"], pages[:2])
    assert backend.exists(["x", "a", "c", "y", "z", "a"]) == [False, True, True, False, False, True]
    backend.close()


@pytest.mark.parametrize(
    ("method", "call", "message"),
    [
        (
            "batch_exists",
            lambda each, _: each.exists(["a"]),
            "must return how many leading keys",
        ),
        (
            "batch_get",
            lambda each, page: each.get(["a", "b"], [page] * 2),
            "one entry for each of 2",
        ),
    ],
)
def test_an_answer_that_is_none_is_a_failure_of_the_call(
    module: Any, method: str, call: Any, message: str
) -> None:
    wrong = f"\n        def {method}(self, keys, *_): return [True]\n"
    _, view, pages = room()
    backend = open_dynamic(setting(module(SGLANG + wrong), view))
    with pytest.raises(StorageError, match=message):
        call(backend, pages[0])
    backend.close()


def test_a_batch_that_is_refused_is_asked_for_name_by_name(module: Any) -> None:
    wrong = """
        def batch_set(self, keys, values=None, *_):
            self.set(keys[0], values[0])
            return False
    """
    _, view, pages = room()
    backend = open_dynamic(setting(module(SGLANG + wrong), view))
    assert backend.set(["a", "b"], pages[:2]) == [True, False]
    backend.close()


def test_a_get_may_say_how_many_leading_pages_it_filled(module: Any) -> None:
    counted = """
        def batch_get(self, keys, target_locations=None, target_sizes=None):
            target_locations[0].fill_(1)
            return 1
    """
    pool, view, pages = room()
    backend = open_dynamic(setting(module(SGLANG + counted), view))
    assert backend.get(["a", "b"], pages[:2]) == [True, False]
    assert pool.tensor[:, 0].unique().tolist() == [1]
    backend.close()


# ---- the stand-in -------------------------------------------------------------------------------


def test_the_stand_in_is_there_while_a_backend_needs_it_and_is_announced(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    late = SGLANG + (
        "\n        def exists(self, key):"
        "\n            from sglang.srt.mem_cache.hicache_storage import PoolName"
        "\n            return PoolName.KV == 'kv'\n"
    )
    with caplog.at_level(logging.WARNING):
        first = open_dynamic(setting(module(SGLANG), room()[1]))
    assert "sglang is not installed" in caplog.text
    second = open_dynamic(setting(module(late), room()[1]))
    first.close()
    first.close()
    assert second.exists(["any"]) == [True]  # it imports when it runs
    second.close()
    assert [name for name in sys.modules if name.partition(".")[0] == "sglang"] == []
    with pytest.raises(ModuleNotFoundError):
        __import__(INTERFACE)


def test_a_plain_class_never_meets_the_stand_in(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        open_dynamic(setting(module(DICT)))
    assert (caplog.text, "sglang" in sys.modules) == ("", False)


def test_where_sglang_is_installed_it_is_used(module: Any, tmp_path: Path) -> None:
    """A package of that name stands on the path: nothing of the stand-in may get in its way."""
    folder = tmp_path / "sglang" / "srt" / "mem_cache"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent, folder.parent.parent):
        (each / "__init__.py").touch()
    source = Path(sys.modules["refimpl.run.sglang_stand_in"].__file__ or "")
    text = source.read_text(encoding="utf-8")
    (folder / "hicache_storage.py").write_text(f"{text}\nIS_INSTALLED = True\n", encoding="utf-8")
    try:
        backend = open_dynamic(setting(module(SGLANG), room()[1]))
        assert sys.modules[INTERFACE].IS_INSTALLED
        assert type(thing(backend).config).__module__ == INTERFACE
        backend.close()
        assert INTERFACE in sys.modules
        missing = module("from sglang.srt.mem_cache.memory_pool_host import HostKVCache")
        with pytest.raises(ConfigError, match="can't be imported"):
            find_class(missing)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]


def test_whoever_holds_the_stand_in_last_takes_it_away() -> None:
    hold_stand_in()
    hold_stand_in()
    __import__(INTERFACE)
    release_stand_in()
    assert INTERFACE in sys.modules
    release_stand_in()
    assert INTERFACE not in sys.modules

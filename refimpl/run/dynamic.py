"""The backend ``dynamic``: a class of the user's own, named in the extra config.

Keys: ``backend_name``, ``module_path``, ``class_name``; ``interface_v1`` asks for the calls that move
pages in place. A class derived from SGLang's ``HiCacheStorage`` runs unmodified (sglang_class), any
other needs three methods (plain_class, which also says how a class is constructed).
Must not know: tensors, policies. Called by: whoever opens storage, the conformance kit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, Final

from refimpl.config import ConfigError, require
from refimpl.run import sglang_stand_in as stand_in
from refimpl.run.plain_class import PlainBackend, check_methods, takes
from refimpl.run.sglang_class import HostPool, SGLangBackend, complete, is_sglang_class
from refimpl.storage.backend import Backend, Setting, StorageError
from refimpl.storage.factory import register_backend
from refimpl.storage.names import Identity

KEYS: Final = ("backend_name", "module_path", "class_name")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DynamicClass:
    """A class that was found and can be a backend. ``what`` is how messages call it."""

    cls: type
    what: str
    is_sglang: bool
    uses_v1: bool


def open_dynamic(setting: Setting) -> Backend:
    """Load the class, construct it, adapt it. A class of SGLang's kind needs ``setting.host``.

    Raises ConfigError for what the configuration has wrong, StorageError for a constructor that fails.
    """
    stand_in.hold_stand_in()
    try:
        found = _load(setting.extra)
        if found.is_sglang:
            # It keeps the stand-in while it is open: classes import when they run, too.
            return _open_sglang(found, setting)
        backend: Backend = PlainBackend(
            _construct_plain(found, setting), setting.namespace, found.what
        )
    except BaseException:
        stand_in.release_stand_in()
        raise
    stand_in.release_stand_in()
    return backend


def find_class(extra: Mapping[str, Any]) -> DynamicClass:
    """The class, not constructed. Raises what ``open_dynamic`` would of the class alone."""
    stand_in.hold_stand_in()
    try:
        return _load(extra)
    finally:
        stand_in.release_stand_in()


def with_floats(value: Any) -> Any:
    """A value of the extra config with floats for decimals, which are there for times of ours."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {name: with_floats(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_floats(each) for each in value]
    return value


# ---- finding ------------------------------------------------------------------------------------


def _load(extra: Mapping[str, Any]) -> DynamicClass:
    name, module_path, class_name = (_text(extra, key) for key in KEYS)
    uses_v1 = bool(extra.get("interface_v1"))
    module = _import(module_path)
    cls = getattr(module, class_name, None)
    if cls is None:
        close = get_close_matches(class_name, vars(module), 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"class_name: module {module_path} has no {class_name!r}{hint}")
    require(
        isinstance(cls, type),
        f"class_name: {module_path}.{class_name} is a {type(cls).__name__}, not a class",
    )
    what = f"class {module_path}.{class_name} of the dynamic backend {name!r}"
    if uses_v1 or is_sglang_class(cls):
        return DynamicClass(complete(cls, what, uses_v1=uses_v1), what, True, uses_v1)
    check_methods(cls, what)
    return DynamicClass(cls, what, False, False)


def _text(extra: Mapping[str, Any], key: str) -> str:
    value = extra.get(key)
    require(value is not None, f"the dynamic backend needs the key {key} in its extra config")
    require(isinstance(value, str) and value != "", f"{key} must be a string, not {value!r}")
    assert isinstance(value, str)
    return value


def _import(module_path: str) -> ModuleType:
    try:
        return import_module(module_path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module_path}.".startswith(f"{missing}."):
            raise ConfigError(
                f"module_path: there is no module {module_path!r};"
                " its folder must be on PYTHONPATH or its package installed"
            ) from None
        raise ConfigError(_lacking(module_path, missing, error)) from None
    except ImportError as error:
        raise ConfigError(_lacking(module_path, error.name or "", error)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: nobody would see what ended the command
        raise ConfigError(f"module_path: importing {module_path} raised {error!r}") from error


def _lacking(module_path: str, missing: str, error: ImportError) -> str:
    if missing.partition(".")[0] == stand_in.PACKAGE and not stand_in.is_sglang_installed():
        return (
            f"module_path: {module_path} wants more of SGLang than its storage interface ({error});"
            " install sglang"
        )
    return f"module_path: {module_path} can't be imported: {error}"


# ---- constructing -------------------------------------------------------------------------------


def _construct_plain(found: DynamicClass, setting: Setting) -> Any:
    own = {name: value for name, value in setting.extra.items() if name not in KEYS}
    extra = with_floats(own)
    choices: tuple[tuple[Any, ...], ...] = ((_config(setting), extra), (extra,), ())
    for arguments in choices:
        if takes(found.cls, *arguments):
            return _construct(found, *arguments)
    raise ConfigError(
        f"{found.what} can't be constructed: its __init__ must take (storage_config, extra),"
        " (extra) or nothing beside self"
    )


def _open_sglang(found: DynamicClass, setting: Setting) -> Backend:
    host = setting.host
    if not isinstance(host, HostPool):
        raise ConfigError(
            f"{found.what} is written for SGLang's interface, which needs a host pool;"
            " open it where there is one"
        )
    config = _config(setting)
    # SGLang's factory gives a dict to users' classes and the pool to its own, which say so.
    second: Any = host if _wants_pool(found.cls) else {}
    choices: tuple[tuple[Any, ...], ...] = ((config, second), (config,))
    arguments = next((each for each in choices if takes(found.cls, *each)), None)
    if arguments is None:
        raise ConfigError(
            f"{found.what} can't be constructed: its __init__ must take (storage_config, kwargs)"
        )
    thing = _construct(found, *arguments)
    try:
        return SGLangBackend(
            thing, host, found.what, uses_v1=found.uses_v1, let_go=stand_in.release_stand_in
        )
    except BaseException as error:
        _close_quietly(thing)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise StorageError(f"{found.what} refused the host pool: {error!r}") from error


def _close_quietly(thing: Any) -> None:
    """Close what is no use: what led here is the news, not what its close may raise."""
    try:
        close = getattr(thing, "close", None)
        if callable(close):
            close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _log.warning("closing a %s raised %r", type(thing).__name__, error)


def _wants_pool(cls: type) -> bool:
    try:
        names = list(signature(cls).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) > 1 and "pool" in names[1]


def _construct(found: DynamicClass, *arguments: Any) -> Any:
    try:
        thing = found.cls(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise StorageError(f"the constructor of {found.what} raised {error!r}") from error
    _log.info("opened %s", found.what)
    return thing


def _config(setting: Setting) -> Any:
    """``HiCacheStorageConfig`` of SGLang or the stand-in, with the fields that this version has."""
    identity: Identity = setting.identity
    kind = stand_in.interface().HiCacheStorageConfig
    values = {
        "tp_rank": identity.tp_rank,
        "tp_size": identity.tp_size,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": identity.is_mla,
        "enable_storage_metrics": False,
        "is_page_first_layout": identity.layout == "page_first",
        "model_name": identity.model,
        "extra_config": with_floats(dict(setting.extra)),
        "logical_page_size": identity.page_size,
    }
    known = {entry.name for entry in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


register_backend("dynamic", open_dynamic)

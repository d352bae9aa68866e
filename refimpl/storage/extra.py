"""Values of the extra config: sizes, times, ratios, switches, each with its error.

A key that is null is absent. The names of keys stand with whoever reads them. Must not
know: which keys there are. Called by: run/extra_config, backends, what stacks them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any, Final

from refimpl.config import ConfigError, require
from refimpl.units import NS_PER_S, PER_MILLION, scaled_decimal

NAME: Final = "--hicache-storage-backend-extra-config"
_SIZES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("kmgt")
}


def whole(keys: Mapping[str, Any], name: str) -> int | None:
    """A whole number from 1; None where the key is absent."""
    value = keys.get(name)
    if value is None:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole and value >= 1, f"{NAME}: {name} must be a whole number from 1, not {value!r}")
    assert isinstance(value, int)
    return value


def time_ns(keys: Mapping[str, Any], name: str) -> int | None:
    """A number of seconds, in nanoseconds; None where the key is absent."""
    value = keys.get(name)
    if value is None:
        return None
    amount = _scaled(value, NS_PER_S)
    require(amount is not None, f"{NAME}: {name} must be a number of seconds, not {value!s}")
    assert amount is not None
    require(amount >= 0, f"{NAME}: {name} must not be negative, but is {value}")
    return amount


def size_bytes(keys: Mapping[str, Any], name: str, *, may_be_zero: bool = False) -> int:
    """A number of bytes, or a number with a unit: 10GB, 512MiB."""
    text = str(keys[name]).strip().lower().removesuffix("b")
    digits = text.rstrip("kmgti ")
    unit = text[len(digits) :].strip()
    try:
        size = scaled_decimal(digits, _SIZES[unit])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{NAME}: {name} {keys[name]!r} is no size; write 10GB or 512MiB"
        ) from None
    require(size > 0 or (may_be_zero and size == 0), f"{NAME}: {name} must be above 0")
    return size


def ratio_per_million(keys: Mapping[str, Any], name: str) -> int | None:
    """A share above 0 and up to 1, in millionths; None where the key is absent."""
    value = keys.get(name)
    if value is None:
        return None
    share = _scaled(value, PER_MILLION)
    require(
        share is not None and 0 < share <= PER_MILLION,
        f"{NAME}: {name} must be a number above 0 and up to 1, not {value!s}",
    )
    return share


def switch(keys: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """True or false, as such or as a word."""
    value = keys.get(name)
    value = default if value is None else value
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    require(isinstance(value, bool), f"{NAME}: {name} must be true or false, not {value!r}")
    return value is True


def text_of(keys: Mapping[str, Any], name: str, *, default: str = "") -> str:
    """A string; ``default`` where the key is absent or empty."""
    value = keys.get(name)
    is_text = value is None or isinstance(value, str)
    require(is_text, f"{NAME}: {name} must be a string, not {value!r}")
    return value or default


def choice(keys: Mapping[str, Any], name: str, choices: Collection[str], default: str) -> str:
    """One of a few words."""
    value = keys.get(name)
    value = default if value is None else value
    known = ", ".join(choices)
    require(value in choices, f"{NAME}: {name} must be one of {known}, not {value!r}")
    return str(value)


def _scaled(value: Any, scale: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    try:
        return scaled_decimal(str(value), scale)
    except ValueError:
        return None

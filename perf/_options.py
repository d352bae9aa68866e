"""Options of the load generator, as Locust takes them from the command line, a file or a form.

Must not know: what is done with them. Called by: _node, and whoever needs one of them.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from refimpl.config import ConfigError, require, require_choice
from refimpl.units import NS_PER_MS, PER_MILLION, scaled_decimal
from refimpl.workload.trace import TRACE_FORMATS

APIS: Final = ("openai-chat", "openai", "sglang")
LOOPS: Final = ("open", "closed")
_PERCENT: Final = 100  # expectations are kept in hundredths of a percent

# Name, default, help. All defaults are texts or flags, so that a form of the web interface keeps them.
_OPTIONS: Final[tuple[tuple[str, str | bool, str], ...]] = (
    ("api", "openai-chat", "what the server speaks: openai-chat, openai (completions) or sglang"),
    ("scenario", "", "traffic as in `refimpl workloads`, instead of the class's own"),
    ("seed", "0", "of the traffic; equal seeds send equal requests"),
    ("loop", "open", "open: sessions begin when they are due; closed: each user plays one at a time"),
    ("rate", "", "sessions begun a second, Poisson, instead of the traffic's own times"),
    ("speed", "1", "how many times as fast as its own times the traffic begins"),
    ("trace", "", "the trace that TraceReplay sends"),
    ("trace-format", "mooncake", f"its format: {', '.join(TRACE_FORMATS)}"),
    ("trace-limit", "", "its first so many requests"),
    ("vocab", "", "token ids are below this, for --api openai and sglang and for ZMQ"),
    ("model", "", "its name; asked of the server otherwise"),
    ("extra-body", "", "JSON merged into each body; null removes a key"),
    ("api-key", "", "sent as bearer token, and in ZMQ messages"),
    ("zmq", "tcp://127.0.0.1:30001", "where the server's ZMQ ingress is bound"),
    ("request-timeout", "600", "seconds without a word after which a request has failed"),
    ("results", "", "a parquet file to write, one row a request"),
    ("lag-limit-ms", "50", "the run fails when the load generator itself is later than this"),
    ("flush-first", False, "flush the server's cache first, and stop when it refuses"),
    ("expect-hit-rate", "", "LOW-HIGH in percent; the run fails when the hit rate is outside"),
)  # fmt: skip
_SECRET: Final = frozenset({"api-key"})


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """What traffic is made of. Rate and speed are in millionths, 0 is none."""

    scenario: str
    seed: int
    rate: int
    speed: int
    trace: str
    trace_format: str
    trace_limit: int
    vocab: int


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """All options, checked."""

    traffic: TrafficOptions
    api: str
    loop: str
    model: str
    extra_body: dict[str, Any]
    api_key: str
    zmq: str
    timeout_s: int
    results: Path | None
    lag_limit_ns: int
    flush_first: bool
    expected: tuple[int, int] | None  # hit rate in hundredths of a percent

    @property
    def is_open(self) -> bool:
        """Do sessions begin when they are due, whatever became of others?"""
        return self.loop == "open"


def add_options(parser: Any) -> None:
    """Tell Locust of them."""
    for name, default, meaning in _OPTIONS:
        words: dict[str, Any] = {"default": default, "help": meaning}
        if isinstance(default, bool):
            words["action"] = "store_true"
        if name in _SECRET:
            words["is_secret"] = True
        parser.add_argument(f"--{name}", **words)


def read_options(given: Namespace) -> LoadOptions:
    """The options of a run. Raises ConfigError, one line, for a value that can't be used."""
    texts = {name: getattr(given, name.replace("-", "_")) for name, _, _ in _OPTIONS}
    require_choice("--api", texts["api"], APIS)
    require_choice("--loop", texts["loop"], LOOPS)
    return LoadOptions(
        traffic=_traffic(texts),
        api=texts["api"],
        loop=texts["loop"],
        model=texts["model"],
        extra_body=_object("extra-body", texts["extra-body"]),
        api_key=texts["api-key"],
        zmq=texts["zmq"],
        timeout_s=_count("request-timeout", texts["request-timeout"], least=1),
        results=Path(texts["results"]) if texts["results"] else None,
        lag_limit_ns=_count("lag-limit-ms", texts["lag-limit-ms"], least=1) * NS_PER_MS,
        flush_first=texts["flush-first"] in (True, "true"),
        expected=_expected(texts["expect-hit-rate"]),
    )


def _traffic(texts: dict[str, Any]) -> TrafficOptions:
    return TrafficOptions(
        scenario=texts["scenario"],
        seed=_count("seed", texts["seed"]),
        rate=_decimal("rate", texts["rate"] or "0", PER_MILLION),
        speed=_decimal("speed", texts["speed"], PER_MILLION, least=1),
        trace=texts["trace"],
        trace_format=texts["trace-format"],
        trace_limit=_count("trace-limit", texts["trace-limit"] or "0"),
        vocab=_count("vocab", texts["vocab"] or "0"),
    )


def _count(name: str, text: str, least: int = 0) -> int:
    legal = text.isascii() and text.isdigit() and int(text) >= least
    require(legal, f"--{name} {text!r} is not a whole number from {least} up")
    return int(text)


def _decimal(name: str, text: str, scale: int, least: int = 0) -> int:
    try:
        value = scaled_decimal(text, scale)
    except ValueError:
        raise ConfigError(f"--{name} {text!r} is not a decimal number") from None
    require(value >= least, f"--{name} {text!r} must be above 0")
    return value


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--{name} is not a JSON object: {error}") from None


def _expected(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    low, dash, high = text.partition("-")
    require(bool(dash), f"--expect-hit-rate {text!r} is not LOW-HIGH, as in 0-5")
    return (
        _decimal("expect-hit-rate", low, _PERCENT),
        _decimal("expect-hit-rate", high, _PERCENT),
    )

"""Traffic: a workload cut into chains, which are played apart from each other.

A chain holds the requests that wait for one another: a conversation, a single question, or, where
rounds have a barrier or requests a cap, the whole workload.
Must not know: servers, Locust. Called by: _player, _director.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from perf._options import TrafficOptions
from refimpl.config import require
from refimpl.units import PER_MILLION
from refimpl.workload.draws import Draws
from refimpl.workload.request import RequestSpec, Workload
from refimpl.workload.scenario import parse_scenario
from refimpl.workload.trace import read_trace

VOCABULARY: Final = 128_000  # of tokens for blocks of a trace, where --vocab says nothing


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one class of users sends, as chains in the order in which they begin."""

    name: str
    chains: list[Workload]
    vocabulary: int  # token ids for blocks are below this
    seed: int

    @property
    def requests(self) -> int:
        """How many there are."""
        return sum(len(chain.requests) for chain in self.chains)


@lru_cache(maxsize=8)
def build_traffic(scenario: str, options: TrafficOptions) -> Traffic:
    """The traffic of a class whose own scenario is ``scenario``; empty: it replays a trace.

    Equal arguments give equal traffic, in every process. Raises ConfigError for what can't be built.
    """
    workload = _scenario(scenario, options) if scenario else _trace(options)
    chains = _from_zero(sorted(_chains(workload), key=begins_ns))
    if options.speed != PER_MILLION:
        chains = [_faster(chain, options.speed) for chain in chains]
    if options.rate:
        require(
            all(_sessions(chain) == 1 for chain in chains),
            "--rate can't begin sessions one by one where a cap, a barrier or a trace holds several"
            " together: write rate= into the scenario, or use --speed",
        )
        begins = Draws(options.seed, VOCABULARY).arrivals(len(chains), options.rate)
        pairs = zip(chains, begins, strict=True)
        chains = _from_zero([beginning(chain, at) for chain, at in pairs])
    return Traffic(workload.name, chains, options.vocab or VOCABULARY, options.seed)


def begins_ns(chain: Workload) -> int:
    """When its first request is due, in ns since the first chain began."""
    return min(spec.arrival_ns + spec.think_ns for spec in chain.requests if not spec.after)


def beginning(chain: Workload, at_ns: int) -> Workload:
    """The same chain, begun at ``at_ns``."""
    moved = at_ns - begins_ns(chain)
    return _retimed(chain, [spec.arrival_ns + moved for spec in chain.requests])


def _scenario(own: str, options: TrafficOptions) -> Workload:
    text = options.scenario or own
    if options.vocab and "vocab=" not in text:
        text += f"{',' if ':' in text else ':'}vocab={options.vocab}"
    return parse_scenario(text, options.seed)


def _trace(options: TrafficOptions) -> Workload:
    require(bool(options.trace), "TraceReplay replays a trace: name it with --trace FILE")
    return read_trace(Path(options.trace), options.trace_format, options.trace_limit or None)


def _chains(workload: Workload) -> list[Workload]:
    """What waits for one another stays together, and all of it where a cap holds over all."""
    if workload.parallel_max is not None:
        return [workload]
    groups: dict[int, list[RequestSpec]] = {}
    roots = _roots(workload.requests)
    for spec in workload.requests:
        groups.setdefault(_root(roots, spec.rid), []).append(spec)
    return [replace(workload, requests=specs) for specs in groups.values()]


def _roots(requests: Sequence[RequestSpec]) -> list[int]:
    """For each rid one that it hangs together with; a root names itself."""
    roots = list(range(len(requests) + 1))
    joined: tuple[int, ...] = ()
    for spec in requests:
        # A barrier makes a whole round wait for the same requests, which are joined once.
        others = spec.after[:1] if spec.after is joined else spec.after
        joined = spec.after
        for rid in others:
            low, high = sorted((_root(roots, rid), _root(roots, spec.rid)))
            roots[high] = low
    return roots


def _root(roots: list[int], rid: int) -> int:
    while roots[rid] != rid:
        roots[rid] = roots[roots[rid]]
        rid = roots[rid]
    return rid


def _from_zero(chains: list[Workload]) -> list[Workload]:
    """The same, the first one begun at once rather than after the first gap of a Poisson stream."""
    first = begins_ns(chains[0])
    return [beginning(chain, begins_ns(chain) - first) for chain in chains]


def _faster(chain: Workload, speed: int) -> Workload:
    """Begun ``speed`` millionths times as fast; pauses for thought stay as they are."""
    return _retimed(chain, [spec.arrival_ns * PER_MILLION // speed for spec in chain.requests])


def _sessions(chain: Workload) -> int:
    return len({spec.session for spec in chain.requests})


def _retimed(chain: Workload, arrivals: list[int]) -> Workload:
    requests = [
        replace(spec, arrival_ns=at) for spec, at in zip(chain.requests, arrivals, strict=True)
    ]
    return replace(chain, requests=requests)

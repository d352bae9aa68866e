"""The whole run, wherever it is played: hands out chains, gathers rows, gives the verdict.

It lives where the users are counted: in the one process of a plain run, in the master of a
distributed one.
Must not know: how chains are played, Locust's messages. Called by: _node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from perf._answer import UNFINISHED
from perf._monitor import CPU_PERCENT_MAX, Health, complaints, total
from perf._options import LoadOptions
from perf._rows import Row
from perf._traffic import Traffic

_HUNDREDTHS: Final = 10_000  # of a percent


@dataclass(slots=True)
class Director:
    """One run. ``traffic`` is that of each class of users."""

    options: LoadOptions
    traffic: dict[str, Traffic]
    rows: list[Row] = field(default_factory=list)
    is_refused: bool = False
    _players: dict[str, Mapping[str, int] | None] = field(default_factory=dict)  # None: still at it
    _numbers: dict[str, Iterator[int]] = field(default_factory=dict)
    _played: int = 0

    def __post_init__(self) -> None:
        self._numbers = {
            name: iter(range(len(traffic.chains))) for name, traffic in self.traffic.items()
        }

    def next_chain(self, name: str, process: str) -> int | None:
        """The next chain of a class, in the order in which they begin; None when there is no other."""
        self._players.setdefault(process)
        return None if self.is_refused else next(self._numbers[name], None)

    def played(self, rows: list[Row]) -> bool:
        """A chain has ended. True when that was the last one."""
        self.rows += rows
        self._played += 1
        return self._played == sum(len(traffic.chains) for traffic in self.traffic.values())

    def ended(self, process: str, health: Mapping[str, int]) -> None:
        """A process has stopped, and sent all its rows."""
        self._players[process] = health

    @property
    def health(self) -> Health:
        """How well all processes kept up."""
        return total([health for health in self._players.values() if health is not None])

    @property
    def unsent(self) -> int:
        """Requests that the run ended too early for."""
        return sum(traffic.requests for traffic in self.traffic.values()) - len(self.rows)

    def warnings(self) -> list[str]:
        """What should be known of a run that is valid."""
        found = []
        busiest = self.health["cpu_percent_max"]
        if busiest > CPU_PERCENT_MAX:
            found.append(
                f"a process of the load generator used {busiest} % of a CPU for a second: divide the"
                " load with --processes"
            )
        unfinished = sum(row.error == UNFINISHED for row in self.rows)
        if unfinished or self.unsent:
            found.append(
                f"the run ended with {unfinished} requests under way and {self.unsent} of the"
                " traffic not sent"
            )
        return found

    def verdict(self) -> list[str]:
        """Why the figures must not be used; empty when they may be."""
        if not self.rows:
            return ["no request was sent"]
        found = complaints(self.health, self.options.lag_limit_ns)
        found += [
            f"{process} ended without a report: its last requests are missing"
            for process, health in self._players.items()
            if health is None
        ]
        if self.options.flush_first:
            found += self._warm_start()
        if self.options.expected is not None:
            found += self._unexpected(*self.options.expected)
        return found

    def _warm_start(self) -> list[str]:
        """After a flush nothing can be cached when the first request comes."""
        sent = [row for row in self.rows if row.sent_ns is not None and row.hit_tokens is not None]
        first = min(sent, key=lambda row: row.sent_ns or 0, default=None)
        if first is None:
            return [
                "--flush-first: the server tells no cached tokens, so a cold start is not shown"
            ]
        if first.hit_tokens:
            found = f"the first request found {first.hit_tokens} cached tokens"
            return [
                f"--flush-first: {found}, so the start was warm; does L3 hold what a flush leaves?"
            ]
        return []

    def _unexpected(self, low: int, high: int) -> list[str]:
        known = [row for row in self.rows if row.hit_tokens is not None and row.prompt_tokens]
        if not known:
            return ["--expect-hit-rate: the server tells no cached tokens"]
        hit = sum(row.hit_tokens or 0 for row in known)
        rate = hit * _HUNDREDTHS // sum(row.prompt_tokens or 0 for row in known)
        if low <= rate <= high:
            return []
        return [
            f"--expect-hit-rate: {rate / 100:.1f} % is not from {low / 100:g} to {high / 100:g} %"
        ]

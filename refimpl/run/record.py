"""The one record: what was decided when, folded while it comes in.

Reports, goldens and ``--explain`` are folds over commands and facts, so they can't disagree. The
decision digest is SHA-256 over every step, which catches changes that cancel out in totals.
Must not know: engines, how commands are carried out. Called by: world, replay.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import msgspec

from refimpl.messages import (
    Admitted,
    Demoted,
    Dropped,
    Evicted,
    Fact,
    Finished,
    LoadedBack,
    Prefetch,
    Readmitted,
    Reply,
    Retracted,
    Skipped,
    Step,
    Wrote,
)
from refimpl.workload.request import RequestSpec


@dataclass(slots=True)
class Row:
    """One request, as the record tells it. Times are in ns of the run, -1 where they never came."""

    rid: int
    session: int
    turn: int
    instance: int
    arrival_ns: int
    prompt_tokens: int
    first_token_ns: int = -1
    end_ns: int = -1
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0  # after a retraction
    finish: str = ""

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_tokens + self.host_tokens + self.storage_tokens

    @property
    def ttft_ns(self) -> int:
        """Time to first token."""
        return self.first_token_ns - self.arrival_ns


class Listener(Protocol):
    """Somebody who wants to see the record pass by."""

    def see(self, now: int, instance: int, fact: Fact) -> None:
        """One fact."""


class Record:
    """The fold. ``rows`` are in the order of submission."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._encode = msgspec.msgpack.Encoder().encode
        self.listener: Listener | None = None
        self.rows: dict[int, Row] = {}
        self.now_ns = 0
        self.counts: Counter[str] = Counter()  # of everything that is not about one request
        self.revoked: Counter[str] = Counter()  # prefetches by reason
        self.skipped: Counter[str] = Counter()  # "action: reason" -> pages
        self.finished: Counter[str] = Counter()  # reasons

    def submitted(self, spec: RequestSpec, instance: int, now: int) -> None:
        """A request was sent to an instance."""
        row = Row(spec.rid, spec.session, spec.turn, instance, now, spec.prompt.length)
        self.rows[spec.rid] = row

    def take(self, step: Step, instance: int, now: int) -> None:
        """What one instance ordered and decided at ``now``."""
        if step is Step.NOTHING:
            return
        self.now_ns = now
        self._sha256.update(self._encode((now, instance, step)))
        for command in step.commands:
            if isinstance(command, Reply) and command.first:
                self.rows[command.rid].first_token_ns = now
        for fact in step.facts:
            self._fold(fact, now)
            if self.listener is not None:
                self.listener.see(now, instance, fact)

    @property
    def digest(self) -> str:
        """SHA-256 over all steps so far, in hex."""
        return self._sha256.hexdigest()

    def _fold(self, fact: Fact, now: int) -> None:
        counts = self.counts
        match fact:
            case Admitted():
                row = self.rows[fact.rid]
                row.device_tokens = fact.device_tokens
                row.host_tokens = fact.host_tokens
                row.storage_tokens = fact.storage_tokens
            case Demoted():
                counts["demoted"] += fact.pages
            case Evicted():
                counts[f"evicted_{fact.tier}"] += fact.pages
                counts[f"evicted_{fact.tier}_{fact.reason}"] += fact.pages
            case Dropped():
                counts["dropped"] += fact.pages
            case LoadedBack():
                counts["load_back"] += fact.pages
            case Wrote():
                counts[f"wrote_{fact.tier}"] += fact.done
                counts[f"lost_{fact.tier}"] += fact.pages - fact.done
            case Prefetch():
                self._fold_prefetch(fact)
            case Skipped():
                self.skipped[f"{fact.action}: {fact.reason}"] += fact.pages
            case Readmitted():
                self.rows[fact.rid].recomputed_tokens += fact.tokens - fact.cached_tokens
            case Retracted():
                counts["retracted"] += 1
            case Finished():
                row = self.rows[fact.rid]
                row.end_ns = now
                row.output_tokens = fact.tokens
                row.finish = fact.reason
                self.finished[fact.reason.partition(":")[0]] += 1
            case _:
                pass  # Matched, Inserted, StorageChanged: in the digest, not in the totals

    def _fold_prefetch(self, fact: Prefetch) -> None:
        if fact.step == "revoked":
            self.revoked[fact.reason] += 1
            return
        self.counts[f"prefetch_{fact.step}"] += 1
        if fact.step in ("completed", "failed", "stopped"):
            self.counts["prefetch_pages"] += fact.pages

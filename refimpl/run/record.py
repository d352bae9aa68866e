"""The one record: what was decided when, folded while it comes in.

Reports, goldens and ``--explain`` are folds over commands and facts, so they can't disagree. The
decision digest is SHA-256 over every step, which catches changes that cancel out in totals.
Must not know: engines, how commands are carried out. Called by: world, replay.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from refimpl.facts import (
    Admitted,
    Demoted,
    Dropped,
    Evicted,
    Finished,
    LoadedBack,
    Prefetch,
    Readmitted,
    Retracted,
    Skipped,
    Wrote,
)
from refimpl.messages import Fact, Probe, Reply, Step
from refimpl.run.account import Account
from refimpl.workload.request import RequestSpec


class Row(msgspec.Struct):
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
    admitted: bool = False  # it got as far as hitting or computing something
    finish: str = ""
    account: Account | None = None  # where somebody has asked for one

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
        self._accounts: dict[int, Account] = {}  # by rid, of those that are not admitted yet
        self.now_ns = 0
        self.counts: Counter[str] = Counter()  # of everything that is not about one request
        self.revoked: Counter[str] = Counter()  # prefetches by reason
        self.skipped: Counter[str] = Counter()  # "action: reason" -> pages
        self.finished: Counter[str] = Counter()  # reasons
        self.ranks: dict[str, Any] = {}  # what came of it that ranks differ, where they may
        # The others (Matched, Inserted, StorageChanged) are in the digest, not in the totals.
        self._folds: dict[type[Fact], Callable[[Any, int], None]] = {
            Admitted: self._on_admitted,
            Demoted: self._on_demoted,
            Dropped: self._on_dropped,
            Evicted: self._on_evicted,
            Finished: self._on_finished,
            LoadedBack: self._on_loaded_back,
            Prefetch: self._on_prefetch,
            Readmitted: self._on_readmitted,
            Retracted: self._on_retracted,
            Skipped: self._on_skipped,
            Wrote: self._on_wrote,
        }

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
        folds = self._folds
        for fact in step.facts:
            fold = folds.get(type(fact))
            if fold is not None:
                fold(fact, now)
            if self.listener is not None:
                self.listener.see(now, instance, fact)
        if self._accounts:
            self._explain(step, now)

    def explain(self, rid: int, account: Account) -> None:
        """``account`` is kept of a request that was submitted, until it is admitted or over."""
        self._accounts[rid] = self.rows[rid].account = account

    def _explain(self, step: Step, now: int) -> None:
        for rid, account in list(self._accounts.items()):
            facts = [fact for fact in step.facts if getattr(fact, "rid", None) == rid]
            probes = [each for each in step.commands if isinstance(each, Probe) and each.rid == rid]
            account.take(facts, sum(len(probe.keys) for probe in probes), now)
            if any(isinstance(fact, Admitted | Finished) for fact in facts):
                del self._accounts[rid]

    @property
    def digest(self) -> str:
        """SHA-256 over all steps so far, in hex."""
        return self._sha256.hexdigest()

    def _on_admitted(self, fact: Admitted, _: int) -> None:
        row = self.rows[fact.rid]
        row.device_tokens = fact.device_tokens
        row.host_tokens = fact.host_tokens
        row.storage_tokens = fact.storage_tokens
        row.admitted = True

    def _on_demoted(self, fact: Demoted, _: int) -> None:
        self.counts["demoted"] += fact.pages

    def _on_evicted(self, fact: Evicted, _: int) -> None:
        self.counts[f"evicted_{fact.tier}"] += fact.pages
        self.counts[f"evicted_{fact.tier}_{fact.reason}"] += fact.pages

    def _on_dropped(self, fact: Dropped, _: int) -> None:
        self.counts["dropped"] += fact.pages

    def _on_loaded_back(self, fact: LoadedBack, _: int) -> None:
        self.counts["load_back"] += fact.pages

    def _on_wrote(self, fact: Wrote, _: int) -> None:
        self.counts[f"wrote_{fact.tier}"] += fact.done
        if fact.done < fact.pages:
            self.counts[f"lost_{fact.tier}"] += fact.pages - fact.done

    def _on_prefetch(self, fact: Prefetch, _: int) -> None:
        if fact.step == "revoked":
            self.revoked[fact.reason] += 1
            return
        self.counts[f"prefetch_{fact.step}"] += 1
        if fact.step in ("completed", "failed", "stopped"):
            self.counts["prefetch_pages"] += fact.pages

    def _on_skipped(self, fact: Skipped, _: int) -> None:
        self.skipped[f"{fact.action}: {fact.reason}"] += fact.pages

    def _on_readmitted(self, fact: Readmitted, _: int) -> None:
        self.rows[fact.rid].recomputed_tokens += fact.tokens - fact.cached_tokens

    def _on_retracted(self, fact: Retracted, _: int) -> None:
        del fact
        self.counts["retracted"] += 1

    def _on_finished(self, fact: Finished, now: int) -> None:
        row = self.rows[fact.rid]
        row.end_ns = now
        row.output_tokens = fact.tokens
        row.finish = fact.reason
        self.finished[fact.reason.partition(":")[0]] += 1

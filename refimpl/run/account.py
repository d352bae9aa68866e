"""What became of one prompt's tokens: asked of L3, found, loaded, used, and lost by reason.

A fold over what the record says of one request until it is first admitted. Hits and losses add up to all
that may hit, so that a slow answer is explained to the last page.
Must not know: engines, other requests. Called by: record, the server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from refimpl.core.policy import usable_pages
from refimpl.facts import Admitted, Matched, Prefetch, Skipped
from refimpl.messages import Fact
from refimpl.run.fact_words import sentence


@dataclass(slots=True)
class _Asked:
    """One time that L3 was asked, in pages. ``found`` and ``started`` are None until they are known."""

    skipped: int = 0  # too few to ask for
    joined: int = 0  # which a read for somebody else brings
    own: int = 0
    found: int | None = None
    started: int | None = None
    landed: int = 0
    revoked: str = ""
    late: str = "not_waited_for"  # why what L3 has may be missing


class Account:
    """Of a request with ``prompt_tokens``, which came at ``arrival_ns``."""

    def __init__(
        self, prompt_tokens: int, page_size: int, arrival_ns: int, *, has_storage: bool
    ) -> None:
        self._page_size, self._arrival_ns, self._has_storage = page_size, arrival_ns, has_storage
        self._usable = usable_pages(prompt_tokens, page_size)
        self._events: list[str] = []
        self._matched: int | None = None  # None: nothing is kept for later requests
        self._asked = _Asked()
        self._left_out: list[tuple[str, int]] = []  # loads that were not made
        self._admitted: Admitted | None = None
        self._times = 0  # that L3 was asked

    def take(self, facts: list[Fact], asked_pages: int, now: int) -> None:
        """What one step decided about the request; ``asked_pages``: L3 is asked for, by itself."""
        if self._admitted is not None:
            return
        is_anew = False
        for fact in facts:
            if not is_anew and _begins(fact):
                is_anew = True
                self._ask_anew()
            self._note(fact)
            if text := sentence(now - self._arrival_ns, fact):
                self._events.append(text)
        if asked_pages:
            if not is_anew:
                self._ask_anew()
            self._asked.own += asked_pages

    def _ask_anew(self) -> None:
        self._asked = _Asked()
        self._times += 1

    def _note(self, fact: Fact) -> None:
        match fact:
            case Matched():
                self._matched = min(fact.l1 + fact.l2, self._usable)
            case Skipped(action="prefetch", reason="below_threshold"):
                self._asked.skipped += fact.pages
            case Skipped(action="load_back"):
                self._left_out.append((f"load_back_{fact.reason}", fact.pages))
            case Prefetch():
                self._note_prefetch(fact)
            case Admitted():
                self._admitted = fact
            case _:
                pass

    def _note_prefetch(self, fact: Prefetch) -> None:
        asked = self._asked
        match fact.step:
            case "joined":
                asked.joined += fact.pages
            case "probed":
                asked.found = fact.pages
            case "revoked":
                asked.revoked = fact.reason
            case "started":
                asked.started = fact.pages
            case "landed":
                asked.landed += fact.pages
            case "timed_out":
                asked.late = "timed_out"
            case "failed":
                asked.late = "read_failed"
            case _:
                pass

    def told(self) -> dict[str, Any]:
        """All of it, in tokens; times in sentences are from when the request came."""
        page, admitted = self._page_size, self._admitted
        hits = used = 0
        if admitted is not None:
            used = admitted.storage_tokens // page
            hits = (admitted.device_tokens + admitted.host_tokens) // page + used
        asked = self._asked
        joined = self._joined_that_came(hits)
        loaded = max(asked.landed + joined, used)
        found = max((asked.found or 0) + joined, loaded)
        return {
            "may_hit_tokens": self._usable * page,
            "asked_tokens": max(asked.own + asked.joined, found) * page,
            "found_tokens": found * page,
            "loaded_tokens": loaded * page,
            "used_tokens": used * page,
            "lost_tokens": {
                reason: pages * page for reason, pages in self._lost(self._usable - hits).items()
            },
            "events": list(self._events),
        }

    def _joined_that_came(self, hits: int) -> int:
        """Pages of reads for others that are among the first ``hits``; nobody says when they land."""
        asked = self._asked
        behind = asked.own + asked.skipped + self._unasked()
        return min(max(hits - (self._usable - behind - asked.joined), 0), asked.joined)

    def _unasked(self) -> int:
        """Pages behind one that L3 is taken not to have: it was read in vain a moment ago."""
        asked = self._asked
        if self._times > 1 or not self._has_storage or self._matched is None:
            return 0
        told_of = self._matched + asked.skipped + asked.joined + asked.own
        return max(self._usable - told_of, 0)

    def _lost(self, pages: int) -> dict[str, int]:
        """Pages that were computed though they might have hit, by reason; the last of the prompt first."""
        lost: Counter[str] = Counter()
        for reason, count in self._reasons():
            lost[reason] += min(count, pages - lost.total())
        lost["left_before_admission"] += pages - lost.total()
        return dict(+lost)

    def _reasons(self) -> list[tuple[str, int]]:
        """Why, and how many pages at most, from the end of the prompt to its beginning."""
        if self._admitted is None:
            return [("never_admitted", self._usable)]
        if self._matched is None:
            return [("nothing_is_kept", self._usable)]
        if not self._has_storage:
            return [*self._left_out, ("not_in_l1_or_l2", self._usable - self._matched)]
        asked = self._asked
        unasked = [("below_threshold", asked.skipped), ("missing_lately", self._unasked())]
        return [*unasked, *_of_l3(asked), *self._left_out]


def _begins(fact: Fact) -> bool:
    """Is it the first thing that is said when L3 is asked?"""
    if isinstance(fact, Prefetch):
        return fact.step == "joined"
    return isinstance(fact, Skipped) and (fact.action, fact.reason) == (
        "prefetch",
        "below_threshold",
    )


def _of_l3(asked: _Asked) -> list[tuple[str, int]]:
    """The same for what L3 was asked for."""
    joined = (asked.late, asked.joined)
    if asked.found is None:
        return [(asked.late, asked.own), joined]
    reasons = [("not_in_storage", asked.own - asked.found)]
    if asked.revoked:
        return [*reasons, (asked.revoked, asked.found), joined]
    started = asked.started
    if started is None:  # its read waits for room in L2 that other reads hold
        return [*reasons, ("host_capacity", asked.found), joined]
    late = (asked.late, started - asked.landed)
    return [*reasons, ("host_capacity", asked.found - started), late, joined]

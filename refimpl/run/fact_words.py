"""What was decided about a request, in plain words.

Must not know: who asks, when it was. Called by: explain, account.
"""

from __future__ import annotations

from typing import Final

from refimpl.facts import LoadedBack, Matched, Prefetch, Retracted, Skipped
from refimpl.messages import Fact
from refimpl.units import NS_PER_MS

_REVOKED: Final = {
    "not_in_storage": "L3 did not have its next page: it was never written, not written yet, or"
    " has left L3",
    "below_threshold": "L3 had fewer pages than prefetch_threshold asks for",
    "host_capacity": "L2 had no room to stage what L3 had",
    "nobody_waits": "the request had stopped waiting before L3 answered",
}
_SKIPPED: Final = {
    (
        "prefetch",
        "below_threshold",
    ): "{pages} pages were too few to ask L3 for (prefetch_threshold)",
    ("prefetch", "host_capacity"): "{pages} pages that L3 had found no room in L2",
    ("load_back", "load_failed"): "{pages} pages in L2 were recomputed: a load for this request had"
    " failed",
    ("load_back", "below_threshold"): "{pages} pages in L2 were too few to load back"
    " (load_back_threshold) and were recomputed",
}


def sentence(now: int, fact: Fact) -> str:
    """What one fact says to a reader; empty when the tiers have said it already."""
    at = f"at {now / NS_PER_MS:,.1f} ms"
    match fact:
        case Matched():
            return f"{at} it came; the tree held {fact.l1} of its pages in L1 and {fact.l2} in L2"
        case LoadedBack():
            return f"{at} {fact.pages} pages were loaded back from L2"
        case Skipped():
            text = _SKIPPED.get((fact.action, fact.reason), "{pages} pages: " + fact.reason)
            return f"{at} {text.format(pages=fact.pages)}"
        case Retracted():
            return f"{at} it was retracted: L1 had no slot for its next token"
        case Prefetch():
            return f"{at} {_prefetch_words(fact)}"
        case _:
            return ""


def _prefetch_words(fact: Prefetch) -> str:
    match fact.step:
        case "probed":
            return f"L3 said it has {fact.pages} of the pages asked for"
        case "started":
            return f"a read of {fact.pages} pages from L3 began"
        case "joined":
            return f"it joined a read from L3 under way, for {fact.pages} pages"
        case "revoked":
            return f"the read from L3 was given up: {_REVOKED.get(fact.reason, fact.reason)}"
        case "timed_out":
            return f"it stopped waiting for L3 at its deadline; {fact.pages} pages had arrived"
        case "landed":
            lost = "; their parent was gone, so they were dropped" if fact.reason else ""
            return f"{fact.pages} pages from L3 entered the tree{lost}"
        case _:
            return f"the read from L3 has {fact.step} with {fact.pages} pages"

"""How two golden documents differ, and whether that is for the better.

A document is what ``expected.json`` holds: integers, digests and where they come from, nested by
subject. Ratios, which are floats, come from live runs alone.
Must not know: cases, files, simulations. Called by: golden, golden_history, live_gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Figure: TypeAlias = int | float | str

# A figure that is not listed is neither good nor bad by itself: reads from L3, the end of a run whose
# requests arrive by the clock.
_LOWER_IS_BETTER: Final = (
    "ttft_ns.",
    "computed_tokens",
    "recomputed_tokens",
    "pages_lost.",
    "host_pressure_pages",
    "prefetch.failed",
    "prefetch.timed_out",
    "retracted",
)
_HIGHER_IS_BETTER: Final = ("hit_rate_ppm",)
_HITS: Final = "hit_tokens."
_FIGURES: Final = "figures."


@dataclass(frozen=True, slots=True)
class Change:
    """One figure and what became of it. None: it is not there.

    The verdict is worse, better or changed; figures of live runs may be ``equal`` as well, and those
    that can fail have a ``limit``.
    """

    path: str
    old: Figure | None
    new: Figure | None
    verdict: str
    limit: Figure | None = None

    @property
    def change(self) -> str:
        """The difference for reading; empty where there is no number to subtract from."""
        old, new = self.old, self.new
        if not isinstance(old, int | float) or not isinstance(new, int | float):
            return ""
        difference = new - old
        share = f" ({100 * difference / old:+.2f} %)" if old else ""
        is_whole = isinstance(old, int) and isinstance(new, int)
        return f"{difference:+,}{share}" if is_whole else f"{difference:+.3g}{share}"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The figures that differ, sorted by path."""
    before, after = flatten(old), flatten(new)
    return [
        Change(
            path.removeprefix(_FIGURES),
            before.get(path),
            after.get(path),
            _verdict(path.removeprefix(_FIGURES), before, after),
        )
        for path in sorted(before | after)
        if before.get(path) != after.get(path)
    ]


def overall(changes: list[Change]) -> str:
    """``equal``, or the verdict on all changes together: one that is worse decides."""
    verdicts = {change.verdict for change in changes}
    return next((word for word in ("worse", "better", "changed") if word in verdicts), "equal")


def flatten(document: Mapping[str, Any], above: str = "") -> dict[str, Figure]:
    """Nested figures by their dotted path."""
    flat: dict[str, Figure] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat


def _verdict(path: str, before: Mapping[str, Figure], after: Mapping[str, Figure]) -> str:
    if path.startswith(_HITS):
        # A hit that another tier serves now is not lost, so the tiers are judged together.
        return _direction(_hits(after) - _hits(before))
    old, new = before.get(_FIGURES + path, 0), after.get(_FIGURES + path, 0)
    if not isinstance(old, int) or not isinstance(new, int):
        return "changed"
    if path.startswith(_HIGHER_IS_BETTER):
        return _direction(new - old)
    return _direction(old - new) if path.startswith(_LOWER_IS_BETTER) else "changed"


def _direction(gain: int) -> str:
    return "better" if gain > 0 else "worse" if gain < 0 else "changed"


def _hits(flat: Mapping[str, Figure]) -> int:
    found = (value for path, value in flat.items() if path.startswith(_FIGURES + _HITS))
    return sum(value for value in found if isinstance(value, int))

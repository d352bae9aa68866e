"""Counters and histograms of one registry, with all their label sets there from the start.

Must not know: what is counted. Called by: metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram


class Instruments:
    """Makes instruments that carry ``labels``; a label of their own has a child for each value."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)

    def counter(self, name: str, text: str) -> Counter:
        """A counter; its name ends in ``_total``."""
        made = Counter(name, text, list(self._labels), registry=self._registry)
        return made.labels(**self._labels)

    def counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """A counter for each value of ``label``."""
        made = Counter(name, text, [*self._labels, label], registry=self._registry)
        return {value: made.labels(**self._labels, **{label: value}) for value in values}

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """A histogram with these upper bounds."""
        made = Histogram(
            name, text, list(self._labels), registry=self._registry, buckets=tuple(buckets)
        )
        return made.labels(**self._labels)

    def histograms(
        self, name: str, text: str, label: str, values: Sequence[str], buckets: Sequence[float]
    ) -> dict[str, Histogram]:
        """A histogram for each value of ``label``."""
        names = [*self._labels, label]
        made = Histogram(name, text, names, registry=self._registry, buckets=tuple(buckets))
        return {value: made.labels(**self._labels, **{label: value}) for value in values}

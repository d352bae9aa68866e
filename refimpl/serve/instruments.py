"""Counters and histograms of one registry, with all their label sets there from the start.

Must not know: what is counted. Called by: metrics, loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


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


class Merged(Collector):
    """Several collectors as one: each metric once, with the samples of all, whose labels differ."""

    def __init__(self, parts: Sequence[Collector]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """In the order of the first that has it."""
        merged: dict[str, Metric] = {}
        for part in self._parts:
            for metric in part.collect():
                if metric.name in merged:
                    merged[metric.name].samples.extend(metric.samples)
                else:
                    merged[metric.name] = metric
        yield from merged.values()

"""The plots of one case: TTFT, its tail by prompt length, hits by turn, bandwidths.

Must not know: pages, verdicts. Called by: golden_report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from plotly.graph_objects import Bar
from plotly.subplots import make_subplots

from refimpl.run.picture import Picture

_COLOURS: Final = ("#2f6db5", "#b0b7c0")  # of the run that is judged, and of its reference
_OF_TIERS: Final = {
    "device": "#1f4e89",
    "host": "#4a90c2",
    "storage": "#9ccbe8",
    "computed": "#d9d9d9",
}
_OF_PERCENTILES: Final = {"p50": 0.45, "p90": 0.7, "p99": 1.0}  # opacity
_WAYS: Final = {
    "backup": "L1 to L2",
    "load_back": "L2 to L1",
    "l3_read": "L3 to L2",
    "l3_write": "L2 to L3",
}
_DISTRIBUTION: Final = "TTFT in ms, share of the requests"
_SPACING: Final = 0.24  # between rows, of one of them
_HEIGHT: Final = 320  # of a row of plots, in pixels


def figure_json(picture: Picture) -> str:
    """The case's plots as one figure, in plotly's JSON."""
    kinds = {
        _DISTRIBUTION: list(_distribution(picture)),
        "TTFT by prompt length, p50, p90, p99 in ms": list(_tails(picture)),
        "Prompt tokens by turn": list(_turns(picture)),
        "Bandwidth, GB/s": list(_rates(picture)),
    }
    drawn = {title: bars for title, bars in kinds.items() if bars}
    rows = max(-(-len(drawn) // 2), 1)
    figure = make_subplots(
        rows=rows, cols=2, subplot_titles=list(drawn), vertical_spacing=_SPACING / rows
    )
    for at, (title, bars) in enumerate(drawn.items()):
        place = {"row": at // 2 + 1, "col": at % 2 + 1}
        for bar in bars:
            figure.add_trace(bar, **place)
        if title != _DISTRIBUTION:
            figure.update_xaxes(type="category", **place)
    figure.update_layout(
        template="none",
        height=_HEIGHT * rows,
        margin={"l": 50, "r": 20, "t": 30, "b": 30},
        legend={"orientation": "h", "y": -0.12},
        font={"family": "system-ui, sans-serif", "size": 12},
        bargap=0.15,
        barmode="group",
    )
    text: str = figure.to_json()
    return text


def _distribution(picture: Picture) -> Iterator[Any]:
    for (name, run), colour in zip(picture.runs.items(), _COLOURS, strict=False):
        histogram = run.ttft_ms
        if histogram is None:
            continue
        counted = max(sum(histogram.counts), 1)
        yield Bar(
            name=f"{name}, {run.requests:,} requests",
            x=[histogram.low + (at + 0.5) * histogram.width for at in range(len(histogram.counts))],
            y=[count / counted for count in histogram.counts],
            width=histogram.width,
            offset=-histogram.width / 2,
            marker={"color": colour, "opacity": 0.7},
        )


def _tails(picture: Picture) -> Iterator[Any]:
    for (name, run), colour in zip(picture.runs.items(), _COLOURS, strict=False):
        for percentile, opacity in _OF_PERCENTILES.items():
            if run.tails:
                yield Bar(
                    name=f"{name}, {percentile}",
                    x=[tail.bucket for tail in run.tails],
                    y=[tail.ms[percentile] for tail in run.tails],
                    customdata=[tail.requests for tail in run.tails],
                    hovertemplate="%{x} tokens, %{customdata} requests: %{y:.1f} ms",
                    marker={"color": colour, "opacity": opacity},
                    showlegend=False,
                )


def _turns(picture: Picture) -> Iterator[Any]:
    """Of the run that is judged. Bars of one offset group lie on each other, by their bases."""
    turns = next(iter(picture.runs.values())).turns
    below = [0] * len(turns)
    for part, colour in _OF_TIERS.items():
        tokens = [turn.tokens[part] for turn in turns]
        if any(tokens):
            yield Bar(
                name=f"tokens: {part}",
                x=[turn.turn for turn in turns],
                y=tokens,
                base=list(below),
                offsetgroup="tiers",
                marker={"color": colour},
            )
        below = [under + more for under, more in zip(below, tokens, strict=True)]


def _rates(picture: Picture) -> Iterator[Any]:
    ways = {label: picture.rates[way] for way, label in _WAYS.items() if picture.rates.get(way)}
    if ways:
        yield Bar(
            x=list(ways),
            y=list(ways.values()),
            marker={"color": _COLOURS[0]},
            showlegend=False,
        )

"""The report of a run: integers folded from the record, and how they are shown.

Must not know: engines, files, the terminal. Called by: the command line, golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refimpl.run.record import Record, Row
from refimpl.units import NS_PER_MS, NS_PER_S, PER_MILLION, nearest_rank

PERCENTILES = (50, 90, 99)


def integers(record: Record) -> dict[str, Any]:
    """What goldens compare: counts and virtual times of a run, all of them integers."""
    rows = list(record.rows.values())
    hits = _hits_of(rows)
    admitted = [row for row in rows if row.admitted]
    counts = record.counts
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    ranks = {"ranks": record.ranks} if record.ranks else {}
    return ranks | {
        "requests": len(rows),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(row.output_tokens for row in rows),
        "hit_tokens": hits,
        "hit_rate_ppm": _ppm(sum(hits.values()), prompt_tokens),
        "computed_tokens": sum(row.prompt_tokens - row.hit_tokens for row in admitted),
        "recomputed_tokens": sum(row.recomputed_tokens for row in rows),
        "ttft_ns": _ttft_of(rows),
        "evicted_pages": {
            "device": counts["demoted"] + counts["evicted_device"],
            "host": counts["evicted_host"] + counts["dropped"],
        },
        "pages_moved": {
            "load_back": counts["load_back"],
            "backup": counts["wrote_host"],
            "prefetch": counts["prefetch_pages"],
            "store": counts["wrote_storage"],
        },
        "pages_lost": {"backup": counts["lost_host"], "store": counts["lost_storage"]},
        "prefetch": {
            "started": counts["prefetch_started"],
            "completed": counts["prefetch_completed"],
            "stopped": counts["prefetch_stopped"],
            "failed": counts["prefetch_failed"],
            "timed_out": counts["prefetch_timed_out"],
            "joined": counts["prefetch_joined"],
            "revoked_by_reason": dict(sorted(record.revoked.items())),
        },
        "host_pressure_pages": counts["evicted_device_host_pressure"],
        "skipped_pages": dict(sorted(record.skipped.items())),
        "retracted": counts["retracted"],
        "finished": dict(sorted(record.finished.items())),
        "virtual_ns": record.now_ns,
        "decisions_sha256": record.digest,
    }


def _ppm(part: int, whole: int) -> int:
    """Parts per million, rounded to the nearest."""
    return (part * PER_MILLION * 2 + whole) // (2 * whole) if whole else 0


def failures(rows: list[Row]) -> dict[str, int]:
    """How many requests ended with an error or an abort, by reason."""
    reasons = sorted(row.finish for row in rows if row.finish not in ("", "length", "stop"))
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def failure_words(found: Mapping[str, int], requests: int) -> str:
    """How many of ``requests`` failed and why, in a line; empty when none did."""
    if not found:
        return ""
    shown = [f"{reason.removeprefix('error: ')} ({count})" for reason, count in found.items()]
    more = f"; {len(shown) - 3} other reasons" if len(shown) > 3 else ""
    return f"{sum(found.values()):,} of {requests:,} requests failed: {'; '.join(shown[:3])}{more}"


def percentiles(values: list[int]) -> dict[str, int]:
    """Nearest-rank percentiles and the maximum of ``values``; zeros when there are none."""
    ordered = sorted(values)
    found = {f"p{percent}": nearest_rank(ordered, percent) for percent in PERCENTILES}
    return found | {"max": ordered[-1] if ordered else 0}


def _hits_of(rows: list[Row]) -> dict[str, int]:
    """Hit tokens by tier."""
    return {
        "device": sum(row.device_tokens for row in rows),
        "host": sum(row.host_tokens for row in rows),
        "storage": sum(row.storage_tokens for row in rows),
    }


def _ttft_of(rows: list[Row]) -> dict[str, int]:
    """Percentiles of TTFT in ns, of those that have a first token."""
    return percentiles([row.ttft_ns for row in rows if row.first_token_ns >= 0])


def by_turn(rows: list[Row]) -> list[tuple[int, int, dict[str, int], dict[str, int]]]:
    """For each turn, of requests admitted: count, tokens by tier and in all, TTFT in ns."""
    turns: dict[int, list[Row]] = {}
    for row in rows:
        if row.admitted:
            turns.setdefault(row.turn, []).append(row)
    return [
        (
            turn,
            len(group),
            {
                "prompt": sum(row.prompt_tokens for row in group),
                **_hits_of(group),
            },
            _ttft_of(group),
        )
        for turn, group in sorted(turns.items())
    ]


def by_worker(rows: list[Row], dp_size: int) -> list[dict[str, Any]]:
    """The same of each data-parallel rank of each instance; integers."""
    workers: dict[int, list[Row]] = {}
    for row in rows:
        workers.setdefault(row.instance, []).append(row)
    return [
        {
            "instance": worker // dp_size,
            "dp_rank": worker % dp_size,
            "requests": len(group),
            "prompt_tokens": sum(row.prompt_tokens for row in group),
            "hit_tokens": _hits_of(group),
            "ttft_ns": _ttft_of(group),
        }
        for worker, group in sorted(workers.items())
    ]


def for_output(figures: dict[str, Any], wall_ns: int) -> dict[str, Any]:
    """The figures with those for reading beside them: rates, milliseconds, seconds, speed."""
    ttft = figures["ttft_ns"]
    wall = max(wall_ns, 1) / NS_PER_S
    return figures | {
        "hit_rate": figures["hit_rate_ppm"] / PER_MILLION,
        "ttft_ms": {name: value / NS_PER_MS for name, value in ttft.items()},
        "virtual_seconds": figures["virtual_ns"] / NS_PER_S,
        "wall_seconds": wall,
        "requests_per_wall_second": figures["requests"] / wall,
    }

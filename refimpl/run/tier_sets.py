"""The same load with no cache, L1, L1 and L2, and all three tiers: what each tier is worth.

Must not know: the terminal. Called by: the command line (``refimpl run``, ``refimpl golden table``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from refimpl.config import ConfigError, require
from refimpl.run.golden import expected, replace_file
from refimpl.run.options import MULTI_TURN, Options
from refimpl.run.record import Row
from refimpl.run.report import by_turn, integers
from refimpl.run.setup import Simulation
from refimpl.units import NS_PER_MS, PER_MILLION

NAMES: Final = ("no cache", "L1", "L1 + L2", "L1 + L2 + L3")
GOLDEN_CASES: Final = dict(
    zip(
        NAMES,
        ("multi_turn_no_cache", "multi_turn_l1", "multi_turn_l1_l2", "multi_turn_l1_l2_l3"),
        strict=True,
    )
)
TABLE_BEGIN: Final = "<!-- table:multi_turn -->"
TABLE_END: Final = "<!-- /table -->"


@dataclass(frozen=True, slots=True)
class TierSet:
    """One run of the comparison."""

    name: str
    figures: dict[str, Any]
    rows: list[Row]
    notices: list[str]


def tier_sets(options: Options) -> dict[str, Options]:
    """The four configurations; all else is as ``options`` says. ConfigError for what they set."""
    require(
        not options.disable_radix_cache,
        "refimpl run compares runs with and without the cache: leave out --disable-radix-cache",
    )
    require(
        not options.cache_only,
        "refimpl run compares TTFT, which --cache-only has not: use refimpl simulate",
    )
    if options.trace is not None and options.workload == MULTI_TURN["workload"]:
        options = replace(options, workload=None)  # the default gives way
    storage = options.hicache_storage_backend or "memory"
    full = replace(options, enable_hierarchical_cache=True, hicache_storage_backend=storage)
    one = replace(options, enable_hierarchical_cache=False, **_defaults("hicache_"))
    return {
        NAMES[0]: replace(one, disable_radix_cache=True),
        NAMES[1]: one,
        NAMES[2]: replace(full, **_defaults("hicache_storage_")),
        NAMES[3]: full,
    }


def _defaults(start: str) -> dict[str, Any]:
    """Fields whose names begin like that, as they are when nothing is said."""
    return {entry.name: entry.default for entry in fields(Options) if entry.name.startswith(start)}


def run_tier_sets(options: Options) -> list[TierSet]:
    """Run all four. What can't work is refused before the first starts."""
    simulations = {name: Simulation(each) for name, each in tier_sets(options).items()}
    done = []
    for name, simulation in simulations.items():
        record = simulation.run().record
        rows = list(record.rows.values())
        done.append(TierSet(name, integers(record), rows, simulation.notices))
    return done


def for_json(done: list[TierSet]) -> dict[str, Any]:
    """The comparison as one JSON object: figures of each set, and the turns of the full one."""
    return {
        "clock": "virtual",
        "tier_sets": [{"tiers": each.name} | each.figures for each in done],
        "turns": [
            {"turn": turn + 1, "requests": count, "tokens": tokens, "ttft_ns": ttft}
            for turn, count, tokens, ttft in by_turn(done[-1].rows)
        ],
        "notices": notices(done),
    }


def notices(done: list[TierSet]) -> list[str]:
    """What was switched, each thing once."""
    return list(dict.fromkeys(notice for each in done for notice in each.notices))


# ---- the table of the README --------------------------------------------------------------------


def markdown(folder: Path) -> str:
    """The table of the multi-turn goldens below ``folder``. ConfigError when one is missing."""
    lines = [
        "| tiers | from L1 | from L2 | from L3 | computed | hit rate | p50 TTFT |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, case in GOLDEN_CASES.items():
        try:
            lines.append(_line(name, expected(folder, case)["figures"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{case}: expected.json lacks {error}") from None
    return "\n".join(lines) + "\n"


def _line(name: str, figures: Mapping[str, Any]) -> str:
    hits = figures["hit_tokens"]
    cells = [
        name,
        *(f"{hits[tier]:,}" for tier in ("device", "host", "storage")),
        f"{figures['computed_tokens']:,}",
        f"{100 * figures['hit_rate_ppm'] / PER_MILLION:.1f} %",
        f"{figures['ttft_ns']['p50'] / NS_PER_MS:,.1f} ms",
    ]
    return f"| {' | '.join(cells)} |"


def with_table(text: str, table: str) -> str:
    """``text`` with the table between the markers; unchanged where there are none."""
    before, begin, rest = text.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        return text
    return f"{before}{begin}\n{table}{end}{after}"


def rewrite_readme(folder: Path) -> bool:
    """Put the table into the README beside ``folder``; True if that changed it."""
    path = folder.resolve().parent / "README.md"
    has_all = all((folder / case / "expected.json").is_file() for case in GOLDEN_CASES.values())
    if not has_all or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    changed = with_table(text, markdown(folder))
    if changed == text:
        return False
    replace_file(path, changed)
    return True

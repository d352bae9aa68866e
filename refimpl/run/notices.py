"""What a user should hear about a run that goes on: sizes no machine has, flags without effect.

Must not know: how a run is carried out, the terminal. Called by: setup.
"""

from __future__ import annotations

from typing import Final

from refimpl.config import CacheConfig
from refimpl.run.cost import HOST_RESERVE_BYTES, Cost
from refimpl.run.options import Options, option_names
from refimpl.units import GB
from refimpl.workload.request import Workload

_DEFAULTS: Final = Options()


def beyond_the_hardware(cache: CacheConfig, cost: Cost, budget_bytes: int) -> list[str]:
    """Tiers that could not exist; ``budget_bytes`` is what weights and L1 may take of a device."""
    found = []
    hardware, model = cost.hardware, cost.model
    room = max(budget_bytes - cost.weight_bytes, 0)
    l1 = (cache.l1_pages or 0) * cost.page_bytes
    if l1 > room:
        found.append(
            f"L1 takes {_gb(l1)} a rank and {hardware.name} has {_gb(room)} beside the weights of"
            f" {model.name}: figures are those of a larger device"
        )
    host = (hardware.host_bytes - HOST_RESERVE_BYTES) // hardware.ranks_per_host
    l2 = (cache.l2_pages or 0) * cost.page_bytes
    if l2 > host:
        found.append(
            f"L2 takes {_gb(l2)} a rank and a host of {hardware.name} has {_gb(host)}:"
            " figures are those of a larger host"
        )
    return found


def without_l2(options: Options) -> list[str]:
    """Flags that were given and do nothing because the host tier is off."""
    if options.enable_hierarchical_cache:
        return []
    said = [
        f"--{name}"
        for name, field in option_names().items()
        if name.startswith("hicache-") and getattr(options, field) != getattr(_DEFAULTS, field)
    ]
    if not said:
        return []
    return [f"{', '.join(said)} without --enable-hierarchical-cache: there is no L2"]


def lower_bound(workload: Workload, page_size: int) -> list[str]:
    """Traces that name blocks hide what prompts share inside one, others hide all of it."""
    block_size = workload.block_size
    if workload.hides_sharing:
        return ["this trace does not say what prompts share: no prompt can hit another's pages"]
    if block_size is None or page_size >= block_size:
        return []
    said = (
        f"hit tokens are a lower bound: what prompts share inside one of the trace's blocks of"
        f" {block_size} tokens can't be seen with pages of {page_size}"
    )
    return [said]


def _gb(size: int) -> str:
    return f"{size // GB:,} GB" if size >= 10 * GB else f"{size / GB:.1f} GB"

"""Several ranks of one instance: they answer as one does, and one that is silent is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.run.model_choice import ModelChoice  # noqa: E402
from refimpl.run.options import Options  # noqa: E402
from refimpl.run.rank_setup import RankChoice  # noqa: E402
from refimpl.run.real import Served, serve  # noqa: E402
from refimpl.run.setup import Simulation  # noqa: E402
from refimpl.workload.request import unscripted  # noqa: E402
from refimpl.workload.scenario import parse_scenario  # noqa: E402

pytestmark = pytest.mark.live

CHATS = "multi_turn:clients=3,rounds=3,request_length=40,output_length=5,vocab=256,rate=0"
PAGE_BYTES = 1 << 12  # of no consequence where --hicache-size is not given


def simulation(tp_size: int, folder: Path | None = None) -> Simulation:
    """Chats that fit into L1 and L2 in part; with a folder, L3 has the rest."""
    extra = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 8})
    options = Options(
        page_size=8,
        max_total_tokens=160,
        enable_hierarchical_cache=True,
        hicache_ratio="1.5",
        hicache_storage_backend="file" if folder else None,
        hicache_storage_backend_extra_config=extra if folder else None,
        hicache_storage_prefetch_policy="wait_complete" if folder else None,
        tp_size=tp_size,
    )
    return Simulation(options, unscripted(parse_scenario(CHATS, 1, 8)), PAGE_BYTES)


def served(
    tp_size: int, model: str, folder: Path | None = None, transport: str = "thread"
) -> Served:
    choice = ModelChoice(model, "reference")
    ranks = RankChoice(transport, limit_s=30)
    return serve("ranks", simulation(tp_size, folder), choice, choice.open(0), ranks=ranks)


@pytest.mark.parametrize("model", ["tiny-gqa", "tiny-mla"])
def test_one_two_and_four_ranks_give_equal_tokens(model: str, tmp_path: Path) -> None:
    done = [served(size, model, tmp_path / str(size)) for size in (1, 2, 4)]
    assert done[0].outputs == done[1].outputs == done[2].outputs
    for each in done:
        hits = each.figures["hit_tokens"]
        assert hits["host"] + hits["storage"] > 0
        assert each.figures["pages_moved"]["load_back"] > 0
        assert each.store_failures == 0


def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    alone = served(1, "tiny-gqa", tmp_path / "one")
    pair = served(2, "tiny-gqa", tmp_path / "two", "process")
    assert pair.outputs == alone.outputs
    assert pair.figures["pages_moved"]["load_back"] > 0
    assert pair.figures["hit_tokens"]["storage"] > 0

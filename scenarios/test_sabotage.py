"""Every check can fail: one line of a copy of the engine is spoiled, and a named check must see it.

A check is one of ``sabotage_probe.py``, or ``story NAME``, a story of scenarios/test_stories.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from scenarios.sabotage_probe import CHECKS
from scenarios.tidy import ROOT

RED: Final = "AssertionError"
# An engine that can't be imported or calls what is not there proves nothing.
BROKEN: Final = ("ImportError", "SyntaxError", "NameError", "AttributeError", "TypeError")


@dataclass(frozen=True)
class Sabotage:
    """``old``, which stands in ``file`` once, becomes ``new``; then ``check`` must be red.

    ``says`` is part of what it says.
    """

    name: str
    file: str
    old: str
    new: str
    check: str = "swarm"
    says: str = RED


SABOTAGES: Final = (
    Sabotage(
        "pages that come from L3 are not told of",
        "core/cache.py",
        "self.tree.residency.place_l2(pages, slots)",
        "self.tree.residency.fill_l2(pages, slots)\n        for page in pages: page.l2_state = 2",
        says="events tell of other pages",
    ),
    Sabotage(
        "pages fetched for somebody have no tokens to tell",
        "core/prefetch.py",
        "        self._cache.tree.residency.naming(op.request, first, op.first + op.landed)\n",
        "",
        says="events tell of other pages",
    ),
    Sabotage(
        "an op that ends keeps its pin",
        "core/ops.py",
        "            self._tree.unpin(op.anchor)",
        "            pass",
        says="pins",
    ),
    Sabotage(
        "a locked node is evicted",
        "core/evict.py",
        "node.l1_kids == 0 and node.locks == 0",
        "node.l1_kids == 0",
    ),
    Sabotage(
        "pages count as landed before they have",
        "core/prefetch.py",
        "        op.landed = pages\n",
        "        op.landed = len(op.slots)\n",
        "swarm 4",
    ),
    Sabotage(
        "a page still on its way to L2 is stored",
        "core/writing.py",
        "if p.l2_state == READY and p.offered",
        "if p.l2_state and p.offered",
        says="copied before it was there",
    ),
    Sabotage(
        "the namespace is forgotten",
        "core/request.py",
        "self.seed = namespace_seed(submit.extra_key, submit.cache_salt, submit.lora_id)",
        "self.seed = namespace_seed()",
        "unwatched_swarm",
        says="not the request's own",
    ),
    Sabotage(
        "no token is left to compute",
        "core/policy.py",
        "    return (prompt_tokens - 1) // page_size",
        "    return prompt_tokens // page_size",
        says="stands still",
    ),
    Sabotage(
        "slots of pages that never came are lost",
        "core/prefetch.py",
        "            self._cache.host.pool.give_back(op.slots[pages:])",
        "            pass",
        "swarm 24",
        says="slots are out",
    ),
    Sabotage(
        "the timeout has no maximum",
        "core/policy.py",
        "    return min(config.timeout_max_ns, timeout)",
        "    return timeout",
        "timeout",
        "not that of the formula",
    ),
    Sabotage(
        "a deadline is met one nanosecond late",
        "core/prefetch.py",
        "now >= self._deadline(op, rid)",
        "now > self._deadline(op, rid)",
        "timeout",
        "at its deadline",
    ),
    Sabotage(
        "fetched pages enter below a parent that has gone",
        "core/cache.py",
        "        if match.pages < first:\n            self.host.pool.give_back(slots)",
        "        if match.pages < 0:\n            self.host.pool.give_back(slots)",
        "swarm 23",
    ),
    Sabotage(
        "pages that were not backed up are taken for it",
        "core/writing.py",
        "self._tree.residency.unfilled_l2(lost)",
        "self._tree.residency.filled_l2(lost)",
    ),
    Sabotage(
        "the latest used goes first",
        "core/evict.py",
        '    "lru": lambda node: node.touched,',
        '    "lru": lambda node: -node.touched,',
        "page_lru",
        "not what a page LRU hits",
    ),
    Sabotage(
        "what a failed write left out is never offered again",
        "core/writing.py",
        "            page.offered = 0\n            node = page.node\n",
        "            node = page.node\n",
        "store_again",
        "written to L3",
    ),
    Sabotage(
        "short host runs are loaded back",
        "core/policy.py",
        "pages * config.page_size >= config.load_back_threshold_tokens",
        "pages >= 0",
        "load_back",
        "pages loaded",
    ),
    Sabotage(
        "selective writing does not count the creation",
        "core/policy.py",
        "            return config.selective_hits",
        "            return config.selective_hits + 1",
        "selective",
        "wrote",
    ),
    Sabotage(
        "who leaves an L3 read stays in its list",
        "core/prefetch.py",
        "            del op.waiters[request.rid]",
        "            pass",
    ),
    Sabotage(
        "an end is told twice",
        "core/scheduler.py",
        "        self._out.commands.append(Reply(request.rid, first, reason))",
        "        self._out.commands.extend([Reply(request.rid, first, reason)] * 2)",
        says="after its end",
    ),
    Sabotage(
        "a split leaves the upper part unlocked",
        "core/tree.py",
        "        upper.locks, upper.l2_locks = lower.locks, lower.l2_locks\n",
        "        upper.locks, upper.l2_locks = 0, lower.l2_locks\n",
        says="pins at or below",
    ),
    Sabotage(
        "an abort frees the slots of a batch in flight",
        "core/scheduler.py",
        "        elif not self._is_in_batch(request):",
        "        else:",
        "swarm 3",
    ),
    Sabotage(
        "a page is named before its last token is computed",
        "core/scheduler.py",
        "        full = request.computed // self._page_size",
        "        full = request.tokens // self._page_size",
        # Seeds decide whether a tier's content, or an insert that finds no page, is seen first.
    ),
    Sabotage(
        "a page computed twice keeps two slots",
        "core/cache.py",
        "            self.device.pool.give_back(slots[:known])",
        "            pass",
        says="slots are out",
    ),
    Sabotage(
        "a request that loses its slots still decodes",
        "core/scheduler.py",
        "        self._out.commands.append(Withdraw(request.rid))\n"
        "        self._out.facts.append(Retracted(request.rid))",
        "        self._out.facts.append(Retracted(request.rid))",
        "swarm 3",
        says="who decodes is not agreed",
    ),
    Sabotage(
        "a running request is flushed",
        "core/engine.py",
        '            self._out.commands.append(Answer("flush", False,',
        "            self.cache.flush()\n"
        '            self._out.commands.append(Answer("flush", False,',
    ),
    Sabotage(
        "a failed load counts as arrived",
        "core/admission.py",
        "            if request.rid in failed or any(",
        "            if any(",
        "swarm 4",
    ),
    Sabotage(
        "the least often used does not go first",
        "core/evict.py",
        '    "lfu": lambda node: (node.hits, node.touched),',
        '    "lfu": lambda node: (0, node.touched),',
        "story policies/lfu",
    ),
    Sabotage(
        "an adapter shares pages with the plain model",
        "core/request.py",
        "submit.cache_salt, submit.lora_id)",
        "submit.cache_salt)",
        "story namespaces/",
    ),
)
named = pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda each: each.name.replace(" ", "_"))


def copied(folder: Path) -> Path:
    """A copy of the engine and of what checks it, apart from everything that is installed."""
    for top in ("refimpl", "scenarios"):
        shutil.copytree(ROOT / top, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_check(check: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a check in a copy; the modules of the current folder come before all others."""
    kind, _, story = check.partition(" ")
    module = ["scenarios.sabotage_probe", *check.split()]
    if kind == "story":
        module = ["pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-k", story]
        module.append("scenarios/test_stories.py")
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", *module],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@named
def test_a_spoiled_engine_is_caught(sabotage: Sabotage, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    file = folder / "refimpl" / sabotage.file
    text = file.read_text(encoding="utf-8")
    assert text.count(sabotage.old) == 1, f"{sabotage.file} has changed: find the line anew"
    file.write_text(text.replace(sabotage.old, sabotage.new), encoding="utf-8")
    done = run_check(sabotage.check, folder)
    assert done.returncode == 1, f"nothing noticed that {sabotage.name}\n{done.stdout[-500:]}"
    said = done.stdout + done.stderr
    assert RED in said, said[-2000:]
    assert not any(error in said for error in BROKEN), said[-2000:]
    assert sabotage.says in said, said[-2000:]


@pytest.mark.parametrize(
    "check", [name for name in CHECKS if "swarm" not in name]
)  # see test_swarm
def test_the_engine_as_it_is_passes_the_check(check: str, tmp_path: Path) -> None:
    done = run_check(check, copied(tmp_path))
    assert done.returncode == 0, done.stderr

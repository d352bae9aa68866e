"""``--explain RID``: why a request hit or missed each tier, in plain words.

A listener of the record: it notes what was decided about the request and who computed what before,
and makes sentences of that at the end. Must not know: engines. Called by: the command line.
"""

from __future__ import annotations

from refimpl.config import require
from refimpl.core.policy import usable_pages
from refimpl.facts import Admitted, Finished, Inserted, Prefetch, Skipped
from refimpl.keys import TokenPrompt, namespace_seed
from refimpl.messages import Fact
from refimpl.run.fact_words import sentence
from refimpl.run.setup import Simulation
from refimpl.units import NS_PER_MS
from refimpl.workload.request import RequestSpec


class Explanation:
    """What there is to say about one request."""

    def __init__(self, simulation: Simulation, rid: int) -> None:
        specs = {spec.rid: spec for spec in simulation.workload.requests}
        require(
            rid in specs, f"--explain {rid}: there is no such request; they are 1 to {len(specs)}"
        )
        self._specs = specs
        self._spec = specs[rid]
        self._config = simulation.engine
        self._page_size = simulation.options.page_size
        self._seed = _seed(self._spec)
        self._keys = self._spec.prompt.page_keys(self._page_size, self._seed)
        self._facts: list[tuple[int, Fact]] = []
        self._instance = 0
        self._admitted: tuple[int, Admitted] | None = None
        self._computed_by: dict[int, tuple[int, int]] = {}  # rid -> (time, instance), before it

    def see(self, now: int, instance: int, fact: Fact) -> None:
        """One fact of the record."""
        if isinstance(fact, Inserted) and self._admitted is None:
            self._computed_by.setdefault(fact.rid, (now, instance))
        if getattr(fact, "rid", None) != self._spec.rid:
            return
        self._instance = instance
        self._facts.append((now, fact))
        if isinstance(fact, Admitted):
            self._admitted = (now, fact)

    def lines(self) -> list[str]:
        """The explanation, a sentence a line."""
        rid, prompt = self._spec.rid, self._spec.prompt.length
        usable = usable_pages(prompt, self._page_size)
        head = (
            f"request {rid}: {prompt} tokens, {len(self._keys)} full pages of {self._page_size},"
            f" of which {usable} may hit (one token is always left to compute)"
        )
        if self._admitted is None:
            return [head, *self._ends(), "it was never admitted, so it hit nothing"]
        return [head, *self._tiers(usable), *self._events(), *self._ends()]

    def _tiers(self, usable: int) -> list[str]:
        assert self._admitted is not None
        _, admitted = self._admitted
        page = self._page_size
        device, host, storage = (
            admitted.device_tokens // page,
            admitted.host_tokens // page,
            admitted.storage_tokens // page,
        )
        lines = [
            f"L1 device: {device} pages hit",
            f"L2 host: {host} pages hit" if self._config.cache.has_l2 else "L2 host: off",
            f"L3 storage: {storage} pages hit"
            if self._config.storage_backend
            else "L3 storage: off",
        ]
        hit = device + host + storage
        if hit >= usable:
            return [*lines, "every page that may hit did"]
        return [
            *lines,
            f"page {hit + 1} of {usable} was the first to be computed: {self._why(hit)}",
        ]

    def _why(self, index: int) -> str:
        """Why the page at ``index`` was in no tier that it could be taken from."""
        if not self._config.reuse:
            return "nothing is kept for later requests (--disable-radix-cache)"
        maker = self._maker(index)
        if maker is None:
            return self._why_new(index)
        if maker not in self._computed_by:
            return f"request {maker} has the same page and had not finished computing it yet"
        at, instance = self._computed_by[maker]
        if instance != self._instance:
            return (
                f"request {maker} computed it on instance {instance}, whose L1 and L2 are its own,"
                f" and this one ran on instance {self._instance}"
            )
        since = f"request {maker} computed it at {at / NS_PER_MS:,.1f} ms; since then it"
        if self._skipped("load_back"):
            return f"{since} went to L2, and it was not loaded back"
        return f"{since} {self._gone()}{self._late()}"

    def _gone(self) -> str:
        """Where a page went that neither local tier has."""
        cache = self._config.cache
        if not cache.has_l2:
            return "was evicted from L1"
        if cache.write_policy == "write_through":
            return "was evicted from L1 and L2"
        return f"was evicted from L1, and L2 has it no more or never had ({cache.write_policy})"

    def _late(self) -> str:
        """What to add when L3 was reading the page and the request went on without it."""
        steps = {fact.step for _, fact in self._facts if isinstance(fact, Prefetch)}
        return "; L3 had it, and not all of that arrived in time" if "stopped" in steps else ""

    def _why_new(self, index: int) -> str:
        for spec in self._earlier():
            if _seed(spec) != self._seed:
                keys = spec.prompt.page_keys(self._page_size, self._seed)
                if len(keys) > index and keys[index] == self._keys[index]:
                    return f"request {spec.rid} had the same tokens in another namespace"
        return "no request before it had the same prefix that far"

    def _maker(self, index: int) -> int | None:
        """Who had the page at ``index`` before, in prompt or answer: best one that computed it."""
        makers = [
            spec.rid
            for spec in self._earlier()
            if _seed(spec) == self._seed and self._has_page(spec, index)
        ]
        computed = [rid for rid in makers if rid in self._computed_by]
        return computed[-1] if computed else makers[-1] if makers else None

    def _has_page(self, spec: RequestSpec, index: int) -> bool:
        prompt, page = spec.prompt, self._page_size
        if isinstance(prompt, TokenPrompt) and prompt.script is not None:
            prompt = TokenPrompt(prompt.tokens + prompt.script[: spec.output_tokens])
        keys = prompt.page_keys(page, self._seed)
        return len(keys) > index and keys[index] == self._keys[index]

    def _earlier(self) -> list[RequestSpec]:
        return [spec for rid, spec in self._specs.items() if rid < self._spec.rid]

    def _skipped(self, action: str) -> bool:
        return any(isinstance(f, Skipped) and f.action == action for _, f in self._facts)

    def _events(self) -> list[str]:
        return [line for now, fact in self._facts if (line := sentence(now, fact))]

    def _ends(self) -> list[str]:
        return [
            f"it ended at {now / NS_PER_MS:,.1f} ms after {fact.tokens} tokens: {fact.reason}"
            for now, fact in self._facts
            if isinstance(fact, Finished)
        ]


def _seed(spec: RequestSpec) -> bytes:
    return namespace_seed(spec.extra_key, spec.cache_salt, spec.lora_id)

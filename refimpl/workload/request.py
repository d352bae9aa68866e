"""A workload: requests with the order and the times at which they want to be sent.

One definition serves the simulator, the engine and the load generator.
Must not know: caches, engines, how a request is carried out. Called by: scenario, trace, run, perf.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refimpl.keys import Prompt, TokenPrompt
from refimpl.messages import Submit


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request, sent at ``arrival_ns`` and ``think_ns`` after all of ``after`` have finished."""

    rid: int
    prompt: Prompt
    output_tokens: int
    arrival_ns: int = 0
    after: tuple[int, ...] = ()  # rids
    think_ns: int = 0
    session: int = 0
    turn: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    priority: int = 0

    def submit(self) -> Submit:
        """The event that hands it to an engine."""
        return Submit(
            self.rid,
            self.prompt,
            self.output_tokens,
            self.extra_key,
            self.cache_salt,
            self.lora_id,
            self.priority,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their rids, which count from 1; at most ``parallel_max`` in flight."""

    name: str
    requests: list[RequestSpec]
    parallel_max: int | None = None
    block_size: int | None = None  # of a trace that names blocks
    hides_sharing: bool = False  # a trace that does not say what its prompts have in common


def unscripted(workload: Workload) -> Workload:
    """The same prompts without a script: the model says what comes out."""
    requests = []
    for spec in workload.requests:
        assert isinstance(spec.prompt, TokenPrompt)
        requests.append(replace(spec, prompt=TokenPrompt(spec.prompt.tokens, None)))
    return replace(workload, requests=requests)

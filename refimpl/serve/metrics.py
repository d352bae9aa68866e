"""Prometheus metrics as folds over the record: SGLang's names, and what they lack (mission M10).

Called on the engine's thread after each turn, scraped from any. All label sets exist from the start, so
that "never happened" reads 0 (field report V09); counters only grow, and a hit is counted once, when its
request is first admitted (V01, V03, V04).
Must not know: HTTP, what an engine decides. Called by: bridge, loads, gauges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry

from refimpl.facts import (
    Admitted,
    Demoted,
    Evicted,
    Finished,
    LoadedBack,
    Matched,
    Prefetch,
    Retracted,
    Skipped,
    Wrote,
)
from refimpl.messages import AnyEvent, BatchDone, Fact, RunBatch, Step, Submit
from refimpl.run.record import Row
from refimpl.serve.copy_times import CopyTimes, Moved
from refimpl.serve.instruments import Instruments
from refimpl.units import NS_PER_S

TIERS: Final = ("device", "host", "storage")
OUTCOMES: Final = ("completed", "stopped", "timed_out", "failed", "revoked")
# Why what L3 had did not serve (spec 11.2): the core's reasons in upstream's words.
UNFULFILLED: Final = {
    "below_threshold": "below_threshold",
    "host_capacity": "host_capacity",
    "nobody_waits": "dropped",
}
PROMPT_BUCKETS: Final = (1024, 4096, 16_384, 65_536)  # upper bounds of prompt lengths, in tokens
# Upper bounds in seconds, upstream's (spec 11.4).
TTFT_S: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
FINE_S: Final = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1,
    2,
    4,
    8,
)
END_S: Final = (0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 100, 200, 400, 600, 1200, 2400)
# Ours: a prefix that is loaded back answers in milliseconds.
PREFILL_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
COUNTS: Final = (16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)


def prompt_bucket(tokens: int) -> str:
    """The label of a prompt of that length."""
    bound = next((bound for bound in PROMPT_BUCKETS if tokens <= bound), None)
    return f"over {PROMPT_BUCKETS[-1]}" if bound is None else f"to {bound}"


class Metrics:
    """All counters and histograms of one engine. ``page_bytes`` is a page of all its ranks.

    ``dp_rank`` is its number where there are several engines.
    """

    def __init__(
        self,
        model: str,
        page_size: int,
        page_bytes: int,
        moved: Moved,
        dp_rank: int | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model, "engine_type": "unified"}
        if dp_rank is not None:
            self.labels["dp_rank"] = str(dp_rank)
        self.page_size = page_size
        self.hit_tokens = dict.fromkeys(TIERS, 0)
        self.prompt_tokens = 0  # of all that were admitted
        self.prefetches = dict.fromkeys(OUTCOMES, 0)
        self.last_hit_rate = 0.0  # of the last batch that admitted somebody
        self.prefill_busy_ns = 0
        self._uncached: dict[int, int] = {}  # rid -> tokens to compute, while it waits
        self._arrived: dict[int, int] = {}  # rid -> when, while it waits
        self._prefill_begun: int | None = None
        self._generated: dict[int, int] = {}  # tokens by second, of the last two seconds
        make = Instruments(self.registry, self.labels)
        self._make_request_instruments(make)
        self._make_cache_instruments(make)
        self.copies = CopyTimes(make, page_size, page_bytes, moved)
        self._folds: dict[type[Fact], Callable[[Any, int], None]] = {
            Admitted: self._on_admitted,
            Demoted: self._on_demoted,
            Evicted: self._on_evicted,
            Finished: self._on_finished,
            LoadedBack: self._on_loaded_back,
            Matched: self._on_matched,
            Prefetch: self._on_prefetch,
            Retracted: self._on_retracted,
            Skipped: self._on_skipped,
            Wrote: self._on_wrote,
        }

    def _make_request_instruments(self, make: Instruments) -> None:
        kinds = ("true", "false")
        self._ttft = make.histograms(
            "sglang:time_to_first_token_seconds", "from submission", "is_streaming", kinds, TTFT_S
        )
        self._ttft_by_prompt = make.histograms(
            "hicache:time_to_first_token_by_prompt_seconds",
            "from submission, by prompt length in tokens",
            "prompt_tokens",
            [prompt_bucket(bound) for bound in (*PROMPT_BUCKETS, PROMPT_BUCKETS[-1] + 1)],
            PREFILL_S + TTFT_S[-6:],
        )
        self._end = make.histograms(
            "sglang:e2e_request_latency_seconds", "until the end", "is_streaming", kinds, END_S
        )
        self._requests = make.counters(
            "sglang:num_requests_total", "requests that are over", "is_streaming", kinds
        )
        self._aborted = make.counter("sglang:num_aborted_requests_total", "requests aborted")
        self._refused = make.counter("hicache:refused_requests_total", "requests refused")
        self._between = make.histogram(
            "sglang:inter_token_latency_seconds", "between tokens of a stream", FINE_S
        )
        self._per_token = make.histogram(
            "sglang:request_time_per_output_token_seconds", "decode time over its tokens", FINE_S
        )
        self._queue_time = make.histogram(
            "sglang:queue_time_seconds", "from submission to the first admission", TTFT_S
        )
        self._prompt_tokens = make.counter("sglang:prompt_tokens_total", "prompt tokens admitted")
        self._generation_tokens = make.counter("sglang:generation_tokens_total", "tokens generated")
        self._effective = make.counter(
            "sglang:prefill_effective_tokens_total", "prompt tokens that were computed"
        )
        self._uncached_prompt = make.histogram(
            "sglang:uncached_prompt_tokens_histogram", "prompt tokens computed a request", COUNTS
        )
        self._prefill_latency = make.histogram(
            "hicache:prefill_latency_seconds", "a prefill batch, its load-backs included", PREFILL_S
        )
        self._retracted = make.counter(
            "sglang:num_retracted_requests_total", "retractions for lack of L1"
        )

    def _make_cache_instruments(self, make: Instruments) -> None:
        self._cached = make.counters(
            "sglang:cached_tokens_total", "prompt tokens found, by tier", "cache_source", TIERS
        )
        self._skipped_tokens = make.counter(
            "hicache:prefill_tokens_skipped_total", "prompt tokens that needed no computing"
        )
        self._evicted = make.counter("sglang:evicted_tokens_total", "tokens that left L1")
        self._dropped = make.counters(
            "sglang:hicache_dropped_tokens_total",
            "tokens that left the last local tier",
            "reason",
            ("host_pressure", "copy_failed", "write_through_unbacked_eviction"),
        )
        self._prefetched = make.counter("sglang:prefetched_tokens_total", "tokens L3 -> L2")
        self._stored = make.counter("sglang:backuped_tokens_total", "tokens L2 -> L3")
        self._lost = make.counter(
            "sglang:hicache_backup_dropped_tokens_total", "tokens whose write failed"
        )
        self._probed = make.counter(
            "sglang:storage_prefetch_hit_tokens_total", "tokens that L3 said it has"
        )
        self._unfulfilled = make.counters(
            "sglang:storage_prefetch_unfulfilled_tokens_total",
            "of these, not served",
            "reason",
            tuple(UNFULFILLED.values()),
        )
        self._outcomes = make.counters(
            "hicache:prefetches_total", "reads of L3 by how they ended", "outcome", OUTCOMES
        )

    # ---- on the engine's thread -----------------------------------------------------------------

    def took(self, events: Iterable[AnyEvent], step: Step, now: int) -> None:
        """One turn: what had happened, and what came of it."""
        for event in events:
            if isinstance(event, BatchDone):
                self._on_batch_done(event, now)
            elif isinstance(event, Submit):
                self._arrived[event.rid] = now
            else:
                self.copies.ended(event, now)
        for command in step.commands:
            if not isinstance(command, RunBatch):
                self.copies.began(command, now)
            elif not command.is_decode:
                self._prefill_begun = now
        admitted = [fact for fact in step.facts if isinstance(fact, Admitted)]
        if admitted:
            hits = sum(_hits(fact) for fact in admitted)
            self.last_hit_rate = hits / max(sum(fact.prompt_tokens for fact in admitted), 1)
        for fact in step.facts:
            fold = self._folds.get(type(fact))
            if fold is not None:
                fold(fact, now)

    def followed(self, gap_ns: int, tokens: int) -> None:
        """``tokens`` tokens of a stream came ``gap_ns`` after the one before them."""
        for _ in range(tokens):
            self._between.observe(gap_ns / tokens / NS_PER_S)

    def ended(self, row: Row, *, is_streaming: bool) -> None:
        """A request is over. One that never had a token has no time to it (field report W02)."""
        kind = "true" if is_streaming else "false"
        if row.end_ns < 0 or row.finish.startswith("error"):
            self._refused.inc()
            return
        self._requests[kind].inc()
        if row.finish == "abort":
            self._aborted.inc()
        self._end[kind].observe((row.end_ns - row.arrival_ns) / NS_PER_S)
        if row.first_token_ns < 0:
            return
        self._ttft[kind].observe(row.ttft_ns / NS_PER_S)
        self._ttft_by_prompt[prompt_bucket(row.prompt_tokens)].observe(row.ttft_ns / NS_PER_S)
        if row.output_tokens > 1:
            decode_ns = row.end_ns - row.first_token_ns
            self._per_token.observe(decode_ns / (row.output_tokens - 1) / NS_PER_S)

    # ---- read at a scrape -----------------------------------------------------------------------

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were found in no tier."""
        return self.prompt_tokens - sum(self.hit_tokens.values())

    @property
    def waiting_uncached_tokens(self) -> int:
        """Prompt tokens of waiting requests that were in no local tier when they came."""
        return sum(self._uncached.values())

    def generated_per_s(self, now: int) -> int:
        """Tokens generated in the last full second."""
        return self._generated.get(now // NS_PER_S - 1, 0)

    # ---- folds ----------------------------------------------------------------------------------

    def _on_batch_done(self, event: BatchDone, now: int) -> None:
        if self._prefill_begun is not None:
            busy_ns, self._prefill_begun = now - self._prefill_begun, None
            self.prefill_busy_ns += busy_ns
            self._prefill_latency.observe(busy_ns / NS_PER_S)
        tokens = sum(map(len, event.tokens.values()))
        self._generation_tokens.inc(tokens)
        second = now // NS_PER_S
        self._generated = {
            at: count for at, count in self._generated.items() if at >= second - 1
        } | {second: self._generated.get(second, 0) + tokens}

    def _on_matched(self, fact: Matched, _: int) -> None:
        self._uncached[fact.rid] = (fact.pages - fact.l1 - fact.l2) * self.page_size

    def _on_admitted(self, fact: Admitted, now: int) -> None:
        self._uncached.pop(fact.rid, None)
        self._queue_time.observe((now - self._arrived.pop(fact.rid, now)) / NS_PER_S)
        by_tier = (fact.device_tokens, fact.host_tokens, fact.storage_tokens)
        for tier, tokens in zip(TIERS, by_tier, strict=True):
            self.hit_tokens[tier] += tokens
            self._cached[tier].inc(tokens)
        self.prompt_tokens += fact.prompt_tokens
        self._prompt_tokens.inc(fact.prompt_tokens)
        self._skipped_tokens.inc(_hits(fact))
        computed = fact.prompt_tokens - _hits(fact)
        self._effective.inc(computed)
        self._uncached_prompt.observe(computed)

    def _on_finished(self, fact: Finished, _: int) -> None:
        self._uncached.pop(fact.rid, None)
        self._arrived.pop(fact.rid, None)

    def _on_retracted(self, fact: Retracted, _: int) -> None:
        del fact
        self._retracted.inc()

    def _on_demoted(self, fact: Demoted, _: int) -> None:
        self._evicted.inc(fact.pages * self.page_size)

    def _on_evicted(self, fact: Evicted, _: int) -> None:
        tokens = fact.pages * self.page_size
        if fact.tier == "device":
            self._evicted.inc(tokens)
        if fact.reason in ("host_pressure", "copy_failed"):
            self._dropped[fact.reason].inc(tokens)
        elif fact.tier == "device" and fact.reason == "capacity":
            self._dropped["write_through_unbacked_eviction"].inc(tokens)

    def _on_loaded_back(self, fact: LoadedBack, _: int) -> None:
        self.copies.loaded_back(fact.pages)

    def _on_prefetch(self, fact: Prefetch, _: int) -> None:
        tokens = fact.pages * self.page_size
        if fact.step in self.prefetches:
            self.prefetches[fact.step] += 1
            self._outcomes[fact.step].inc()
        if fact.step == "probed":
            self._probed.inc(tokens)
        elif fact.step in ("completed", "failed", "stopped"):
            self._prefetched.inc(tokens)
        elif fact.step == "revoked" and fact.reason in UNFULFILLED:
            self._unfulfilled[UNFULFILLED[fact.reason]].inc(tokens)

    def _on_skipped(self, fact: Skipped, _: int) -> None:
        if fact.action == "prefetch" and fact.reason == "host_capacity":
            self._unfulfilled["host_capacity"].inc(fact.pages * self.page_size)

    def _on_wrote(self, fact: Wrote, _: int) -> None:
        self._lost.inc((fact.pages - fact.done) * self.page_size)
        if fact.tier == "storage":
            self._stored.inc(fact.done * self.page_size)


def _hits(fact: Admitted) -> int:
    return fact.device_tokens + fact.host_tokens + fact.storage_tokens

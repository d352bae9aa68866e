"""The running requests: they decode in lockstep, so what happens to each is planned in steps.

A request joins with its context; from then on its length follows from the step counter alone.
Nothing is done for it until a page of it fills, its slots run out or its last token comes, so the
cost of a batch is in what changes, not in how many run.
Must not know: tree, tiers, time, why a request runs. Called by: scheduler.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TypeAlias

from refimpl.core.request import RUNNING, Request
from refimpl.units import ceil_div

Plan: TypeAlias = list[tuple[int, int, int, Request]]  # heap of (step, rid, epoch, request)


class Decoding:
    """The decode batch and its step counter."""

    __slots__ = (
        "_base_tokens",
        "_end_steps",
        "_ends",
        "_fills",
        "_page_size",
        "_short",
        "requests",
        "step",
    )

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.step = 0  # decode steps since the engine began
        self.requests: dict[int, tuple[Request, int]] = {}  # rid -> (request, step it joined at)
        self._base_tokens = 0  # sum over requests of (computed at joining - step of joining)
        self._end_steps = 0  # sum over requests of the step of their last token
        self._fills: Plan = []  # when a page of it is full
        self._short: Plan = []  # when it needs another slot
        self._ends: Plan = []  # when its last token comes

    @property
    def context_tokens(self) -> int:
        """Sum of the running requests' contexts, in tokens with KV."""
        return self._base_tokens + len(self.requests) * self.step

    @property
    def remaining_tokens(self) -> int:
        """Sum of the output tokens still to come."""
        return self._end_steps - len(self.requests) * self.step

    def join(self, request: Request) -> None:
        """``request`` has produced a token and decodes from now on."""
        assert request.remaining > 0 and request.computed == request.tokens - 1
        self.requests[request.rid] = (request, self.step)
        self._base_tokens += request.computed - self.step
        self._end_steps += request.remaining + self.step
        self._plan(self._ends, self.step + request.remaining, request)
        self._plan(self._fills, self._next_fill(request), request)
        self._plan(self._short, self._runs_short(request), request)

    def leave(self, request: Request) -> None:
        """``request`` decodes no longer; its counters are brought up to date."""
        self.settle(request)
        del self.requests[request.rid]
        self._base_tokens -= request.computed - self.step
        self._end_steps -= request.remaining + self.step

    def settle(self, request: Request) -> None:
        """Bring ``computed`` and ``tokens`` up to the current step."""
        _, since = self.requests[request.rid]
        steps = self.step - since
        if steps:
            request.computed += steps
            request.tokens += steps
            self.requests[request.rid] = (request, self.step)

    def steps_to_end(self) -> int:
        """Steps until the first request produces its last token; at least one request runs."""
        return self._first(self._ends)[0] - self.step

    def steps_to_short(self) -> int:
        """Steps all requests can take with the slots they have."""
        return self._first(self._short)[0] - self.step

    def short_within(self, steps: int) -> list[tuple[Request, int]]:
        """Requests that can't take ``steps`` steps with the slots they have, and how many they lack."""
        found, kept = [], []
        goal = self.step + steps
        while (entry := self._peek(self._short)) and entry[0] < goal:
            kept.append(heappop(self._short))
            found.append((entry[3], ceil_div(goal - entry[0], self._page_size)))
        for entry in kept:
            heappush(self._short, entry)
        return found

    def add_slots(self, request: Request, slots: list[int]) -> None:
        """``request`` got slots it lacked."""
        self.settle(request)
        request.slots.extend(slots)
        self._plan(self._short, self._runs_short(request), request)

    def advance(self, steps: int) -> tuple[list[Request], list[Request]]:
        """``steps`` steps ran: requests with a page that filled, and those that are at their end."""
        self.step += steps
        filled, ended = [], []
        while (entry := self._peek(self._fills)) and entry[0] <= self.step:
            request = heappop(self._fills)[3]
            self.settle(request)
            filled.append(request)
            self._plan(self._fills, self._next_fill(request), request)
        while (entry := self._peek(self._ends)) and entry[0] <= self.step:
            ended.append(heappop(self._ends)[3])
        return filled, ended

    # ---- plans ----------------------------------------------------------------------------------

    def _next_fill(self, request: Request) -> int:
        return self.step + self._page_size - request.computed % self._page_size

    def _runs_short(self, request: Request) -> int:
        owned = (request.inserted + len(request.slots)) * self._page_size
        return self.step + owned - request.computed

    def _plan(self, heap: Plan, step: int, request: Request) -> None:
        heappush(heap, (step, request.rid, request.epoch, request))

    def _first(self, heap: Plan) -> tuple[int, int, int, Request]:
        entry = self._peek(heap)
        assert entry is not None
        return entry

    def _peek(self, heap: Plan) -> tuple[int, int, int, Request] | None:
        while heap:
            step, rid, epoch, request = heap[0]
            is_current = request.state == RUNNING and request.epoch == epoch
            if is_current and rid in self.requests and not self._is_outdated(heap, step, request):
                return heap[0]
            heappop(heap)
        return None

    def _is_outdated(self, heap: Plan, step: int, request: Request) -> bool:
        """A slot came meanwhile: the entry planned without it is void."""
        if heap is not self._short:
            return False
        _, since = self.requests[request.rid]
        owned = (request.inserted + len(request.slots)) * self._page_size
        return since + owned - request.computed != step

"""Scenario families of conversations: each turn repeats all that was said before.

Sessions start as an open stream; a turn is closed: it waits for the answer to the one before.
Must not know: caches, how scenario text is parsed. Called by: scenario.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from refimpl.config import require
from refimpl.keys import TokenPrompt
from refimpl.units import NS_PER_MS, Random
from refimpl.workload.draws import Draws, Purpose
from refimpl.workload.family import Family, count, flag, rate
from refimpl.workload.request import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurn(Family):
    """Chat: clients that each hold one conversation, whose prompts grow from round to round."""

    name: ClassVar[str] = "multi_turn"
    grows_with: ClassVar[tuple[str, ...]] = ("clients", "rounds", "request_length", "system_length")

    clients: int = count(80, "conversations")
    rounds: int = count(10, "turns of a conversation")
    request_length: int = count(2048, "tokens the user adds each turn")
    system_length: int = count(0, "tokens of the system prompt; 0: none", least=0)
    systems: int = count(1, "different system prompts, given to the clients in turn")
    rate: int = rate(16, "conversations started a second, Poisson; 0: all at once")
    think_ms: int = count(0, "ms between an answer and the next turn", least=0)
    round_barrier: bool = flag(
        default=False, meaning="a round starts when all of the round before has finished"
    )

    def request_count(self) -> int:
        """One a turn."""
        return self.clients * self.rounds

    def token_count(self) -> int:
        """Turn k holds the system prompt, k messages and k answers."""
        repeats = self.rounds * (self.rounds + 1) // 2
        said = (self.request_length + self.output_length) * repeats
        return self.clients * (self.rounds * self.system_length + said)

    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """Requests round by round, in the order in which the clients started."""
        del page_size
        systems = [
            draws.tokens(Purpose.SYSTEM, self.system_length, index)
            for index in range(min(self.systems, self.clients))
        ]
        dialogues = [
            _dialogue(
                systems[client % len(systems)],
                [
                    draws.tokens(Purpose.QUESTION, self.request_length, client, turn)
                    for turn in range(self.rounds)
                ],
                _answers(draws, client, self.rounds, self.output_length),
            )
            for client in range(self.clients)
        ]
        return _in_rounds(
            dialogues,
            draws.arrivals(self.clients, self.rate),
            self.think_ms * NS_PER_MS,
            barrier=self.round_barrier,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent(Family):
    """Agents: a long tool description shared by all, a task, then many short tool outputs."""

    name: ClassVar[str] = "agent"
    grows_with: ClassVar[tuple[str, ...]] = ("sessions", "turns", "tools_length", "tool_output_max")

    sessions: int = count(20, "agents at work")
    turns: int = count(20, "requests of an agent")
    tools_length: int = count(6000, "tokens of the tool description that opens every prompt")
    task_length: int = count(500, "tokens of the task, which is the agent's own")
    tool_output_min: int = count(50, "tokens of a tool output, at least")
    tool_output_max: int = count(1500, "tokens of a tool output, at most")
    rate: int = rate(2, "agents started a second, Poisson; 0: all at once")
    think_ms: int = count(500, "ms a tool runs between two turns", least=0)

    def request_count(self) -> int:
        """One a turn."""
        return self.sessions * self.turns

    def token_count(self) -> int:
        """As if every tool output were of the largest length."""
        opening = self.tools_length + self.task_length
        added = (self.output_length + self.tool_output_max) * (self.turns - 1)
        longest = opening + added + self.output_length
        return self.sessions * self.turns * (opening + self.output_length + longest) // 2

    def build(self, draws: Draws, page_size: int) -> list[RequestSpec]:
        """Requests turn by turn, in the order in which the agents started."""
        del page_size
        require(
            self.tool_output_min <= self.tool_output_max,
            f"agent: tool_output_min={self.tool_output_min} is above"
            f" tool_output_max={self.tool_output_max}; lower it or raise tool_output_max",
        )
        tools = draws.tokens(Purpose.SYSTEM, self.tools_length)
        dialogues = [
            _dialogue(
                tools,
                list(self._messages(draws, session)),
                _answers(draws, session, self.turns, self.output_length),
            )
            for session in range(self.sessions)
        ]
        starts = draws.arrivals(self.sessions, self.rate)
        return _in_rounds(dialogues, starts, self.think_ms * NS_PER_MS, barrier=False)

    def _messages(self, draws: Draws, session: int) -> Iterator[array[int]]:
        """The task, then the tool output that opens each later turn."""
        yield draws.tokens(Purpose.QUESTION, self.task_length, session, 0)
        lengths: Random = draws.stream(Purpose.LENGTH, session)
        for turn in range(1, self.turns):
            length = lengths.between(self.tool_output_min, self.tool_output_max)
            yield draws.tokens(Purpose.QUESTION, length, session, turn)


def _answers(draws: Draws, session: int, turns: int, length: int) -> list[array[int]]:
    return [draws.tokens(Purpose.OUTPUT, length, session, turn) for turn in range(turns)]


def _dialogue(
    opening: array[int], messages: Sequence[array[int]], answers: Sequence[array[int]]
) -> list[TokenPrompt]:
    """One prompt a turn: the prompt before, its answer, the new message."""
    prompts = []
    said = opening
    for message, answer in zip(messages, answers, strict=True):
        tokens = said + message
        prompts.append(TokenPrompt(tokens, answer))
        said = tokens + answer
    return prompts


def _in_rounds(
    dialogues: Sequence[Sequence[TokenPrompt]],
    starts: Sequence[int],
    think_ns: int,
    *,
    barrier: bool,
) -> list[RequestSpec]:
    """Turn k of all sessions, then turn k + 1: rid = turn * sessions + session + 1."""
    sessions = len(dialogues)
    requests: list[RequestSpec] = []
    for turn in range(len(dialogues[0])):
        before = range((turn - 1) * sessions + 1, turn * sessions + 1) if turn else range(0)
        whole_round = tuple(before)  # one tuple for all: a round may be large
        for session, prompts in enumerate(dialogues):
            prompt = prompts[turn]
            requests.append(
                RequestSpec(
                    rid=len(requests) + 1,
                    prompt=prompt,
                    output_tokens=0 if prompt.script is None else len(prompt.script),
                    arrival_ns=starts[session],
                    after=whole_round if barrier else tuple(before[session : session + 1]),
                    think_ns=think_ns if turn else 0,
                    session=session,
                    turn=turn,
                )
            )
    return requests

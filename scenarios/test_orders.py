"""Every order in which what is in flight can complete, in worlds small enough to try them all.

``Choices`` walks the tree of all decisions without knowing its shape: a run asks for numbers below
a bound; the next run repeats all but the last answer that can still grow, and that one grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from refimpl.config import EngineConfig
from refimpl.keys import TokenPrompt
from refimpl.messages import Abort, AnyEvent, Submit, Tick
from scenarios.labels import tokens_of
from scenarios.stage import config_of
from scenarios.tabletop import Tabletop

_RUNS_MAX = 20_000


class Choices:
    """One walk through the decisions; ``grow`` moves on to the next, False when there is none."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # (answer, bound)
        self._at = 0

    def below(self, bound: int) -> int:
        if self._at == len(self._taken):
            self._taken.append((0, bound))
        answer, known = self._taken[self._at]
        assert known == bound, "the same answers led elsewhere"
        self._at += 1
        return answer

    def grow(self) -> bool:
        while self._taken and self._taken[-1][0] + 1 == self._taken[-1][1]:
            self._taken.pop()
        if not self._taken:
            return False
        answer, bound = self._taken.pop()
        self._taken.append((answer + 1, bound))
        self._at = 0
        return True


@dataclass(frozen=True)
class World:
    """What happens from outside, in this order, at any point between the completions."""

    config: str
    events: tuple[str, ...]
    stored: str = ""  # in L3 from the start
    served: tuple[str, ...] = ()  # before it begins


def event_of(table: Tabletop, text: str) -> AnyEvent:
    verb, *words = text.split()
    match verb:
        case "abort":
            return Abort(int(words[0]))
        case "tick":
            table.now += 40_000_000_000
            return Tick()
    return Submit(int(verb), TokenPrompt(tokens_of(words[0])), int(words[1]))


def play(world: World, config: EngineConfig, choices: Choices) -> Tabletop:
    """One run; the table checks every invariant after every step."""
    table = Tabletop(config)
    for text in world.served:
        table.tell(event_of(table, text))
        table.settle()
    if world.stored:
        key_maker = Tabletop(config)
        key_maker.tell(event_of(key_maker, f"1 {world.stored} 1"))
        table.storage.update(dict.fromkeys(key_maker.requests[1].keys))
    events = list(world.events)
    while moves := list(moves_of(table, events)):
        moves[choices.below(len(moves))]()
    table.finish_all()
    return table


def moves_of(table: Tabletop, events: list[str]) -> Iterator[Callable[[], object]]:
    if events:
        yield lambda: table.tell(event_of(table, events.pop(0)))
    if table.batch is not None:
        yield table.batch_done
    for op in table.ops:
        yield lambda op=op: table.op_done(op)


WORLDS = {
    "two share a prefix": World(
        "storage=on l1=6 prefetch_threshold=99", ("1 a*4+b*1 1", "2 a*4+c*3 1")
    ),
    "a third splits what is being written": World(
        "storage=on l1=8 prefetch_threshold=99 chunk=4", ("1 a*4+b*2 1", "2 a*2+c*2 1")
    ),
    "two read the same from L3": World(
        "storage=on l1=6", ("1 a*5 1", "2 a*6+c*1 1", "3 d*3 1"), stored="a*6"
    ),
    "a reader goes away": World("storage=on l1=6", ("1 a*5 1", "2 a*7 1", "abort 1"), stored="a*6"),
    "a deadline passes": World("storage=on l1=6", ("1 a*5 2", "tick"), stored="a*4"),
    "best effort takes what is there": World(
        "storage=on l1=6 prefetch=best_effort", ("1 b*3 1", "2 a*5 1"), stored="a*4"
    ),
    "write back under pressure": World(
        "write=write_back l1=3 l2=3", ("2 b*5 1", "3 a*5 1", "4 c*3 1"), served=("1 a*5 1",)
    ),
    "write back with storage": World(
        "write=write_back l1=3 l2=2 storage=on prefetch_threshold=99",
        ("2 b*5 1", "3 a*5 1", "4 c*3 1"),
        served=("1 a*5 1",),
    ),
    "two outgrow L1 together": World("l1=4 reserve=0", ("1 a*3 4", "2 b*3 4", "abort 2")),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_order_of_completion_ends_well(name: str) -> None:
    world = WORLDS[name]
    config = config_of(world.config)
    choices, runs, stored, answers = Choices(), 0, set(), set()
    while True:
        table = play(world, config, choices)
        stored.add(tuple(sorted(table.storage)))
        answers.add(tuple(sorted(table.finish.items())))
        runs += 1
        assert runs <= _RUNS_MAX, "too large a world to try every order"
        if not choices.grow():
            break
    assert runs > 10, "no world has so few orders"
    assert len(stored) == 1, "what is stored depends on the order"
    if not any(text.startswith("abort") for text in world.events):
        assert len(answers) == 1, f"the answers depend on the order: {answers}"


def test_all_combinations_of_choices_come_up_once() -> None:
    choices, seen = Choices(), []
    while True:
        first = choices.below(3)
        seen.append((first, choices.below(first + 1)))
        if not choices.grow():
            break
    assert seen == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]

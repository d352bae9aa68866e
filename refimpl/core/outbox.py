"""What one step has ordered and decided so far. Called by: everything in core that decides."""

from __future__ import annotations

from refimpl.messages import Command, Fact, Step


class Outbox:
    """Commands and facts of the step being taken."""

    __slots__ = ("commands", "facts")

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.facts: list[Fact] = []

    def drain(self) -> Step:
        """The step, leaving the outbox empty."""
        if not self.commands and not self.facts:
            return Step.NOTHING
        step = Step(self.commands, self.facts)
        self.commands, self.facts = [], []
        return step

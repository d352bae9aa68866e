"""Attach, detach, clear and flush on all data-parallel ranks: done everywhere, or as before everywhere.

Two phases: every rank is asked; where one refuses or fails, those that did it take it back. Taking back waits
for the requests under way on that rank and holds back new ones, so none is lost. What can't be undone: a
flush or a clear; and a detach where the store does not open a second time. The answer says so then.
Must not know: HTTP, how a backend is opened. Called by: settle, admin, info.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from refimpl.core.attach import NAMES, Change
from refimpl.messages import Answer, AttachStorage, ClearStorage, DetachStorage, Flush
from refimpl.serve.bridge import Bridge

TAKE_BACK: Final = DetachStorage("queue", takes_back=True)


class FanOut:
    """``attached`` is what every rank has at the start. Not ``rolls_back``: upstream's mix stays."""

    def __init__(self, bridges: Sequence[Bridge], attached: AttachStorage | None = None) -> None:
        self.rolls_back = True
        self._bridges = list(bridges)
        self.attached = [attached for _ in bridges]  # what opened the store of each rank, if any
        self._is_changing = False
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def change(self, event: Change | Flush) -> Answer:
        """Carried out on all ranks, also when whoever asked stops waiting."""
        task = asyncio.ensure_future(self._change(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _change(self, event: Change | Flush) -> Answer:
        if isinstance(event, Flush) or len(self._bridges) == 1:
            answers = await self._ask_all([event] * len(self._bridges))
            self._note(event, answers)
            return _joined(answers)
        if self._is_changing:
            name = NAMES[type(event)]
            refused = f"Reject {name}: another attach, detach or clear is under way"
            return Answer(name, False, refused)
        self._is_changing = True
        try:
            return await self._on_all(event)
        finally:
            self._is_changing = False

    async def _on_all(self, event: Change) -> Answer:
        before = list(self.attached)
        answers = await self._ask_all([event] * len(self._bridges))
        self._note(event, answers)
        if not all(answer.ok for answer in answers) and self.rolls_back:
            answers = await self._roll_back(event, answers, before)
        return _joined(answers)

    def _note(self, event: Change | Flush, answers: Sequence[Answer]) -> None:
        if isinstance(event, Flush):
            return
        for rank, answer in enumerate(answers):
            if answer.ok:
                self.attached[rank] = _after(event, self.attached[rank])

    async def _roll_back(
        self, event: Change, answers: Sequence[Answer], before: Sequence[AttachStorage | None]
    ) -> list[Answer]:
        """The answers, with what became of those that had succeeded."""
        undoing = [
            _undo(event, had) if answer.ok else None
            for answer, had in zip(answers, before, strict=True)
        ]
        undone = await self._ask_all(undoing)
        told = list(answers)
        for rank, (answer, undo) in enumerate(zip(undone, undoing, strict=True)):
            if undo is None:
                continue
            if answer.ok:
                self.attached[rank] = before[rank]
            result = "taken back" if answer.ok else f"NOT TAKEN BACK: {answer.message}"
            told[rank] = Answer(NAMES[type(event)], False, f"{answers[rank].message}, {result}")
        return told

    async def _ask_all(self, events: Sequence[Change | Flush | None]) -> list[Answer]:
        """Each rank its own, all at the same time; None asks nothing and counts as done."""

        async def ask(bridge: Bridge, event: Change | Flush | None) -> Answer:
            if event is None:
                return Answer("", True, "")
            return await asyncio.wrap_future(bridge.change(event))

        asked = zip(self._bridges, events, strict=True)
        return list(await asyncio.gather(*(ask(bridge, event) for bridge, event in asked)))


def _after(event: Change, before: AttachStorage | None) -> AttachStorage | None:
    """What a rank has after the event succeeded: an attach to what is attached changes policies alone."""
    if isinstance(event, DetachStorage):
        return None
    return event if before is None and isinstance(event, AttachStorage) else before


def _undo(event: Change, before: AttachStorage | None) -> Change | None:
    """What puts a rank back; policies outlive a detach, so that another attach needs none."""
    if isinstance(event, AttachStorage):
        return TAKE_BACK
    if before is None or isinstance(event, ClearStorage):
        return None
    return AttachStorage(before.backend, drain="queue", extra_config=before.extra_config)


def _joined(answers: Sequence[Answer]) -> Answer:
    """One answer: done if all ranks have done it, with what each said; one rank speaks for itself."""
    if len(answers) == 1:
        return answers[0]
    said = " | ".join(f"rank {rank}: {answer.message}" for rank, answer in enumerate(answers))
    return Answer(answers[0].request, all(answer.ok for answer in answers), said)

"""All rules, and what becomes of a backend that is put to them.

Must not know: how verdicts are shown. Called by: the command line, scenarios/test_backends.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from refimpl.conformance import ending, sharing, values
from refimpl.conformance.limit import SECONDS_MAX, StoppedError, within
from refimpl.conformance.shapes import SMALL
from refimpl.conformance.subject import Subject
from refimpl.conformance.verdict import Rule, Verdict, judge
from refimpl.storage.backend import StorageError

RULES: Final[dict[str, Rule]] = {
    "round_trip": values.round_trip,
    "other_values": values.other_values,
    "batches": values.batches,
    "overwriting": values.overwriting,
    "absent_names": values.absent_names,
    "wrong_lengths": values.wrong_lengths,
    "partial_batches": values.partial_batches,
    "exists_agrees": values.exists_agrees,
    "odd_requests": values.odd_requests,
    "threads": sharing.threads,
    "processes": sharing.processes,
    "restart": sharing.restart,
    "namespaces": sharing.namespaces,
    "clearing": ending.clearing,
    "closing": ending.closing,
    "leftovers": ending.leftovers,
}


def certify(
    subject: Subject,
    progress: Callable[[int], None] | None = None,
    seconds: float = SECONDS_MAX,
) -> list[Verdict]:
    """The verdict of every rule, each of which has ``seconds`` to answer.

    Raises ConfigError or StorageError when it can't be opened at all.
    """
    try:
        opened = within(seconds, lambda: subject.open(SMALL, slots=1))
    except StoppedError as stopped:
        raise StorageError(f"{name_of(subject)} can't be opened: {stopped}") from None
    with suppress(Exception):  # rules tell what is wrong with its close
        within(seconds, opened.backend.close)
    return list(_verdicts(subject, progress, seconds))


def _verdicts(
    subject: Subject, progress: Callable[[int], None] | None, seconds: float
) -> Iterator[Verdict]:
    for name, rule in RULES.items():
        yield judge(name, rule, subject, seconds)
        if progress is not None:
            progress(1)
    clean_up(subject, seconds)


def clean_up(subject: Subject, seconds: float = SECONDS_MAX) -> None:
    """Delete what the rules stored, as far as the backend lets itself be cleared in that time."""
    with suppress(StoppedError):
        within(seconds, lambda: _clear(subject))


def _clear(subject: Subject) -> None:
    for shape, identity in list(subject.used):
        # What exits here can't end the command: this is a thread of its own.
        with suppress(BaseException), subject.opened(shape, 1, identity) as store:
            store.backend.clear()


def for_json(subject: Subject, verdicts: list[Verdict]) -> dict[str, Any]:
    """One object for programs."""
    counts = {
        outcome: sum(verdict.outcome == outcome for verdict in verdicts)
        for outcome in ("passed", "failed", "skipped")
    }
    return {
        "backend": name_of(subject),
        "lifetime": subject.lifetime,
        **counts,
        "verdicts": {
            verdict.rule: {"outcome": verdict.outcome, "reason": verdict.reason}
            for verdict in verdicts
        },
    }


def name_of(subject: Subject) -> str:
    """As it was typed."""
    if subject.backend != "dynamic":
        return subject.backend
    return f"{subject.extra['module_path']}:{subject.extra['class_name']}"

"""What came of a rule: passed, failed or skipped, and why.

Must not know: which rules there are, how verdicts are shown. Called by: rules, kit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from refimpl.conformance.limit import SECONDS_MAX, StoppedError, within
from refimpl.conformance.subject import Subject

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]
# Puts a backend to the test and says what it saw; raises ViolationError or InapplicableError.
Rule: TypeAlias = Callable[[Subject], str]


class InapplicableError(Exception):
    """A rule does not apply to this backend; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one rule."""

    rule: str
    outcome: Outcome
    reason: str


def judge(name: str, rule: Rule, subject: Subject, seconds: float = SECONDS_MAX) -> Verdict:
    """Apply a rule. Whatever the backend raises where it should answer is a failure, and so is silence.

    ``seconds`` count anew from each opening: a rule may open the store many times.
    """
    try:
        reason = within(seconds, lambda: rule(subject), lambda: subject.opened_last)
        return Verdict(name, "passed", reason)
    except InapplicableError as skipped:
        return Verdict(name, "skipped", str(skipped))
    except StoppedError as stopped:
        return Verdict(name, "failed", str(stopped))
    except (
        AssertionError
    ) as broken:  # ViolationError is one; an assertion of the backend's own counts as well
        return Verdict(name, "failed", str(broken) or repr(broken))
    except Exception as error:
        return Verdict(name, "failed", f"it raised {error!r}")

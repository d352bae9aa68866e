"""What a load generator measured, as files: requests of some runs, each beside the run of a reference.

Must not know: how the load was sent, baselines, verdicts. Called by: the command line, tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from refimpl.config import require
from refimpl.run.baselines import machine_class
from refimpl.run.live_figures import Measured, compared, failure_problems
from refimpl.run.live_gate import Gate
from refimpl.run.results import read_results

_NAME: Final = re.compile(r"\w[\w.-]*")


class ResultFiles:
    """Files as what is measured: a pair of results and reference is one repetition.

    Raises ConfigError for a name that no baseline can have, or files without a partner.
    """

    def __init__(self, name: str, results: Sequence[Path], references: Sequence[Path]) -> None:
        require(
            _NAME.fullmatch(name) is not None,
            f"{name!r} can't name a case: use letters, digits, dots, dashes and underscores",
        )
        require(
            len(results) == len(references),
            f"every --results needs its --reference: there are {len(results)} and {len(references)}",
        )
        self.name = name
        self.arguments = f"{name} --results FILE --reference FILE"
        self.machine = machine_class()
        self.gate = Gate()
        self.provenance: Mapping[str, str] = {"measured_by": "a load generator"}
        self._pairs = list(zip(results, references, strict=True))

    def measure(self, *, is_baseline: bool) -> Measured:
        """Read them. Raises ConfigError for a file that says nonsense."""
        del is_baseline  # there are as many repetitions as files
        measured = Measured()
        pairs = [tuple(read_results(path) for path in pair) for pair in self._pairs]
        for subject, reference in pairs:
            measured.problems += failure_problems(subject, reference)
            measured.subject += subject
            measured.reference += reference
        if all(any(not each.failure for each in side) for pair in pairs for side in pair):
            for subject, reference in pairs:
                measured.add(compared([subject], [reference]))
            subjects, references = zip(*pairs, strict=True)
            measured.best = compared(subjects, references)
        return measured

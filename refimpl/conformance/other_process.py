"""The second process of the rule about processes: ``python -m refimpl.conformance.other_process TASK``.

TASK is JSON with the fields of a Subject. It exits with 0, or prints in one line what is wrong.
Called by: sharing, as a process.
"""

from __future__ import annotations

import json
import os
import sys

from refimpl.conformance.limit import SECONDS_MAX, within
from refimpl.conformance.sharing import be_the_other
from refimpl.conformance.subject import Subject


def main() -> int:
    """Do the other half."""
    try:
        subject = Subject(**json.loads(sys.argv[1]))
        within(SECONDS_MAX, lambda: be_the_other(subject))  # or it would outlive who started it
    except Exception as error:
        print(" ".join(str(error).split()) or repr(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what hangs in the backend must not keep it

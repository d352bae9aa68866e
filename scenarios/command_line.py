"""Calling the command line inside this process, which is many times faster than starting one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from refimpl.__main__ import main


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


class CommandLine:
    """``refimpl`` with arguments."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture

    def __call__(self, *words: str) -> Done:
        self._patch.setattr(sys, "argv", ["refimpl", *words])
        self._capture.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = self._capture.readouterr()
        code = end.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, said.out, said.err)

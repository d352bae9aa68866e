"""Lines of a trace file, plain or gzipped, and the error that says which one is wrong.

Must not know: any format. Called by: trace and its formats.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from refimpl.config import ConfigError
from refimpl.units import scaled_decimal

TOKENS_MAX: Final = 1 << 31  # of one prompt or output
TIME_MAX_NS: Final = (1 << 62) - 1  # 146 years
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class TraceError(ConfigError):
    """A trace that can't be read: ``FILE:LINE: reason``, with line 0 for the file itself."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path, self.line, self.reason = path, line, reason

    def __reduce__(self) -> tuple[type[TraceError], tuple[Path, int, str]]:
        """Pickled by its three parts, so that it crosses a process pool."""
        return type(self), (self.path, self.line, self.reason)


class LineError(ValueError):
    """A line that a format can't read; the message is the reason alone."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """What any format can say of one request.

    ``at_ns`` is on the trace's own clock. ``session`` is empty where the format has none. ``chat``
    and ``parent`` number the turns of a format that links them; -1 is none.
    """

    at_ns: int
    input_length: int  # tokens
    output_length: int  # tokens
    block_ids: tuple[int, ...] = ()
    session: str = ""
    chat: int = -1
    parent: int = -1
    turn: int = 0


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1.

    A gzipped file is known by its content, not its name. Raises TraceError for a file that can't
    be opened or unpacked and for a line that is not UTF-8.
    """
    number = 0
    try:
        with path.open("rb") as file:
            zipped = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            for raw in gzip.GzipFile(fileobj=file) if zipped else file:
                number += 1
                text = _text(path, number, raw)
                if text:
                    yield number, text
    except OSError as error:
        raise TraceError(path, number, f"can't be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise TraceError(path, number, f"can't be unpacked: {error}") from None


def time_ns(text: str, unit_ns: int) -> int:
    """A decimal time counted in ``unit_ns``, as ns. Raises LineError unless it is 0 or more."""
    try:
        value = scaled_decimal(text, unit_ns)
    except ValueError:
        raise LineError("the timestamp is not a decimal number") from None
    if value < 0:
        raise LineError("the timestamp is negative")
    if value > TIME_MAX_NS:
        raise LineError(f"the timestamp is above {TIME_MAX_NS} ns")
    return value


def _text(path: Path, number: int, raw: bytes) -> str:
    if number == 1:
        raw = raw.removeprefix(_BYTE_ORDER_MARK)
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise TraceError(path, number, f"byte {error.start + 1} is not UTF-8") from None

"""Public request traces as workloads, sent by their timestamps.

Must not know: caches, engines. Called by: run, perf, the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from refimpl.config import require, require_choice
from refimpl.workload.request import RequestSpec, Workload
from refimpl.workload.trace_blocks import (
    BAILIAN_BLOCK,
    MOONCAKE_BLOCK,
    bailian_requests,
    bailian_row,
    mooncake_requests,
    mooncake_row,
)
from refimpl.workload.trace_lines import (
    TIME_MAX_NS,
    LineError,
    TraceError,
    TraceRow,
    numbered_lines,
)
from refimpl.workload.trace_tables import (
    RowParser,
    azure_parser,
    burstgpt_parser,
    table_requests,
)


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How one format is read: a parser made of the header line, if there is one, then requests."""

    parser: Callable[[str], RowParser]
    requests: Callable[[Sequence[TraceRow]], list[RequestSpec]]
    has_header: bool = False
    block_size: int | None = None  # tokens; None where the trace names no blocks


_BAILIAN: Final = TraceFormat(lambda _: bailian_row, bailian_requests, block_size=BAILIAN_BLOCK)
TRACE_FORMATS: Final = {
    "mooncake": TraceFormat(lambda _: mooncake_row, mooncake_requests, block_size=MOONCAKE_BLOCK),
    "bailian": _BAILIAN,
    "qwen": _BAILIAN,
    "azure": TraceFormat(azure_parser, table_requests, has_header=True),
    "burstgpt": TraceFormat(burstgpt_parser, table_requests, has_header=True),
}


def read_trace(path: Path, trace_format: str, limit: int | None = None) -> Workload:
    """The requests of the trace at ``path``, plain or gzipped, at most the first ``limit`` lines.

    They are sent at their timestamps, in ns from the earliest; lines out of order are sorted, ties
    keep the order of the file. ``block_size`` of the result is in tokens: with pages below it hits
    are a lower bound; where the trace names no blocks, ``hides_sharing`` is set and there are none.
    Raises ConfigError for an unknown format or a limit below 1, and TraceError,
    ``FILE:LINE: reason``, for a malformed line,
    a file without requests or one that can't be read.
    """
    require_choice("trace format", trace_format, tuple(TRACE_FORMATS))
    require(limit is None or limit >= 1, f"trace limit {limit} must be at least 1 request")
    reader = TRACE_FORMATS[trace_format]
    rows = list(islice(_rows(path, reader), limit))
    if not rows:
        raise TraceError(path, 0, "holds no request")
    rows.sort(key=lambda row: row.at_ns)
    if rows[-1].at_ns - rows[0].at_ns > TIME_MAX_NS:
        raise TraceError(path, 0, "spans more than 146 years; mend its timestamps")
    block = reader.block_size
    return Workload(path.name, reader.requests(rows), block_size=block, hides_sharing=block is None)


def _rows(path: Path, reader: TraceFormat) -> Iterator[TraceRow]:
    """The rows in the order of the file; the only place where a reason gets its file and line."""
    parse: RowParser | None = None if reader.has_header else reader.parser("")
    for number, text in numbered_lines(path):
        try:
            if parse is None:
                parse = reader.parser(text)
            else:
                yield parse(text)
        except LineError as error:
            raise TraceError(path, number, str(error)) from None

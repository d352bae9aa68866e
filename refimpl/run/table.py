"""Per-request results as a polars table, and as a file.

Must not know: engines, the terminal. Called by: the command line, tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import polars
from msgspec.structs import asdict, fields

from refimpl.config import ConfigError, require
from refimpl.run.record import Row

SUFFIXES: Final = (".parquet", ".csv", ".jsonl")


def check_output(path: Path) -> None:
    """Raise ConfigError unless ``path`` can be written and its suffix is known."""
    require(path.suffix in SUFFIXES, f"--output {path} must end in one of {', '.join(SUFFIXES)}")
    require(path.parent.is_dir(), f"--output {path}: there is no folder {path.parent}")
    require(not path.is_dir(), f"--output {path} is a folder")


def frame(rows: list[Row]) -> polars.DataFrame:
    """One line a request; ``ttft_ns`` and ``hit_tokens`` beside the fields of ``Row``.

    Times that never came are null.
    """
    types = {"finish": polars.String, "admitted": polars.Boolean}
    names = [entry.name for entry in fields(Row)]
    schema = {name: types.get(name, polars.Int64) for name in names}
    table = polars.DataFrame([asdict(row) for row in rows], schema=schema)
    came = polars.col("first_token_ns") >= 0
    return table.with_columns(
        first_token_ns=polars.when(came).then("first_token_ns"),
        end_ns=polars.when(polars.col("end_ns") >= 0).then("end_ns"),
        ttft_ns=polars.when(came).then(polars.col("first_token_ns") - polars.col("arrival_ns")),
        hit_tokens=polars.sum_horizontal("device_tokens", "host_tokens", "storage_tokens"),
    )


def write_rows(rows: list[Row], path: Path) -> None:
    """Write the table; raises ConfigError when the file can't be written."""
    table = frame(rows)
    try:
        with path.open("wb") as file:  # ours, because polars takes no path that isn't UTF-8
            match path.suffix:
                case ".parquet":
                    table.write_parquet(file)
                case ".csv":
                    table.write_csv(file)
                case _:
                    table.write_ndjson(file)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise ConfigError(f"--output {path} can't be written: {error}") from None

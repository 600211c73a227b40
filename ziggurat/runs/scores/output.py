"""Where scores are written: Parquet, CSV or TSV by the suffix, whole or not at all, and not over what they are made of.

A file appears when its last row is in it (`ziggurat/files`). Parquet is compressed with zstd, and each page has a
checksum; text has one line of names. Lists cannot stand in text and are refused before a row is scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa

from ziggurat.commands import pasted
from ziggurat.data.raw.frames import is_frame
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError
from ziggurat.files import replacing
from ziggurat.files.parquet import ParquetFile
from ziggurat.files.table_endings import separator_by_ending
from ziggurat.runs.scores.given_data import files_in


def refuse_own_input(out: str | Path, data: object, *, trained: Sequence[Path]) -> None:
    """Never write scores over the files they are made of, or over those that the run was trained on.

    Raises:
        ConfigError: `out` is one of them.
    """
    read = [] if is_frame(data) else RawSource(files_in(data)).paths
    place = Path(out).resolve()
    for path in (*read, *trained):
        if path.resolve() == place:
            raise ConfigError(
                expected="a file of its own for the scores",
                found=f"{out}, which holds the data" + (" that is scored" if path in read else " of the run"),
                where="out",
                ways_out=f"--out {pasted(place.with_name(place.stem + '_scores' + place.suffix))}",
            )


def check_output(out: str | Path, schema: pl.Schema) -> str:
    """Return what divides the fields of a text file; "" for Parquet.

    Raises:
        ConfigError: a URL, a suffix that is neither, or lists that are to be kept in a text file.
    """
    separator = separator_by_ending(out)
    nested = [name for name, kind in schema.items() if kind.is_nested() or kind == pl.Binary]
    if separator and nested:
        raise ConfigError(
            expected="plain columns to keep in a text file",
            found=", ".join(f"{name} ({schema[name]})" for name in nested),
            where="keep",
            ways_out=("write Parquet: --out scores.parquet", "do not keep them"),
        )
    return separator


def write_frames(frames: Iterator[pl.DataFrame], out: str | Path, *, schema: pl.Schema) -> int:
    """Write frames into one file, Parquet or text by its suffix; it appears when it is complete. Returns the rows."""
    separator = check_output(out, schema)
    num_rows = 0
    if separator:
        with replacing(out) as temporary, open(temporary, "wb") as file:
            pl.DataFrame(schema=schema).write_csv(file, separator=separator)
            for frame in frames:
                frame.write_csv(file, separator=separator, include_header=False)
                num_rows += frame.height
        return num_rows
    columns = _to_arrow(pl.DataFrame(schema=schema)).schema
    with (
        replacing(out) as temporary,
        ParquetFile(temporary, columns, compression="zstd", write_page_checksum=True) as writer,
    ):
        for frame in frames:
            writer.write_table(_to_arrow(frame))
            num_rows += frame.height
    return num_rows


def _to_arrow(frame: pl.DataFrame) -> pa.Table:
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())

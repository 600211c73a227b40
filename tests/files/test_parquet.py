"""A Parquet file that cannot be written is one error, and nothing is printed beside it when the writer is collected."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ziggurat.files.parquet import ParquetFile


class _Broken:
    """A file that a full disk does not let close."""

    def close(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("kind", "said"), [(ParquetFile, 0), (pq.ParquetWriter, 1)])
def test_the_end_of_a_writer_says_nothing_of_what_its_caller_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[pq.ParquetWriter], said: int
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    table = pa.table({"x": [1, 2, 3]})
    writer = kind(tmp_path / "x.parquet", table.schema)
    writer.write_table(table)
    writer.file_handle = _Broken()
    del writer
    gc.collect()
    assert len(heard) == said


def test_an_error_of_closing_reaches_the_caller(tmp_path: Path) -> None:
    writer = ParquetFile(tmp_path / "x.parquet", pa.table({"x": [1]}).schema)
    writer.file_handle = _Broken()
    with pytest.raises(OSError, match="No space left"):
        writer.close()

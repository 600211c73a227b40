"""EncodedDataset: preprocessed rows on disk, as a folder of Parquet files and a manifest.

    train/
      manifest.json           inputs, rows, files, rows of every row group, checksums; itself checksummed
      part-00000.parquet      row groups of 65,536 rows, every page with a CRC
      part-00001.parquet

Encoding once and reading many times takes the parsing, the vocabularies and the checks out of the training loop. What
is left a row is decoding: 26 rows, 13 numbers and a label take about 0.15 µs on one core.

Why the checksums: without them, a flipped bit in a Parquet file comes back as another id, silently, in more than nine
of ten cases. Pages are written with a CRC and it is verified on every read; the footer, which no CRC covers, has a
SHA-256 in the manifest; so has the manifest itself. What fails is a `DataError` that names file and row group.

A folder is either complete or absent: files are written to a temporary folder beside it, flushed to the disk, and the
folder is renamed when it is whole.

In data with sessions a list that equals the one of the row before is stored as a null (`stored_once.py`).

Reading takes one row group at a time, so memory is bounded by its size, whatever the size of the data.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.ledger import expected_sum
from ziggurat.data.encoded.manifest import MANIFEST, REDO, Manifest, ManifestFile
from ziggurat.data.encoded.open_files import OpenFiles
from ziggurat.data.encoded.part_files import Part, PartFiles, footer_sha256, group_digest, row_groups
from ziggurat.data.encoded.records import (
    ROW_COLUMN,
    SESSION_COLUMN,
    conform,
    encoded_schema,
    has_labels,
    table_to_batch,
    with_wide_labels,
)
from ziggurat.data.encoded.sessions import session_lengths
from ziggurat.data.encoded.stored_once import plain_lists, shared_lists
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.batches.checks import validate_batch
from ziggurat.features.inputs import InputSpec
from ziggurat.files import publish, temporary_beside
from ziggurat.plain import JSON

DEFAULT_ROWS_PER_GROUP = 65_536
DEFAULT_ROWS_PER_FILE = 8 * DEFAULT_ROWS_PER_GROUP

_MANIFEST = "manifest.json"


class EncodedWriter:
    """Writes an encoded data set; use as a context manager, or call `close` (or `abort`).

    Args:
        folder: where the data set appears when it is complete; must not exist.
        inputs: what the columns are.
        rows_per_group: rows of a row group, the unit of reading. Smaller shuffles better, larger reads faster.
        rows_per_file: rows of a file, a multiple of `rows_per_group` (rounded down to one).
        extra: plain data to keep in the manifest.
    """

    def __init__(
        self,
        folder: str | Path,
        inputs: InputSpec,
        *,
        rows_per_group: int = DEFAULT_ROWS_PER_GROUP,
        rows_per_file: int = DEFAULT_ROWS_PER_FILE,
        extra: Mapping[str, JSON] | None = None,
    ) -> None:
        assert rows_per_group >= 1
        self.folder = Path(folder)
        self.num_rows = 0
        self._inputs = inputs
        self._rows_per_group = rows_per_group
        self._extra = dict(extra or {})
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._schema: pa.Schema | None = None
        self._closed = False
        if self.folder.exists():
            raise DataError(
                expected="a folder that does not exist yet",
                found="it exists",
                where=str(self.folder),
                ways_out=("choose another folder", "delete it"),
            )
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_beside(self.folder)
        self._temporary.mkdir()
        self._parts = PartFiles(self._temporary, groups_per_file=max(1, rows_per_file // rows_per_group))

    def __enter__(self) -> EncodedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def append(self, table: pa.Table) -> None:
        """Add encoded rows, any number of them.

        Raises:
            DataError: the table does not have the columns of the inputs.
        """
        assert not self._closed
        table = conform(table, self._inputs, where=f"rows {self.num_rows} … of {self.folder}")
        if self._schema is None:
            # The first table says whether labels come; all others must agree.
            self._schema = table.schema
        if table.schema != self._schema:
            raise DataError(
                expected="labels in all tables or in none",
                found=f"columns {table.column_names} after {self._schema.names}",
                where=str(self.folder),
                ways_out="encode all chunks with the same with_labels",
            )
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.num_rows += table.num_rows
        if self._pending_rows >= self._rows_per_group:
            self._write_pending(all_rows=False)

    def _write_pending(self, *, all_rows: bool) -> None:
        rest: list[pa.Table] = []
        for group in row_groups(self._pending, rows_per_group=self._rows_per_group):
            # A group that is not full waits for more rows, except at the end.
            if all_rows or group.num_rows == self._rows_per_group:
                self._parts.write(group)
            else:
                rest.append(group)
        self._pending = rest
        self._pending_rows = sum(table.num_rows for table in rest)

    def close(self) -> None:
        """Write the rest, flush everything to the disk and let the folder appear."""
        if self._closed:
            return
        try:
            self._write_pending(all_rows=True)
            parts = self._parts.close()
            # Without a table there is nothing to tell by, and labels are taken for granted.
            unlabelled = encoded_schema(self._inputs, with_labels=False).names
            with_labels = self._schema is None or self._schema.names != unlabelled
            write_manifest(self._temporary, parts, inputs=self._inputs, with_labels=with_labels, extra=self._extra)
            publish(self._temporary, self.folder)
        except BaseException:
            self.abort()
            raise
        self._closed = True

    def abort(self) -> None:
        """Throw away what was written."""
        if not self._closed:
            self._parts.abort()
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._closed = True


def write_manifest(
    folder: Path, parts: Sequence[Part], *, inputs: InputSpec, with_labels: bool = True, extra: Mapping[str, object]
) -> None:
    """Make a data set of files that were written one by one; the last thing to be written.

    Args:
        folder: of the files.
        parts: what `write_part` said of each, in the order of the rows.
        inputs: what the columns are.
        with_labels: whether labels are among them.
        extra: plain data to keep in the manifest.
    """
    content = hashlib.sha256()
    # By row groups, so that the digest does not depend on the files that they lie in.
    for digest in (digest for part in parts for digest in part.digests):
        content.update(bytes.fromhex(digest))
    manifest = {
        "num_rows": sum(sum(part.group_rows) for part in parts),
        # Sums may wrap: rows are compared by their sum in 64 bits.
        "row_sum": f"{sum(part.row_sum for part in parts) % 2**64:016x}",
        "content": content.hexdigest(),
        "with_labels": with_labels,
        "inputs": to_json(inputs),
        "files": [
            {
                "name": part.name,
                "group_rows": list(part.group_rows),
                "bytes": part.bytes,
                "footer_sha256": part.footer_sha256,
            }
            for part in parts
        ],
        "extra": dict(extra),
    }
    MANIFEST.write(folder / _MANIFEST, manifest)


class EncodedDataset:
    """An encoded data set on disk, checked on opening: the manifest, every file's size and every footer.

    Args:
        folder: what an `EncodedWriter` made.

    Raises:
        MissingFileError: the folder or one of its files is absent.
        DataError: the manifest is damaged or of another version, or a file is not the one that was written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder / _MANIFEST)
        self.inputs: InputSpec = from_json(InputSpec, manifest["inputs"], where=str(self.folder / _MANIFEST))
        self.num_rows = manifest["num_rows"]
        self.row_sum = int(manifest["row_sum"], 16)  # for the sample ledger
        self.digest = manifest["content"]  # of all values in their order
        self.with_labels = manifest["with_labels"]
        self.extra = manifest["extra"]
        self._places: list[tuple[Path, int]] = []
        sizes: list[int] = []
        for entry in manifest["files"]:
            path = self.folder / entry["name"]
            _check_file(path, entry)
            self._places += [(path, index) for index in range(len(entry["group_rows"]))]
            sizes += entry["group_rows"]
        self.group_sizes: tuple[int, ...] = tuple(sizes)
        self._schema = encoded_schema(self.inputs, with_labels=self.with_labels)
        self._open = OpenFiles()

    def read_group(self, index: int) -> pa.Table:
        """The columns of row group `index`, checksums verified. Safe to call from several threads.

        Raises:
            DataError: the row group is damaged; names file and row group.
        """
        table = self._read(index, None)
        if self.inputs.has_sessions:
            # Lists that were stored once become whole lists again.
            table = self._sound(index, lambda: plain_lists(table, schema=self._schema))
        if table.num_rows != self.group_sizes[index] or not table.schema.equals(self._schema):
            found = f"{table.num_rows} rows of {table.schema.names}"
            raise _damaged(f"{self.group_sizes[index]} rows of {self._schema.names}", found, self._where(index))
        return table

    def read_shared(self, index: int) -> pa.Table:
        """`read_group`, where rows of a session share equal lists (`stored_once.py`): list views in place of lists.

        Raises:
            DataError: the row group is damaged; names file and row group.
        """
        if not self.inputs.has_sessions:
            return self.read_group(index)
        stored = self._read(index, None)
        table = self._sound(index, lambda: shared_lists(stored))
        # Types differ, as views of lists stand in place of lists: the names must do.
        if table.num_rows != self.group_sizes[index] or table.column_names != self._schema.names:
            found = f"{table.num_rows} rows of {table.column_names}"
            raise _damaged(f"{self.group_sizes[index]} rows of {self._schema.names}", found, self._where(index))
        return table

    def sessions(self, index: int) -> np.ndarray:
        """Lengths of the sessions of row group `index`, in their order; reads one column."""
        return session_lengths(self._read(index, [SESSION_COLUMN]), where=str(self.folder))

    def _read(self, index: int, columns: list[str] | None) -> pa.Table:
        path, group = self._places[index]
        try:
            return with_wide_labels(self._open.read_row_group(path, group, columns=columns), self.inputs)
        # A file may vanish after the data set was opened.
        except FileNotFoundError as error:
            raise _absent(path) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            found = str(error)
            raise _damaged("a row group whose pages match their checksums", found, self._where(index)) from error

    def _sound(self, index: int, make: Callable[[], pa.Table]) -> pa.Table:
        try:
            return make()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged("columns as they were written", str(error), self._where(index)) from error

    def _where(self, index: int) -> str:
        path, group = self._places[index]
        return f"{path}, row group {group}"


def dataset_facts(datasets: Mapping[str, object]) -> dict[str, str]:
    """Rows and digest of data sets by name, as text: what two runs on the same data have in common. Reads no row.

    Of a data source of one's own, which every rank may have another part of, only its kind is known.
    """
    facts: dict[str, str] = {}
    for name, dataset in datasets.items():
        if dataset is None:
            facts[f"data {name} rows"] = "0"
        elif not hasattr(dataset, "read_group"):
            facts[f"data {name}"] = type(dataset).__name__
        else:
            facts[f"data {name} rows"] = str(getattr(dataset, "num_rows", "unknown"))
            facts[f"data {name} content"] = str(getattr(dataset, "digest", "unknown"))[:16]
    return facts


def _read_manifest(path: Path) -> Manifest:
    try:
        return MANIFEST.read(path)
    except FileNotFoundError as error:
        raise _absent(path) from error


def _check_file(path: Path, entry: ManifestFile) -> None:
    if not path.is_file():
        raise _absent(path)
    size = path.stat().st_size
    if size != entry["bytes"]:
        # The cheap look before the one that reads.
        raise _damaged(f"{entry['bytes']} bytes", f"{size} bytes", str(path))
    if footer_sha256(path) != entry["footer_sha256"]:
        raise _damaged("a footer that matches the manifest", "another one", str(path))


def _damaged(expected: str, found: str, where: str) -> DataError:
    return DataError(expected=expected, found=found, where=where, ways_out=(REDO, "restore the file from a copy"))


def _absent(path: Path) -> MissingFileError:
    return MissingFileError(
        expected="an encoded data set with all its files",
        found=f"{path.name} does not exist",
        where=str(path),
        ways_out=(REDO, "restore the file from a copy", "check the path"),
    )


class MemoryDataset:
    """Encoded rows in memory, for tests, benchmarks and small data; to a `Loader` it looks like an `EncodedDataset`.

    Args:
        table: encoded columns (see `ziggurat.data.encoded.records`); an absent `row:` column counts from 0.
        inputs: what the columns are.
        rows_per_group: rows of a row group.

    Raises:
        DataError: the table does not have the columns of `inputs`, or a value that no model may be given: a number that
            is not finite, a label that is none, a negative weight.
        BoundsError: a row is outside its table.
    """

    def __init__(self, table: pa.Table, inputs: InputSpec, *, rows_per_group: int = DEFAULT_ROWS_PER_GROUP) -> None:
        # Rows of a frame of one's own are numbered as they come.
        if ROW_COLUMN not in table.column_names:
            table = table.append_column(ROW_COLUMN, pa.array(range(table.num_rows), type=pa.int64()))
        self.inputs = inputs
        self.with_labels = has_labels(table, inputs)
        self.num_rows: int = table.num_rows
        self._table = conform(table, inputs, where="MemoryDataset").combine_chunks()
        self._starts = range(0, self.num_rows, rows_per_group)
        self.group_sizes = tuple(min(rows_per_group, self.num_rows - start) for start in self._starts)
        # Nothing inside a step looks at values, and a row outside its table would read memory of something else.
        for start in self._starts:
            group = self._table.slice(start, rows_per_group)
            validate_batch(table_to_batch(group, inputs), inputs, has_rows=not inputs.numbered)

    @property
    def row_sum(self) -> int:
        """Sum of the mixed row ids, for the sample ledger."""
        return sum(expected_sum(chunk.to_numpy()) for chunk in self._table.column(ROW_COLUMN).chunks) % 2**64

    @functools.cached_property
    def digest(self) -> str:
        """The digest of all values in their order; an `EncodedDataset` of the same row groups has the same one."""
        content = hashlib.sha256()
        for index in range(len(self.group_sizes)):
            # Group by group, as files are digested.
            content.update(group_digest(self.read_group(index)))
        return content.hexdigest()

    def read_group(self, index: int) -> pa.Table:
        """The columns of row group `index`; no copy."""
        return self._table.slice(self._starts[index], self.group_sizes[index])

    def sessions(self, index: int) -> np.ndarray:
        """See `EncodedDataset.sessions`."""
        return session_lengths(self.read_group(index), where="MemoryDataset")

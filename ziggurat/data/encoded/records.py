"""Records: encoded rows as fixed-width structured items, the shape in which they can be shuffled cheaply.

Parquet is column-major, a batch is too, but a shuffle moves *rows*. Gathering 40 columns one at a time touches 40
cache lines a sample; so the loader transposes once, into records, and a shuffled batch gathers whole records:

    Parquet row group          records (one numpy structured item a sample)            batch
    I1: f f f f …     write    row │ group │ starts │ lengths │ dense │ … │ single   take   dense (B, N)
    C1: r r r r …   ───────►   ────┼───────┼────────┼─────────┼───────┼───┼───────  ─────►  single (S, B)
    tags: [..] [] …            …   │       │        │         │       │   │                 jagged, labels, …

A record of Criteo (13 numbers, 26 rows, 1 label) has 168 bytes, and moving one costs about as much as one cache
miss. Lists do not fit a fixed width: the record keeps where each list starts and how long it is, and all list
values of a shuffle buffer lie in one array that is never moved; a batch copies the segments it needs.

The columns of an encoded table (`encoded_schema`): a dense feature is float32, a single feature int32, a jagged
feature list<int32> (both int64 if ids of the table come and go, `InputSpec.numbered`), moments list<int64>, a vector
fixed_size_list<float32>, a history of vectors fixed_size_list<int32> (`VectorHistory`), `label:NAME` float32 (float64
where a label is a number, `InputSpec.has_number_labels`), `extra:NAME` float32 or fixed_size_list<float32>, `weight:`
float32, `group:` int64, `session:` int64 and `row:` int64, the position in the raw data. None is null; what an extra
lacks is NaN. The session decides what a shuffle keeps together and is not in records.
Rows are int32 on disk and in records, which halves both, and int64 in a batch, which is what embedding kernels take.
Moments and numbers of ids lie among the list values as two halves each (`halves_of`), so that all lists are kept and
gathered in one way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from ziggurat.data.encoded.slices import gather_segments
from ziggurat.errors import DataError
from ziggurat.features.batch import Batch, JaggedRows, SequenceGroup
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import moments_group

ROW_COLUMN = "row:"
GROUP_COLUMN = "group:"
WEIGHT_COLUMN = "weight:"
SESSION_COLUMN = "session:"


def label_column(name: str) -> str:
    """The encoded column of the label called `name`."""
    return f"label:{name}"


def extra_column(name: str) -> str:
    """Return the encoded column of the extra called `name`."""
    return f"extra:{name}"


def extra_type(dim: int) -> pa.DataType:
    """Return the type of an extra in an encoded table: a number, or a list of `dim` numbers."""
    return pa.list_(pa.field("item", pa.float32(), nullable=False), dim) if dim else pa.float32()


def encoded_schema(inputs: InputSpec, *, with_labels: bool = True) -> pa.Schema:
    """The Arrow schema of an encoded table: names, order and types; no column may hold nulls.

    Args:
        inputs: what the features are.
        with_labels: False for data to predict, which has neither labels nor weights nor sessions.
    """
    columns: list[tuple[str, pa.DataType]] = [(name, pa.float32()) for name in inputs.dense]
    columns += [(spec.name, row_type(inputs, spec.name)) for spec in inputs.single]
    columns += [
        (spec.name, pa.list_(pa.field("item", row_type(inputs, spec.name), nullable=False))) for spec in inputs.jagged
    ]
    time = pa.field("item", pa.int64(), nullable=False)
    columns += [(spec.name, pa.list_(time)) for spec in inputs.moments]
    number = pa.field("item", pa.float32(), nullable=False)
    word = pa.field("item", pa.int32(), nullable=False)
    columns += [(spec.name, pa.list_(number if spec.history is None else word, spec.width)) for spec in inputs.vectors]
    if with_labels:
        columns += [(label_column(spec.name), label_type(inputs)) for spec in inputs.labels]
        columns += [(extra_column(spec.name), extra_type(spec.dim)) for spec in inputs.extras]
        columns += [(WEIGHT_COLUMN, pa.float32())] if inputs.has_weights else []
        columns += [(SESSION_COLUMN, pa.int64())] if inputs.has_sessions else []
    columns += [(GROUP_COLUMN, pa.int64())] if inputs.has_groups else []
    columns.append((ROW_COLUMN, pa.int64()))
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def label_type(inputs: InputSpec) -> pa.DataType:
    """Return the type of every label in an encoded table: one array of a batch holds all labels."""
    return pa.float64() if inputs.has_number_labels else pa.float32()


def row_type(inputs: InputSpec, name: str) -> pa.DataType:
    """Return the type of the rows of a feature in an encoded table, or of the numbers of its ids."""
    return pa.int64() if name in inputs.numbered else pa.int32()


def has_labels(table: pa.Table, inputs: InputSpec) -> bool:
    """True if an encoded table carries its labels (and weights); prediction data does not."""
    return any(label_column(spec.name) in table.column_names for spec in inputs.labels)


def conform(table: pa.Table, inputs: InputSpec, *, where: str) -> pa.Table:
    """The table with exactly the columns, order and types of `encoded_schema`; copies nothing it need not.

    Raises:
        DataError: a column is missing, has another type or holds nulls; `where` names the origin.
    """
    table = with_wide_labels(table, inputs)
    schema = encoded_schema(inputs, with_labels=has_labels(table, inputs))
    # What our own preprocessing encoded is as it should be: the usual case costs no copy.
    if table.schema.equals(schema) and not any(column.null_count for column in table.columns):
        return table
    counts = Counter(table.column_names)
    for entry in schema:
        if counts[entry.name] != 1:
            raise DataError(
                expected=f"one encoded column {entry.name!r} of type {entry.type}",
                found=f"{counts[entry.name]} of that name among {', '.join(table.column_names[:100])}",
                where=where,
                ways_out="encode the table with the Preprocessing that made the InputSpec",
            )
    return pa.Table.from_arrays([_conform_column(table, entry, where) for entry in schema], schema=schema)


def with_wide_labels(table: pa.Table, inputs: InputSpec) -> pa.Table:
    """Return the table with labels in 64 bits where `inputs` has them so; versions before wrote 32 bits."""
    if not inputs.has_number_labels:
        return table
    for spec in inputs.labels:
        at = table.schema.get_field_index(label_column(spec.name))
        if at >= 0 and table.schema.field(at).type == pa.float32():
            wide = pa.field(label_column(spec.name), pa.float64(), nullable=False)
            table = table.set_column(at, wide, table.column(at).cast(pa.float64()))
    return table


def _conform_column(table: pa.Table, entry: pa.Field, where: str) -> pa.Array:
    name = entry.name
    kind = entry.type
    array = _one_array(table.column(name))
    nested = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    same = _same_type(array.type, kind)
    # Nulls of elements are no nulls of the list, and are counted apart.
    nulls = array.null_count + (array.flatten().null_count if same and nested else 0)
    if not same or nulls:
        raise DataError(
            expected=f"type {kind} without nulls",
            found=f"type {array.type} with {nulls} nulls",
            where=f"{where}, column {name!r}",
            ways_out="encode the table with the Preprocessing that made the InputSpec",
        )
    if pa.types.is_list(kind):
        # The same buffers under the wanted type, which says that nothing in it may be null.
        return pa.ListArray.from_arrays(array.offsets, array.values, type=kind)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(array.flatten(), type=kind)
    return array


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and found.value_type == wanted.value_type
    if pa.types.is_fixed_size_list(wanted):
        same_size = pa.types.is_fixed_size_list(found) and found.list_size == wanted.list_size
        return same_size and found.value_type == wanted.value_type
    return found == wanted


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def record_dtype(inputs: InputSpec, *, with_labels: bool = True) -> np.dtype:
    """The structured type of one record; 8-byte entries first, so that all are aligned."""
    num_jagged = len(inputs.jagged) + len(inputs.moments)
    entries = [
        ("row", "i8"),
        # Zero entries of a field take no room, and its column need not be asked for anywhere.
        ("group", "i8", (1 if inputs.has_groups else 0,)),
        ("starts", "i8", (num_jagged,)),
        ("lengths", "i4", (num_jagged,)),
        ("dense", "f4", (len(inputs.dense),)),
        ("labels", "f8" if inputs.has_number_labels else "f4", (len(inputs.labels) if with_labels else 0,)),
        ("weight", "f4", (1 if inputs.has_weights and with_labels else 0,)),
        # Words of 32 bits, which are floats but of a history of vectors.
        ("vectors", "i4", (sum(spec.width for spec in inputs.vectors),)),
        ("extras", "f4", (sum(max(spec.dim, 1) for spec in inputs.extras) if with_labels else 0,)),
        ("single", "i8" if inputs.numbered else "i4", (len(inputs.single),)),
    ]
    wide = {"single"} if inputs.numbered else set[str]()
    if inputs.has_number_labels:
        wide.add("labels")
    # The sort is stable: wide entries move before `row`, the others keep their order.
    return np.dtype(sorted(entries, key=lambda entry: entry[0] not in wide))


def write_records(
    target: np.ndarray,
    table: pa.Table,
    *,
    inputs: InputSpec,
    keep: np.ndarray | None = None,
    start: int = 0,
) -> list[np.ndarray]:
    """Transpose an encoded table (see `conform`) into records.

    Args:
        target: (R,) structured array to fill; R is the table's rows, or len(keep).
        table: encoded columns.
        inputs: what the columns are.
        keep: rows of the table to take, in this order; None takes all.
        start: where the first value returned will lie in the array of all list values.

    Returns:
        Arrays of list values (int32), to be laid one after the other from `start` on.
    """
    assert len(target) == (table.num_rows if keep is None else len(keep))

    def column(name: str) -> np.ndarray:
        # Without a copy or not at all: a column that needs one has nulls, which `conform` refuses.
        values = _one_array(table.column(name)).to_numpy(zero_copy_only=True)
        return values if keep is None else values[keep]

    target["row"] = column(ROW_COLUMN)
    if inputs.has_groups:
        target["group"][:, 0] = column(GROUP_COLUMN)
    for entry, names in (
        ("dense", inputs.dense),
        ("single", [spec.name for spec in inputs.single]),
        ("labels", [label_column(spec.name) for spec in inputs.labels]),
        ("weight", [WEIGHT_COLUMN]),
    ):
        matrix = target[entry]
        for index in range(matrix.shape[1]):
            matrix[:, index] = column(names[index])
    first = 0
    for spec in inputs.vectors:
        values = _one_array(table.column(spec.name)).flatten().to_numpy(zero_copy_only=True)
        vectors = values.view(np.int32).reshape(-1, spec.width)
        target["vectors"][:, first : first + spec.width] = vectors if keep is None else vectors[keep]
        first += spec.width
    first = 0
    for spec in inputs.extras if target["extras"].shape[1] else ():
        width = max(spec.dim, 1)
        extras = numbers_of(_one_array(table.column(extra_column(spec.name)))).reshape(-1, width)
        target["extras"][:, first : first + width] = extras if keep is None else extras[keep]
        first += width
    chunks: list[np.ndarray] = []
    for index, spec in enumerate((*inputs.jagged, *inputs.moments)):
        array = _one_array(table.column(spec.name))
        values, starts, lengths = halves_of(array)
        # `starts` counts from the front of the values that the slice shares with its table.
        first, last = (int(starts[0]), int(starts[-1] + lengths[-1])) if len(starts) else (0, 0)
        # A slice of a table keeps the values of all its rows: only those of these lists are taken.
        values = values[first:last]
        starts = starts - first
        if keep is not None:
            starts = starts[keep]
            lengths = lengths[keep]
            values = gather_segments(values, starts, lengths)
            # Gathered, the lists stand one after the other, in the order of `keep`.
            starts = np.cumsum(lengths) - lengths
        # Where the lists of this feature begin in the array of all lists.
        target["starts"][:, index] = starts + start
        target["lengths"][:, index] = lengths
        chunks.append(values)
        # The next feature's values lie behind these.
        start += len(values)
    return chunks


def numbers_of(array: pa.Array) -> np.ndarray:
    """Return the numbers of a column of numbers, or of lists of one length, one after the other."""
    is_list = pa.types.is_fixed_size_list(array.type)
    return (array.flatten() if is_list else array).to_numpy(zero_copy_only=True)


def records_to_batch(records: np.ndarray, values: np.ndarray, *, inputs: InputSpec) -> Batch:
    """Build a batch from records; every tensor is a fresh copy, contiguous.

    Args:
        records: (B,) structured array.
        values: list values that the records' `starts` point into (int32).
        inputs: what the records hold.
    """
    size = len(records)
    single_SB = torch.empty((len(inputs.single), size), dtype=torch.int64)
    # Transposed and widened to 64 bits in one pass.
    np.copyto(single_SB.numpy(), records["single"].T)
    vectors: dict[str, Tensor] = {}
    first = 0
    for spec in inputs.vectors:
        words = _copied(records["vectors"][:, first : first + spec.width])
        vectors[spec.name] = words.view(torch.float32) if spec.history is None else words
        first += spec.width
    extras: dict[str, Tensor] = {}
    first = 0
    for spec in inputs.extras if records["extras"].shape[1] else ():
        width = max(spec.dim, 1)
        extra = _copied(records["extras"][:, first : first + width])
        # A number has no second axis in a batch.
        extras[spec.name] = extra if spec.dim else extra.view(-1)
        first += width
    num_jagged = len(inputs.jagged)
    return Batch(
        dense=_copied(records["dense"]),
        single=single_SB,
        jagged=rows_of_halves(_jagged_rows(records, values, lists=slice(num_jagged)), inputs, range(num_jagged)),
        vectors=vectors,
        sequences={
            spec.name: moments_of_halves(_jagged_rows(records, values, lists=slice(at, at + 1)))
            for at, spec in enumerate(inputs.moments, start=num_jagged)
        },
        labels=_copied(records["labels"]),
        weights=_copied(records["weight"]).view(-1) if records["weight"].shape[1] else None,
        groups=_copied(records["group"]).view(-1) if records["group"].shape[1] else None,
        row_ids=_copied(records["row"]),
        extras=extras,
    )


def halves_of(array: pa.Array) -> tuple[Int32[np.ndarray, " V"], Int64[np.ndarray, " N"], Int32[np.ndarray, " N"]]:
    """The values of an encoded list column as int32, those of 64 bits as two each; where lists begin, and how long.

    Args:
        array: lists, or list views.
    """
    offsets, values = (each.to_numpy(zero_copy_only=True) for each in (array.offsets, array.values))
    is_view = pa.types.is_list_view(array.type)
    # A view of lists has their sizes; plain lists have their ends, whose differences these are.
    sizes = array.sizes.to_numpy(zero_copy_only=True) if is_view else np.diff(offsets)
    # Widened before it is doubled: 32 bits may not hold twice an offset.
    begins = (offsets if is_view else offsets[:-1]).astype(np.int64)
    # Two halves for each value: begins and lengths double with them.
    return (values.view(np.int32), 2 * begins, 2 * sizes) if values.dtype == np.int64 else (values, begins, sizes)


def moments_of_halves(halves: JaggedRows) -> SequenceGroup:
    """Moments from the halves that they were kept in."""
    # Gathering widened each half to 64 bits; narrowed again, two of them side by side are one moment.
    times = np.ascontiguousarray(halves.values.numpy().astype(np.int32)).view(np.int64)
    # Offsets counted halves.
    return moments_group(torch.from_numpy(times), halves.offsets // 2)


def rows_of_halves(lists: JaggedRows, inputs: InputSpec, jagged: Sequence[int]) -> JaggedRows:
    """Lists some of which are numbers of ids in two halves each, with these put together.

    Args:
        lists: of B samples.
        inputs: what they are.
        jagged: which of its lists, in order.
    """
    wide = [inputs.jagged[index].name in inputs.numbered for index in jagged]
    if not any(wide):
        return lists
    size = (len(lists.offsets) - 1) // len(wide)
    # Feature-major: every size-th offset is where the lists of a feature begin.
    ends = lists.offsets[::size] if size else lists.offsets
    values = lists.values.numpy()
    parts = list[np.ndarray]()
    lengths = lists.offsets.diff().view(len(wide), size).clone()
    for index, is_wide in enumerate(wide):
        part = values[ends[index] : ends[index + 1]] if size else values
        # Gathering widened each half to 64 bits; narrowed again, two side by side are one number.
        parts.append(np.ascontiguousarray(part.astype(np.int32)).view(np.int64) if is_wide else part)
        # Lengths counted halves of numbers.
        lengths[index] //= 2 if is_wide else 1
    offsets = torch.zeros_like(lists.offsets)
    torch.cumsum(lengths.view(-1), 0, out=offsets[1:])
    return JaggedRows(torch.from_numpy(np.concatenate(parts)), offsets)


def _jagged_rows(records: np.ndarray, values: np.ndarray, *, lists: slice) -> JaggedRows:
    lengths_JB = records["lengths"].T[lists]
    if lengths_JB.shape[0] == 0:
        return JaggedRows.empty()
    lengths = lengths_JB.ravel().astype(np.int64)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Records keep lists sample by sample; transposed, those of a feature lie side by side.
    rows = gather_segments(values, records["starts"].T[lists].ravel(), lengths)
    return JaggedRows(torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(offsets))


def _copied(array: np.ndarray) -> Tensor:
    # In C order, since a column of records is a view with the stride of a record.
    return torch.from_numpy(np.array(array, order="C"))


def concatenate_values(chunks: Sequence[np.ndarray]) -> np.ndarray:
    """All list values of a buffer in one array (int32)."""
    return np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32)


def table_to_batch(table: pa.Table, inputs: InputSpec, *, where: str = "table") -> Batch:
    """The whole encoded table as one batch, in its order; for small tables (serving, tests).

    Labels are (B, 0) and weights None where the table has no label columns.

    Raises:
        DataError: the table does not have the columns of `inputs`.
    """
    table = conform(table, inputs, where=where)
    records = np.empty(table.num_rows, dtype=record_dtype(inputs, with_labels=has_labels(table, inputs)))
    values = concatenate_values(write_records(records, table, inputs=inputs))
    return records_to_batch(records, values, inputs=inputs)

"""Blocks: encoded rows in columns, the shape in which they are shuffled and from which batches are gathered.

    row group (Arrow)  ── views, no copy ──►  Block  ── gather runs ──►  Batch
                       ── place, permuted ─►  Block of a window ──┘

Every column has one value a row. A list has two: its length, and where its values start (in a chunk, which is the
Arrow array of a row group; the values themselves are never moved before they are copied into a batch).

Rows are int32 in blocks, which halves the bytes to move, and int64 in a batch, which is what embedding kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int32, Int64

from ziggurat.data.encoded.records import (
    GROUP_COLUMN,
    ROW_COLUMN,
    WEIGHT_COLUMN,
    extra_column,
    halves_of,
    label_column,
    moments_of_halves,
    numbers_of,
    rows_of_halves,
)
from ziggurat.data.encoded.slices import gather_segments, repeated_rows
from ziggurat.data.encoded.stored_once import is_repeated
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.inputs import ExtraSpec, InputSpec
from ziggurat.features.jagged import FeatureGroup, RepeatedRows
from ziggurat.ops.rows import CHUNK_BITS, Columns, Targets, gather_lists, gather_rows, place_rows, share_lists

# A start is an int64: the number of a chunk above CHUNK_BITS bits of the place in it, and the sign stays clear.
_CHUNKS_MOST = 1 << (63 - CHUNK_BITS)


class Block:
    """Rows in columns, and the chunks that hold the values of their lists.

    Args:
        columns: as `BlockLayout` orders them.
        chunks: values of lists.
    """

    def __init__(self, columns: Columns, chunks: list[np.ndarray]) -> None:
        self.columns = columns
        self.chunks = chunks


class BlockLayout:
    """Order, types and places of the columns of encoded rows in a block, and in a batch.

    Args:
        inputs: what the columns are.
        with_labels: False for data to predict.
        groups: features of which a batch keeps each distinct combination once; see `Batch.repeated`.
    """

    def __init__(self, inputs: InputSpec, *, with_labels: bool, groups: Sequence[FeatureGroup] = ()) -> None:
        self.inputs = inputs
        self.groups = tuple(groups)
        self._shared = frozenset(at for group in groups for at in group.jagged)
        assert not any(inputs.jagged[at].name in inputs.numbered for at in self._shared), "halves are no rows"
        labels = [label_column(spec.name) for spec in inputs.labels] if with_labels else []
        self._extras = inputs.extras if with_labels else ()
        # Columns of several numbers a row, and how many: vectors, then extras.
        self._wide = [(spec.name, spec.width) for spec in inputs.vectors]
        self._wide += [(extra_column(spec.name), max(spec.dim, 1)) for spec in self._extras]
        self._words = frozenset(spec.name for spec in inputs.vector_histories)
        self._names = {
            "row_ids": ([ROW_COLUMN], np.int64),
            "groups": ([GROUP_COLUMN] if inputs.has_groups else [], np.int64),
            "weights": ([WEIGHT_COLUMN] if inputs.has_weights and with_labels else [], np.float32),
            "dense": (list(inputs.dense), np.float32),
            "labels": (labels, np.float64 if inputs.has_number_labels else np.float32),
            "single": ([spec.name for spec in inputs.single], np.int32),
        }
        self._num_lists = len(inputs.jagged) + len(inputs.moments)
        # A cache of this object: as a decorator of the method it would keep every layout alive.
        self._targets = functools.lru_cache(maxsize=4)(self._make_targets)

    def views(self, table: pa.Table, *, first_chunk: int = 0) -> Block:
        """The rows of an encoded table (see `records.conform`), not copied.

        Args:
            table: encoded columns.
            first_chunk: number that the chunk of the first list gets.
        """
        arrays = [_values(table, name) for names, _ in self._names.values() for name in names]
        arrays += [numbers_of(_array(table, name)).reshape(-1, width) for name, width in self._wide]
        lengths: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        chunks: list[np.ndarray] = []
        for index, spec in enumerate((*self.inputs.jagged, *self.inputs.moments)):
            array = _array(table, spec.name)
            values, begins, sizes = halves_of(array)
            is_view = pa.types.is_list_view(array.type)  # rows of a session share their lists already
            if index in self._shared and not is_view:
                begins = share_lists(values, np.append(begins, begins[-1] + sizes[-1] if len(begins) else 0))
            lengths.append(sizes)
            chunks.append(values)
            starts.append(begins + ((first_chunk + index) << CHUNK_BITS))
        return Block(Columns([*arrays, *lengths, *starts]), chunks)

    def empty(self, num_rows: int) -> Columns:
        """Columns for so many rows, not filled."""
        numbered = self.inputs.numbered
        arrays = [
            np.empty(num_rows, np.int64 if name in numbered else dtype)
            for names, dtype in self._names.values()
            for name in names
        ]
        arrays += [np.empty((num_rows, width), self._type_of(name)) for name, width in self._wide]
        for dtype in (np.int32, np.int64):
            arrays += [np.empty(num_rows, dtype) for _ in range(self._num_lists)]
        return Columns(arrays)

    def place(self, table: pa.Table, *, target: Block, part: int, places: Int32[np.ndarray, " N"]) -> None:
        """Copy rows of a table to their places in a block. Several threads may place other parts at once.

        Args:
            table: encoded columns.
            target: has room for the chunks of all its parts.
            part: number of the part that the table is.
            places: row of the block for each row of the table; -1 leaves it out.
        """
        first_chunk = part * self._num_lists
        assert first_chunk + self._num_lists <= _CHUNKS_MOST
        block = self.views(table, first_chunk=first_chunk)
        if self._num_lists:
            self._keep_values(block, target, first_chunk, places)
        place_rows(block.columns, out=target.columns, places=places)

    def _keep_values(self, block: Block, target: Block, first_chunk: int, places: np.ndarray) -> None:
        """Hand the values of lists to the target; only those of rows that are kept."""
        kept = places >= 0
        every = bool(kept.all())
        lengths = block.columns.arrays[-2 * self._num_lists : -self._num_lists]
        all_starts = block.columns.arrays[-self._num_lists :]
        for index, (chunk, length, starts) in enumerate(zip(block.chunks, lengths, all_starts, strict=True)):
            base = (first_chunk + index) << CHUNK_BITS
            if not every:
                mine = starts[kept] - base
                sizes = length[kept].astype(np.int64)
                # Rows that share a list with the row before point to the same copy of it.
                heads = ~is_repeated(mine, sizes)
                chunk = gather_segments(chunk, mine[heads], sizes[heads])
                begins = np.cumsum(sizes[heads]) - sizes[heads]
                # `views` made these starts as a new array, so nothing of Arrow's memory is written to.
                starts[kept] = begins[np.cumsum(heads) - 1] + base
            target.chunks[first_chunk + index] = chunk

    def chunks_of(self, num_parts: int) -> list[np.ndarray]:
        """Room for the values of the lists of so many parts."""
        # One array stands for all: entries are replaced, never written to.
        return [np.empty(0, np.int32)] * (num_parts * self._num_lists)

    def batch(self, blocks: Sequence[Block], runs: Int64[np.ndarray, "K 3"]) -> Batch:
        """Gather a batch; every tensor is a fresh copy, contiguous.

        Args:
            blocks: rows.
            runs: number of the block, first row, number of rows; blocks rise.
        """
        if not len(runs):
            return deduplicate(self._empty_batch(), self.groups) if self.groups else self._empty_batch()
        size = int(runs[:, 2].sum())
        wide = {name: np.empty((size, width), self._type_of(name)) for name, width in self._wide}
        lists = np.empty((2 if self._num_lists else 0, self._num_lists, size), np.int64)  # lengths, starts
        made = {
            name: np.empty(self._shape(name, size), np.int64 if dtype is np.int32 else dtype)
            for name, (_, dtype) in self._names.items()
        }
        out = [*made.values(), *wide.values(), *lists]
        gather_rows([block.columns for block in blocks], runs, out=out, targets=self._targets(size))
        tensors = {name: torch.from_numpy(array) for name, array in made.items()}
        has = {name: bool(names) for name, (names, _) in self._names.items()}
        batch = Batch(
            dense=tensors["dense"],
            single=tensors["single"],
            vectors={spec.name: torch.from_numpy(wide[spec.name]) for spec in self.inputs.vectors},
            labels=tensors["labels"],
            weights=tensors["weights"] if has["weights"] else None,
            groups=tensors["groups"] if has["groups"] else None,
            row_ids=tensors["row_ids"],
            extras={
                spec.name: torch.from_numpy(wide[extra_column(spec.name)]).view(*_extra_shape(spec, size))
                for spec in self._extras
            },
        )
        return self._with_lists(batch, *lists, blocks=blocks, runs=runs) if self._num_lists else batch

    def _type_of(self, wide: str) -> type[np.generic]:
        """Return the type of a column of several numbers a row."""
        return np.int32 if wide in self._words else np.float32

    def _shape(self, name: str, size: int) -> tuple[int, ...]:
        names = self._names[name][0]
        if name in ("dense", "labels"):
            return size, len(names)
        return (len(names), size) if name == "single" else (size * len(names),)

    def _make_targets(self, size: int) -> Targets:
        """Return where each column goes in the arrays of a batch of so many samples."""
        rows: list[tuple[int, int, int]] = []
        for array, (name, (names, _)) in enumerate(self._names.items()):
            by_row = name in ("dense", "labels")
            rows += [(array, n if by_row else n * size, len(names) if by_row else 1) for n in range(len(names))]
        array = len(self._names)
        for _, width in self._wide:
            rows.append((array, 0, width))
            array += 1
        for _ in range(2 if self._num_lists else 0):
            rows += [(array, n * size, 1) for n in range(self._num_lists)]
            array += 1
        return Targets(*np.array(rows, dtype=np.int64).T.copy())

    def _with_lists(
        self, batch: Batch, lengths_JB: np.ndarray, starts_JB: np.ndarray, *, blocks: Sequence[Block], runs: np.ndarray
    ) -> Batch:
        """The batch with its lists, each distinct combination of `groups` once."""
        chunks = _one_numbering(blocks, runs, starts_JB) if len(blocks) > 1 else blocks[0].chunks
        num_jagged = len(self.inputs.jagged)
        plain = [at for at in range(num_jagged) if at not in self._shared]
        times = {
            spec.name: moments_of_halves(_gathered(lengths_JB[at : at + 1], starts_JB[at : at + 1], chunks))
            for at, spec in enumerate(self.inputs.moments, start=num_jagged)
        }
        batch = replace(batch, sequences=times) if times else batch
        if self._shared:
            repeated = tuple(self._repeated(group, batch, lengths_JB, starts_JB, chunks) for group in self.groups)
            batch = replace(batch, repeated=repeated)
        lengths_JB = lengths_JB[plain]
        starts_JB = starts_JB[plain]
        if not plain:
            return batch
        return replace(batch, jagged=rows_of_halves(_gathered(lengths_JB, starts_JB, chunks), self.inputs, plain))

    def _repeated(
        self,
        group: FeatureGroup,
        batch: Batch,
        lengths_JB: np.ndarray,
        starts_JB: np.ndarray,
        chunks: Sequence[np.ndarray],
    ) -> RepeatedRows:
        at = list(group.jagged)
        return repeated_rows(
            group,
            single=batch.single.numpy()[list(group.single)],
            starts=starts_JB[at],
            lengths=lengths_JB[at],
            gather=lambda starts, offsets: gather_lists(starts, offsets=offsets, chunks=chunks),
        )

    def _empty_batch(self) -> Batch:
        batch = Batch.empty(self.inputs)
        labels = batch.labels if self._names["labels"][0] else torch.empty(0, 0)
        weights = batch.weights if self._names["weights"][0] else None
        extras = {spec.name: torch.empty(_extra_shape(spec, 0)) for spec in self._extras}
        return replace(batch, labels=labels, weights=weights, extras=extras)


def _extra_shape(spec: ExtraSpec, size: int) -> tuple[int, ...]:
    return (size, spec.dim) if spec.dim else (size,)


def _one_numbering(blocks: Sequence[Block], runs: np.ndarray, starts_JB: np.ndarray) -> list[np.ndarray]:
    """The chunks of all blocks, and the starts changed to their numbers."""
    chunks: list[np.ndarray] = []
    ends = np.cumsum(runs[:, 2])
    for number, block in enumerate(blocks):
        # Blocks rise from run to run, so the rows of one block are one stretch of the batch.
        of_block = np.flatnonzero(runs[:, 0] == number)
        first = ends[of_block[0]] - runs[of_block[0], 2]
        last = ends[of_block[-1]]
        starts_JB[:, first:last] += len(chunks) << CHUNK_BITS
        chunks += block.chunks
    return chunks


def _gathered(lengths_JB: np.ndarray, starts_JB: np.ndarray, chunks: Sequence[np.ndarray]) -> JaggedRows:
    offsets = np.zeros(lengths_JB.size + 1, dtype=np.int64)
    np.cumsum(lengths_JB.reshape(-1), out=offsets[1:])
    rows = gather_lists(starts_JB.reshape(-1), offsets=offsets, chunks=chunks)
    return JaggedRows(torch.from_numpy(rows), torch.from_numpy(offsets))


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _values(table: pa.Table, name: str) -> np.ndarray:
    # A silent copy would double the bytes to move: an encoded column that needs one is a mistake.
    return _array(table, name).to_numpy(zero_copy_only=True)

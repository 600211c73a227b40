"""Users and items apart: encoded once each, then joined to the pairs that a model scores.

A request asks for the scores of one user with a thousand items. Encoding a thousand raw rows, each with the same user
in it, would cost more than the model. So both sides are encoded on their own, items when the export is loaded, and a
batch of pairs is gathered from them:

    users    u0 u1          pairs  (u0, i3) (u0, i7) (u1, i3)      Batch of 3 samples, features in the model's order
    items    i0 … i9               dense, single, lists and vectors of both sides, column by column

Each feature belongs to one side, and its encoding depends on nothing else, so the joined batch is bit for bit the one
that `Preprocessing.batch` makes of whole rows; a test compares them.

Cost: one gather for each feature; 1,000 pairs of 8 features take about 0.1 ms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import polars as pl
import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import MOMENT, SequenceGroup, moments_group
from ziggurat.features.schema import table_of
from ziggurat.serving.answering.histories import HistorySnapshots

_CHUNK_ROWS = 65_536


class Side:
    """Encodes the columns of some features of a schema.

    Args:
        whole: the preprocessing of all features.
        names: of the features of this side; none are allowed.
        histories: vectors of users, which no request brings.
    """

    def __init__(
        self, whole: Preprocessing, *, names: Collection[str], histories: HistorySnapshots | None = None
    ) -> None:
        self._histories = histories or HistorySnapshots()
        schema = whole.schema
        features = tuple(feature for feature in schema.features if feature.name in names)
        self.names = tuple(feature.name for feature in features)
        self.preprocessing: Preprocessing | None = None
        if features:
            used = {table_of(feature) for feature in features}
            # Requests bring features alone: a label, weight, group or time that is not there must not be asked for.
            part = dataclasses.replace(
                schema,
                features=features,
                labels=(),
                tables=tuple(table for table in schema.tables if table.name in used),
                weight="",
                group="",
                session="",
                time="",
                items=None,
            )
            self.preprocessing = Preprocessing(
                part,
                vocabularies={name: each for name, each in whole.vocabularies.items() if name in used},
                numbers={name: each for name, each in whole.numbers.items() if name in self.names},
            )

    @property
    def inputs(self) -> InputSpec:
        """The inputs that a batch of this side has."""
        return InputSpec() if self.preprocessing is None else self.preprocessing.inputs

    def encode(self, frame: pl.DataFrame, *, num_rows: int, first_row: int = 0) -> Batch:
        """Raw rows as a batch with the features of this side alone.

        Args:
            frame: the columns of its features.
            num_rows: of the frame; what the batch has where this side has no feature.
            first_row: number of the first row in errors, for a part of a frame.

        Raises:
            SchemaError, DataError, BoundsError: as `Preprocessing.encode`.
        """
        if self.preprocessing is not None:
            return self.preprocessing.batch(self._histories.added_to(frame), first_row=first_row)
        return Batch(
            dense=torch.empty(num_rows, 0),
            single=torch.empty(0, num_rows, dtype=torch.int64),
            labels=torch.empty(num_rows, 0),
            row_ids=torch.arange(num_rows),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedSide:
    """A batch of one side, with the names of what is in it."""

    inputs: InputSpec
    batch: Batch


def encode_frame(side: Side, frame: pl.DataFrame) -> EncodedSide:
    """Rows of a frame as one side; columns that the frame lacks are missing, others are ignored.

    Args:
        side: whose features are wanted.
        frame: raw rows.
    """
    names = () if side.preprocessing is None else side.preprocessing.schema.columns
    chosen = [name if name in frame.columns else pl.lit(None).alias(name) for name in names]
    parts = [
        side.encode(part.select(chosen), num_rows=part.height, first_row=number * _CHUNK_ROWS)
        for number, part in enumerate(frame.iter_slices(_CHUNK_ROWS))
    ]
    return EncodedSide(inputs=side.inputs, batch=stacked(parts))


def stacked(parts: Sequence[Batch]) -> Batch:
    """Batches of one side, one after the other."""
    # Without a copy: a catalogue of one part is large enough.
    if len(parts) == 1:
        return parts[0]
    return dataclasses.replace(Batch.stacked(parts), row_ids=torch.arange(sum(part.batch_size for part in parts)))


def join(
    inputs: InputSpec, *, users: EncodedSide, items: EncodedSide, pairs: tuple[Int64[Tensor, "P"], Int64[Tensor, "P"]]
) -> Batch:
    """The batch of some pairs.

    Args:
        inputs: of the model; each feature is in one of the sides.
        users: one sample a user.
        items: one sample an item.
        pairs: number of the user, and of the item, of each pair.
    """
    sides = ((users, pairs[0]), (items, pairs[1]))
    size = len(pairs[0])
    dense = torch.empty(size, len(inputs.dense))
    single = torch.empty(len(inputs.single), size, dtype=torch.int64)
    vectors: dict[str, Tensor] = {}
    lists: dict[str, tuple[Tensor, Tensor]] = {}
    moments: dict[str, SequenceGroup] = {}
    dense_at = {name: index for index, name in enumerate(inputs.dense)}
    single_at = {spec.name: index for index, spec in enumerate(inputs.single)}
    for side, chosen in sides:
        if side.inputs.dense:
            dense[:, [dense_at[name] for name in side.inputs.dense]] = side.batch.dense[chosen]
        for index, spec in enumerate(side.inputs.single):
            # Straight into its row, since a gather of its own would be copied once more.
            torch.index_select(side.batch.single[index], 0, chosen, out=single[single_at[spec.name]])
        vectors |= {spec.name: side.batch.vectors[spec.name][chosen] for spec in side.inputs.vectors}
        for index, spec in enumerate(side.inputs.jagged):
            lists[spec.name] = _take_lists(side.batch, index, chosen)
        for spec in side.inputs.moments:
            group = side.batch.sequences[spec.name].expanded()
            times, lengths = _take(group.values[MOMENT], group.offsets, chosen)
            moments[spec.name] = moments_group(times, _offsets_of(lengths))
    # In the order of the model, in which features of users and items may alternate.
    ordered = [lists[spec.name] for spec in inputs.jagged]
    jagged = JaggedRows.empty()
    if ordered:
        lengths = torch.cat([each for _, each in ordered])
        jagged = JaggedRows(torch.cat([values for values, _ in ordered]), _offsets_of(lengths))
    return Batch(
        dense=dense,
        single=single,
        jagged=jagged,
        vectors={spec.name: vectors[spec.name] for spec in inputs.vectors},
        sequences={spec.name: moments[spec.name] for spec in inputs.moments},
        labels=torch.empty(size, 0),
        row_ids=torch.arange(size),
    )


def _take_lists(batch: Batch, feature: int, chosen: Int64[Tensor, "P"]) -> tuple[Tensor, Tensor]:
    """Values and lengths of the lists of one feature of some samples."""
    size = batch.batch_size
    offsets = batch.jagged.offsets[feature * size : (feature + 1) * size + 1]
    return _take(batch.jagged.values, offsets, chosen)


def _take(values: Tensor, offsets: Int64[Tensor, "B+1"], chosen: Int64[Tensor, "P"]) -> tuple[Tensor, Tensor]:
    """Values and lengths of some lists."""
    starts = offsets[:-1][chosen]
    lengths = offsets.diff()[chosen]
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    # Place p of the result lies p − (begin of its list there) behind the begin of that list in `values`.
    at = torch.arange(total) + (starts - (ends - lengths)).repeat_interleave(lengths, output_size=total)
    return values[at], lengths


def _offsets_of(lengths: Int64[Tensor, "N"]) -> Int64[Tensor, "N+1"]:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets

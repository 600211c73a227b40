"""Batch: the samples of one step, as tensors. What every layer above the data speaks.

Features with one row a sample lie feature-major in one matrix, so the common path (Criteo has 26 of them) has no
offsets at all. Lists are *jagged*: all rows one after the other, feature-major, and offsets that cut them.

    single   feature  sample 0  1  2          jagged   feature  sample 0  sample 1  sample 2
             user         [ 7  4  7 ]                  genres       [5 9]     []        [3]
             item         [ 3  8  5 ]                  tags         [2]       [2 6]     []

    single = [[7, 4, 7], [3, 8, 5]]           values  = [5, 9, 3, 2, 2, 6]
                                              offsets = [0, 2, 2, 3, 4, 6, 6]   (num features · batch size + 1)

A batch is validated once, on the way in (`validate_batch`), never again inside the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from ziggurat.errors import BoundsError, DataError
from ziggurat.features.inputs import InputSpec


@dataclass(frozen=True, slots=True)
class JaggedRows:
    """Lists of rows, feature-major.

    Feature j of sample b is `values[offsets[j·B + b] : offsets[j·B + b + 1]]`.
    """

    values: Int64[Tensor, "N"]
    offsets: Int64[Tensor, "J*B+1"]

    @staticmethod
    def empty() -> JaggedRows:
        """No features at all."""
        return JaggedRows(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    def lengths(self, *, num_features: int) -> Int64[Tensor, "J B"]:
        """Rows of every list."""
        return self.offsets.diff().view(num_features, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step; the order of columns is that of an `InputSpec`.

    Args:
        dense: (B, N) numbers after their transforms.
        single: (S, B) rows, feature-major.
        jagged: lists of rows for J features.
        vectors: one (B, dim) tensor for each vector feature, by name.
        labels: (B, L); empty second axis when predicting.
        weights: (B,) sample weights, or None.
        groups: (B,) group of each sample for GAUC, or None.
        row_ids: (B,) position of each sample in its data set; the sample ledger hashes them.
    """

    dense: Float32[Tensor, "B N"]
    single: Int64[Tensor, "S B"]
    jagged: JaggedRows = field(default_factory=JaggedRows.empty)
    vectors: dict[str, Float32[Tensor, "B D"]] = field(default_factory=dict)
    labels: Float32[Tensor, "B L"]
    weights: Float32[Tensor, "B"] | None = None
    groups: Int64[Tensor, "B"] | None = None
    row_ids: Int64[Tensor, "B"]

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.dense.shape[0]

    @staticmethod
    def empty(inputs: InputSpec) -> Batch:
        """A batch of no samples."""
        rows = torch.empty(0, dtype=torch.int64)
        return Batch(
            dense=torch.empty(0, len(inputs.dense)),
            single=rows.view(len(inputs.single), 0),
            jagged=JaggedRows.empty(),
            vectors={spec.name: torch.empty(0, spec.dim) for spec in inputs.vectors},
            labels=torch.empty(0, len(inputs.labels)),
            weights=torch.empty(0) if inputs.has_weights else None,
            groups=rows if inputs.has_groups else None,
            row_ids=rows,
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device (no copy where it already is)."""
        device = torch.device(device)
        if device == self.dense.device:
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(
            dense=moved(self.dense),
            single=moved(self.single),
            jagged=JaggedRows(moved(self.jagged.values), moved(self.jagged.offsets)),
            vectors={name: moved(tensor) for name, tensor in self.vectors.items()},
            labels=moved(self.labels),
            weights=None if self.weights is None else moved(self.weights),
            groups=None if self.groups is None else moved(self.groups),
            row_ids=self.row_ids,  # only the ledger reads them, on the host
        )


def validate_batch(batch: Batch, inputs: InputSpec) -> Batch:
    """Check shapes, offsets and bounds of a batch; returns it unchanged.

    Cost: one pass over the rows (min and max of each feature). Data that comes from `Preprocessing` is right by
    construction; call this for batches made by hand.

    Raises:
        DataError: a shape or an offset is wrong, or a dense value is not finite.
        BoundsError: a row is outside its table; names feature, sample and table.
    """
    size = batch.batch_size
    _expect_shape("dense", batch.dense, (size, len(inputs.dense)))
    _expect_shape("single", batch.single, (len(inputs.single), size))
    _expect_shape("jagged.offsets", batch.jagged.offsets, (len(inputs.jagged) * size + 1,))
    _expect_shape("row_ids", batch.row_ids, (size,))
    offsets = batch.jagged.offsets
    if int(offsets[0]) != 0 or int(offsets[-1]) != batch.jagged.values.numel() or bool((offsets.diff() < 0).any()):
        raise DataError(
            expected=f"offsets that start at 0, never fall and end at {batch.jagged.values.numel()} (number of values)",
            found=f"first {int(offsets[0])}, last {int(offsets[-1])}, smallest step "
            f"{int(offsets.diff().min()) if offsets.numel() > 1 else 0}",
            where="batch.jagged.offsets",
            ways_out="build offsets with torch.cumsum over the lengths, feature-major",
        )
    if not bool(torch.isfinite(batch.dense).all()):
        sample, column = (batch.dense.isfinite().logical_not().nonzero()[0]).tolist()
        raise DataError(
            expected="finite dense values",
            found=str(batch.dense[sample, column].item()),
            where=f"dense feature {inputs.dense[column]!r}, sample {sample} (row {int(batch.row_ids[sample])})",
            ways_out="clean the value, or give the feature a `missing` value in the schema",
        )
    _check_bounds(batch, inputs)
    return batch


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise DataError(
            expected=f"shape {shape}",
            found=f"shape {tuple(tensor.shape)}",
            where=f"batch.{name}",
            ways_out="build the batch in the order of model.inputs (an InputSpec)",
        )


def _check_bounds(batch: Batch, inputs: InputSpec) -> None:
    size = batch.batch_size
    for index, spec in enumerate(inputs.single):
        _check_feature(batch.single[index], spec.name, inputs.table(spec.table).num_rows, batch, None)
    for index, spec in enumerate(inputs.jagged):
        offsets = batch.jagged.offsets[index * size : (index + 1) * size + 1]
        values = batch.jagged.values[int(offsets[0]) : int(offsets[-1])]
        _check_feature(values, spec.name, inputs.table(spec.table).num_rows, batch, offsets - offsets[0])


def _check_feature(rows: Tensor, feature: str, num_rows: int, batch: Batch, offsets: Tensor | None) -> None:
    if rows.numel() == 0 or (int(rows.min()) >= 0 and int(rows.max()) < num_rows):
        return
    position = int(((rows < 0) | (rows >= num_rows)).nonzero()[0])
    sample = position if offsets is None else int(torch.searchsorted(offsets, position, right=True)) - 1
    raise BoundsError(
        expected=f"rows 0 … {num_rows - 1}",
        found=f"row {int(rows[position])}",
        where=f"feature {feature!r}, sample {sample} of the batch (row {int(batch.row_ids[sample])} of the data)",
        ways_out=(
            "encode raw ids with the run's Preprocessing instead of by hand",
            'choose out_of_range = "unknown" or "clamp" for the table in the schema',
        ),
    )

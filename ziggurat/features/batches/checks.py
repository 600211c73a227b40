"""Checks of batches that were made by hand: shapes, offsets, and rows inside their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ziggurat.errors import BoundsError, DataError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import JaggedRows, SequenceGroup

if TYPE_CHECKING:
    from ziggurat.features.batch import Batch


def validate_batch(batch: Batch, inputs: InputSpec, *, has_rows: bool = True, must_have_labels: bool = False) -> Batch:
    """Check shapes, offsets, bounds, labels and weights of a batch; returns it unchanged.

    Cost: one pass over the rows (min and max of each feature). Data that comes from `Preprocessing` is right by
    construction; call this for batches made by hand. Trainers call it for every batch of a source of your own.

    Args:
        batch: to check.
        inputs: of the model.
        has_rows: whether its ids are rows already; False where vocabularies grow, and rows are taken from ids later.
        must_have_labels: whether it is one to train on; a batch to score may have none.

    Raises:
        DataError: a shape or an offset is wrong, a dense value is not finite, a binary label is not between 0 and 1,
            or a weight is negative or no number.
        BoundsError: a row is outside its table; names feature, sample and table.
    """
    size = batch.batch_size
    _expect_shape("dense", batch.dense, (size, len(inputs.dense)))
    _expect_shape("single", batch.single, (len(inputs.single), size))
    # Lists of deduplicated features stand in their groups instead.
    num_plain = len(inputs.jagged) - sum(len(group.features.jagged) for group in batch.repeated)
    _expect_shape("jagged.offsets", batch.jagged.offsets, (num_plain * size + 1,))
    _expect_shape("row_ids", batch.row_ids, (size,))
    _check_offsets(batch.jagged, where="batch.jagged.offsets")
    if not bool(torch.isfinite(batch.dense).all()):
        sample, column = (batch.dense.isfinite().logical_not().nonzero()[0]).tolist()
        raise DataError(
            expected="finite dense values",
            found=str(batch.dense[sample, column].item()),
            where=f"dense feature {inputs.dense[column]!r}, sample {sample} (row {int(batch.row_ids[sample])})",
            ways_out="clean the value, or give the feature a `missing` value in the schema",
        )
    _check_labels(batch, inputs, must_be_there=must_have_labels)
    _check_weights(batch)
    for spec in inputs.vectors:
        if spec.name not in batch.vectors:
            raise DataError(
                expected=f"vectors of {', '.join(repr(each.name) for each in inputs.vectors)}",
                found=", ".join(map(repr, batch.vectors)) or "none",
                where="batch.vectors",
                ways_out=f"give the batch vectors={{{spec.name!r}: a tensor of shape ({size}, {spec.width})}}",
            )
        _expect_shape(f"vectors[{spec.name!r}]", batch.vectors[spec.name], (size, spec.width))
        if spec.history is not None and batch.vectors[spec.name].dtype is not torch.int32:
            raise DataError(
                expected="a history of vectors as words of 32 bits, as `pack_histories` makes them",
                found=str(batch.vectors[spec.name].dtype),
                where=f"batch.vectors[{spec.name!r}]",
                ways_out="pack_histories(vectors, lengths, history=spec.history) of ziggurat.ops.vector_histories",
            )
    _check_repeated(batch, inputs)
    if has_rows:
        # Expanded, so that an error names the sample and not a slice that several share.
        _check_bounds(batch.expanded(), inputs)
    for name, group in batch.sequences.items():
        _check_sequences(name, group, size)
    for name, value in batch.extras.items():
        _expect_shape(f"extras[{name!r}]", value, (size, *value.shape[1:]))
    return batch


def _check_labels(batch: Batch, inputs: InputSpec, *, must_be_there: bool) -> None:
    """Refuse labels of another shape, and values that the loss of their task does not know."""
    size = batch.batch_size
    num_labels = batch.labels.shape[1] if batch.labels.dim() == 2 else None
    # Data to predict has labels without columns, which are right for any model.
    if must_be_there or num_labels != 0:
        _expect_shape("labels", batch.labels, (size, len(inputs.labels)))
    if num_labels == 0 or not size:
        return
    for column, label in enumerate(inputs.labels):
        values_B = batch.labels[:, column]
        # By what may be learned, not by what a row may say: a teacher's label lies between 0 and 1.
        wrong_B = ~(label.task.learnable(values_B) | values_B.isnan())
        if not bool(wrong_B.any()):
            continue
        sample = int(wrong_B.nonzero()[0])
        raise DataError(
            expected=f"{label.task.expected_in_batch} (NaN: not known)",
            found=f"{values_B[sample].item():g}",
            where=f"label {label.name!r}, sample {sample} (row {int(batch.row_ids[sample])})",
            ways_out=label.task.ways_out_in_batch,
        )


def _check_weights(batch: Batch) -> None:
    """Refuse weights of another shape, negative ones, and those that are no numbers."""
    weights = batch.weights
    size = batch.batch_size
    if weights is None:
        return
    if tuple(weights.shape) != (size,):
        raise DataError(
            expected=f"shape ({size},): one weight a sample",
            found=f"shape {tuple(weights.shape)}",
            where="batch.weights",
            ways_out=("weights.squeeze(1), if it is a column", "leave weights out: each sample then counts 1"),
        )
    # Not `weights < 0`: that is False for NaN.
    wrong_B = ~(weights >= 0) | weights.isinf()
    if bool(wrong_B.any()):
        sample = int(wrong_B.nonzero()[0])
        raise DataError(
            expected="weights of 0 or more",
            found=f"{weights[sample].item():g}",
            where=f"batch.weights, sample {sample} (row {int(batch.row_ids[sample])})",
            ways_out=("make it 0, which leaves the sample out", "leave the sample out of the batch"),
        )


def _check_sequences(name: str, group: SequenceGroup, size: int) -> None:
    where = f"batch.sequences[{name!r}]"
    num_events = int(group.offsets[-1])
    num_sequences = len(group.offsets) - 1
    wrong = {kind: len(value) for kind, value in group.values.items() if len(value) != num_events}
    if int(group.offsets[0]) != 0 or bool((group.offsets.diff() < 0).any()) or wrong:
        raise DataError(
            expected=f"offsets that start at 0 and never fall, and {num_events} events (the last offset) of each kind",
            found=f"first offset {int(group.offsets[0])}, events {wrong}" if wrong else "offsets that do not",
            where=where,
            ways_out="build offsets with torch.cumsum over the lengths",
        )
    if group.batch_size != size:
        raise DataError(
            expected=f"one sequence (or entry of inverse) for each of {size} samples",
            found=str(group.batch_size),
            where=where,
            ways_out="give each sample a sequence, an empty one where it has none",
        )
    if group.inverse is not None:
        _check_inverse(group.inverse, num_sequences, where=where)


def _check_repeated(batch: Batch, inputs: InputSpec) -> None:
    """Shapes and positions of the groups; their rows are checked in the expanded batch."""
    size = batch.batch_size
    seen: list[int] = []
    for number, group in enumerate(batch.repeated):
        name = f"repeated[{number}]"
        features = group.features
        num_slices = group.num_slices
        _expect_shape(f"{name}.single", group.single, (len(features.single), num_slices))
        _expect_shape(f"{name}.jagged.offsets", group.jagged.offsets, (len(features.jagged) * num_slices + 1,))
        _expect_shape(f"{name}.inverse", group.inverse, (size,))
        _check_offsets(group.jagged, where=f"batch.{name}.jagged.offsets")
        _check_inverse(group.inverse, num_slices, where=f"batch.{name}")
        seen += features.jagged
        impossible = [at for at in features.jagged if at >= len(inputs.jagged)]
        impossible += [at for at in features.single if at >= len(inputs.single)]
        if impossible or len(set(seen)) != len(seen):
            raise DataError(
                expected="each list in one group at most, at a position of model.inputs",
                found=f"lists {seen}, positions that do not exist: {impossible}",
                where=f"batch.{name}.features",
                ways_out="let ziggurat.features.batches.repeats.deduplicate make the groups",
            )
        if not torch.equal(group.single[:, group.inverse], batch.single[list(features.single)]):
            raise DataError(
                expected="the rows of batch.single, each distinct combination once",
                found="others",
                where=f"batch.{name}.single",
                ways_out="let ziggurat.features.batches.repeats.deduplicate make the groups",
            )


def _check_inverse(inverse: Tensor, num: int, *, where: str) -> None:
    if inverse.numel() and not 0 <= int(inverse.min()) <= int(inverse.max()) < num:
        raise BoundsError(
            expected=f"positions 0 … {num - 1} of unique sequences",
            found=f"{int(inverse.min())} … {int(inverse.max())}",
            where=f"{where}.inverse",
            ways_out="make it with torch.unique(…, return_inverse=True)",
        )


def _check_offsets(jagged: JaggedRows, *, where: str) -> None:
    offsets = jagged.offsets
    if int(offsets[0]) != 0 or int(offsets[-1]) != jagged.values.numel() or bool((offsets.diff() < 0).any()):
        raise DataError(
            expected=f"offsets that start at 0, never fall and end at {jagged.values.numel()} (number of values)",
            found=f"first {int(offsets[0])}, last {int(offsets[-1])}, smallest step "
            f"{int(offsets.diff().min()) if offsets.numel() > 1 else 0}",
            where=where,
            ways_out="build offsets with torch.cumsum over the lengths, feature-major",
        )


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
    if size and inputs.single:
        # All features at once: one look at a batch without faults, which nearly all are.
        least_S, most_S = batch.single.aminmax(dim=1)
        sizes_S = [inputs.table(spec.table).num_rows for spec in inputs.single]
        are_inside = bool((least_S >= 0).all()) and all(
            most < num_rows for most, num_rows in zip(most_S.tolist(), sizes_S, strict=True)
        )
    else:
        are_inside = True
    for index, spec in enumerate(() if are_inside else inputs.single):
        _check_feature(batch.single[index], spec.name, inputs.table(spec.table).num_rows, batch, None)
    for index, spec in enumerate(inputs.jagged):
        offsets = batch.jagged.offsets[index * size : (index + 1) * size + 1]
        values = batch.jagged.values[int(offsets[0]) : int(offsets[-1])]
        _check_feature(values, spec.name, inputs.table(spec.table).num_rows, batch, offsets - offsets[0])


def _check_feature(rows: Tensor, feature: str, num_rows: int, batch: Batch, offsets: Tensor | None) -> None:
    if rows.numel() == 0 or (int(rows.min()) >= 0 and int(rows.max()) < num_rows):
        return
    # Looked for only now: batches without a fault do not pay for it.
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

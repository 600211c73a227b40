"""Permute features of a batch: samples keep their labels, and get the values of other samples.

    sample     0  1  2        order = [2, 0, 1], feature `item`        sample     0  1  2
    user     [ 7  4  7 ]                                               user     [ 7  4  7 ]
    item     [ 3  8  5 ]                                               item     [ 5  3  8 ]
    tags     [5 9] [] [3]                                              tags     [5 9] [] [3]

What a feature has of a sample moves as a whole: a number, a row, a list with its length, a vector. Several features
moved together keep what binds them to each other, and lose what binds them to the label and to all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.errors import SchemaError
from ziggurat.features.batch import Batch, JaggedRows, SequenceGroup
from ziggurat.features.inputs import InputSpec


def feature_names(inputs: InputSpec) -> tuple[str, ...]:
    """Every feature of a model: numbers, ids, lists, vectors."""
    specs = (*inputs.single, *inputs.jagged, *inputs.vectors)
    return (*inputs.dense, *(spec.name for spec in specs))


def permuted(
    batch: Batch,
    *,
    inputs: InputSpec,
    features: Sequence[str],
    order: Int64[Tensor, "B"],
    joined: Sequence[Sequence[str]] = (),
) -> Batch:
    """The batch with sample b's values of `features` taken from sample `order[b]`; the rest is shared, not copied.

    Args:
        batch: any number of samples.
        inputs: of the batch.
        features: names.
        order: a permutation of the samples; or any samples, each as often as wanted.
        joined: groups of lists of one length in every sample, which describe the same events (`Model.joined_lists`):
            lengths stay, and the values, in the order of the samples, fill the events anew; a permutation then.

    Raises:
        SchemaError: the inputs have no such feature.
    """
    wanted = set(features)
    known = feature_names(inputs)
    if unknown := sorted(wanted - set(known)):
        raise SchemaError(
            expected="features of the model: " + ", ".join(known),
            found=", ".join(map(repr, unknown)),
            where="features to permute",
            ways_out="correct the names",
        )
    dense = batch.dense
    single = batch.single
    jagged = batch.jagged
    columns = [index for index, name in enumerate(inputs.dense) if name in wanted]
    if columns:
        # The tensor belongs to the caller's batch too.
        dense = dense.clone()
        dense[:, columns] = batch.dense[order][:, columns]
    rows = [index for index, spec in enumerate(inputs.single) if spec.name in wanted]
    if rows:
        single = single.clone()
        single[rows] = batch.single[rows][:, order]
    for index, spec in enumerate(inputs.jagged):
        if spec.name in wanted:
            jagged = _with_lists_moved(jagged, index, order, keep_lengths=any(spec.name in group for group in joined))
    vectors = {name: value[order] if name in wanted else value for name, value in batch.vectors.items()}
    return replace(batch, dense=dense, single=single, jagged=jagged, vectors=vectors)


def _with_lists_moved(jagged: JaggedRows, index: int, order: Tensor, *, keep_lengths: bool) -> JaggedRows:
    """The same lists, those of feature number `index`, or all their values one after the other, in another order."""
    size = len(order)
    first = index * size
    last = (index + 1) * size
    begin = int(jagged.offsets[first])
    end = int(jagged.offsets[last])
    lists = SequenceGroup(
        values={"rows": jagged.values[begin:end]}, offsets=jagged.offsets[first : last + 1] - begin
    ).take(order)
    values = torch.cat([jagged.values[:begin], lists.values["rows"], jagged.values[end:]])
    if keep_lengths:
        return JaggedRows(values, jagged.offsets)
    added = len(lists.values["rows"]) - (end - begin)  # not 0 where some samples are taken more often than others
    offsets = torch.cat([jagged.offsets[:first], lists.offsets + begin, jagged.offsets[last + 1 :] + added])
    return JaggedRows(values, offsets)

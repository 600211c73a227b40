"""Samples picked out of a batch, and batches put together: how whole samples move with everything they have.

    take_samples(batch, [2, 0])          samples 2 and 0, in this order
    concatenate_batches([a, b])          the samples of a, then those of b

Both keep every part of a batch: numbers, rows, lists, vectors, sequences and repeated features (those kept once stay
so), labels, weights, groups, row ids and extras. `concatenate_batches([take_samples(b, first), take_samples(b, rest)])`
has the samples of `b` in another order, and nothing else differs.

Lists lie feature-major, so joining them interleaves: all lists of feature 0 of all batches, then those of feature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.features.batch import Batch
from ziggurat.features.jagged import FeatureGroup, JaggedRows, RepeatedRows, SequenceGroup, offsets_of

_SEQUENCES, _REPEATED = "sequences.", "repeated."


def take_samples(batch: Batch, samples_S: Int64[Tensor, "S"]) -> Batch:
    """The samples of these numbers, in this order, any number of times each; everything is copied.

    Args:
        batch: where they are.
        samples_S: numbers from 0 to the batch size - 1.
    """

    def maybe(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[samples_S]

    def each(named: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value[samples_S] for name, value in named.items()}

    return Batch(
        dense=batch.dense[samples_S],
        single=batch.single[:, samples_S],
        jagged=_take_lists(batch.jagged, samples_S, batch_size=batch.batch_size),
        vectors=each(batch.vectors),
        sequences={name: _take_sequences(group, samples_S) for name, group in batch.sequences.items()},
        repeated=tuple(group.take(samples_S) for group in batch.repeated),
        labels=batch.labels[samples_S],
        weights=maybe(batch.weights),
        groups=maybe(batch.groups),
        row_ids=batch.row_ids[samples_S],
        extras=each(batch.extras),
    )


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """The samples of all batches, batch after batch.

    Args:
        batches: one or more, with the same parts; some may be without samples.

    Raises:
        DataError: a part is in some batches only.
    """
    if len(batches) == 1:
        return batches[0]
    # A batch without samples has offsets, but no number of features that could be told from them.
    filled = [batch for batch in batches if batch.batch_size] or list(batches[:1])
    if len(filled) == 1:
        return filled[0]
    if len({tuple(group.features for group in batch.repeated) for batch in filled}) > 1:
        filled = [batch.expanded() for batch in filled]  # deduplicated in other groups
    first = filled[0]
    for batch in filled[1:]:
        _same_parts(first, batch)

    def joined(part: Callable[[Batch], Tensor]) -> Tensor:
        return torch.cat([part(batch) for batch in filled])

    num_lists = (len(first.jagged.offsets) - 1) // first.batch_size
    lengths = [batch.jagged.lengths(num_features=num_lists) for batch in filled] if num_lists else []
    return Batch(
        dense=joined(lambda batch: batch.dense),
        single=torch.cat([batch.single for batch in filled], dim=1),
        jagged=join_lists(lengths, [batch.jagged.values for batch in filled]) if num_lists else JaggedRows.empty(),
        vectors={name: joined(lambda batch, name=name: batch.vectors[name]) for name in first.vectors},
        sequences={name: _join_sequences([batch.sequences[name] for batch in filled]) for name in first.sequences},
        repeated=tuple(
            _join_repeated([batch.repeated[number] for batch in filled]) for number in range(len(first.repeated))
        ),
        labels=joined(lambda batch: batch.labels),
        weights=None if first.weights is None else torch.cat([b.weights for b in filled if b.weights is not None]),
        groups=None if first.groups is None else torch.cat([b.groups for b in filled if b.groups is not None]),
        row_ids=joined(lambda batch: batch.row_ids),
        extras={name: joined(lambda batch, name=name: batch.extras[name]) for name in first.extras},
    )


def named_parts(batch: Batch) -> dict[str, Tensor]:
    """Everything of a batch as tensors by name, for `batch_of_parts`: how a batch travels."""
    named = batch.tensors()
    for number, group in enumerate(batch.repeated):
        named[f"{_REPEATED}{number}:single"] = torch.tensor(group.features.single, dtype=torch.int64)
        named[f"{_REPEATED}{number}:jagged"] = torch.tensor(group.features.jagged, dtype=torch.int64)
    return named


def batch_of_parts(named: Mapping[str, Tensor]) -> Batch:
    """The inverse of `named_parts`."""

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}

    events = below(_SEQUENCES)
    # Names of values hold no colon, so that ":offsets" and ":inverse" are those of the group itself.
    names = [name.removesuffix(":offsets") for name in events if name.endswith(":offsets")]
    sequences = {
        name: SequenceGroup(
            values={kind: value for kind, value in below(f"{_SEQUENCES}{name}.").items() if ":" not in kind},
            offsets=events[f"{name}:offsets"],
            inverse=events.get(f"{name}:inverse"),
        )
        for name in names
    }
    num_groups = sum(name.endswith(":single") for name in below(_REPEATED))
    repeated = tuple(
        RepeatedRows(
            features=FeatureGroup(tuple(named[f"{at}:single"].tolist()), tuple(named[f"{at}:jagged"].tolist())),
            single=named[f"{at}.single"],
            jagged=JaggedRows(named[f"{at}.values"], named[f"{at}.offsets"]),
            inverse=named[f"{at}.inverse"],
        )
        for at in (f"{_REPEATED}{number}" for number in range(num_groups))
    )
    return Batch(
        dense=named["dense"],
        single=named["single"],
        jagged=JaggedRows(named["jagged.values"], named["jagged.offsets"]),
        vectors=below("vectors."),
        sequences=sequences,
        repeated=repeated,
        labels=named["labels"],
        weights=named.get("weights"),
        groups=named.get("groups"),
        row_ids=named["row_ids"],
        extras=below("extras."),
    )


def join_lists(
    lengths: Sequence[Int64[Tensor, "J B"]],
    values: Sequence[Int64[Tensor, "N"]],
    *,
    num_rows: Sequence[Sequence[int]] | None = None,
) -> JaggedRows:
    """Lists of several batches, each feature-major, as those of one batch, feature-major.

    Args:
        lengths: of the lists of each batch; the same J > 0.
        values: the rows of each batch.
        num_rows: of each feature of each batch, where that is known: sums of `lengths`.
    """
    sums = num_rows or [each.sum(dim=1).tolist() for each in lengths]
    pieces = [each.split(list(sizes)) for each, sizes in zip(values, sums, strict=True)]
    ordered = [pieces[part][index] for index in range(lengths[0].shape[0]) for part in range(len(pieces))]
    return JaggedRows(torch.cat(ordered), offsets_of(torch.cat(list(lengths), dim=1).reshape(-1)))


def _take_lists(jagged: JaggedRows, samples_S: Tensor, *, batch_size: int) -> JaggedRows:
    num_features = (len(jagged.offsets) - 1) // batch_size if batch_size else 0
    if num_features == 0:
        return jagged
    # Feature-major lists are taken as sequences: sample s has one in the block of each feature.
    begins_J = torch.arange(0, num_features * batch_size, batch_size, device=samples_S.device)
    lists = SequenceGroup(values={"rows": jagged.values}, offsets=jagged.offsets)
    taken = lists.take((begins_J.unsqueeze(1) + samples_S).reshape(-1))
    return JaggedRows(taken.values["rows"], taken.offsets)


def _take_sequences(group: SequenceGroup, samples_S: Tensor) -> SequenceGroup:
    if group.inverse is None:
        return group.take(samples_S)
    kept, inverse = torch.unique(group.inverse[samples_S], return_inverse=True)
    return replace(group.take(kept), inverse=inverse)


def _join_sequences(groups: Sequence[SequenceGroup]) -> SequenceGroup:
    """One after the other; sequences that are kept once in one of them are kept once in the result."""
    values = {kind: torch.cat([group.values[kind] for group in groups]) for kind in groups[0].values}
    offsets = offsets_of(torch.cat([group.offsets.diff() for group in groups]))
    if all(group.inverse is None for group in groups):
        return SequenceGroup(values=values, offsets=offsets)
    inverses = []
    begin = 0
    for group in groups:
        num_sequences = len(group.offsets) - 1
        # One group that keeps sequences once makes all of them numbered; the others number theirs one by one.
        own = torch.arange(num_sequences, device=offsets.device) if group.inverse is None else group.inverse
        inverses.append(own + begin)
        begin += num_sequences
    return SequenceGroup(values=values, offsets=offsets, inverse=torch.cat(inverses))


def _join_repeated(groups: Sequence[RepeatedRows]) -> RepeatedRows:
    """Slices of one batch after those of another; equal ones of several batches stay apart."""
    begins = [sum(group.num_slices for group in groups[:index]) for index in range(len(groups))]
    num_lists = len(groups[0].features.jagged)
    jagged = JaggedRows.empty()
    if num_lists:
        # Feature-major lists of several batches cannot be put one after the other: those of each feature are.
        lengths = [group.jagged.lengths(num_features=num_lists) for group in groups]
        jagged = join_lists(lengths, [group.jagged.values for group in groups])
    return RepeatedRows(
        features=groups[0].features,
        single=torch.cat([group.single for group in groups], dim=1),
        jagged=jagged,
        inverse=torch.cat([group.inverse + begin for group, begin in zip(groups, begins, strict=True)]),
    )


def _same_parts(first: Batch, other: Batch) -> None:
    """Refuse batches of different parts, which cannot be one batch."""
    parts = _parts(first)
    others = _parts(other)
    if parts != others:
        raise DataError(
            expected=f"batches with the same parts: {', '.join(sorted(parts))}",
            found=f"{', '.join(sorted(parts ^ others))} in one of them only",
            where="batches that are put together",
            ways_out="let the source fill the same fields in every batch",
        )


def _parts(batch: Batch) -> set[str]:
    # Whether sequences are kept once is no matter of which parts there are: they can be joined either way.
    return {name for name in batch.tensors() if not name.endswith(":inverse")}

"""Batches: every tensor is reached by name, by `map` and by `rows`; sequences kept once mean the same written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.errors import BoundsError, DataError
from ziggurat.features.batch import Batch, JaggedRows, SequenceGroup, validate_batch
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec, VectorSpec

INPUTS = InputSpec(
    dense=("price",),
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    jagged=(JaggedSpec(name="tags", table="tags"), JaggedSpec(name="seen", table="item")),
    vectors=(VectorSpec(name="title", dim=3),),
    tables=tuple(TableSpec(name=name, num_rows=50) for name in ("user", "item", "tags")),
    labels=(LabelSpec(name="click"),),
    has_weights=True,
    has_groups=True,
)
LENGTHS = st.lists(st.integers(0, 4), min_size=0, max_size=6)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def full_batch(size: int, *, seed: int, sequences: list[int] | None = None) -> Batch:
    """Every field filled; `sequences`: lengths of unique histories, one a sample if None."""
    draw = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randint(3, 50, shape, generator=draw)

    lists = torch.randint(0, 4, (2 * size,), generator=draw).tolist()
    lengths = torch.randint(0, 4, (size,), generator=draw).tolist() if sequences is None else sequences
    inverse = None if sequences is None else torch.randint(0, len(sequences), (size,), generator=draw)
    history = SequenceGroup(
        values={"item": rows(sum(lengths)), "dwell": torch.rand(sum(lengths), 2, generator=draw)},
        offsets=offsets_of(lengths),
        inverse=inverse,
    )
    return Batch(
        dense=torch.rand(size, 1, generator=draw),
        single=rows(2, size),
        jagged=JaggedRows(rows(sum(lists)), offsets_of(lists)),
        vectors={"title": torch.rand(size, 3, generator=draw)},
        sequences={"history": history},
        labels=torch.rand(size, 1, generator=draw),
        weights=torch.rand(size, generator=draw),
        groups=rows(size),
        row_ids=torch.arange(size),
        extras={"teacher": torch.rand(size, 2, generator=draw)},
    )


def samples_of(batch: Batch) -> list[dict[str, list]]:
    """What each sample is, read the slow way."""
    size, found = batch.batch_size, []
    for sample in range(size):
        lists = [
            batch.jagged.values[batch.jagged.offsets[j * size + sample] : batch.jagged.offsets[j * size + sample + 1]]
            for j in range((len(batch.jagged.offsets) - 1) // size)
        ]
        values = {name: batch.tensors()[name][sample] for name in ("dense", "labels", "weights", "groups", "row_ids")}
        for name, group in batch.sequences.items():
            which = sample if group.inverse is None else int(group.inverse[sample])
            for kind, value in group.values.items():
                values[f"{name}.{kind}"] = value[group.offsets[which] : group.offsets[which + 1]]
        values |= {f"vectors.{name}": value[sample] for name, value in batch.vectors.items()}
        values |= {f"extras.{name}": value[sample] for name, value in batch.extras.items()}
        values |= {"single": batch.single[:, sample]} | {f"list {j}": each for j, each in enumerate(lists)}
        found.append({name: value.tolist() for name, value in values.items()})
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(0, 100), st.data())
def test_rows_are_the_samples(size: int, seed: int, data: st.DataObject) -> None:
    sequences = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    batch = full_batch(size, seed=seed, sequences=sequences)
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    part = validate_batch(batch.rows(first, last), INPUTS)
    assert samples_of(part) == samples_of(batch)[first:last]
    for group in part.sequences.values():
        assert group.inverse is None or len(group.inverse.unique()) == len(group.offsets) - 1, "nothing unused is kept"


@settings(max_examples=40, deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 8), st.integers(0, 50))
def test_expanded_sequences_mean_the_same(lengths: list[int], size: int, seed: int) -> None:
    batch = full_batch(size, seed=seed, sequences=lengths)
    plain = dataclasses.replace(batch, sequences={"history": batch.sequences["history"].expanded()})
    assert plain.sequences["history"].inverse is None
    assert samples_of(plain) == samples_of(batch)


def test_map_and_names_reach_every_tensor() -> None:
    """A new field that `map` or `tensors` forgets fails here: every tensor in the dataclass must be seen once."""
    batch = full_batch(3, seed=1, sequences=[2, 1])

    def found(value: object) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if dataclasses.is_dataclass(value):
            return [t for each in dataclasses.fields(value) for t in found(getattr(value, each.name))]
        return [t for each in value.values() for t in found(each)] if isinstance(value, dict) else []

    wanted = sorted(map(id, found(batch)))
    seen: list[torch.Tensor] = []
    doubled = batch.map(lambda tensor: seen.append(tensor) or tensor * 2)
    assert sorted(map(id, seen)) == wanted
    assert sorted(map(id, batch.tensors().values())) == wanted
    assert doubled.tensors().keys() == batch.tensors().keys()
    for name, tensor in doubled.tensors().items():
        torch.testing.assert_close(tensor, batch.tensors()[name] * 2)


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"offsets": torch.tensor([0, 2, 1, 3])}, DataError),
        ({"offsets": torch.tensor([1, 2, 3])}, DataError),
        ({"offsets": torch.tensor([0, 3])}, DataError),
        ({"inverse": torch.tensor([0, 2])}, BoundsError),
        ({"inverse": torch.tensor([0])}, DataError),
        ({"values": {"item": torch.tensor([3, 4, 5]), "dwell": torch.zeros(2)}}, DataError),
    ],
)
def test_sequences_that_are_wrong_are_refused(broken: dict, error: type[Exception]) -> None:
    good = SequenceGroup(
        values={"item": torch.tensor([3, 4, 5])}, offsets=torch.tensor([0, 2, 3]), inverse=torch.tensor([0, 1])
    )
    batch = dataclasses.replace(full_batch(2, seed=0), sequences={"history": good})
    validate_batch(batch, INPUTS)
    group = dataclasses.replace(good, **broken)
    if "offsets" in broken and len(broken["offsets"]) == 2:
        group = dataclasses.replace(group, inverse=None)
    with pytest.raises(error, match="history"):
        validate_batch(dataclasses.replace(batch, sequences={"history": group}), INPUTS)

"""Fingerprints name what differs, down to one value of one row."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa

from ziggurat.data.encoded.dataset import EncodedDataset, EncodedWriter, MemoryDataset
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.fingerprint import differences, fingerprint

INPUTS = InputSpec(dense=("age",), labels=(LabelSpec(name="click"),))


def table(age: float = 3.0) -> pa.Table:
    rows = 100
    return pa.table(
        {
            "age": pa.array([1.0] * (rows - 1) + [age], pa.float32()),
            "label:click": pa.array([0.0, 1.0] * (rows // 2), pa.float32()),
            "row:": pa.array(range(rows), pa.int64()),
        }
    )


def stored(folder: Path, content: pa.Table) -> EncodedDataset:
    with EncodedWriter(folder, INPUTS, rows_per_group=32) as writer:
        writer.append(content.slice(0, 7))  # other pieces than the row groups: the digest does not depend on them
        writer.append(content.slice(7))
    return EncodedDataset(folder)


def test_one_value_of_one_row_changes_the_digest_and_nothing_else_does(tmp_path: Path) -> None:
    first, same, other = (stored(tmp_path / name, table(age)) for name, age in (("a", 3.0), ("b", 3.0), ("c", 4.0)))
    assert first.digest == same.digest == MemoryDataset(table(), INPUTS, rows_per_group=32).digest
    assert first.digest != other.digest
    assert first.row_sum == other.row_sum
    found = differences(fingerprint(None, datasets={"train": first}), fingerprint(None, datasets={"train": other}))
    assert [it.setting for it in found] == ["data train content"]


def test_settings_that_differ_are_named_as_on_the_command_line() -> None:
    config = recipe_named("movielens_dlrm", schema=None)
    training = dataclasses.replace(config.training, learning_rate=0.5, epochs=7)
    other = dataclasses.replace(config, training=training)
    one, two = fingerprint(config, inputs=INPUTS), fingerprint(other, inputs=dataclasses.replace(INPUTS, dense=("b",)))
    found = {it.setting: (it.first, it.second) for it in differences(one, two)}
    assert set(found) == {"training.learning-rate", "training.epochs", "inputs.dense"}
    assert found["training.epochs"] == (str(config.training.epochs), "7")
    assert [it.setting for it in differences(one, two, ignore=["training", "inputs.de"])] == ["inputs.dense"]
    assert differences(one, dict(one)) == []
    assert "absent" in str(differences({}, {"version torch": "2"})[0])

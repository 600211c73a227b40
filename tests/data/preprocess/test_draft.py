"""Drafts: rows that were parsed once and encoded later are those that are encoded at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.preprocess.preprocessing_reference import Reference, Row
from tests.data.preprocess.test_preprocessing import EVERYTHING, TEXT_ROWS
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.fit.draft import DraftWriter, read_draft
from ziggurat.data.preprocess.fit.fitter import Fitted, Fitter
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.preprocess.values.parsing import ParsedChunk, parse_chunk
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import FileFormat
from ziggurat.features.schema import (
    Categorical,
    Dense,
    Encoding,
    Label,
    NumericTransform,
    Schema,
    Table,
    Vector,
)
from ziggurat.testing.data import shared_data


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(TEXT_ROWS, min_size=1, max_size=40),
    size=st.integers(1, 20),
    train_chunks=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_encoding_a_draft_is_encoding(tmp_path: Path, rows: list[Row], size: int, train_chunks: list[bool]):
    schema = EVERYTHING
    frame = pl.DataFrame(rows, schema=dict.fromkeys(schema.columns, pl.String))
    chunks = [RawChunk.of(frame.slice(start, size), start=start) for start in range(0, len(rows), size)]
    is_training = train_chunks[: len(chunks)]
    training = [chunk for chunk, train in zip(chunks, is_training, strict=True) if train]
    direct = Preprocessing.fit(schema, training)
    fitter = Fitter(schema)
    for path in tmp_path.iterdir():
        path.unlink()
    with DraftWriter(tmp_path / "train") as train, DraftWriter(tmp_path / "valid") as valid:
        for chunk, to_train in zip(chunks, is_training, strict=True):
            parsed = parse_chunk(schema, chunk, bad_rows=BadRows())
            (train if to_train else valid).append(fitter.add(parsed) if to_train else parsed)
    fitted = fitter.finish()
    drafted = Preprocessing(schema, vocabularies=fitted.vocabularies, numbers=fitted.numbers)
    assert drafted.fingerprint == direct.fingerprint
    for draft, wanted in ((train, True), (valid, False)):
        expected = [
            direct.encode(chunk) for chunk, to_train in zip(chunks, is_training, strict=True) if to_train == wanted
        ]
        kept = read_draft(draft.path, draft.facts)
        found = [drafted.encode_parsed(parsed, row_of_number=fitted.row_of_number) for parsed in kept]
        assert draft.facts.num_rows == sum(table.num_rows for table in expected)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.equals(theirs)
    for name, counters in drafted.counters.items():
        counters.out_of_range += sum(draft.facts.out_of_range.get(name, 0) for draft in (train, valid))
        counters.truncated += sum(draft.facts.truncated.get(name, 0) for draft in (train, valid))
    assert drafted.counters == direct.counters
    _check_any_rows(train, drafted, fitted, first=size // 2, last=train.facts.num_rows - size // 3)


def _check_any_rows(draft: DraftWriter, drafted: Preprocessing, fitted: Fitted, *, first: int, last: int) -> None:
    """Rows from the middle of a draft are those that all its rows hold there."""

    def encoded(parsed: Iterator[ParsedChunk]) -> list[dict]:
        return [
            row
            for chunk in parsed
            for row in drafted.encode_parsed(chunk, row_of_number=fitted.row_of_number).to_pylist()
        ]

    some = encoded(read_draft(draft.path, draft.facts, first=first, last=last))
    assert some == encoded(read_draft(draft.path, draft.facts))[first : max(last, first)]


def test_vectors_and_empty_chunks(tmp_path: Path):
    schema = Schema(features=(Vector(name="v", dim=2), Categorical(name="a")))
    frame = pl.DataFrame({"v": [[1.0, 2.0], [3.0, 4.5]], "a": ["x", None]})
    parsed = parse_chunk(schema, RawChunk.of(frame), bad_rows=BadRows())
    nothing = parse_chunk(schema, RawChunk.of(frame.clear()), bad_rows=BadRows())
    with DraftWriter(tmp_path / "draft") as draft:
        assert list(read_draft(draft.path, draft.facts)) == []
        draft.append(nothing)
        draft.append(parsed)
    (back,) = read_draft(draft.path, draft.facts)
    assert back.features["v"].tolist() == [[1.0, 2.0], [3.0, 4.5]]
    assert back.global_rows.tolist() == [0, 1]


def _table(dataset: EncodedDataset | None) -> list[dict]:
    assert dataset is not None
    return pa.concat_tables([dataset.read_group(index) for index in range(len(dataset.group_sizes))]).to_pylist()


@pytest.mark.parametrize("name", ["criteo_first10k.tsv.gz", "made up"])
def test_prepare_equals_the_slow_reference(tmp_path: Path, name: str):
    """Real and made-up Criteo text: every value of every tenth row of every split."""
    path = tmp_path / "made_up.tsv" if name == "made up" else shared_data("criteo_sample") / name
    columns = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    if name == "made up":
        _write_odd_criteo(path)
    schema = Schema(
        features=(
            *(Dense(name=f"I{i}", transform=NumericTransform.LOG1P_STANDARDISE) for i in range(1, 14)),
            Dense(name="B1", column="I1", transform=NumericTransform.CRITEO_BUCKETS),
            *(Categorical(name=f"C{i}") for i in range(1, 27)),
        ),
        labels=(Label(name="label"),),
        tables=tuple(Table(name=f"C{i}", min_count=2) for i in range(1, 20))
        + tuple(Table(name=f"C{i}", encoding=Encoding.HASHING, num_rows=1000) for i in range(20, 27)),
    )
    config = DataConfig(train=(str(path),), format=FileFormat.CRITEO, split=SplitConfig(by=SplitBy.RANDOM))
    prepared = prepare(config, schema=schema, folder=tmp_path / "cache")
    raw = pl.read_csv(path, separator="\t", has_header=False, infer_schema=False, new_columns=columns, quote_char=None)
    rows = raw.to_dicts()
    splits = [_table(part) for part in (prepared.train, prepared.valid, prepared.test)]
    reference = Reference(schema, [rows[row["row:"]] for row in splits[0]])
    assert sorted(row["row:"] for split in splits for row in split) == list(range(len(rows)))
    for split in splits:
        for found in split[::10]:
            row = rows[found["row:"]]
            assert found["label:label"] == float(row["label"])
            for feature, value in reference.encode(row).items():
                assert found[feature] == (value if isinstance(value, int) else pytest.approx(value, rel=1e-5, abs=1e-6))
    assert not list(prepared.folder.rglob("*.arrow")), "drafts are taken away"


def _write_odd_criteo(path: Path) -> None:
    """Ids of any length, ids that end in .0, numbers with points, signs and blanks, empty fields."""
    rng = np.random.default_rng(3)
    ids = ["", "a", "68fd1e64", "0", "7", "7.0", "an id of more than eight bytes", "ü", "x.0"]
    numbers = ["", "0", "-1", "12345678", "123456789", "1.5", "3", "1e3", "-0"]
    with path.open("w") as file:
        for row in range(3000):
            plain = row % 1000 < 700
            take = [str(rng.integers(0, 2))]
            take += [str(rng.integers(-3, 99)) if plain else numbers[rng.integers(len(numbers))] for _ in range(13)]
            take += [f"{rng.integers(9):08x}" if plain else ids[rng.integers(len(ids))] for _ in range(26)]
            file.write("\t".join(take) + "\n")

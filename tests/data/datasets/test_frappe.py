"""Frappe from the published log: held out splits byte for byte, positives exact, negatives by the rule."""

import gzip
import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from ziggurat.data.datasets import fetch, frappe, schema_for
from ziggurat.data.datasets.fetch import read_plain_or_gzip
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.schema import Categorical
from ziggurat.testing.data import shared_data


@pytest.fixture(scope="module")
def source() -> Path:
    return shared_data("frappe")


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch("frappe", source=source, cache=tmp_path_factory.mktemp("cache"))


def test_valid_and_test_are_those_of_bars_byte_for_byte(folder: Path):
    for split in ("valid", "test"):
        text = pl.read_parquet(folder / f"{split}.parquet").write_csv(line_terminator="\r\n")
        assert hashlib.md5(text.encode()).hexdigest() == frappe._CSV_MD5[split]


def test_train_has_every_use_once_and_two_negatives_for_each(folder: Path):
    frames = {split: pl.read_parquet(folder / f"{split}.parquet") for split in ("train", "valid", "test")}
    everything = pl.concat(frames.values())
    positive, negative = everything.filter(label=1), everything.filter(label=0)
    assert (frames["train"].filter(label=1).height, frames["train"].filter(label=0).height) == (67_604, 134_423)
    assert (positive.height, negative.height) == (96_203, 2 * 96_203)
    contexts = ["user", *frappe.CONTEXT]
    uses = Counter(positive.select(contexts).rows())
    assert Counter(negative.select(contexts).rows()) == Counter({key: 2 * count for key, count in uses.items()})


def test_no_redrawn_negative_was_used_and_items_are_uniform(folder: Path):
    everything = pl.concat([pl.read_parquet(path) for path in folder.glob("*.parquet")])
    used = set(everything.filter(label=1).select("user", "item").rows())
    train = pl.read_parquet(folder / "train.parquet")
    negative = train.filter(label=0)
    assert not used & set(negative.select("user", "item").rows())
    assert (negative["item"].min(), negative["item"].max()) == (957, 5038)
    counts = negative["item"].value_counts()["count"]
    assert len(counts) == 4082
    assert counts.std() == pytest.approx((134_423 / 4082) ** 0.5, rel=0.2)  # Poisson, but for what users used
    halves = train["label"].head(101_013).mean(), train["label"].tail(101_014).mean()
    assert halves == pytest.approx((0.3346, 0.3346), abs=0.008)  # shuffled


def test_the_seed_decides_the_negatives_alone(source: Path, folder: Path, tmp_path: Path):
    other = frappe.fetch_frappe(source=source, cache=tmp_path / "other", seed=7)
    ours, different = (pl.read_parquet(path / "train.parquet") for path in (folder, other))
    columns = ours.columns
    assert ours.filter(label=1).sort(columns).equals(different.filter(label=1).sort(columns))
    assert not ours.filter(label=0).sort(columns).equals(different.filter(label=0).sort(columns))
    assert "redrawn with seed 7" in json.loads((other / "manifest.json").read_text())["origin"]
    # Pinned, so that a run can be repeated with a later NumPy or polars.
    digest = hashlib.sha256(ours.write_csv().encode()).hexdigest()
    assert digest == "ea8e8640bae7c599ef4a872a65f8fc31c894994e737ec9f12b187ae2805b3d80"


def test_cached_data_needs_no_source_and_nothing_cached_says_what_to_get(folder: Path, tmp_path: Path):
    with pytest.raises(MissingFileError, match="no source"):
        fetch("frappe", cache=tmp_path)
    made = shutil.copytree(folder, tmp_path / "frappe")
    assert fetch("frappe", cache=tmp_path) == made
    (made / "test.parquet").unlink()
    with pytest.raises(MissingFileError, match="damaged"):
        fetch("frappe", cache=tmp_path)


def test_plain_files_do_and_damaged_or_missing_ones_are_named(source: Path, tmp_path: Path):
    shutil.copy(source / "Mobile_Frappe.zip", tmp_path)
    with pytest.raises(MissingFileError, match=r"frappe\.validation\.libfm"):
        fetch("frappe", source=tmp_path, cache=tmp_path / "cache")
    for name in ("frappe.validation.libfm", "frappe.test.libfm"):
        (tmp_path / name).write_bytes(gzip.decompress((source / f"{name}.gz").read_bytes()))
    assert pl.read_parquet(fetch("frappe", source=tmp_path, cache=tmp_path / "cache") / "test.parquet").height == 28_860
    text = (tmp_path / "frappe.test.libfm").read_bytes()
    (tmp_path / "frappe.test.libfm").write_bytes(text.replace(b"-1 204:1", b"1 204:1", 1))
    with pytest.raises(DataError, match=r"frappe\.test\.libfm"):
        fetch("frappe", source=tmp_path, cache=tmp_path / "cache")
    (tmp_path / "frappe.test.libfm").unlink()
    (tmp_path / "frappe.test.libfm.gz").write_bytes((source / "frappe.test.libfm.gz").read_bytes()[:1000])
    with pytest.raises(DataError, match="whole gzip file"):
        fetch("frappe", source=tmp_path, cache=tmp_path / "cache")


def test_csv_files_are_taken_as_they_are_if_their_md5_is_right(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for split in frappe.SPLITS:
        pl.read_parquet(folder / f"{split}.parquet").write_csv(tmp_path / f"{split}.csv", line_terminator="\r\n")
    with pytest.raises(DataError, match="ba7306e6c4fc19dd2cd84f2f0596d158") as raised:
        fetch("frappe", source=tmp_path, cache=tmp_path / "cache")
    assert raised.value.where.endswith("train.csv")
    # The true train.csv is not at hand; with its md5 replaced by ours the rest of the path is the same.
    ours = hashlib.md5((tmp_path / "train.csv").read_bytes()).hexdigest()
    monkeypatch.setitem(frappe._CSV_MD5, "train", ours)
    made = fetch("frappe", source=tmp_path, cache=tmp_path / "cache")
    for split in frappe.SPLITS:
        assert pl.read_parquet(made / f"{split}.parquet").equals(pl.read_parquet(folder / f"{split}.parquet"))


def test_the_schema_has_the_ten_features(folder: Path):
    schema = schema_for("frappe")
    assert len(schema.features) == 10
    assert all(isinstance(feature, Categorical) for feature in schema.features)
    assert set(schema.columns) == set(pl.read_parquet_schema(folder / "train.parquet"))
    assert schema.table("item").min_count == 1


def test_a_gzip_bomb_is_read_no_further_than_the_file_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(read_plain_or_gzip.__globals__, "_MAX_BYTES", 1000)
    (tmp_path / "whole.gz").write_bytes(gzip.compress(bytes(1000)))
    assert read_plain_or_gzip(tmp_path / "whole", ways_out=()) == bytes(1000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(DataError, match="more than 1,000 bytes when unpacked"):
        read_plain_or_gzip(tmp_path / "bomb", ways_out=())

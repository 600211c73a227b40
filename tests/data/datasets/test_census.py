"""Census-Income in UCI's form: what is read, how halves are drawn, what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.datasets import fetch, schema_for
from ziggurat.data.datasets.census import CATEGORIES, COLUMNS, NUMBERS, halves, read_census
from ziggurat.errors import DataError, MissingFileError

# Written as the published files are: a space behind each comma, a point behind each income.
_PERSON = {
    "age": "73",
    "wage_per_hour": "0",
    "capital_gains": "4386",
    "capital_losses": "0",
    "dividends": "12.5",
    "persons_of_employer": "6",
    "weeks_worked": "52",
    "marital_status": "Widowed",
    "instance_weight": "1700.09",
    "hispanic_origin": "NA",
    "previous_state": "?",
    "income": "- 50000.",
}


def line(**others: str) -> str:
    """One person in the published form; what is not named is "Not in universe"."""
    return ", ".join({**_PERSON, **others}.get(name, "Not in universe") for name in COLUMNS) + "\n"


def test_a_person_becomes_numbers_categories_and_two_answers() -> None:
    text = line() + line(marital_status="Never married", income="50000+.", age="30")
    people = read_census(text.encode(), where="made")
    first, second = people.to_dicts()
    assert (first["income"], first["never_married"], second["income"], second["never_married"]) == (0, 0, 1, 1)
    assert (first["age"], first["capital_gains"], first["dividends"], second["age"]) == (73.0, 4386.0, 12.5, 30.0)
    assert (first["previous_state"], first["hispanic_origin"], first["race"]) == ("?", "NA", "Not in universe")
    assert "marital_status" not in people.columns, "it is the second label"
    assert "instance_weight" not in people.columns
    assert len(NUMBERS) == 7
    assert len(CATEGORIES) == 32
    assert {each.name for each in schema_for("census-income").features} == {*NUMBERS, *CATEGORIES}


def test_a_folder_becomes_three_parts_that_are_kept(tmp_path: Path) -> None:
    status = ("Never married", "Divorced")
    incomes = ("50000+.", *("- 50000.",) * 4)
    people = [line(age=str(age), income=incomes[age % 5], marital_status=status[age % 2]) for age in range(1, 41)]
    source = tmp_path / "downloads"
    source.mkdir()
    (source / "census-income.data.gz").write_bytes(gzip.compress("".join(people).encode()))
    with pytest.raises(MissingFileError, match=r"census-income\.test"):
        fetch("census-income", source=source, cache=tmp_path / "cache")
    (source / "census-income.test").write_text("".join(people))
    with pytest.raises(DataError, match="twice the same file"):
        fetch("census-income", source=source, cache=tmp_path / "cache")
    with pytest.raises(MissingFileError, match="found:    a file"):
        fetch("census-income", source=source / "census-income.test", cache=tmp_path / "cache")
    (source / "census-income.test").write_text("".join(people[::-1]))
    for place in (source, None):
        folder = fetch("census-income", source=place, cache=tmp_path / "cache")
        parts = {name: pl.read_parquet(folder / f"{name}.parquet") for name in ("train", "valid", "test")}
        assert [each.height for each in parts.values()] == [40, 20, 20]
        assert parts["valid"]["income"].sum() == parts["test"]["income"].sum() == 4
        ages = [*parts["valid"]["age"], *parts["test"]["age"]]
        assert sorted(ages) == sorted(parts["train"]["age"]), "nobody is in both halves"


def test_halves_repeat_and_hold_half_of_each_side() -> None:
    people = pl.DataFrame({"income": np.arange(101) % 3 == 0, "number": np.arange(101)}).cast({"income": pl.Int8})
    first, second = halves(people, seed=1)
    again, _ = halves(people, seed=1)
    assert first.equals(again)
    assert not first.equals(halves(people, seed=2)[0])
    assert sorted([*first["number"], *second["number"]]) == list(range(101))
    assert abs(first["income"].sum() - second["income"].sum()) <= 1
    assert first["number"].is_sorted()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("39, State-gov, 77516, Bachelors, 13, <=50K\n", "6 columns"),
        (line(income="<=50K"), "income '<=50K'"),
        (line(marital_status="Never married") + line(age="old"), "line 2"),
        (line(marital_status="Never married") + line(age="nan"), "age 'nan'"),
        (line(marital_status="Never married") + line(dividends="inf"), "dividends 'inf'"),
        (line() + line(marital_status=""), "no marital status"),
        (line() + line(marital_status="Never-married"), "'Never-married', 'Widowed'"),
        ("", "empty"),
        (line() + "1, 2\n", "columns"),
    ],
    ids=["adult", "income", "number", "nan", "infinite", "blank", "other words", "empty", "cut"],
)
def test_another_file_is_refused(text: str, found: str) -> None:
    with pytest.raises(DataError, match="Adult, which has 15 columns") as error:
        read_census(text.encode(), where="made")
    assert found in str(error.value)


def test_without_a_source_it_says_where_the_files_are(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="UCI Machine Learning Repository"):
        fetch("census-income", cache=tmp_path)


def test_its_recipes_read_what_is_kept() -> None:
    for name in ("census_shared_bottom", "census_mmoe", "census_ple"):
        assert zg.recipe_named(name).table_schema == schema_for("census-income")

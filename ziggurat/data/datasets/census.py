"""Census-Income (KDD) of the UCI repository, as two labels: who earns more than 50,000, and who never married.

    73, Not in universe, 0, 0, High school graduate, 0, …, Widowed, …, 95, - 50000.      42 columns, no header

199,523 people to train on and 99,762 to test. Features are 7 numbers and 32 categories. `income` is the label of the
main task, `never_married` the second one: the marital status, of which it is made, is no feature. The column "instance
weight", of how many people a row stands for, is left out, as the set's own description asks. Half of the test file
validates and half tests, drawn at random from each side of `income`, with one seed for all; published figures have
halves, too, drawn in other ways.

Parquet, train, valid and test: numbers float32 · categories string · income, never_married int8.

Reference: MMoE (KDD 2018, section 5.3), whose labels these are. Dua and Graff, UCI Machine Learning Repository.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import kept_dataset, read_plain_or_gzip, require_file, write_dataset
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.schema import Categorical, Dense, Feature, Label, NumericTransform, Schema
from ziggurat.files import sha256_of

NAME = "census-income"
FILES = {"train": "census-income.data", "test": "census-income.test"}
# In the order of the file. The answers: marital_status and income; no feature: instance_weight.
COLUMNS = (
    *("age", "class_of_worker", "industry_code", "occupation_code", "education", "wage_per_hour"),
    *("enrolled_in_school", "marital_status", "major_industry", "major_occupation", "race", "hispanic_origin", "sex"),
    *("member_of_union", "reason_for_unemployment", "employment", "capital_gains", "capital_losses", "dividends"),
    *("tax_filer", "previous_region", "previous_state", "household_detail", "household_summary", "instance_weight"),
    *("migration_msa", "migration_region", "migration_within_region", "same_house_a_year_ago", "previous_sunbelt"),
    *("persons_of_employer", "family_under_18", "country_of_father", "country_of_mother", "country_of_birth"),
    *("citizenship", "own_business", "veterans_questionnaire", "veterans_benefits", "weeks_worked", "year", "income"),
)
NUMBERS = (
    "age",
    "wage_per_hour",
    "capital_gains",
    "capital_losses",
    "dividends",
    "persons_of_employer",
    "weeks_worked",
)
_AMOUNTS = ("wage_per_hour", "capital_gains", "capital_losses", "dividends")  # 0 for most people, thousands for some
_ABSENT = ("marital_status", "instance_weight", "income")
CATEGORIES = tuple(name for name in COLUMNS if name not in (*NUMBERS, *_ABSENT))
_INCOMES = {"- 50000.": 0, "50000+.": 1}
_NEVER = "Never married"
_SEED = 2018
_WAYS = (
    "get census-income.data and census-income.test (Census-Income (KDD) of the UCI Machine Learning Repository), plain "
    "or .gz, into one folder, then: ziggurat data fetch census-income --source FOLDER",
)
TERMS = """
Terms: CC BY 4.0, as the UCI Machine Learning Repository states.
Cite: Census-Income (KDD). UCI Machine Learning Repository, 2000. https://doi.org/10.24432/C5N30T
Task: Jiaqi Ma et al. Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts. KDD 2018.
"""


def fetch_census(*, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder with train.parquet, valid.parquet and test.parquet.

    Args:
        source: a folder with `census-income.data` and `census-income.test`, plain or packed (.gz); None takes what is
            in the cache.
        cache: the cache folder; see `cache_folder`.

    Raises:
        MissingFileError: nothing cached and no source, or a file of the source is missing.
        DataError: a file of another form, or the cache cannot be written.
    """
    folder = cache_folder(cache) / NAME
    if source is None:
        return kept_dataset(folder, why="there is no default download", ways_out=_WAYS)
    path = require_file(source, expected="a folder with the files of Census-Income", ways_out=_WAYS)
    if path.is_file():
        raise MissingFileError(
            expected="the folder with the two files of Census-Income", found="a file", where=str(path), ways_out=_WAYS
        )
    frames = {}
    members = {}
    for split, name in FILES.items():
        data = read_plain_or_gzip(path / name, ways_out=_WAYS)
        frames[split] = read_census(data, where=str(path / name))
        members[name] = sha256_of(data)
    are_one = members[FILES["train"]] == members[FILES["test"]]
    if are_one or min(frames["test"]["income"].value_counts()["count"]) < 2:
        raise DataError(
            expected="two files, the test with people of both incomes, of which half validate",
            found=f"{frames['train'].height:,} and {frames['test'].height:,} people, "
            + ("twice the same file" if are_one else "too few of one income"),
            where=str(path),
            ways_out=_WAYS,
        )
    valid, test = halves(frames["test"], seed=_SEED)
    files = {"train.parquet": frames["train"], "valid.parquet": valid, "test.parquet": test}
    return write_dataset(folder, files, origin="Census-Income (KDD), UCI", members=members, notes=TERMS)


def census_schema() -> Schema:
    """Seven numbers, 32 categories, and two labels: income first."""
    numbers: list[Feature] = [Dense(name=name, transform=_transform(name)) for name in NUMBERS]
    return Schema(
        features=(*numbers, *(Categorical(name=name) for name in CATEGORIES)),
        labels=(Label(name="income"), Label(name="never_married")),
    )


def _transform(name: str) -> NumericTransform:
    return NumericTransform.LOG1P_STANDARDISE if name in _AMOUNTS else NumericTransform.STANDARDISE


def read_census(data: bytes, *, where: str) -> pl.DataFrame:
    """The people of a file in the published form.

    Args:
        data: its bytes.
        where: named in errors.

    Raises:
        DataError: other columns, an income that is none of the two, a number that is none, no marital status, or
            nobody who never married, in the words of the published files.
    """
    try:
        frame = pl.read_csv(io.BytesIO(data), has_header=False, infer_schema=False, truncate_ragged_lines=False)
    except pl.exceptions.PolarsError as error:
        raise _other_form(where, str(error).splitlines()[0]) from error
    if frame.width != len(COLUMNS):
        raise _other_form(where, f"{frame.width} columns")
    frame = frame.rename(dict(zip(frame.columns, COLUMNS, strict=True)))
    frame = frame.with_columns(pl.all().str.strip_chars())
    is_unknown = ~frame["income"].is_in(list(_INCOMES)).fill_null(value=False)
    if is_unknown.any():
        row = int(is_unknown.arg_true()[0])
        raise _other_form(f"{where}, line {row + 1}", f"income {frame['income'][row]!r}")
    has_no_status = frame["marital_status"].fill_null("") == ""
    if has_no_status.any():
        raise _other_form(f"{where}, line {int(has_no_status.arg_true()[0]) + 1}", "no marital status")
    if not (frame["marital_status"] == _NEVER).any():
        statuses = ", ".join(map(repr, frame["marital_status"].unique().sort().to_list()[:4]))
        raise _other_form(where, f"nobody whose marital status is {_NEVER!r}; there are {statuses}")
    read = frame.select(
        *(pl.col(name).cast(pl.Float32, strict=False) for name in NUMBERS),
        *CATEGORIES,
        pl.col("income").replace_strict(_INCOMES, return_dtype=pl.Int8),
        (pl.col("marital_status") == _NEVER).cast(pl.Int8).alias("never_married"),
    )
    for name in NUMBERS:
        is_none = ~read[name].is_finite().fill_null(value=False)
        if is_none.any():
            row = int(is_none.arg_true()[0])
            raise _other_form(f"{where}, line {row + 1}", f"{name} {frame[name][row]!r}")
    return read


def halves(people: pl.DataFrame, *, seed: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Two halves of some people, each with half of those who earn more and half of the others; rows keep their order.

    Args:
        people: with `income`.
        seed: of the draw.
    """
    income = people["income"].to_numpy()
    generator = np.random.Generator(np.random.PCG64(seed))
    is_first = np.zeros(len(income), dtype=bool)
    for value in (0, 1):
        rows = np.flatnonzero(income == value)
        is_first[generator.permutation(rows)[: len(rows) // 2]] = True
    return people.filter(pl.Series(is_first)), people.filter(pl.Series(~is_first))


def _other_form(where: str, found: str) -> DataError:
    return DataError(
        expected=f"{len(COLUMNS)} columns separated by commas, without a header; the last one, income, is "
        + " or ".join(map(repr, _INCOMES)),
        found=found,
        where=where,
        ways_out=(
            "take the file as it was published: Census-Income (KDD), not Adult, which has 15 columns",
            "for data of your own, skip fetch: `ziggurat data inspect FILE --write-schema my.toml`",
        ),
    )

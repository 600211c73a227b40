"""From raw columns, of whatever type, to numbers, ids, lists and vectors; every cell that cannot be is named.

The raw type of a column may differ between the files of one data set, and between training and prediction: an integer
column of a Parquet file is text in a CSV file, and floats as soon as pandas met a null. So an id has one *canonical
text*, whatever it came as, and only that is counted, hashed and looked up:

    raw value                       canonical text
    7 (any integer type), 7.0, "7", "7.0", Decimal 7.00      "7"       (pandas writes 7.0 for integers with nulls)
    "007", "a7", " 7", "7.00"       as it is
    7.5, 1e300                      "7.5", "1e+300"   (Python's shortest text that reads back as the same float)
    0.7 in 32 bits                  "0.7"             (the decimal that was written: `ops/written_decimals.py`)
    true, false, "True", "False"    "true", "false"   (pandas' to_csv writes True)
    Decimal 1.50                    "1.5"             (as the float; the text "1.50" may be a version, and stays)
    2024-05-01 (date)               "2024-05-01"
    "" (empty text), null, NaN      missing

Numbers: text is read as Python's `float` reads it (spaces around it are ignored, "true" is 1; marks between thousands
and the like are read where settings of the files say so: `raw/written_numbers.py`), a float of 32 bits as
the decimal that it was written from, null, NaN and empty text are missing, infinities and numbers beyond ±3.4e38
(32-bit floats) are faults.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from ziggurat.data.preprocess.values.list_ends import without_padding
from ziggurat.data.preprocess.values.vocabulary import hash_series
from ziggurat.data.preprocess.values.written_lists import refuse_brackets
from ziggurat.data.preprocess.values.written_vectors import vectors_of_texts
from ziggurat.data.raw.bad_rows import BadReason, BadRow, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.written_numbers import WrittenNumbers, other_numbers, ways_to_read
from ziggurat.errors import SchemaError
from ziggurat.features.schema import Spaces
from ziggurat.ops.written_decimals import as_float64, with_decimals

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_TRUTH = {"true": 1.0, "false": 0.0}
_PYTHON_TRUTH = {"True": "true", "False": "false"}  # as pandas writes booleans into a CSV file
_NUMERAL = r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"


@dataclass(kw_only=True)
class Faults:
    """Cells of a chunk that cannot be used: the first one of each row."""

    chunk: RawChunk
    found: dict[int, BadRow] = field(default_factory=dict)

    def add(
        self,
        index: int,
        *,
        column: str,
        reason: BadReason,
        expected: str,
        found: object,
        ways_out: tuple[str, ...] = (),
    ) -> None:
        """Note the cell in row `index` of the chunk, unless the row has a fault already."""
        # The first one alone: a bad row is reported once, whatever else is wrong with it.
        if index not in self.found:
            self.found[index] = self.chunk.bad_row(
                index, column=column, reason=reason, expected=expected, found=str(found), ways_out=ways_out
            )

    def report(self, bad_rows: BadRows) -> np.ndarray:
        """Report all faults in the order of rows.

        Returns:
            (N,) mask of the rows without fault.

        Raises:
            DataError, BoundsError: policy ERROR, or the budget is spent.
        """
        for index in sorted(self.found):
            bad_rows.report(self.found[index])
        keep = np.ones(self.chunk.num_rows, dtype=bool)
        keep[list(self.found)] = False
        return keep


@dataclass(frozen=True, kw_only=True)
class IdLists:
    """Lists of ids, one after the other: canonical texts, and the length of each list."""

    values: pl.Series
    lengths: np.ndarray


def read_numbers(series: pl.Series, *, faults: Faults, role: str, ways_out: tuple[str, ...] = ()) -> np.ndarray:
    """(N,) float64 numbers of a column; NaN where missing.

    Args:
        series: the raw column.
        faults: takes the cells that are not finite 32-bit numbers; they come out as NaN.
        role: what the column is for, in errors ("dense feature 'price'").
        ways_out: of a text that is no number, if not the usual ones.

    Raises:
        SchemaError: a column of lists, dates or other things that are not numbers.
    """
    dtype = series.dtype
    if dtype == pl.Null:
        return np.full(len(series), np.nan)
    if isinstance(dtype, pl.Categorical | pl.Enum):
        series = series.cast(pl.String)
        dtype = pl.String()
    if dtype == pl.String:
        numbers = _numbers_in_text(series, faults, written=faults.chunk.written.of(series.name), ways_out=ways_out)
    elif dtype.is_numeric() or dtype == pl.Boolean:
        numbers = as_float64(series).to_numpy()  # null becomes NaN
    else:
        raise wrong_type(series, faults.chunk, role=role, expected="numbers")
    numbers = numbers + 0.0  # −0 is 0, which is all that integers and decimals have
    too_large = np.abs(numbers) > LARGEST_FLOAT32
    if too_large.any():
        numbers = np.where(too_large, np.nan, numbers)
        for index in np.flatnonzero(too_large).tolist():
            # A text such as 1e999 has become infinite only when it was read, and says no "inf".
            infinite = "inf" in str(series[index]).lower() or np.isinf(float(series[index]))
            faults.add(
                index,
                column=series.name,
                reason=BadReason.NOT_FINITE if infinite else BadReason.TOO_LARGE,
                expected="a finite number" if infinite else "a number within ±3.4e38 (a 32-bit float)",
                found=series[index],
            )
    return numbers


@dataclass(frozen=True)
class MissingValues:
    """The texts that a schema takes for nothing, in every form in which a type of column may carry them.

    `missing = ["-1"]` means the text "-1", and as well the numbers −1, −1.0 and Decimal −1.00 of a Parquet file.

    Args:
        texts: as they are written, in canonical form, and whole numbers as floats are written ("-1.0").
        numbers: those of the texts that are finite numbers.
    """

    texts: frozenset[str]
    numbers: tuple[float, ...]

    @staticmethod
    @functools.cache
    def of(texts: tuple[str, ...]) -> MissingValues:
        """Find the forms of texts."""
        canonical = [text for text in _canonical_string(pl.Series(texts, dtype=pl.String)).to_list() if text]
        numerals = [text for text in canonical if re.fullmatch(_NUMERAL, text)]
        # A float column of whole numbers is written with ".0" when it becomes text.
        as_floats = [f"{text}.0" for text in numerals if text.lstrip("-").isdigit()]
        # As Python writes truths, which is what pandas puts into a CSV file.
        as_python = [text.capitalize() for text in canonical if text in _TRUTH]
        numbers = sorted({float(text) for text in numerals})
        return MissingValues(frozenset([*texts, *canonical, *as_floats, *as_python]), tuple(numbers))

    def where(self, series: pl.Series) -> pl.Series | None:
        """Find the cells of a column that are one of them; None where the type has none. Lists are not looked at."""
        dtype = series.dtype
        wanted = pl.Series(sorted(self.texts), dtype=pl.String).implode()
        if isinstance(dtype, pl.String | pl.Categorical | pl.Enum):
            return series.cast(pl.String).is_in(wanted)
        if dtype.is_numeric() and not self.numbers:
            return None
        if dtype.is_float():
            return as_float64(series).is_in(pl.Series(self.numbers, dtype=pl.Float64).implode())
        # Texts of a nested column would be those of its elements, and these stay.
        texts = None if dtype.is_nested() else canonical_text(series)
        return None if texts is None else texts.is_in(wanted)

    def has(self, value: object) -> bool:
        """Return whether a value of a request is one of them."""
        if isinstance(value, str):
            return value in self.texts
        # Before the look at numbers, because a bool is an int in Python.
        if isinstance(value, bool):
            return str(value).lower() in self.texts
        return isinstance(value, int | float) and value in self.numbers


def with_nulls(chunk: RawChunk, texts: Sequence[str]) -> RawChunk:
    """The chunk with null where a whole cell is one of `texts`: missing values that somebody wrote out.

    Cells of numbers count too, as the texts that they would be in a CSV file; lists and their elements stay.
    """
    if not texts:
        return chunk
    frame = chunk.frame
    spans = chunk.spans
    missing = MissingValues.of(tuple(texts))
    if frame.height:
        nulls: list[pl.Series] = []
        for series in frame.get_columns():
            found = missing.where(series)
            if found is not None and found.any():
                # `when` without `otherwise` is null.
                nulls.append(series.to_frame().select(pl.when(~found).then(pl.col(series.name))).to_series())
        frame = frame.with_columns(nulls) if nulls else frame
    if spans:
        forms = sorted(missing.texts)
        hashes = hash_series(pl.Series(forms, dtype=pl.String))
        # A longer cell cannot be one of the forms, so its bytes need no look.
        longest = max(len(text.encode()) for text in forms)
        spans = {name: column.without(hashes, longest=longest) for name, column in spans.items()}
    return replace(chunk, frame=frame, spans=spans)


def with_truths(chunk: RawChunk) -> RawChunk:
    """The chunk with columns of "True" or "False" as text, to be made canonical, that a text file gave as spans."""
    hashes = hash_series(pl.Series(list(_PYTHON_TRUTH), dtype=pl.String))
    # No longer than "False": other cells are passed over by their length.
    named = [name for name, column in chunk.spans.items() if column.has(hashes, longest=5)]
    if not named:
        return chunk
    texts = [chunk.spans[name].series(name) for name in named]
    frame = pl.DataFrame([*chunk.frame.get_columns(), *texts])
    return replace(chunk, frame=frame, spans={name: each for name, each in chunk.spans.items() if name not in named})


def _numbers_in_text(
    series: pl.Series, faults: Faults, *, written: WrittenNumbers, ways_out: tuple[str, ...]
) -> np.ndarray:
    numbers = written.cast(series)
    open_cells = (numbers.is_null() & series.is_not_null()).to_numpy()
    values = numbers.fill_null(float("nan")).to_numpy()
    if not open_cells.any():
        return values
    # polars gives a view of its own memory, which must not be written to.
    values = values.copy()
    advice: tuple[str, ...] | None = None
    for index in np.flatnonzero(open_cells).tolist():
        # Python's `float` takes spaces around a number, and the cast does not.
        text = series[index].strip()
        parsed = written.cast(pl.Series([text]))[0]
        if parsed is None:
            # Text files write truths as words, and where numbers are wanted they count 1 and 0.
            parsed = _TRUTH.get(text.lower())
        if parsed is not None:
            values[index] = parsed
        elif text:
            # It looks at the whole column, so it is asked for once, and only where a cell needs it.
            if advice is None:
                is_own = series.name in faults.chunk.written.own
                advice = ways_to_read(series, present=written, is_own=is_own)
            faults.add(
                index,
                column=series.name,
                reason=BadReason.NOT_A_NUMBER,
                expected="a number, or nothing" + written.in_words(),
                found=series[index],
                ways_out=(*advice, *_as_here(text, written), *(ways_out or _ways_without_a_number(series[index]))),
            )
    return values


def _as_here(text: str, written: WrittenNumbers) -> tuple[str, ...]:
    """Return ways out that write a cell as the others of its column are, if it is a number by other marks."""
    numbers = () if written.is_plain else other_numbers(text[:400], present=written)
    return tuple(f"if {text!r:.80} is {each:.10g}, write it as {written.text_of(each)!r}" for each in numbers[:2])


def _ways_without_a_number(text: str) -> tuple[str, ...]:
    return (f"if this text means that there is no value, add it to `missing` in the schema: missing = [{text!r}]",)


def canonical_strings(frame: pl.DataFrame, columns: Iterable[str]) -> dict[str, pl.Series]:
    """Those of the columns that are text, in canonical form; one vectorised look finds the few that need a change."""
    series = {each.name: each for each in frame.get_columns()}
    names = [name for name in dict.fromkeys(columns) if name in series and series[name].dtype == pl.String]
    if not names:
        return {}
    # Numbered, since a column may be named so that its flag would have the name of another's.
    empty = (pl.col(name).eq("").any().alias(f"{i} empty") for i, name in enumerate(names))
    zero = (pl.col(name).str.ends_with(".0").any().alias(f"{i} zero") for i, name in enumerate(names))
    words = pl.Series(list(_PYTHON_TRUTH)).implode()
    truth = (pl.col(name).is_in(words).any().alias(f"{i} truth") for i, name in enumerate(names))
    flags = frame.select(*empty, *zero, *truth).row(0, named=True)
    kinds = ("empty", "zero", "truth")
    changed = {name: any(flags[f"{i} {kind}"] for kind in kinds) for i, name in enumerate(names)}
    # The others are handed on as they are: canonical text costs a pass over the column.
    return {name: _canonical_string(series[name]) if changed[name] else series[name] for name in names}


def read_ids(series: pl.Series, *, faults: Faults, role: str) -> pl.Series:
    """The canonical texts of a column of ids; null where missing.

    Args:
        series: the raw column; if it is text, from `canonical_strings`.
        faults: takes cells that cannot be ids.
        role: what the column is for, in errors.

    Raises:
        SchemaError: a column of lists, timestamps or other things that are no ids.
    """
    dtype = series.dtype
    if dtype == pl.String:
        return series
    if isinstance(dtype, pl.List | pl.Array):
        raise wrong_type(
            series, faults.chunk, role=role, expected="one id a row", way_out='set kind = "multi_hot" or "sequence"'
        )
    if dtype == pl.Binary:
        return _decoded(series, faults)
    if dtype.is_float():
        # Only infinities: NaN is a missing id.
        infinite = series.is_infinite().fill_null(False)
        if infinite.any():
            for index in np.flatnonzero(infinite.to_numpy()).tolist():
                faults.add(
                    index,
                    column=series.name,
                    reason=BadReason.NOT_FINITE,
                    expected="an id",
                    found=series[index],
                )
    text = canonical_text(series)
    if text is None:
        raise wrong_type(series, faults.chunk, role=role, expected="ids: text, integers, booleans or categories")
    return text


def canonical_text(series: pl.Series) -> pl.Series | None:
    """The canonical texts of a column of scalars (see the module); None if its type cannot be ids."""
    dtype = series.dtype
    if dtype == pl.String:
        return _canonical_string(series)
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return _canonical_string(series.cast(pl.String))
    if dtype.is_integer() or dtype == pl.Boolean or dtype == pl.Date or dtype == pl.Null:
        return series.cast(pl.String)
    if isinstance(dtype, pl.Decimal):
        # Zeros behind the point say nothing of a decimal, whose places are those of its column.
        return series.cast(pl.String).str.replace(r"(\.[0-9]*?)0+$", "$1").str.strip_suffix(".")
    if dtype.is_float():
        return _canonical_float(with_decimals(series))
    return None


def _canonical_string(series: pl.Series) -> pl.Series:
    if (series == "").any():
        series = series.set(series == "", None)
    if series.is_in(pl.Series(list(_PYTHON_TRUTH)).implode()).any():
        series = series.replace(_PYTHON_TRUTH)
    # A cheap look first: few columns have such a text, and the pattern below is slow.
    ends_in_zero = series.str.ends_with(".0")
    if ends_in_zero.any():
        shortened = series.str.replace(r"^(-?[0-9]+)\.0$", "$1")
        # "-0.0" is the number 0; a text "-0" stays as it is.
        shortened = shortened.set((shortened == "-0") & (series != "-0"), "0")
        return shortened
    return series


def _canonical_float(series: pl.Series) -> pl.Series:
    series = series.fill_nan(None)
    # From 2^63 on, a whole number does not fit Int64.
    integral = ((series.floor() == series) & (series.abs() < 2.0**63)).fill_null(True)
    whole = series.cast(pl.Int64, strict=False).cast(pl.String)
    if integral.all():
        return whole
    # Python's and numpy's shortest texts are promised to stay; those of polars are not.
    others = [str(value) for value in series.filter(~integral).to_numpy()]
    return whole.scatter(integral.not_().arg_true(), others)


def _decoded(series: pl.Series, faults: Faults) -> pl.Series:
    try:
        return _canonical_string(series.cast(pl.String))
    except PolarsError:
        # The slow way tells the row: a cast of the whole column only says that one is wrong.
        texts = [None if value is None else value.decode(errors="replace") for value in series]
    for index, (value, text) in enumerate(zip(series, texts, strict=True)):
        if value is not None and text is not None and text.encode() != value:
            # Decoding replaced something, so encoding gives other bytes than there were.
            faults.add(
                index,
                column=series.name,
                reason=BadReason.INVALID_UTF8,
                expected="valid UTF-8",
                found=value,
            )
    return _canonical_string(pl.Series(series.name, texts, dtype=pl.String))


def read_id_lists(
    series: pl.Series, *, separator: str, faults: Faults, role: str, spaces: Spaces = Spaces.KEEP, padding: str = ""
) -> IdLists:
    """Read lists of ids from a list column, or from text split at `separator`; null or empty text is an empty list.

    A null or empty *element* stays in the list, as a missing id, so that parallel lists keep their places. Elements
    that are `padding` at the ends of a list are none of it.

    Raises:
        SchemaError: a column of scalars (without separator), or lists of things that are no ids.
    """
    dtype = series.dtype
    if isinstance(dtype, pl.Categorical | pl.Enum) and separator:
        series = series.cast(pl.String)
        dtype = pl.String()
    if dtype == pl.Null:
        return IdLists(values=pl.Series(dtype=pl.String), lengths=np.zeros(len(series), dtype=np.int64))
    if dtype == pl.String and separator:
        refuse_brackets(series, faults.chunk, role=role, separator=separator)
        series = series.set(series == "", None).str.split(separator)
    elif isinstance(dtype, pl.Array):
        series = series.arr.to_list()
    elif not isinstance(dtype, pl.List):
        divided = 'separator = "|"; to score files with a trained run: --data.list-separator "|"'
        way_out = "before training: set " + (divided if dtype == pl.String else 'kind = "categorical"')
        raise wrong_type(series, faults.chunk, role=role, expected="lists of ids", way_out=way_out)
    # A null list has no length, and is an empty one here.
    lengths = series.list.len().fill_null(0).to_numpy().astype(np.int64)
    # `explode` makes a null of an empty list, which would be an element too many.
    values = series.filter(pl.Series(lengths > 0)).explode()
    if spaces is Spaces.STRIP and values.dtype == pl.String:
        values = values.str.strip_chars()
    text = canonical_text(values)
    if text is None or isinstance(values.dtype, pl.List | pl.Array):
        raise wrong_type(series, faults.chunk, role=role, expected="lists of text, integers, booleans or categories")
    if values.dtype.is_float() and values.is_infinite().any():
        # The row that each flat value belongs to.
        owner = np.repeat(np.arange(len(lengths)), lengths)
        for index in np.unique(owner[values.is_infinite().fill_null(False).to_numpy()]).tolist():
            faults.add(
                index,
                column=series.name,
                reason=BadReason.NOT_FINITE,
                expected="a list of ids",
                found=series[index].to_list(),
            )
    if padding:
        text, lengths = without_padding(text, lengths, padding=padding)
    return IdLists(values=text, lengths=lengths)


def read_vectors(series: pl.Series, *, dim: int, faults: Faults, role: str) -> np.ndarray:
    """(N, dim) float32 vectors of a column of lists, or of texts of numbers; zeros where null.

    Faults: a list of another length, a missing or non-finite element.

    Raises:
        SchemaError: not a column of lists of numbers, nor of texts.
    """
    cells = series
    if series.dtype == pl.String:
        series = vectors_of_texts(series)
    dtype = series.dtype
    num_rows = len(series)
    if dtype == pl.Null:
        return np.zeros((num_rows, dim), dtype=np.float32)
    if isinstance(dtype, pl.Array):
        series = series.arr.to_list()
    if not isinstance(series.dtype, pl.List) or not (series.dtype.inner.is_numeric() or series.dtype.inner == pl.Null):
        raise wrong_type(series, faults.chunk, role=role, expected=f"lists of {dim} numbers")
    lengths = series.list.len().fill_null(0).to_numpy()
    given = series.is_not_null().to_numpy()
    wrong = given & (lengths != dim)
    for index in np.flatnonzero(wrong).tolist():
        faults.add(
            index,
            column=series.name,
            reason=BadReason.WRONG_LENGTH,
            expected=f"a vector of {dim} numbers",
            found=f"{lengths[index]} numbers" + (f", {cells[index]!r}" if cells.dtype == pl.String else ""),
        )
    right = given & ~wrong
    # In float64, so that a number beyond 32 bits is seen before the cast makes it infinite.
    vectors = np.zeros((num_rows, dim), dtype=np.float64)
    # An element that is null becomes NaN, and so a fault below.
    flat = series.filter(pl.Series(right)).explode().cast(pl.Float64).fill_null(float("nan")).to_numpy()
    vectors[right] = flat.reshape(-1, dim)
    # Written as a negation, because NaN fails every comparison.
    broken = ~(np.abs(vectors) <= LARGEST_FLOAT32).all(axis=1)
    for index in np.flatnonzero(broken).tolist():
        faults.add(
            index,
            column=series.name,
            reason=BadReason.NOT_FINITE,
            expected=f"a vector of {dim} finite 32-bit numbers",
            found=series[index].to_list() if cells.dtype != pl.String else cells[index],
        )
    # A fault may be put aside, and the cast of a number beyond 32 bits would warn.
    vectors[broken] = 0.0
    return vectors.astype(np.float32)


def wrong_type(series: pl.Series, chunk: RawChunk, *, role: str, expected: str, way_out: str = "") -> SchemaError:
    """The error for a column whose type does not fit its role in the schema."""
    example = series.drop_nulls().head(1).to_list()
    return SchemaError(
        expected=f"{expected}, for {role}",
        found=f"type {series.dtype}" + (f", for example {str(example[0])[:100]!r}" if example else ""),
        where=f"{chunk.path}, column {series.name!r}",
        ways_out=(*([way_out] if way_out else []), "correct the schema", "for a trained run: convert the column"),
    )

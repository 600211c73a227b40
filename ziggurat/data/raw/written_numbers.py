"""Numbers in text as people and office programs write them: 1,200 and 1.234,5 and 1 200 and $12.5 and 12 %.

Problem: "4.731" is four and three quarters to one program and nearly five thousand to another, and one cell alone never
says which. A reader that guesses cell by cell divides by a thousand without a word.

Idea: how numbers are written is a setting of the files, and holds for all of their numbers but those of columns that
have a block of their own in the schema (`features/number_marks.py`). Within it a cell is read strictly: marks between
thousands stand behind one to three digits that do not begin with 0, before groups of exactly three digits, and only
before the fraction; anything else is no number, and so a bad row. Commas may also stand as in India, before groups of
two digits and a last one of three.

    settings                              reads                            refuses
    decimal point (the default)           3.5  1200                        1,200  3,5
    decimal comma                         3,5  1200                        1.234  3.5
    thousands comma                       1,200  1,234.5  1,20,000  3.5    1,20  12,3456  0,500
    decimal comma, thousands point        1.234,5  4.731 (= 4731)  3,5     1.23  3.5  0.500  1.20.000
    signs strip                           $12.5  12.5 €  12% (= 0.12)      12 kg

`find_marks` looks at whole columns, says under which settings most can be read, and which need a block of their own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum

import polars as pl

from ziggurat.errors import ConfigError
from ziggurat.features.number_marks import DecimalMark as DecimalMark
from ziggurat.features.number_marks import NumberColumn
from ziggurat.features.number_marks import NumberSigns as NumberSigns
from ziggurat.features.number_marks import ThousandsMark as ThousandsMark

_CURRENCY = r"[$€£¥₹]"
_SPACES = " \u00a0\u202f\u2009"
_MAX_WITHOUT_ZERO = 50  # distinct fractions of two digits and more: that none begins with 0 has a chance of 0.5 %
_MIN_MARKED = 5  # distinct cells with three digits behind their only mark, before that is taken for thousands


_CHARACTERS = {
    ThousandsMark.NONE: "",
    ThousandsMark.COMMA: ",",
    ThousandsMark.POINT: r"\.",
    ThousandsMark.SPACE: f"[{_SPACES}]",
    ThousandsMark.APOSTROPHE: "['’]",
}
_EXAMPLES = {
    ThousandsMark.NONE: "",
    ThousandsMark.COMMA: ",",
    ThousandsMark.POINT: ".",
    ThousandsMark.SPACE: " ",
    ThousandsMark.APOSTROPHE: "'",
}


@dataclass(frozen=True, kw_only=True)
class WrittenNumbers:
    """Settings for how the numbers in the texts of some files are written.

    Args:
        decimal: what stands before the fraction.
        thousands: what stands between thousands; numbers without any are read as well.
        signs: whether signs of currencies and per cent may stand around a number.

    Raises:
        ConfigError: one mark for both.
    """

    decimal: DecimalMark = DecimalMark.POINT
    thousands: ThousandsMark = ThousandsMark.NONE
    signs: NumberSigns = NumberSigns.REFUSE

    def __post_init__(self) -> None:
        if self.decimal.value == self.thousands.value:
            raise ConfigError(
                expected="two marks: one between thousands, and another before the fraction",
                found=f"a {self.decimal.value} for both",
                where="data settings, decimal and thousands",
                ways_out=(
                    "1.234,5: --data.decimal comma --data.thousands point",
                    "1,234.5: --data.decimal point --data.thousands comma",
                ),
            )

    @staticmethod
    def of_column(column: NumberColumn) -> WrittenNumbers:
        """Return how a column with settings of its own is written."""
        return WrittenNumbers(decimal=column.decimal, thousands=column.thousands, signs=column.signs)

    @property
    def is_plain(self) -> bool:
        """True if numbers are written as programs write them: a point before the fraction, and nothing else."""
        return self == PLAIN_NUMBERS

    def settings(self) -> tuple[str, ...]:
        """Return the flags of a command line that say this; none where it is the default."""
        decimal = ("--data.decimal", self.decimal.value) if self.decimal is not DecimalMark.POINT else ()
        thousands = ("--data.thousands", self.thousands.value) if self.thousands is not ThousandsMark.NONE else ()
        signs = ("--data.signs", self.signs.value) if self.signs is not NumberSigns.REFUSE else ()
        return (*decimal, *thousands, *signs)

    def block(self, column: str) -> str:
        """Say in words which block of a schema says this of a column."""
        keys = {"decimal": self.decimal, "thousands": self.thousands, "signs": self.signs}
        plain = {"decimal": DecimalMark.POINT, "thousands": ThousandsMark.NONE, "signs": NumberSigns.REFUSE}
        lines = [f"column = {json.dumps(column, ensure_ascii=False)}"]
        lines += [f'{name} = "{value.value}"' for name, value in keys.items() if value is not plain[name]]
        return f"[[number]], and below it {' and '.join(lines)}"

    def as_column(self, column: str) -> NumberColumn:
        """Return the settings of a column that is written so."""
        return NumberColumn(column=column, decimal=self.decimal, thousands=self.thousands, signs=self.signs)

    def cast(self, series: pl.Series) -> pl.Series:
        """Read texts as Float64; null where a text is no number, or is null or blank."""
        if self.is_plain:
            return series.cast(pl.Float64, strict=False)
        text = pl.col("text").str.strip_chars()
        percent = pl.lit(value=False)
        if self.signs is NumberSigns.STRIP:
            # Looked for first, because the next line takes the sign away.
            percent = text.str.contains(r"\d\s*%$")
            text = text.str.replace(r"(\d)\s*%$", "${1}")
            text = text.str.replace(rf"(\d)\s*{_CURRENCY}$", "${1}")
            # Plus or minus may stand on either side of the currency.
            text = text.str.replace(rf"^([+-]?)\s*{_CURRENCY}\s*([+-]?)", "${1}${2}")
        if self.thousands is not ThousandsMark.NONE:
            mark = _CHARACTERS[self.thousands]
            # Marks are taken out of well-formed groups alone; other texts keep them, and the cast refuses them.
            text = pl.when(text.str.contains(self._grouped())).then(text.str.replace_all(mark, "")).otherwise(text)
        if self.decimal is DecimalMark.COMMA:
            # A point that is left stands between no thousands, and nobody can say what it divides.
            text = pl.when(text.str.contains(".", literal=True)).then(None).otherwise(text)
            text = text.str.replace(",", ".", literal=True)
        # In the text: a division would round a second time.
        text = pl.when(percent).then(text + "e-2").otherwise(text)
        read = text.cast(pl.Float64, strict=False)
        return pl.DataFrame({"text": series}).select(read).to_series().alias(series.name)

    def text_of(self, number: float) -> str:
        """Write a number as these settings read it: the way back from `cast`."""
        if not math.isfinite(number):
            return str(number)
        # `repr` alone writes small and large numbers with an exponent.
        text = format(Decimal(repr(number)), "f").removesuffix(".0")
        return text.replace(".", ",") if self.decimal is DecimalMark.COMMA else text

    def as_points(self, series: pl.Series) -> pl.Series:
        """Write texts of numbers as programs do; texts that are none stay as they are."""
        if self.is_plain:
            return series
        numbers = self.cast(series)
        plain = series.cast(pl.Float64, strict=False)
        # A cell that a plain reading gets right keeps its own spelling.
        texts = numbers.cast(pl.String).zip_with((numbers != plain).fill_null(True), series)
        return texts.zip_with(numbers.is_not_null(), series)

    def in_words(self) -> str:
        """Say what is expected of a number, for errors."""
        parts = ["a comma before the fraction"] if self.decimal is DecimalMark.COMMA else []
        if self.thousands is not ThousandsMark.NONE:
            mark = _EXAMPLES[self.thousands]
            name = "an apostrophe" if self.thousands is ThousandsMark.APOSTROPHE else f"a {self.thousands.value}"
            parts.append(
                f"{name} between thousands (1{mark}200; groups of three digits, the first of one to three and not "
                f"0{mark}200), or none"
            )
        if self.signs is NumberSigns.STRIP:
            parts.append("a sign of a currency or of per cent around it, or none")
        return f", with {', and '.join(parts)}" if parts else ""

    def _grouped(self) -> str:
        """Return the pattern of a number with marks between its thousands."""
        mark = _CHARACTERS[self.thousands]
        fraction = "," if self.decimal is DecimalMark.COMMA else r"\."
        # Nobody writes 0.500 for 500: a zero in front says that the mark stands before a fraction.
        groups = rf"[1-9]\d{{0,2}}({mark}\d{{3}})+"
        if self.thousands is ThousandsMark.COMMA:
            groups += rf"|[1-9]\d?({mark}\d{{2}})+{mark}\d{{3}}"  # India: 12,34,567
        return rf"^[+-]?({groups})({fraction}\d*)?$"


PLAIN_NUMBERS = WrittenNumbers()  # as programs write them
DECIMAL_COMMA = WrittenNumbers(decimal=DecimalMark.COMMA)


@dataclass(frozen=True, kw_only=True)
class WrittenColumns:
    """The way in which the numbers of each column of text are written.

    Args:
        files: that of the files.
        own: by column, of those that the schema says more of.
    """

    files: WrittenNumbers = PLAIN_NUMBERS
    own: Mapping[str, WrittenNumbers] = field(default_factory=dict)

    def with_own(self, columns: Iterable[NumberColumn]) -> WrittenColumns:
        """Return the same, with the columns of a schema; those that are there already stay as they are."""
        own = {each.column: WrittenNumbers.of_column(each) for each in columns}
        return WrittenColumns(files=self.files, own={**own, **self.own})

    def of(self, column: str) -> WrittenNumbers:
        """Return how the numbers of a column are written."""
        return self.own.get(column, self.files)

    @property
    def is_plain(self) -> bool:
        """True if the numbers of all columns are written as programs write them."""
        return self.files.is_plain and all(each.is_plain for each in self.own.values())


@dataclass(frozen=True, kw_only=True)
class MarksFound:
    """The way in which the numbers of a file are written, as its columns show.

    Args:
        numbers: the settings under which most columns of numbers can be read.
        marked: names of columns that need these settings, or their own: they are measurements, and no ids.
        warnings: what may be read in two ways.
        own: by column, of those that are written in another way than most.
        own_notes: by such a column, what is to be said of it where it is read as numbers.
        pairs: names of columns of lists of one or two ids, which the settings could read as numbers.
    """

    numbers: WrittenNumbers
    marked: frozenset[str]
    warnings: tuple[str, ...]
    own: Mapping[str, WrittenNumbers] = field(default_factory=dict)
    own_notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pairs: frozenset[str] = frozenset()

    def of(self, column: str) -> WrittenNumbers:
        """Return how the numbers of a column are written."""
        return PLAIN_NUMBERS if column in self.pairs else self.own.get(column, self.numbers)


def find_marks(columns: Mapping[str, pl.Series], *, separator: str) -> MarksFound:
    """Find out how the numbers in columns of text are written: for most of them alike, for others by themselves.

    Args:
        columns: texts by the name of the column, without nulls and texts that mean nothing.
        separator: what divides the fields of the file; "" if it is no text file. A comma makes a decimal comma
            unlikely.
    """
    looked_at = {name: _Texts.of(texts, separator=separator) for name, texts in columns.items()}
    known = {name: each for name, each in looked_at.items() if each.readings}
    if not any(each.needs_settings for each in known.values()):
        warnings = [
            note
            for name, each in known.items()
            for note in each.doubts(name, PLAIN_NUMBERS, beside=_others(known, name))
        ]
        return MarksFound(numbers=PLAIN_NUMBERS, marked=frozenset(), warnings=tuple(warnings))
    candidates = _in_order(separator)
    # Of equals the one that stands first: it is the likelier one.
    best = max(candidates, key=lambda marks: (_fit(known.values(), marks), -candidates.index(marks)))
    needy = {name: each for name, each in known.items() if each.needs_settings}
    marked = {name: each for name, each in needy.items() if each.reading_by(best) in _LIKELY}
    signed = any(each.has_signs for each in marked.values())
    numbers = replace(best, signs=NumberSigns.STRIP if signed else NumberSigns.REFUSE)
    warnings: list[str] = []
    if not numbers.is_plain:
        shown = ", ".join(
            f"{name!r} ({each.example!r} is {each.read_as(numbers)})" for name, each in sorted(marked.items())[:3]
        )
        warnings.append(f"numbers are read with {' '.join(numbers.settings())}, as columns show: {shown}")
    own: dict[str, WrittenNumbers] = {}
    own_notes: dict[str, tuple[str, ...]] = {}
    for name, each in known.items():
        alone = each.read_alone(best)
        if alone is None:
            warnings += each.doubts(name, numbers, beside=_others(known, name))
            continue
        own[name] = alone
        note = (
            f"{name!r}: numbers such as {each.example!r} are written in another way than those of other columns; the "
            f"schema says of it alone that this is {each.read_as(alone)}: {alone.block(name)}"
        )
        own_notes[name] = (note, *each.doubts(name, alone, is_own=True))
    marked |= {name: needy[name] for name in own if name in needy}
    # Also where a plain reading would do: no ids have marks between their thousands.
    marked |= {name: each for name, each in known.items() if name not in own and each.has_thousands_of(best)}
    return MarksFound(
        numbers=numbers,
        marked=frozenset(marked),
        warnings=tuple(warnings),
        own=own,
        own_notes=own_notes,
        pairs=frozenset(name for name, each in looked_at.items() if each.are_pairs),
    )


def _others(columns: Mapping[str, _Texts], name: str) -> list[_Texts]:
    """Return all columns but one."""
    return [each for other, each in columns.items() if other != name]


def in_one_line(column: str, *, written: WrittenNumbers) -> str:
    """Return a line of Python that writes a polars frame `df` of texts with one column of numbers, as Parquet.

    Numbers of Parquet are read by no marks, so those of the other columns still hold for these. Per cent is
    left to the user: the line then ends in an error of polars, and in no other number.

    Args:
        column: its name.
        written: the way in which its numbers are written.
    """
    text = f"pl.col({column!r})"
    if written.signs is NumberSigns.STRIP:
        text += f".str.replace_all({_CURRENCY!r}, '')"
    text += ".str.strip_chars()"
    if written.thousands is not ThousandsMark.NONE:
        text += f".str.replace_all({_CHARACTERS[written.thousands]!r}, '')"
    if written.decimal is DecimalMark.COMMA:
        text += ".str.replace(',', '.', literal=True)"
    return f"df.with_columns({text}.cast(pl.Float64)).write_parquet('numbers.parquet')"


def ways_to_read(texts: pl.Series, *, present: WrittenNumbers, is_own: bool = False) -> tuple[str, ...]:
    """Return the settings under which a whole column can be read as numbers, as ways out of an error.

    Args:
        texts: all texts of the column at hand; None of these ways is left where one cell alone is to blame.
        present: the settings that did not do.
        is_own: whether they are those of a [[number]] of this column, which no setting of the files changes.
    """
    found = texts.drop_nulls()
    # As of a file in which commas divide nothing, so that a comma before the fraction is likely.
    column = _Texts.of(found.filter(found.str.strip_chars() != ""), separator=";")
    ways: list[str] = []
    blocks: list[str] = []
    lines: list[str] = []
    for marks, reading in column.readings.items():
        needed = column.with_signs(marks)
        if needed != present and reading in _LIKELY:
            # Settings that are plain have no flags: then those at hand have to go.
            flags = " ".join(needed.settings()) or _plain_flags(present)
            meant = f"if {column.example!r} is {column.read_as(needed)}"
            block = needed.block(texts.name)
            if is_own:
                blocks.append(f"{meant}: in the schema, correct the [[number]] of the column to {block}")
            else:
                ways.append(f"{meant}: {flags}")
                # A setting holds for all columns of the files, so it is no way out where these differ.
                meant = f"{meant}, and numbers of other columns are written in another way"
                blocks.append(f"{meant}: in the schema, {block}")
            lines.append(
                f"{meant}, and the schema is that of a trained run: in Python, of df = "
                f"pl.read_csv(…, infer_schema=False), {in_one_line(texts.name, written=needed)}"
            )
    return (*ways[:2], *blocks[:2], *lines[:1])


def other_numbers(text: str, *, present: WrittenNumbers) -> tuple[float, ...]:
    """Return the numbers that a text is by other settings, the likelier ones first; for ways out of an error.

    Args:
        text: that is no number by the present settings.
        present: those.
    """
    alone = pl.Series([text], dtype=pl.String)
    read = [replace(marks, signs=NumberSigns.STRIP).cast(alone)[0] for marks in _in_order(";") if marks != present]
    return tuple(dict.fromkeys(number for number in read if number is not None and math.isfinite(number)))


class _Reading(StrEnum):
    """The certainty with which a column reads as numbers under some settings."""

    SURE = "sure"
    AMBIGUOUS = "ambiguous"  # other settings would give other numbers, and nothing in the column decides
    UNLIKELY = "unlikely"  # as fractions of three digits each, while numbers without any are below a thousand


_LIKELY = (_Reading.SURE, _Reading.AMBIGUOUS)


def _in_order(separator: str) -> list[WrittenNumbers]:
    """Return the settings without signs, the likelier ones first."""
    point = DecimalMark.POINT
    comma = DecimalMark.COMMA
    order = [PLAIN_NUMBERS]
    thousands = [WrittenNumbers(decimal=point, thousands=ThousandsMark.COMMA)]
    fractions = [DECIMAL_COMMA]
    german = [WrittenNumbers(decimal=comma, thousands=ThousandsMark.POINT)]
    # Where commas divide fields, or no field needs a mark, 3,500 is rather the English form.
    order += thousands + fractions + german if _has_commas(separator) else fractions + german + thousands
    for mark in (ThousandsMark.SPACE, ThousandsMark.APOSTROPHE):
        order += [WrittenNumbers(decimal=decimal, thousands=mark) for decimal in (point, comma)]
    return order


def _has_commas(separator: str) -> bool:
    """Return whether a comma before a fraction is no matter of course: it divides the fields, or no mark does."""
    return separator in (",", "")


@dataclass(frozen=True, kw_only=True)
class _Texts:
    """The distinct texts of a column, and the ways in which all of them are numbers.

    Args:
        unique: the texts, in order of appearance.
        has_signs: whether signs of a currency or of per cent stand around some.
        readings: settings, without those of signs, under which all are numbers; the likelier ones first.
        may_be_pairs: whether texts with a comma may as well be two ids each.
        are_pairs: whether they are lists of one or two ids, which a comma before the fraction would make numbers.
    """

    unique: pl.Series
    has_signs: bool
    readings: Mapping[WrittenNumbers, _Reading]
    may_be_pairs: bool = False
    are_pairs: bool = False

    @staticmethod
    def of(texts: pl.Series, *, separator: str) -> _Texts:
        """Look at the texts of a column."""
        unique = texts.unique(maintain_order=True)
        allowed = rf"^\s*[+-]?\s*({_CURRENCY}\s*)?[+-]?\d[\d.,'’{_SPACES}eE+-]*({_CURRENCY}|%)?\s*$"
        # A cheap look first, which most columns of text do not pass.
        if not len(unique) or not unique.head(100).str.contains(allowed).all():
            return _Texts(unique=unique, has_signs=False, readings={})
        if not unique.str.contains(allowed).all():
            return _Texts(unique=unique, has_signs=False, readings={})
        has_signs = bool(unique.str.contains(rf"{_CURRENCY}|%").any())
        signs = NumberSigns.STRIP if has_signs else NumberSigns.REFUSE
        readings: dict[WrittenNumbers, _Reading] = {}
        pairs = _pairs(unique) if _has_commas(separator) else _Pairs.NUMBERS
        for marks in _in_order(separator):
            if marks == DECIMAL_COMMA and pairs is _Pairs.IDS:
                continue
            if replace(marks, signs=signs).cast(unique).null_count() == 0:
                reading = _reading(unique, marks)
                if reading is not None:
                    readings[marks] = reading
        may_be_pairs = pairs is _Pairs.EITHER and DECIMAL_COMMA in readings
        are_pairs = pairs is _Pairs.IDS and not readings and DECIMAL_COMMA.cast(unique).null_count() == 0
        return _Texts(
            unique=unique, has_signs=has_signs, readings=readings, may_be_pairs=may_be_pairs, are_pairs=are_pairs
        )

    @property
    def needs_settings(self) -> bool:
        """True if the plain settings do not read the column, or not likely as it is meant."""
        return bool(self.readings) and (self.has_signs or self.readings.get(PLAIN_NUMBERS) not in _LIKELY)

    def reading_by(self, marks: WrittenNumbers) -> _Reading | None:
        """Return how surely settings read the texts, also where no mark between thousands stands in one."""
        if marks in self.readings or marks.thousands is ThousandsMark.NONE:
            return self.readings.get(marks)
        if self.unique.str.contains(_CHARACTERS[marks.thousands]).any():
            if self.unique.str.contains(r"[.,]").any():
                return None
            # Whole numbers between spaces: it makes no difference which mark fractions would have.
            return next((each for other, each in self.readings.items() if other.thousands is marks.thousands), None)
        return self.readings.get(replace(marks, thousands=ThousandsMark.NONE))

    def is_read_by(self, marks: WrittenNumbers) -> bool:
        """Return whether settings read all texts, if only because none of their marks stands in one."""
        if self.reading_by(marks) is not None:
            return True
        # Under a decimal comma a point would be a mark between thousands, or make the text no number.
        same_mark = marks.decimal is DecimalMark.POINT or not self.unique.str.contains(".", literal=True).any()
        return self.readings.get(PLAIN_NUMBERS) is _Reading.SURE and same_mark

    def has_thousands_of(self, marks: WrittenNumbers) -> bool:
        """Return whether settings read the texts, in some of which a mark of theirs stands between thousands."""
        return marks.thousands is not ThousandsMark.NONE and self.readings.get(marks) in _LIKELY

    def is_read_well_by(self, marks: WrittenNumbers) -> bool:
        """Return whether settings read all texts, and likely as they are meant."""
        return self.is_read_by(marks) and self.reading_by(marks) is not _Reading.UNLIKELY

    def read_alone(self, marks: WrittenNumbers) -> WrittenNumbers | None:
        """Return the settings that this column needs by itself, where those of most columns do not read it well."""
        likely = [each for each, reading in self.readings.items() if reading in _LIKELY]
        if self.is_read_well_by(marks) or (self.is_read_by(marks) and not likely):
            return None
        return self.with_signs(likely[0] if likely else next(iter(self.readings)))

    @property
    def example(self) -> str:
        """A text with a mark between thousands, or with another one, or the first."""
        marked = self.unique.filter(self.unique.str.contains(rf"[.,'’{_SPACES}%]|{_CURRENCY}"))
        grouped = marked.filter(marked.str.contains(rf"\d[.,'’{_SPACES}]\d{{3}}"))
        return str((grouped if len(grouped) else marked if len(marked) else self.unique)[0])

    def with_signs(self, marks: WrittenNumbers) -> WrittenNumbers:
        """Return settings with that of signs as this column needs it."""
        return replace(marks, signs=NumberSigns.STRIP if self.has_signs else NumberSigns.REFUSE)

    def read_as(self, marks: WrittenNumbers) -> str:
        """Return the number that the example is."""
        return f"{marks.cast(pl.Series([self.example]))[0]:.10g}"

    def doubts(
        self, name: str, marks: WrittenNumbers, *, beside: Iterable[_Texts] = (), is_own: bool = False
    ) -> list[str]:
        """Say what may be read in another way than by these settings, and which signs are mixed.

        Args:
            name: of the column.
            marks: by which it is read.
            beside: other columns that are read by the same settings.
            is_own: whether the schema says them of this column alone.
        """
        plain = replace(marks, signs=NumberSigns.REFUSE)
        reading = self.reading_by(plain)
        notes: list[str] = []
        here = self.read_as(self.with_signs(plain))
        # Settings whose marks stand in none of the texts read them alike.
        others = [other for other in self.readings if self.read_as(self.with_signs(other)) != here]
        if reading in (_Reading.AMBIGUOUS, _Reading.UNLIKELY) and others:
            other = self.with_signs(others[0])
            # A setting holds for all columns of the file, so it is no way out where it would spoil another one.
            if is_own or not all(each.is_read_well_by(others[0]) for each in beside):
                advice = f"say in the schema {other.block(name)}"
            elif other.is_plain:
                advice = _plain_flags(marks)
            else:
                advice = f"say {' '.join(other.settings())}"
            notes.append(f"{name!r}: {self.example!r} is read as {here}; where it is {self.read_as(other)} {advice}")
        if self.may_be_pairs and plain == DECIMAL_COMMA:
            first, _, second = self.example.strip().partition(",")
            notes.append(
                f"{name!r}: {self.example!r} is read as {here}; where it is a list of the ids {first} and {second} say "
                'in the schema kind = "multi_hot" and separator = ","'
            )
        if not self.has_signs or reading is None:
            return notes
        currencies = sorted(self.unique.str.extract(rf"({_CURRENCY})").drop_nulls().unique().to_list())
        if len(currencies) > 1:
            notes.append(f"{name!r} holds {' and '.join(currencies)}: the numbers are taken as they stand, unconverted")
        percent = self.unique.str.contains("%", literal=True)
        if percent.any() and not percent.all():
            other_text = self.unique.filter(~percent)[0]
            notes.append(f"{name!r}: cells with % count as hundredths; others, such as {other_text!r}, do not")
        return notes


def _reading(unique: pl.Series, marks: WrittenNumbers) -> _Reading | None:
    """Judge one way to read texts that all are numbers by it; None where a mark of it stands nowhere."""
    digits = unique.str.replace_all(rf"[+\-\s]|{_CURRENCY}|%", "")
    if marks.thousands is ThousandsMark.SPACE:
        # Spaces between digits are the marks here, so that only those around the text may go.
        digits = unique.str.strip_chars().str.replace_all(rf"[+-]|{_CURRENCY}|%", "").str.strip_chars()
    if marks.thousands is not ThousandsMark.NONE:
        mark = _CHARACTERS[marks.thousands]
        grouped = digits.filter(digits.str.contains(mark))
        if not len(grouped):
            return None
        no_fraction = not digits.str.contains(",", literal=True).any()
        # Without a fraction the mark before it makes no difference, and one of both readings is enough.
        if marks.decimal is DecimalMark.COMMA and marks.thousands is not ThousandsMark.POINT and no_fraction:
            return None
        if not grouped.str.contains(rf"^\d{{1,2}}{mark}").any():
            num_marks = digits.str.count_matches(mark)
            if marks.thousands is ThousandsMark.SPACE or num_marks.n_unique() > 1:
                return None  # lists of ids of three digits each
        # Two marks in one number can only stand between thousands.
        several = grouped.str.contains(rf"^\d+{mark}\d+{mark}").any()
        both = digits.str.contains("," if marks.decimal is DecimalMark.COMMA else r"\.").any()
        unmarked = digits.filter(~digits.str.contains(mark))
        sure = several or both or marks.thousands in (ThousandsMark.SPACE, ThousandsMark.APOSTROPHE)
        # If all numbers without a mark are below a thousand, marks begin where thousands do.
        if sure or (len(grouped) >= _MIN_MARKED and len(unmarked) and _below_a_thousand(unmarked)):
            return _Reading.SURE
        return _Reading.AMBIGUOUS
    fraction = "," if marks.decimal is DecimalMark.COMMA else "."
    fractions = digits.filter(digits.str.contains(fraction, literal=True))
    if marks.decimal is DecimalMark.COMMA and not len(fractions):
        return None
    may_be_thousands = len(fractions) and fractions.str.contains(rf"^[1-9]\d{{0,2}}{re.escape(fraction)}\d{{3}}$").all()
    if not may_be_thousands:
        return _Reading.SURE
    others = digits.filter(~digits.str.contains(fraction, literal=True))
    if len(fractions) >= _MIN_MARKED and len(others) and _below_a_thousand(others):
        return _Reading.UNLIKELY
    return _Reading.AMBIGUOUS


class _Pairs(StrEnum):
    """Kinds of texts in which at most one comma stands between digits."""

    NUMBERS = "numbers"
    IDS = "ids"
    EITHER = "either"  # two whole numbers each, the second of which is as short as a fraction


def _pairs(unique: pl.Series) -> _Pairs:
    """Tell numbers with a comma before the fraction from lists of one or two ids.

    Signs stand around numbers alone. Of fractions of two digits and more a tenth begins with 0, and of ids none. Lists
    mostly have other lengths than two, too.
    """
    if unique.str.contains(rf"^\s*[+-]|{_CURRENCY}|%").any():
        return _Pairs.NUMBERS
    texts = unique.str.strip_chars()
    # People write no number with a 0 before other digits, but ids are padded so.
    if texts.str.contains(r"^0\d").any():
        return _Pairs.IDS
    if texts.str.contains(r",0\d").any() or texts.str.starts_with("0,").sum() > len(texts) / 2:
        return _Pairs.NUMBERS
    if not texts.str.contains(r"^\d+,\d{1,3}$").all():
        return _Pairs.IDS
    num_longer = texts.str.contains(r",\d\d").sum()
    return _Pairs.IDS if num_longer >= _MAX_WITHOUT_ZERO else _Pairs.EITHER


def _below_a_thousand(texts: pl.Series) -> bool:
    return bool(texts.str.contains(r"^\d{1,3}([.,]\d*)?$").all())


def _fit(columns: Iterable[_Texts], marks: WrittenNumbers) -> tuple[int, int]:
    """Count the columns that settings read likely as they are meant, and those that they read at all."""
    likely = 0
    read = 0
    for column in columns:
        likely += column.is_read_well_by(marks)
        read += column.is_read_by(marks)
    return likely, read


def _plain_flags(present: WrittenNumbers) -> str:
    """Return what takes settings back."""
    flags = [flag for flag in present.settings() if flag.startswith("--")]
    return f"leave {' and '.join(flags)} out"

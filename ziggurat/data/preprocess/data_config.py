"""DataConfig: which raw files there are, how they are read, and which of their rows are for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ziggurat.config import JSON, to_json
from ziggurat.data.encoded.dataset import DEFAULT_ROWS_PER_GROUP
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.data.raw.text_parts import TextPart
from ziggurat.data.raw.written_numbers import DecimalMark, NumberSigns, ThousandsMark
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Schema
from ziggurat.files.stores import DataPath
from ziggurat.typed import Count, CountOrNone, Share, checked


@dataclass(frozen=True, kw_only=True)
@checked
class DataConfig:
    """Raw files and how to make training, validation and test data of them.

    Args:
        train: files, folders or globs, here or in stores (s3://bucket/*.parquet); all rows, unless `split.by` is FILES.
        valid: validation files, for FILES.
        test: test files, for FILES.
        format: of the raw files.
        separator: what divides the fields of text files: one character, or comma, semicolon, tab, pipe or space; "" for
            the format's own (comma for CSV, tab for TSV).
        decimal: what stands before the fraction of numbers in text.
        thousands: what stands between the thousands of numbers in text, as in 1,200.
        signs: whether signs of currencies and per cent may stand around numbers in text; 12% is then 0.12.
        split: which rows are for what.
        bad_rows: what happens to rows that cannot be used.
        bad_row_budget: most rows to quarantine; 0 for no limit.
        rows_per_group: rows of a Parquet row group of the encoded data, the unit of reading and of coarse shuffling.
        negative_rate: share of the negatives that training keeps, by a hash of the row's number; validation and test
            keep all. Scores are corrected for it; see `models/contract/losses.py`. For one binary label.
        copies: folder of this machine where whole copies of files in stores are kept and read; "" reads the stores.
        teacher: folder of logged scores that rows are joined with (`ziggurat train --teacher`); "" joins none.

    Example:
        >>> zg.DataConfig(train=("day-*.parquet",), split=zg.SplitConfig(by=zg.SplitBy.TIME)).train
        ('day-*.parquet',)
    """

    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    format: FileFormat = FileFormat.AUTO
    separator: str = ""
    decimal: DecimalMark = DecimalMark.POINT
    thousands: ThousandsMark = ThousandsMark.NONE
    signs: NumberSigns = NumberSigns.REFUSE
    split: SplitConfig = field(default_factory=SplitConfig)
    bad_rows: BadRowPolicy = BadRowPolicy.ERROR
    bad_row_budget: CountOrNone = 0
    rows_per_group: Count = DEFAULT_ROWS_PER_GROUP
    negative_rate: Share = 1.0
    copies: str = ""
    teacher: str = ""

    def resolved(self, schema: Schema) -> DataConfig:
        """The same with the split that the schema decides; see `SplitBy.AUTO`."""
        return replace(self, split=self.split.resolved(schema))

    def __post_init__(self) -> None:
        self.text  # noqa: B018  refuses an impossible separator
        if (self.valid or self.test) and self.split.by is not SplitBy.FILES:
            raise ConfigError(
                expected="validation and test files with split.by = files only",
                found=f"valid = {self.valid}, test = {self.test} with split.by = {self.split.by.value}",
                where="data settings",
                ways_out=("set split.by = files (--data.split.by files)", "leave valid and test empty"),
            )

    @property
    def text(self) -> TextOptions:
        """Options for how text files are read."""
        return TextOptions(delimiter=self.separator, decimal=self.decimal, thousands=self.thousands, signs=self.signs)

    def to_state(self) -> dict[str, JSON]:
        """Return plain data that fingerprints are made of: settings younger than the first release count when used."""
        state = to_json(self)
        defaults = {"thousands": ThousandsMark.NONE.value, "signs": NumberSigns.REFUSE.value, "teacher": ""}
        return {name: value for name, value in state.items() if defaults.get(name) != value}

    def source(
        self, paths: Sequence[str | DataPath], *, bad_rows: BadRows | None = None, part: TextPart | None = None
    ) -> RawSource:
        """Files as these settings read them, or a part of one."""
        return RawSource(paths, format=self.format, bad_rows=bad_rows, text=self.text, copies=self.copies, part=part)

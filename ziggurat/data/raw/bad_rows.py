"""Bad rows: what cannot be used is an error that names it, or is written aside and counted; never skipped quietly.

    ERROR        the first bad row raises a `DataError` with file, row, column and reason (the default)
    QUARANTINE   the row is appended to `FOLDER/quarantine/FILE.jsonl` with the reason, and the rest goes on

A quarantined row keeps its number: the rows after it are numbered as if it were still there, so positions in the
data do not depend on the policy. The same row is reported once, however often the file is read (once to fit, once to
encode). A damaged *file* (a cut gzip stream, a Parquet page whose checksum is wrong) is always an error: whatever
follows the damage is lost, and half a file is not a few bad rows.

One line of the quarantine:

    {"file": "day_0.gz", "row": 17, "line": 18, "column": "I2", "reason": "not_a_number", "detail": "…", "found": "12x"}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from ziggurat.errors import BoundsError, ConfigError, DataError, FileError, ZigguratError
from ziggurat.files import writing_to
from ziggurat.files.stores import DataPath

_SHOWN_CHARACTERS = 200  # of a bad value, in errors and in the quarantine


class BadRowPolicy(StrEnum):
    """Ways to treat a row that cannot be used."""

    ERROR = "error"
    QUARANTINE = "quarantine"


class BadReason(StrEnum):
    """Reasons why a row cannot be used; the quarantine counts by these."""

    NUM_FIELDS = "num_fields"  # more or fewer fields than columns, or a blank line
    NUL_BYTE = "nul_byte"
    INVALID_UTF8 = "invalid_utf8"
    TOO_LONG = "too_long"  # a record longer than TextOptions.max_record_bytes
    BAD_QUOTES = "bad_quotes"  # a quote that never ends, or text after the closing quote
    UNPARSABLE = "unparsable"  # the record looks right, but the parser refuses it
    NOT_A_NUMBER = "not_a_number"
    NOT_AN_INTEGER = "not_an_integer"
    NOT_FINITE = "not_finite"  # infinity, 1e400, or NaN where no missing value is allowed
    TOO_LARGE = "too_large"  # does not fit a 32-bit float
    OUT_OF_RANGE = "out_of_range"  # an id outside an identity table
    BAD_LABEL = "bad_label"  # missing, or not 0 or 1
    BAD_WEIGHT = "bad_weight"  # missing or negative
    WRONG_LENGTH = "wrong_length"  # a vector of another dimension
    MISSING = "missing"  # no user, item or time of an event
    IN_FUTURE = "in_future"  # an event that has not happened yet
    NOT_READABLE = "not_readable"  # no value that its feature can read
    OTHER_UNIT = "other_unit"  # a time of another unit than those of training
    EARLY_LABEL = "early_label"  # a label that is known before its row was there
    SAME_KEY = "same_key"  # a row whose key another row has


PUT_ASIDE = "put such rows aside and go on: --data.bad-rows quarantine; for a trained run --bad-rows quarantine"


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """One row that cannot be used.

    Args:
        path: the file.
        row: 0-based data row in the file; the header is not counted.
        line: 1-based line of a text file, or None.
        column: the column, or "" when the whole record is wrong.
        reason: the kind of fault.
        expected: what would have been right.
        found: the offending text or value; "" where there is none.
        ways_out: extra advice for the error.
    """

    path: DataPath
    row: int
    line: int | None
    column: str
    reason: BadReason
    expected: str
    found: str
    ways_out: tuple[str, ...] = ()

    @staticmethod
    def of(error: ZigguratError) -> BadRow | None:
        """Return the row that an error is about, if `error()` made it in this process."""
        return getattr(error, "bad_row", None)

    @property
    def where(self) -> str:
        """File, row and column in words."""
        return place(self.path, row=self.row, line=self.line, column=self.column)

    def error(self) -> ZigguratError:
        """The error that says all this."""
        kind = BoundsError if self.reason is BadReason.OUT_OF_RANGE else DataError
        advice = [*self.ways_out, "correct the row", PUT_ASIDE]
        if self.reason is BadReason.INVALID_UTF8:
            advice.insert(0, "convert the file: iconv -f latin1 -t utf-8 OLD > NEW")
        error = kind(expected=self.expected, found=shown(self.found), where=self.where, ways_out=advice)
        error.bad_row = self  # type: ignore[attr-defined]  # for those who know the row by another name; see `of`
        return error


def place(path: DataPath, *, row: int, line: int | None = None, column: str = "") -> str:
    """A position in a raw file in words: file, line (1-based) if it is text, row (0-based), column."""
    parts = [str(path)]
    if line is not None:
        parts.append(f"line {line}")
    parts.append(f"row {row}")
    if column:
        parts.append(f"column {column!r}")
    return ", ".join(parts)


def shown(value: str) -> str:
    """A value as errors show it: quoted, cut to 200 characters, with its length if it was cut; "" in words."""
    if not value:
        return "nothing: it is empty"
    if len(value) <= _SHOWN_CHARACTERS:
        return repr(value)
    return f"{value[:_SHOWN_CHARACTERS]!r}… ({len(value):,} characters)"


class BadRows:
    """Collects bad rows according to a policy.

    Args:
        policy: raise on the first bad row, or write them aside.
        folder: where the folder `quarantine` is made; needed for QUARANTINE, and made on the first bad row.
        budget: most rows to quarantine before giving up with an error; 0 for no limit.
        message_of: gives the id of the message of a row, by its number, where rows came as messages; it is written
            beside the row.

    Raises:
        ConfigError: QUARANTINE without a folder, or a negative budget.
    """

    def __init__(
        self,
        policy: BadRowPolicy = BadRowPolicy.ERROR,
        *,
        folder: str | Path | None = None,
        budget: int = 0,
        message_of: Callable[[int], str] | None = None,
    ) -> None:
        if policy is BadRowPolicy.QUARANTINE and folder is None:
            raise ConfigError(
                expected="a folder for quarantined rows",
                found="none",
                where="bad_rows",
                ways_out=("give BadRows(…, folder=…)", "use BadRowPolicy.ERROR"),
            )
        if budget < 0:
            raise ConfigError(
                expected="bad_row_budget >= 0 (0: no limit)",
                found=str(budget),
                where="bad_rows",
                ways_out="give the most rows that may be written aside",
            )
        self.policy = policy
        self.budget = budget
        self._message_of = message_of
        self.folder = None if folder is None else Path(folder) / "quarantine"
        self.counts: Counter[BadReason] = Counter()
        self._seen: dict[DataPath, set[int]] = {}
        self._files: dict[DataPath, TextIO] = {}
        self._targets: list[Path] = []

    @property
    def kept_in(self) -> Path | None:
        """The file with the rows that were put aside, the folder if there are several; None without such rows."""
        return self.folder if len(self._targets) > 1 else next(iter(self._targets), None)

    @property
    def num_rows(self) -> int:
        """Rows quarantined so far."""
        return self.counts.total()

    def report(self, bad: BadRow) -> bool:
        """Handle one bad row.

        Returns:
            True if it was new; False if this row of this file was reported before.

        Raises:
            DataError: the policy is ERROR, or the budget is spent.
            BoundsError: the policy is ERROR and the id is out of range.
        """
        if self.policy is BadRowPolicy.ERROR:
            raise bad.error()
        seen = self._seen.setdefault(bad.path, set())
        if bad.row in seen:
            return False
        seen.add(bad.row)
        self.counts[bad.reason] += 1
        self._write(bad)
        if self.budget and self.num_rows > self.budget:
            self.close()
            raise DataError(
                expected=f"at most {self.budget:,} bad rows (bad_row_budget)",
                found=f"{self.num_rows:,}: {self.summary()}; the last one: {shown(bad.found)}",
                where=bad.where,
                ways_out=(f"look at {self.folder}", "raise bad_row_budget", "correct the data"),
            )
        return True

    def is_known(self, path: DataPath, row: int) -> bool:
        """Return whether this row was quarantined before."""
        return row in self._seen.get(path, ())

    def summary(self) -> str:
        """Counts by reason, most frequent first, as one line."""
        return ", ".join(f"{count:,} {reason.value}" for reason, count in self.counts.most_common()) or "none"

    def close(self) -> None:
        """Write out and close the quarantine files; more rows may still follow."""
        # If one file cannot be written out, the others are closed nevertheless.
        with contextlib.ExitStack() as files:
            for file in self._files.values():
                files.enter_context(writing_to(Path(file.name), FileError))
                files.callback(file.close)
            self._files.clear()

    def __enter__(self) -> BadRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, bad: BadRow) -> None:
        assert self.folder is not None
        if bad.path not in self._files:
            # Two files of one name in different folders must not share a quarantine.
            tag = hashlib.blake2b(str(bad.path).encode(errors="surrogateescape"), digest_size=4).hexdigest()
            first_time = len(self._seen[bad.path]) == 1
            target = self.folder / f"{bad.path.name}.{tag}.jsonl"
            with writing_to(target, FileError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._files[bad.path] = target.open("w" if first_time else "a", encoding="utf-8")
            if first_time:
                self._targets.append(target)
        record = {
            "file": str(bad.path),
            **({} if self._message_of is None else {"message": self._message_of(bad.row)}),
            "row": bad.row,
            "line": bad.line,
            "column": bad.column,
            "reason": bad.reason.value,
            "detail": bad.expected,
            "found": bad.found if len(bad.found) <= 100_000 else bad.found[:100_000] + "…",
        }
        with writing_to(self.folder / bad.path.name, FileError):
            self._files[bad.path].write(json.dumps(record) + "\n")

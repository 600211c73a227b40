"""Makes text files with known faults: which rows are good, and for each bad one the line, column and reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ziggurat.data.raw.bad_rows import BadReason
from ziggurat.features.schema import Categorical, Dense, Encoding, Label, MultiHot, NumericTransform, Schema, Table

MAX_RECORD_BYTES = 4096
SCHEMA = Schema(
    features=(
        Categorical(name="user"),
        Categorical(name="slot"),
        Dense(name="price", transform=NumericTransform.IDENTITY),
        MultiHot(name="tags", separator="|"),
    ),
    labels=(Label(name="click"),),
    tables=(Table(name="slot", encoding=Encoding.IDENTITY, num_rows=50),),
    weight="w",
)
COLUMNS = ("user", "slot", "price", "tags", "click", "w")
GOOD_USERS = (b"u1", "Zürich".encode(), b'"quoted, user"', b'"two\nlines"', b'5" disk', b"", b"007", b'"a ""b"""')
# Each: the column, text that cannot be right in it, and why.
BAD_VALUES = (
    ("slot", b"50", BadReason.OUT_OF_RANGE),
    ("slot", b"-1", BadReason.OUT_OF_RANGE),
    ("slot", b"99999999999999999999999", BadReason.OUT_OF_RANGE),
    ("slot", b"18446744073709551616", BadReason.OUT_OF_RANGE),
    ("slot", b"x", BadReason.NOT_AN_INTEGER),
    ("slot", b"1.5", BadReason.NOT_AN_INTEGER),
    ("price", b"12x", BadReason.NOT_A_NUMBER),
    ("price", b"1_000", BadReason.NOT_A_NUMBER),
    ("price", b"0x1F", BadReason.NOT_A_NUMBER),
    ("price", b"NULL", BadReason.NOT_A_NUMBER),
    ("price", b"inf", BadReason.NOT_FINITE),
    ("price", b"-Infinity", BadReason.NOT_FINITE),
    ("price", b"1e400", BadReason.NOT_FINITE),
    ("price", b"9" * 400, BadReason.NOT_FINITE),
    ("price", b"1e39", BadReason.TOO_LARGE),
    ("click", b"2", BadReason.BAD_LABEL),
    ("click", b"", BadReason.BAD_LABEL),
    ("click", b"nan", BadReason.BAD_LABEL),
    ("click", b"yes", BadReason.NOT_A_NUMBER),
    ("w", b"-0.5", BadReason.BAD_WEIGHT),
    ("w", b"", BadReason.BAD_WEIGHT),
    ("w", b"1e999", BadReason.NOT_FINITE),
)
# Whole lines that cannot be right; None as column.
BAD_LINES = (
    (b"", BadReason.NUM_FIELDS),
    (b"u", BadReason.NUM_FIELDS),
    (b"u,1,2,a,1", BadReason.NUM_FIELDS),
    (b"u,1,2,a,1,1,9", BadReason.NUM_FIELDS),
    (b",,,,,,,,,,,,", BadReason.NUM_FIELDS),
    (b"u\0,1,2,a,1,1", BadReason.NUL_BYTE),
    (b"\0" * 20 + b",1,2,a,1,1", BadReason.NUL_BYTE),
    (b"\xff\xfe,1,2,a,1,1", BadReason.INVALID_UTF8),
    (b"u,1,2,\xc3,1,1", BadReason.INVALID_UTF8),
    (b"u,1,2,\xed\xa0\x80,1,1", BadReason.INVALID_UTF8),
    (b"u" * (MAX_RECORD_BYTES + 9) + b",1,2,a,1,1", BadReason.TOO_LONG),
    (b'"u"x,1,2,a,1,1', BadReason.BAD_QUOTES),
    (b'"u" ,1,2,a,1,1', BadReason.BAD_QUOTES),
    (b'u,1,2,"a"b",1,1', BadReason.BAD_QUOTES),
    (b'u,1,2,"a,1,1', BadReason.BAD_QUOTES),
)


@dataclass
class FuzzedText:
    """A file's bytes, its good rows, and (line, column, reason) of each bad one, by data row."""

    content: bytes
    good_rows: list[int] = field(default_factory=list)
    good_users: list[str] = field(default_factory=list)
    bad_rows: dict[int, tuple[int, str, BadReason]] = field(default_factory=dict)


def make_text(*, num_rows: int, bad_share: float, seed: int, huge: bool = False) -> FuzzedText:
    """A CSV file of `num_rows` rows, of which about `bad_share` are bad; `huge` adds a field of 10 MB."""
    rng = np.random.default_rng(seed)
    out = FuzzedText(b"")
    parts = [",".join(COLUMNS).encode()]
    line = 2
    for row in range(num_rows):
        user = GOOD_USERS[rng.integers(len(GOOD_USERS))]
        fields = {
            "user": user,
            "slot": str(rng.integers(50)).encode(),
            "price": repr(round(float(rng.normal()), 3)).encode(),
            "tags": b"|".join([b"t1", b"t2", b"t3"][: rng.integers(4)]),
            "click": str(rng.integers(2)).encode(),
            "w": b"1",
        }
        is_bad = rng.random() < bad_share
        if is_bad and huge and row == num_rows // 2:
            parts.append(b"u" * 10_000_000 + b",1,2,a,1,1")
            out.bad_rows[row] = (line, "", BadReason.TOO_LONG)
        elif is_bad and rng.random() < 0.5:
            text, reason = BAD_LINES[rng.integers(len(BAD_LINES))]
            if row == num_rows - 1 and not text:
                text = b"u"  # a blank last line would be the end of the file
            parts.append(text)
            out.bad_rows[row] = (line, "", reason)
        else:
            if is_bad:
                column, value, reason = BAD_VALUES[rng.integers(len(BAD_VALUES))]
                fields[column] = value
                out.bad_rows[row] = (line, column, reason)
            else:
                out.good_rows.append(row)
                out.good_users.append(_unquoted(user))
            parts.append(b",".join(fields.values()))
        line += parts[-1].count(b"\n") + 1
    out.content = b"\n".join(parts) + b"\n"
    return out


def _unquoted(user: bytes) -> str:
    text = user.decode()
    return text[1:-1].replace('""', '"') if text.startswith('"') else text

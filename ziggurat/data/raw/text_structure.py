"""Where the records of a text block begin and end, and which of them cannot be right. No values are parsed here.

A clean block without quotes, by far the most common one, is split by a text kernel (`ops/text`) in one go. Only a block
in which that fails is looked at record by record, with the separators (delimiters and line feeds outside quotes):

    1⇥2⏎4⇥5⇥6⇥7⏎      separators  ⇥ ⏎ ⇥ ⇥ ⇥ ⏎      records end at 1 and 5: 2 and 4 fields instead of 3

Quotes: the running parity of quote characters says what is inside. That is right for every well-formed block (a quote
opens at the start of a field, closes before a separator, and is doubled inside); a block that is not well-formed goes
to a scanner in Python that knows which line is to blame: a stray quote costs its own line, and reading goes on at the
next one.

Reference: RFC 4180. Cost: 1 to 4 ns a byte without quotes, 6 ns with quotes, 10 to 100 ns for the scanner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8

from ziggurat.data.raw.bad_rows import BadReason
from ziggurat.ops.text.kernel import Fields, TextKernel
from ziggurat.ops.text.reference import positions

_LINE_FEED = 10
_MAX_WASTE = 4  # times the block: work spent on quotes that never close, before quotes are confined to one line


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """The layout of a record of a file: number of fields, delimiter and quote as bytes ("" for no quotes)."""

    num_fields: int
    delimiter: bytes
    quote: bytes
    max_record_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A record that cannot be right, by its number in the block."""

    record: int
    reason: BadReason
    expected: str
    found: bytes


@dataclass(kw_only=True)
class Records:
    """The records of a block.

    Args:
        starts: (R,) byte at which each record starts.
        ends: (R,) byte behind each record's line feed.
        lines: (R,) 0-based line of each record in the block.
        num_lines: lines of the block.
        consumed: bytes of the block that belong to these records; the rest waits for more.
        has_quotes: whether a quote character occurs.
        faults: records that cannot be right, in order.
        rewritten: records with a quote in the middle of an unquoted field, which the parser does not take, by number:
            the same record with that field quoted.
        fields: of a block without quotes and faults; else None.
    """

    starts: np.ndarray
    ends: np.ndarray
    lines: np.ndarray
    num_lines: int
    consumed: int
    has_quotes: bool
    faults: list[Fault] = field(default_factory=list)
    rewritten: dict[int, bytes] = field(default_factory=dict)
    fields: Fields | None = None


def find_records(
    data: bytes, layout: TextLayout, *, is_last: bool, kernel: TextKernel, kinds: UInt8[np.ndarray, " n"]
) -> Records:
    """Cut a block into records and find the faulty ones.

    Args:
        data: whole lines; ends in a line feed.
        layout: fields, delimiter, quote.
        is_last: whether the file ends with this block, so that an open quote will never close.
        kernel: splits clean blocks.
        kinds: (num_fields,) the `FieldKind` of each column.
    """
    if layout.quote and layout.quote in data:
        records = _quoted_records(data, layout, is_last=is_last) or _scan(data, layout, is_last=is_last)
    else:
        records = _plain_records(data, layout, kernel=kernel, kinds=kinds)
    _check_bytes(data, records, layout)
    if records.faults:
        # Cells of a block with a fault are read as text, which alone can be told in an error.
        records.fields = None
    records.faults.sort(key=lambda fault: fault.record)
    return records


def _plain_records(data: bytes, layout: TextLayout, *, kernel: TextKernel, kinds: np.ndarray) -> Records:
    """Records of a block without quotes: its lines."""
    fields = None
    if layout.num_fields > 1:  # in one column, look for blank lines
        fields = kernel.split(data, delimiter=layout.delimiter[0], kinds=kinds)
    array = np.frombuffer(data, dtype=np.uint8)
    if fields is None:
        separators = positions(array, _LINE_FEED, layout.delimiter[0])
        ends = separators[array[separators] == _LINE_FEED] + 1
    else:
        separators = np.empty(0, dtype=np.int32)
        # A record ends where the first field of the next one starts.
        ends = np.append(fields.starts[0, 1:], np.int32(len(data)))
    records = _records(ends, num_lines=len(ends), consumed=len(data), has_quotes=False)
    records.fields = fields
    if fields is None:
        _check_field_counts(data, records, separators, layout)
    return records


def _quoted_records(data: bytes, layout: TextLayout, *, is_last: bool) -> Records | None:
    """Records of a block whose quotes are well-formed; None if they are not."""
    array = np.frombuffer(data, dtype=np.uint8)
    quotes = positions(array, layout.quote[0])
    # A quote at the very beginning has no byte before it, and is told by its place below.
    before = array[np.maximum(quotes - 1, 0)]
    # Kept inside the block: a quote may be its last byte.
    after = array[np.minimum(quotes + 1, len(array) - 1)]
    marks = np.frombuffer(layout.quote + layout.delimiter + b"\n\r", dtype=np.uint8)
    # Quotes open and close in turn; a doubled one within a field closes it and opens it again.
    opening_right = np.isin(before[0::2], marks[:3]) | (quotes[0::2] == 0)
    closing_right = np.isin(after[1::2], marks)
    if not (opening_right.all() and closing_right.all()):
        return None
    separators = positions(array, _LINE_FEED, layout.delimiter[0])
    line_feeds = separators[array[separators] == _LINE_FEED]
    # Behind an odd number of quotes, a separator stands within a field.
    separators = separators[np.searchsorted(quotes, separators) % 2 == 0]
    ends = separators[array[separators] == _LINE_FEED] + 1
    consumed = int(ends[-1]) if len(ends) else 0
    if consumed < len(data) and (is_last or len(data) - consumed > layout.max_record_bytes):
        return None  # a quote is open at the end, and will not close
    # Lines behind the last whole record wait for the next block.
    line_feeds = line_feeds[line_feeds < consumed]
    records = _records(ends, num_lines=len(line_feeds), consumed=consumed, has_quotes=True)
    records.lines = np.searchsorted(line_feeds, records.starts)
    _check_field_counts(data, records, separators, layout)
    spans_lines = np.diff(np.append(records.lines, records.num_lines)) > 1
    too_long = records.ends - records.starts > layout.max_record_bytes
    if any(spans_lines[fault.record] for fault in records.faults) or bool((spans_lines & too_long).any()):
        return None  # a stray quote may have joined lines: let the scanner find the one to blame
    return records


def _records(ends: np.ndarray, *, num_lines: int, consumed: int, has_quotes: bool) -> Records:
    # A block without an end has no record, and so no start.
    starts = np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1]])
    return Records(
        starts=starts,
        ends=ends,
        lines=np.arange(len(ends)),
        num_lines=num_lines,
        consumed=consumed,
        has_quotes=has_quotes,
    )


def _check_field_counts(data: bytes, records: Records, separators: np.ndarray, layout: TextLayout) -> None:
    """Add a fault for each record with a wrong number of fields, and for each blank line."""
    num_fields = np.diff(np.searchsorted(separators, records.ends), prepend=0)
    wrong = num_fields != layout.num_fields
    # Two bytes may be a line end alone: such records are looked at, even where one field is wanted.
    short = records.ends - records.starts <= 2
    for record in np.flatnonzero(wrong | short).tolist():
        text = _record_text(data, records, record)
        if wrong[record] or not text:
            records.faults.append(_wrong_count(record, int(num_fields[record]), text, layout))


def _wrong_count(record: int, num_fields: int, text: bytes, layout: TextLayout) -> Fault:
    found = f"{num_fields} field{'s' * (num_fields != 1)}" if text else "a blank line"
    return Fault(
        record=record,
        reason=BadReason.NUM_FIELDS,
        expected=f"{layout.num_fields} fields separated by {layout.delimiter.decode()!r}, not {found}",
        found=text,
    )


def _record_text(data: bytes, records: Records, record: int) -> bytes:
    return data[records.starts[record] : records.ends[record]].rstrip(b"\r\n")


def _check_bytes(data: bytes, records: Records, layout: TextLayout) -> None:
    """Add faults for NUL bytes, invalid UTF-8 and records that are too long (one fault a record)."""
    faulty = {fault.record for fault in records.faults}
    added: dict[int, tuple[BadReason, str]] = {}
    sizes = records.ends - records.starts
    if len(sizes) and int(sizes.max()) > layout.max_record_bytes:
        reason = f"a record of at most {layout.max_record_bytes:,} bytes"
        for record in np.flatnonzero(sizes > layout.max_record_bytes).tolist():
            added[record] = (BadReason.TOO_LONG, reason)
    if b"\0" in data:
        places = positions(np.frombuffer(data, dtype=np.uint8), 0)
        # To the right, since `ends` stand behind the line feeds.
        for record in np.unique(np.searchsorted(records.ends, places, side="right")).tolist():
            # Behind the last record lies what waits for the next block.
            if record < len(sizes):
                added.setdefault(record, (BadReason.NUL_BYTE, "text without NUL bytes"))
    if not data.isascii():
        for record in _invalid_utf8(data, records):
            added.setdefault(record, (BadReason.INVALID_UTF8, "valid UTF-8"))
    for record, (reason, expected) in added.items():
        # One fault for each record: the first that was found.
        if record not in faulty:
            text = _record_text(data, records, record)
            records.faults.append(Fault(record=record, reason=reason, expected=expected, found=text))


def _invalid_utf8(data: bytes, records: Records) -> list[int]:
    """Records that are not valid UTF-8."""
    found = []
    first = 0
    num_records = len(records.ends)
    step = 1
    while first < num_records:
        last = min(first + step, num_records)
        try:
            # Whole records: a character that is cut by the border of two would be no fault.
            data[records.starts[first] : records.ends[last - 1]].decode()
            first = last
            # Steps double while all is valid, so that a clean block takes few calls.
            step = min(step * 2, 8192)
        except UnicodeDecodeError as error:
            position = int(records.starts[first]) + error.start
            record = int(np.searchsorted(records.ends, position, side="right"))
            found.append(record)
            # Behind the bad record, and carefully again.
            first = record + 1
            step = 1
    return found


def _scan(data: bytes, layout: TextLayout, *, is_last: bool) -> Records:
    """Records of a block with damaged quotes, one by one."""
    starts: list[int] = []
    ends: list[int] = []
    lines: list[int] = []
    faults: list[Fault] = []
    rewritten: dict[int, bytes] = {}
    position = line = waste = 0
    while position < len(data):
        line_end = data.find(b"\n", position) + 1
        # Quotes that never close would be searched to the end of the block from each line anew.
        limit = line_end if waste > _MAX_WASTE * len(data) else min(position + layout.max_record_bytes, len(data))
        fields, end, problem = _scan_record(data, position, layout, limit=max(limit, line_end))
        num_fields = len(fields)
        if problem == "open" and limit == len(data) and not is_last:
            break  # the closing quote may come with the next block
        record = len(starts)
        if problem:
            waste += end - position
            expected = "a quote that closes before a delimiter or the end of the line"
            found = data[position:line_end].rstrip(b"\r\n")
            faults.append(Fault(record=record, reason=BadReason.BAD_QUOTES, expected=expected, found=found))
            # Reading goes on at the next line, whatever the quote was to enclose.
            end = line_end
        elif num_fields != layout.num_fields or end - position <= 2:
            text = data[position:end].rstrip(b"\r\n")
            if end > line_end:  # lines were joined by a quote: only the first is to blame
                end = line_end
                text = data[position:line_end].rstrip(b"\r\n")
            if num_fields != layout.num_fields or not text:
                faults.append(_wrong_count(record, num_fields, text, layout))
        elif any(text[:1] != layout.quote and layout.quote in text for text in fields):
            rewritten[record] = _requoted(fields, layout)
        starts.append(position)
        ends.append(end)
        lines.append(line)
        line += data.count(b"\n", position, end)
        position = end
    return Records(
        starts=np.array(starts, dtype=np.int64),
        ends=np.array(ends, dtype=np.int64),
        lines=np.array(lines, dtype=np.int64),
        num_lines=line,
        consumed=position,
        has_quotes=True,
        faults=faults,
        rewritten=rewritten,
    )


def _requoted(fields: list[bytes], layout: TextLayout) -> bytes:
    """A record whose fields with quotes in their middle are quoted."""
    quote = layout.quote
    fixed = [
        quote + text.replace(quote, quote * 2) + quote if quote in text and text[:1] != quote else text
        for text in fields
    ]
    return layout.delimiter.join(fixed) + b"\n"


def _scan_record(data: bytes, position: int, layout: TextLayout, *, limit: int) -> tuple[list[bytes], int, str]:
    """One record from `position` on: its fields (raw), the byte behind it, and "", "open" or "stray"."""
    fields: list[bytes] = []
    quote = layout.quote
    delimiter = layout.delimiter
    while True:
        start = position
        if data[position : position + 1] == quote:
            close = data.find(quote, position + 1, limit)
            while close >= 0 and data[close + 1 : close + 2] == quote:
                # Behind both of a doubled quote, which closes nothing.
                close = data.find(quote, close + 2, limit)
            if close < 0:
                return fields, limit, "open"
            position = end = close + 1
            if data[position : position + 2] == b"\r\n":
                position += 1
            following = data[position : position + 1]
            if following not in (delimiter, b"\n"):
                return fields, position, "stray"
        else:
            line_end = data.find(b"\n", position)
            position = data.find(delimiter, position, line_end)
            position = end = line_end if position < 0 else position
            following = data[position : position + 1]
            # The carriage return belongs to the line end, and not to the last field.
            if following == b"\n" and data[end - 1 : end] == b"\r" and end > start:
                end -= 1
        fields.append(data[start:end])
        position += 1
        if following == b"\n":
            return fields, position, ""

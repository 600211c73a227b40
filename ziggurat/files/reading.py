"""Read small files within bounds: regular files, of so many bytes, nested so deep, with numbers that a computer holds.

A plan that is `/dev/zero`, a schema that is a pipe without a writer, JSON nested 100,000 deep, a number of 5,000
digits: each would hang the reader, fill the memory or end in a traceback of a library. Every bound is checked before
what it bounds is built, and what goes wrong is an error in four parts of the kind that the caller names.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from typing import TypedDict, Unpack

from ziggurat.errors import DataError, MissingFileError, ZigguratError
from ziggurat.files.system_text import text_of
from ziggurat.plain import JSON

MAX_BYTES = 64 << 20  # of a small file
MAX_DEPTH = 64
MAX_DIGITS = 400  # more than any double needs when it is written out
_BLOCK_BYTES = 1 << 20
_LONG_TOML_KEY = re.compile(r"(?:[\w-]{1,64}[ \t]{0,4}\.[ \t]{0,4}){64}")  # MAX_DEPTH
WAYS_OUT = ("check the path", "restore the file from a copy")


def read_bytes(
    path: str | os.PathLike[str],
    *,
    what: str = "a file",
    max_bytes: int = MAX_BYTES,
    error: type[ZigguratError] = DataError,
    missing: type[ZigguratError] = MissingFileError,
    ways_out: str | tuple[str, ...] = WAYS_OUT,
) -> bytes:
    """The bytes of a small regular file. Neither a pipe without a writer nor `/dev/zero` can hold it up.

    Args:
        path: the file; symbolic links are followed.
        what: for people: "a plan in JSON".
        max_bytes: a larger file is refused before it is read.
        error: the kind of error.
        missing: that for a file that does not exist.
        ways_out: of that error.

    Raises:
        missing: there is no such file.
        error: it is a folder, pipe or device, too large, or cannot be read.
    """
    where = os.fspath(path)
    if isinstance(path, str) and "://" in path:
        from ziggurat.files.stores import is_url, local_path, read_object

        path = local_path(path)
        if is_url(path):
            content, size = read_object(path, max_bytes=max_bytes)
            if size > max_bytes:
                raise error(
                    expected=f"{what}, of at most {max_bytes:,} bytes",
                    found=f"{size:,} bytes",
                    where=where,
                    ways_out=ways_out,
                )
            return content

    def refuse(expected: str, found: str) -> ZigguratError:
        return error(expected=expected, found=found, where=where, ways_out=ways_out)

    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise missing(expected=what, found="no such file", where=where, ways_out=ways_out) from None
    except (OSError, ValueError) as problem:  # ValueError: a zero byte in the name
        raise refuse(f"{what}, readable", text_of(problem)) from problem
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refuse(f"{what}, in a regular file", _kind_of(status.st_mode))
        if status.st_size > max_bytes:
            raise refuse(f"{what}, of at most {max_bytes:,} bytes", f"{status.st_size:,} bytes")
        blocks = []
        size = 0
        while block := os.read(descriptor, _BLOCK_BYTES):
            blocks.append(block)
            size += len(block)
            if size > max_bytes:  # it grows while it is read, or lies in /proc
                raise refuse(f"{what}, of at most {max_bytes:,} bytes", "more")
        return b"".join(blocks)
    except OSError as problem:
        # Some of our errors are OSErrors as well, so that callers can expect either.
        if isinstance(problem, ZigguratError):
            raise
        raise refuse(f"{what}, readable", text_of(problem)) from problem
    finally:
        os.close(descriptor)


class ParseOptions(TypedDict, total=False):
    """The options of `parse_json` and `parse_toml`: how an error describes the text."""

    what: str
    error: type[ZigguratError]
    ways_out: str | tuple[str, ...]


class ReadOptions(ParseOptions, total=False):
    """The options of `read_bytes`, as the functions that read text or plain data pass them on."""

    max_bytes: int
    missing: type[ZigguratError]


def read_text(path: str | os.PathLike[str], **options: Unpack[ReadOptions]) -> str:
    """Read a small file as UTF-8 text, with the limits of `read_bytes`; other bytes are an error of the same kind."""
    content = read_bytes(path, **options)
    try:
        return content.decode("utf-8-sig")  # editors of Windows begin a file with a byte order mark
    except UnicodeDecodeError as problem:
        raise options.get("error", DataError)(
            expected=f"{options.get('what', 'a file')}, encoded as UTF-8",
            found=str(problem),
            where=os.fspath(path),
            ways_out=options.get("ways_out", WAYS_OUT),
        ) from problem


def read_json(path: str | os.PathLike[str], **options: Unpack[ReadOptions]) -> JSON:
    """The plain data in a JSON file of any layout, within bounds; see `read_bytes` for the options."""
    return parse_json(read_bytes(path, **options), where=os.fspath(path), **_parse_options(options))


def read_toml(path: str | os.PathLike[str], **options: Unpack[ReadOptions]) -> dict[str, object]:
    """The plain data in a TOML file, within bounds; see `read_bytes` for the options."""
    return parse_toml(read_text(path, **options), where=os.fspath(path), **_parse_options(options))


def parse_json(
    content: bytes | bytearray | str,
    *,
    where: str,
    what: str = "valid JSON",
    error: type[ZigguratError] = DataError,
    ways_out: str | tuple[str, ...] = WAYS_OUT,
) -> JSON:
    """JSON text to plain data: no key twice, nothing nested too deep, no number out of reach."""
    try:
        text = content if isinstance(content, str) else bytes(content).decode("utf-8")
        data = json.loads(text, object_pairs_hook=_no_doubles, parse_int=_whole_number, parse_float=_number)
        _check_depth(data)
    except (ValueError, RecursionError) as problem:
        raise error(expected=what, found=_why(problem), where=where, ways_out=ways_out) from None
    return data


def parse_toml(
    text: str,
    *,
    where: str,
    what: str = "valid TOML",
    error: type[ZigguratError] = DataError,
    ways_out: str | tuple[str, ...] = WAYS_OUT,
) -> dict[str, object]:
    """TOML text to plain data, within the same bounds as `parse_json`."""
    try:
        if _LONG_TOML_KEY.search(text):  # tomllib takes quadratic time for them
            raise ValueError(f"a key of more than {MAX_DEPTH} parts")
        data = tomllib.loads(text, parse_float=_number)
        _check_depth(data)
    except (ValueError, RecursionError) as problem:
        raise error(expected=what, found=_why(problem), where=where, ways_out=ways_out) from None
    return data


def _parse_options(options: ReadOptions) -> ParseOptions:
    # Only those that were given: the parser has defaults of its own, "valid JSON" rather than "a file".
    kept: ParseOptions = {}
    if "what" in options:
        kept["what"] = options["what"]
    if "error" in options:
        kept["error"] = options["error"]
    if "ways_out" in options:
        kept["ways_out"] = options["ways_out"]
    return kept


def _no_doubles(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {name!r:.80} occurs twice")
    return result


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _number(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    value = float(text)
    if math.isinf(value) and "inf" not in text:  # TOML spells infinity; 1e999 is a slip
        raise ValueError(f"{text:.80} is larger than a double can hold")
    return value


def _check_depth(data: object) -> None:
    """Without recursion: level by level. Also looks for whole numbers that no field can hold (TOML has no hook)."""
    level = [data]
    depth = 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        below: list[object] = []
        for item in level:
            if type(item) is str:  # most are, and the body of a request is looked through before every answer
                continue
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            # A decimal digit is 3.3 bits: with 4 for each, no number of MAX_DIGITS digits is refused.
            elif type(item) is int and item.bit_length() > 4 * MAX_DIGITS:
                raise ValueError(f"a number of more than {MAX_DIGITS} digits")
        level = below
        depth = depth + 1


def _why(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return f"nested more than {MAX_DEPTH} deep"
    # Python's own limit of 4,300 digits, which tomllib meets before `_check_depth` sees the number.
    if "integer string conversion" in str(problem):
        return f"a number of more than {MAX_DIGITS} digits"
    return str(problem)[:400]


def _kind_of(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")

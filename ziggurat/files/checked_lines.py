"""Files of JSON lines that grow, each line with a check of its own: what a kill has torn is told from damage.

    {"window": 3, "rows": 61, …, "check": "9f86d081884c7d65"}

A line is added by one write. Whoever is killed in it leaves a part of a line at the end of the file, which is left out
when the file is read, and cut off before the next line is added. A line before the last one that does not match its
check was changed by something else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ziggurat.errors import FileError, ZigguratError
from ziggurat.files.formats import digest_of
from ziggurat.files.writing import writing_to
from ziggurat.plain import JSON, as_group

_CHECK = "check"
_CHECK_DIGITS = 16


def checked_line(content: Mapping[str, JSON]) -> str:
    """Return a line of plain data with its check, and the end of the line."""
    # As it will be read: an infinity is no number of JSON, a tuple becomes a list.
    plain = as_group(json.loads(json.dumps(content)))
    return json.dumps({**plain, _CHECK: digest_of(plain)[:_CHECK_DIGITS]}, ensure_ascii=False) + "\n"


def read_checked_lines(path: Path, *, error: type[ZigguratError], ways_out: tuple[str, ...]) -> list[dict[str, JSON]]:
    """Return the content of all lines of a file, in order; without a last line that is torn. None where there is none.

    Args:
        path: the file.
        error: the kind of error.
        ways_out: of it.

    Raises:
        error: a line before the last one is damaged.
    """
    if not path.is_file():
        return []
    # Not by `splitlines`: text may hold other ends of lines, such as U+2028, as they are.
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    found: list[dict[str, JSON]] = []
    for number, line in enumerate(lines, start=1):
        content = checked_content(line)
        if content is None and number == len(lines):
            break
        if content is None:
            raise error(
                expected="lines as they were written, each with its check",
                found="another content" if line else "an empty line",
                where=f"{path}, line {number}",
                ways_out=ways_out,
            )
        found.append(content)
    return found


def append_line(path: Path, line: str, *, durable: bool = True) -> None:
    """Add a line to a file that ends with a whole one.

    Args:
        path: the file.
        line: of `checked_line`.
        durable: it is on the disk when this returns; a later durable line brings earlier ones there, too.
    """
    with writing_to(path, FileError), path.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def checked_content(line: str) -> dict[str, JSON] | None:
    """Return the content of a line of `checked_line`; None where its check is another one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or _CHECK not in content:
        return None
    check = content.pop(_CHECK)
    return content if check == digest_of(content)[:_CHECK_DIGITS] else None

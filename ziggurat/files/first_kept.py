"""The first kept decision: of processes that decide the same thing at the same time, the first one decides for all.

What was measured with a stopwatch differs from process to process, and what hangs on it (a kernel, a precision) may
change the last bit of a run. So an answer is written beside its place and linked into it: a link fails where a file is,
so the first one stands, whole, and the others read it. A file that cannot be read is replaced.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ziggurat.files.formats import Format

T = TypeVar("T")


def keep_first(path: Path, answer: object, *, file_format: Format, read: Callable[[], T | None]) -> T | None:
    """Keep an answer, unless one that can be read is kept by now; return the one that stands.

    Args:
        path: of the file.
        answer: plain data.
        file_format: of the file.
        read: the answer that is kept, None if there is none, or none that can be read.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a link cannot lead to another file system.
    number, name = tempfile.mkstemp(prefix=f".{path.stem}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(file_format.encode(answer))
        try:
            # Not a rename, which would replace the answer of the process that was first.
            os.link(temporary, path)
        except FileExistsError:
            if read() is None:
                temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # Not `answer`: another process may have been first.
    return read()

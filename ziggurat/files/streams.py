"""Write to standard output and standard error, which may be full, closed, or a pipe that nobody reads any more.

What a verb answers goes to standard output: where that does not take it, the verb has failed. What it says while it
works goes to standard error: where that does not take it, nobody can be told, and the work goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ziggurat.errors import FileError

_COMMAND = re.compile(r"(?:^|(?<=[\s:]))(?=(?:ziggurat|torchrun|curl|tensorboard|rm -r|pip install) )")
_LABEL = re.compile(r"\S+(?: \S+)*\s{2,}")
_MIN_BESIDE = 24  # columns that are left beside a label, or its continuation begins at the left


@contextmanager
def answering() -> Iterator[None]:
    """Print to standard output inside: what the system says against it ends a verb as an error, not as an answer.

    A status of 1 says that a check failed, and a disk that is full must not say so. Whoever reads a pipe may stop
    (`| head`): the process then ends without a word, with the status of the signal that says it.

    Raises:
        FileError: standard output is full, closed, or gone.
    """
    problem = "closed before this process began"
    if sys.stdout is not None:
        try:
            yield
            sys.stdout.flush()
            return
        except (BrokenPipeError, SystemExit):  # rich makes the first the second, with status 1
            give_up(sys.stdout)
            raise SystemExit(128 + signal.SIGPIPE) from None
        except OSError as error:
            if isinstance(error, FileError):
                raise
            give_up(sys.stdout)
            problem = error.strerror or str(error)
    raise FileError(
        expected="standard output that takes the answer",
        found=problem,
        where="standard output",
        ways_out=("free space where it leads to", "let it lead elsewhere: > FILE"),
    )


def say(text: str) -> None:
    """Write to standard error, if there is one that takes it; on a terminal folded between words."""
    if sys.stderr is not None:
        width = _terminal_columns(sys.stderr)
        say_to(sys.stderr, folded(text, width=width) if width else text)


def _terminal_columns(stream: TextIO) -> int:
    """Return how wide the terminal is that a stream leads to; 0 where it is none, or does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # ValueError: it was closed
        return 0


def say_to(stream: TextIO, text: str) -> None:
    """Write to a stream for people; one that does not take it leads nowhere from then on."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):  # ValueError: it was closed
        give_up(stream)


def give_up(stream: TextIO) -> None:
    """Let a stream lead nowhere, so that the interpreter's own end does not fail at what is left in it."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def folded(text: str, *, width: int) -> str:
    """Fold lines that a terminal would break anywhere, so that no number breaks inside its digits.

        valid  auc 0.54317  log_loss 1.37996             parts between two spaces stay together,
               calibration 0.98760                       then words do
        next   better than logistic regression?          a command is one line, however long: it is to be pasted
          ziggurat report runs/first --baseline

    A word that is longer than a line is left to the terminal.

    Args:
        text: any.
        width: columns of the terminal.
    """
    return "\n".join(part for line in text.split("\n") for part in _folded_line(line, width))


def _folded_line(line: str, width: int) -> list[str]:
    if columns_of(line) <= width:
        return [line]
    command = _COMMAND.search(line)
    if command is not None:
        before = line[: command.start()]
        indent = " " * (len(before) - len(before.lstrip()))
        first = _folded_line(before.rstrip(), width) if before.strip() else []
        return [*first, f"{indent}  {line[command.start() :]}" if first else line]
    margin = len(line) - len(line.lstrip())
    label = _LABEL.match(line[margin:])
    indent = margin + (len(label[0]) if label is not None else 2)
    if width - indent < _MIN_BESIDE:
        indent = margin + 2
    lines = [line[:margin]]
    for part, gap in _parts(line[margin:]):
        pieces = [part]
        if columns_of(part) > width - indent:
            pieces = part.split(" ")
        for number, piece in enumerate(pieces):
            before = gap if number == 0 else " "
            is_first = not lines[-1].strip()
            if not is_first and columns_of(lines[-1] + before + piece) > width:
                lines.append(" " * indent)
                is_first = True
            lines[-1] += piece if is_first else before + piece
    return lines


def _parts(line: str) -> Iterator[tuple[str, str]]:
    """Yield what stands between gaps of two spaces or more, with the gap before it."""
    words = re.split(r"(\s{2,})", line)
    for index in range(0, len(words), 2):
        yield words[index], words[index - 1] if index else ""


def columns_of(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(2 if unicodedata.east_asian_width(mark) in "WF" else 1 for mark in text)

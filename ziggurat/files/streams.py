"""Write to standard output and standard error, which may be full, closed, or a pipe that nobody reads any more.

What a verb answers goes to standard output: where that does not take it, the verb has failed. What it says while it
works goes to standard error: where that does not take it, nobody can be told, and the work goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ziggurat.errors import FileError


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
    """Write to standard error, if there is one that takes it."""
    if sys.stderr is not None:
        say_to(sys.stderr, text)


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

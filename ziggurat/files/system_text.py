"""Say what the operating system says of a problem, and what helps where it is one of the process, not of a file."""

from __future__ import annotations

import errno

# What the system refuses to this process, whatever file it asks for, and what helps.
WAYS_OUT_OF_PROCESS = {
    errno.EMFILE: ("raise the limit on open files (ulimit -n), and give the same command again",),
    errno.ENFILE: ("end other programs of this machine that hold many files open, and give the same command again",),
    errno.ENOMEM: ("end other programs that take memory, and give the same command again",),
}


def text_of(problem: Exception) -> str:
    """Return the system's text of a problem, without its number and path."""
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)

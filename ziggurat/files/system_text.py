"""Say what the operating system says of a problem."""

from __future__ import annotations


def text_of(problem: Exception) -> str:
    """Return the system's text of a problem, without its number and path."""
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)

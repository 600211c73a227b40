"""Several cases in one start of ranks: starting four and what they do for the first time costs 2 s of a processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def in_turn(rank: int, check: Callable[..., None], cases: Sequence[Sequence[object]]) -> None:
    """Call `check(rank, *case)` for each case, on every rank; what fails says which case it was."""
    for case in cases:
        try:
            check(rank, *case)
        except Exception as error:
            raise AssertionError(f"{check.__name__}{tuple(case)}: {error}") from error

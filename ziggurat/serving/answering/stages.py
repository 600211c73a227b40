"""How long the stages of an answer take, for who asks: nothing is measured unless somebody collects.

with collected() as stages:
chain.recommend(...)            # stages: user vectors, search, over_arch, ranker, each with begin and end
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_collected: ContextVar[list[Stage] | None] = ContextVar("stages of an answer", default=None)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that was computed.

    Args:
        name: of the stage.
        begin_ns: nanoseconds since 1970.
        end_ns: the same.
    """

    name: str
    begin_ns: int
    end_ns: int


@contextmanager
def collected(wanted: bool = True) -> Iterator[list[Stage]]:
    """A list that gets the stages of this thread's answers until the block ends; it stays empty if not wanted."""
    stages: list[Stage] = []
    if not wanted:
        yield stages
        return
    token = _collected.set(stages)
    try:
        yield stages
    finally:
        _collected.reset(token)


def stage(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function a stage of answers."""

    def measured(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            stages = _collected.get()
            if stages is None:
                return function(*args, **kwargs)
            begin = time.time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                stages.append(Stage(name, begin, time.time_ns()))

        return run

    return measured

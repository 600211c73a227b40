"""One bad request spoils no other: answers of many together, or of each alone with errors in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ziggurat.errors import ZigguratError

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


def isolated(
    answer: Callable[[Sequence[Asked]], Sequence[Answered]], asked: Sequence[Asked]
) -> list[Answered | ZigguratError]:
    """Answers of all together; where one spoils it, of each alone, with errors in their places."""
    if not asked:
        return []
    try:
        return list(answer(asked))
    except ZigguratError as error:
        if len(asked) == 1:
            return [error]
    return [found for each in asked for found in isolated(answer, [each])]


def or_raise(answers: Sequence[Answered | ZigguratError]) -> list[Answered]:
    """Answers without errors among them; the first error is raised."""
    found: list[Answered] = []
    for answer in answers:
        if isinstance(answer, ZigguratError):
            raise answer
        found.append(answer)
    return found

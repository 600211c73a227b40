"""The parts of a formula of the value model, each of which computes itself on tensors; see `formula.py`.

A part is a number or a condition (`is_condition`); the reader has checked that each stands where its kind belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "==": torch.eq,
    "!=": torch.ne,
}
ONE_ARGUMENT: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
}
_ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.div,
    "**": torch.pow,
}


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: float
    # Without an annotation, here and below, which would make it a field.
    is_condition = False

    def compute(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The result for each candidate."""
        like = next(iter(scores.values()))
        # One for each candidate, so that the results of all parts have one shape.
        return torch.full_like(like, self.value)


@dataclass(frozen=True)
class Name:
    """The scores of one name."""

    name: str
    is_condition = False

    def compute(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The result for each candidate."""
        return scores[self.name]


@dataclass(frozen=True)
class Call:
    """A function of numbers that gives a number."""

    name: str
    arguments: tuple[Node, ...]
    is_condition = False

    def compute(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The result for each candidate."""
        given = [argument.compute(scores) for argument in self.arguments]
        if self.name in ONE_ARGUMENT:
            return ONE_ARGUMENT[self.name](given[0])
        if self.name == "clamp":
            return torch.minimum(torch.maximum(given[0], given[1]), given[2])
        if self.name in ("min", "max"):
            return reduce(torch.minimum if self.name == "min" else torch.maximum, given)
        if self.name == "negate":
            return -given[0]
        return _ARITHMETIC["**" if self.name == "pow" else self.name](*given)


@dataclass(frozen=True)
class Comparison:
    """Numbers compared one after the other: a < b <= c."""

    signs: tuple[str, ...]
    arguments: tuple[Node, ...]
    is_condition = True

    def compute(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The result for each candidate."""
        given = [argument.compute(scores) for argument in self.arguments]
        found = [COMPARISONS[sign](given[i], given[i + 1]) for i, sign in enumerate(self.signs)]
        return reduce(torch.logical_and, found)


@dataclass(frozen=True)
class Logic:
    """and, or, not of conditions."""

    word: str
    arguments: tuple[Node, ...]
    is_condition = True

    def compute(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The result for each candidate."""
        given = [argument.compute(scores) for argument in self.arguments]
        if self.word == "not":
            return given[0].logical_not()
        return reduce(torch.logical_and if self.word == "and" else torch.logical_or, given)


@dataclass(frozen=True)
class Choice:
    """One number where a condition holds, another elsewhere."""

    condition: Node
    then: Node
    otherwise: Node
    is_condition = False

    def compute(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The result for each candidate."""
        return torch.where(self.condition.compute(scores), self.then.compute(scores), self.otherwise.compute(scores))


Node = Number | Name | Call | Comparison | Logic | Choice

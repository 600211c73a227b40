"""What questions and changes must be before an index takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ziggurat.errors import ConfigError, DataError

T = TypeVar("T")


def one_a_query(values: Sequence[T | None] | None, num: int, *, name: str) -> Sequence[T | None]:
    """Return the value given for each query; None for each if nothing is given.

    Raises:
        ConfigError: they are not as many as queries.
    """
    if values is None:
        return (None,) * num
    if isinstance(values, str) or len(values) != num:
        raise ConfigError(
            expected=f"{name}: one for each of {num} queries, or None",
            found=f"{values!r:.60}" if isinstance(values, str) else f"{len(values)}",
            where="ItemIndex.search",
            ways_out=f"give a list: {name}=[…] * len(queries)",
        )
    return values


def checked_numbers(numbers: Tensor | Sequence[int], next_number: int) -> Tensor:
    """Numbers of items that are there, each once.

    Raises:
        DataError: one is not, or is named twice.
    """
    numbers = torch.as_tensor(numbers, dtype=torch.int64).view(-1)
    is_wrong = (numbers < 0) | (numbers >= next_number)
    twice = len(numbers.unique()) < len(numbers)
    if is_wrong.any() or twice:
        raise DataError(
            expected=f"numbers of items, from 0 to {next_number - 1:,}, each once",
            found="a number twice" if twice else f"{int(numbers[is_wrong][0])}",
            where="a change of an ItemIndex",
            ways_out="give the numbers that `build` and `add` gave the items",
        )
    return numbers

"""WireFormat: what numbers travel as between ranks, and everything that follows from it.

The rest of the package asks a wire format

    what a message is made of     `carried`, `num_items`, `bytes_per_number`    exchanges, traffic, plans
    how numbers travel            `encode`, `decode`                            exchanges
    whether bits are lost         `is_exact`, `rounds_at_random`                descriptions, refusals
    what may be cut from it       `packs_rows`                                  rows that travel one by one
    which kernel writes the same  `kernel_code`                                 messages on a GPU

and never which format it is. Formats of which each number travels by itself derive from `EachNumber`, formats of bytes
from `PackedRows`: a row is what one sample sends to one rank, several fields side by side, `widths` numbers each.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ziggurat.specification import Specification


class WireFormat(Specification, kind="wire format"):
    """Format in which numbers travel. See the module's docstring.

    Attributes:
        packs_rows: numbers travel as bytes that only whole rows can be read from; else each number by itself.
        rounds_at_random: the format can round up with the probability of the remainder, where asked for.
    """

    packs_rows: ClassVar[bool]
    rounds_at_random: ClassVar[bool] = True

    @abstractmethod
    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of a message's items for numbers of type `dtype`; `torch.uint8` where rows are packed."""

    @abstractmethod
    def num_items(self, num_numbers: int, *, widths: tuple[int, ...]) -> int:
        """Return the items of a message for one rank.

        Args:
            num_numbers: of whole rows.
            widths: numbers of each field of a row.
        """

    @abstractmethod
    def bytes_per_number(self, dtype: torch.dtype, *, widths: tuple[int, ...]) -> float:
        """Return the bytes that a number of type `dtype` takes in a large message."""

    @abstractmethod
    def encode(self, numbers: Tensor, *, widths: tuple[int, ...], at_random: bool) -> Tensor:
        """Return the flat message of flat numbers, for one rank.

        Args:
            numbers: of whole rows.
            widths: numbers of each field of a row.
            at_random: round up with the probability of the remainder; never asked for unless `rounds_at_random`.
        """

    @abstractmethod
    def decode(self, message: Tensor, *, count: int, widths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the flat numbers of a message.

        Args:
            message: of one rank.
            count: numbers in it, of whole rows.
            widths: numbers of each field of a row.
            dtype: of the numbers.
        """

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Return whether a number of type `dtype` arrives with all its bits."""
        return self.carried(dtype) is dtype

    def kernel_code(self, dtype: torch.dtype) -> str:
        """Return the `WireCode` of `ops/wire` for a matrix of type `dtype`; "": the kernels do not know the format."""
        del dtype
        return ""

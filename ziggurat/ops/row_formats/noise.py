"""Random numbers for rounding, as a function of (seed, table, step, row, column) and of nothing else.

A generator with a state would give other numbers for another order of rows, another number of threads, or another
number of ranks. These are counted instead: whoever updates row 17 of a table at step 40 rounds it alike.

    key   = first 64 bits of sha256("rounding/<seed>/<table>")
    word  = lower 32 bits of mix(mix(key + step·G) + row·G)                 one for each row and step
    noise = mix32(word + (column + 1)·0x9E3779B9)   modulo 2^32             32 bits; column −1 is the row's own

`mix` and G are those of splitmix64 (`ziggurat.features.hashing`); mix32 is a bijection of the same build:

    mix32(z) : z ⊕= z ≫ 16; z ·= 0x7FEB352D; z ⊕= z ≫ 15; z ·= 0x846CA68B; z ⊕= z ≫ 16

References: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (counters in place of a state);
Steele, Lea and Flood, OOPSLA 2014 (splitmix64); constants of mix32: Wellons, "Prospecting for hash functions", 2018.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64, UInt64
from torch import Tensor

from ziggurat.features.hashing import GOLDEN, mix
from ziggurat.ops.mixed_bits import GOLDEN_SIGNED
from ziggurat.ops.mixed_bits import mix as torch_mix

_WORD = 0xFFFFFFFF
_STRIDE = 0x9E3779B9


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrigin:
    """Table and table rows that some rows of a storage are.

    Args:
        table: its name.
        first_row: of the storage.
        num_rows: of the storage.
        table_row: row of the table that `first_row` is; −1 where a padding row lies in front of a part.
        table_column: column of the table that the storage's first column is.
    """

    table: str
    first_row: int
    num_rows: int
    table_row: int = 0
    table_column: int = 0


class RowNoise:
    """Noise for the rows of a storage.

    Args:
        origins: what its rows are, in the order of the storage.
        seed: of the run.

    Attributes:
        first_rows: of the storage, where each origin begins.
        shifts: row of the table less row of the storage, of each origin.
        columns: what the first column of each origin adds to the word of a row.
        base_keys: the key of each origin before any step.
    """

    def __init__(self, origins: Sequence[RowOrigin], *, seed: int) -> None:
        self.origins = tuple(origins)
        self.first_rows = np.array([origin.first_row for origin in self.origins], dtype=np.int64)
        self.shifts = np.array([origin.table_row - origin.first_row for origin in self.origins], dtype=np.int64)
        self.columns = np.array([origin.table_column * _STRIDE & _WORD for origin in self.origins], dtype=np.uint32)
        self.base_keys = np.array([_key(seed, origin.table) for origin in self.origins], dtype=np.uint64)
        self._numbers: dict[torch.device, tuple[Tensor, ...]] = {}  # the same on devices: a copy makes the host wait

    def keys(self, step: int) -> UInt64[np.ndarray, "origins"]:
        """The key of each origin at a step, from which the words of its rows follow."""
        return mix(self.base_keys + np.array([step], dtype=np.uint64) * GOLDEN)

    def words(self, rows_N: Int64[Tensor, "N"], *, step: int | Tensor) -> Int64[Tensor, "N"]:
        """The word of each row of the storage at a step; columns are counted from the storage's own first one.

        A step that is a number of the device of the rows stays there: the host asks for nothing.
        """
        if isinstance(step, Tensor):
            return self._words_on_device(rows_N, step)
        rows = rows_N.cpu().numpy()
        place = np.searchsorted(self.first_rows, rows, side="right") - 1
        keys = self.keys(step)[place]
        words = mix(keys + (rows + self.shifts[place]).astype(np.uint64) * GOLDEN) & np.uint64(_WORD)
        # Modulo 2³² throughout, as compiled code computes in 32 bits.
        shifted = words.astype(np.int64) + self.columns[place] & _WORD
        return torch.from_numpy(shifted).to(rows_N.device)

    def _words_on_device(self, rows_N: Tensor, step: Tensor) -> Tensor:
        if rows_N.device not in self._numbers:
            arrays = (self.first_rows, self.shifts, self.columns.astype(np.int64), self.base_keys.view(np.int64))
            self._numbers[rows_N.device] = tuple(torch.from_numpy(each).to(rows_N.device) for each in arrays)
        first_rows, shifts, columns, base_keys = self._numbers[rows_N.device]
        place = torch.searchsorted(first_rows, rows_N, right=True) - 1
        keys = torch_mix(base_keys + step * GOLDEN_SIGNED)[place]
        words = torch_mix(keys + (rows_N + shifts[place]) * GOLDEN_SIGNED) & _WORD
        return words + columns[place] & _WORD


def noise(words_N: Int64[Tensor, "N"], columns_C: Int64[Tensor, "C"]) -> Int64[Tensor, "N C"]:
    """32 random bits for each row and column."""
    z = (words_N.unsqueeze(1) + (columns_C + 1) * _STRIDE) & _WORD
    z = z ^ (z >> 16)
    # The product may overflow 64 bits: its lower 32 are right all the same.
    z = z * 0x7FEB352D & _WORD
    z = z ^ (z >> 15)
    z = z * 0x846CA68B & _WORD
    return z ^ (z >> 16)


def _key(seed: int, table: str) -> int:
    return int.from_bytes(hashlib.sha256(f"rounding/{seed}/{table}".encode()).digest()[:8], "little")

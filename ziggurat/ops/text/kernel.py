"""The interface of the text kernels; `choose.py` chooses between them.

A kernel takes a block of text apart and looks keys up; it knows nothing of files, schemas or bad rows. There are two,
equal to the bit: `reference.py` (numpy) defines the results, `cpp.py` is five to ten times faster and is used wherever
it can be built. Where it cannot, a warning says so and why, and `ziggurat doctor` and the start-up report name the
kernel in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8, UInt64

EMPTY_SLOT = np.uint64(0)


class TextKind(IntEnum):
    """Kinds of value that a column's fields become while a block is split."""

    OTHER = 0  # nothing
    ID = 1  # the stable hash of the text (features/hashing.py); simple unless a text ends in ".0"
    NUMBER = 2  # a float64, NaN of an empty field; simple if all others are integers of at most eight characters


@dataclass(frozen=True)
class Fields:
    """The fields of a block of R records with n fields each, column by column.

    Args:
        starts: (n, R) first byte of each field.
        lengths: (n, R) bytes of each field, without a carriage return at the end of a line.
        values: (n, R) hashes, or the bits of float64 numbers; they mean nothing in a column that is not simple.
        simple: (n,) whether all fields of a column could become what its kind says; true for OTHER.
        longest: bytes of the longest record, its line feed included.
    """

    starts: Int32[np.ndarray, "n R"] = field(repr=False)
    lengths: Int32[np.ndarray, "n R"] = field(repr=False)
    values: UInt64[np.ndarray, "n R"] = field(repr=False)
    simple: Bool[np.ndarray, " n"] = field(repr=False)
    longest: int


@dataclass
class KeySlots:
    """The slots of a hash table with linear probing: at most half of them are taken.

    Args:
        keys: (2^bits,) the key in each slot, `EMPTY_SLOT` in an empty one.
        numbers: (2^bits,) its number; means nothing in an empty slot.
        bits: a key's home is the slot that its top `bits` bits name.
    """

    keys: UInt64[np.ndarray, " 2**bits"] = field(repr=False)
    numbers: Int32[np.ndarray, " 2**bits"] = field(repr=False)
    bits: int

    @staticmethod
    def empty(bits: int) -> KeySlots:
        """2^bits empty slots."""
        return KeySlots(np.zeros(1 << bits, dtype=np.uint64), np.zeros(1 << bits, dtype=np.int32), bits)


class TextKernel(Protocol):
    """Interface of a text kernel."""

    @property
    def name(self) -> str:
        """The kernel's name in reports."""
        ...

    def split(self, data: bytes, *, delimiter: int, kinds: UInt8[np.ndarray, " n"]) -> Fields | None:
        """The fields of a block; None if any record has not n fields, or the block does not end in a line feed.

        Args:
            data: the block.
            delimiter: a byte other than the line feed.
            kinds: (n,) the `TextKind` of each column.
        """
        ...

    def copy(self, data: bytes, *, starts: Int32[np.ndarray, " N"], lengths: Int32[np.ndarray, " N"]) -> np.ndarray:
        """(lengths.sum(),) uint8 bytes of N fields, one behind the other."""
        ...

    def hash_texts(self, data: UInt8[np.ndarray, " M"], *, offsets: Int64[np.ndarray, " N+1"]) -> np.ndarray:
        """(N,) uint64 stable hashes (`features/hashing.py`) of N texts.

        Args:
            data: UTF-8 bytes.
            offsets: rising positions in it; text i is `data[offsets[i] : offsets[i + 1]]`.
        """
        ...

    def find(self, slots: KeySlots, keys: UInt64[np.ndarray, " N"]) -> Int32[np.ndarray, " N"]:
        """(N,) the number of each key, -1 for keys that are not in the table; key 0 is taken as key 1."""
        ...

    def add(
        self,
        slots: KeySlots,
        keys: UInt64[np.ndarray, " N"],
        *,
        next_number: int,
        missing: Bool[np.ndarray, " N"] | None = None,
        counts: Int64[np.ndarray, " C"] | None = None,
        most: int | None = None,
    ) -> tuple[Int32[np.ndarray, " N"], Int64[np.ndarray, " M"]]:
        """Number the keys; new ones are put in, and there must be room for them.

        Args:
            slots: the table; changed in place.
            keys: key 0 is taken as key 1.
            next_number: the number of the first new key.
            missing: keys to leave out.
            counts: takes, by number, how often each key came; has room for all numbers.
            most: new keys to put in; ends before the first one that is too many.

        Returns:
            (N,) the number of each key, of those up to the end; -1 where it is missing. And (M,) where in `keys` each
            new one stands, in the order of their numbers.
        """
        ...

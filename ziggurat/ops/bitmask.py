"""Masks of items as bits: which of N items may be returned, 64 items in a word.

    item      0 1 2 … 63 | 64 65 …            bit  p % 64  (least significant first)
    word      0          | 1                  of word  p // 64,  W = ceil(N / 64) words of int64

Bits at and above N are 0 in every mask that these functions return, and the functions that read masks rely on it. A
mask of a million items takes 125 kB, and AND, OR and NOT of two masks are plain `&`, `|` and `~` on int64 tensors; NOT
sets the bits above N, so `& full_mask(n)` follows it.

Each function is its torch reference for other devices than the CPU, and where no compiler is; else C++
(`csrc/bitmask.cpp`). Both give the same bits. `bitmask_kernel()` says which runs. Most time is lost by
`torch.nonzero` of an unpacked mask, 1 ms for a million items of which 1 % pass; `rows_of_mask` reads the words.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.kernel_choice import library_for

WORD_BITS = 64

_SOURCE = CppSource(
    path=Path(__file__).parent / "csrc" / "bitmask.cpp",
    without="go on without: torch's own operations give the same masks, slower",
)


def num_words(n: int) -> int:
    """The number of words that n items take."""
    return -(-n // WORD_BITS)


def full_mask(n: int, *, device: torch.device | str = "cpu") -> Int64[Tensor, "W"]:
    """A mask of n items that all pass."""
    words = torch.full((num_words(n),), -1, dtype=torch.int64, device=device)
    if n % WORD_BITS:
        # Bits at and above n are 0 in every mask: functions that count bits rely on it.
        words[-1] = (1 << n % WORD_BITS) - 1
    return words


def pack_mask(flags: Bool[Tensor, "*Q N"]) -> Int64[Tensor, "*Q W"]:
    """Turn one flag an item into words."""
    library = library_for(flags, _LIBRARY)
    if library is None:
        return pack_mask_reference(flags)
    # Flags are bytes, words 8 of them: addresses of rows are counted in bytes.
    flags, n = flags.contiguous(), flags.shape[-1]
    words = torch.empty(*flags.shape[:-1], num_words(n), dtype=torch.int64)
    for row in range(_num_rows(flags)):
        library.ziggurat_pack_mask(flags.data_ptr() + row * n, n, words.data_ptr() + row * num_words(n) * 8)
    return words


def pack_mask_reference(flags: Bool[Tensor, "*Q N"]) -> Int64[Tensor, "*Q W"]:
    """Compute the result that `pack_mask` must equal."""
    n = flags.shape[-1]
    padded = torch.nn.functional.pad(flags, (0, num_words(n) * WORD_BITS - n))
    bits = padded.view(*flags.shape[:-1], num_words(n), WORD_BITS).to(torch.int64)
    return (bits << torch.arange(WORD_BITS, device=flags.device)).sum(dim=-1)


def unpack_mask(words: Int64[Tensor, "*Q W"], n: int) -> Bool[Tensor, "*Q N"]:
    """Turn words into one flag an item, for n items."""
    library = library_for(words, _LIBRARY)
    if library is None:
        return unpack_mask_reference(words, n)
    words = words.contiguous()
    flags = torch.empty(*words.shape[:-1], n, dtype=torch.bool)
    for row in range(_num_rows(words)):
        library.ziggurat_unpack_mask(words.data_ptr() + row * words.shape[-1] * 8, n, flags.data_ptr() + row * n)
    return flags


def unpack_mask_reference(words: Int64[Tensor, "*Q W"], n: int) -> Bool[Tensor, "*Q N"]:
    """Compute the result that `unpack_mask` must equal."""
    bits = (words.unsqueeze(-1) >> torch.arange(WORD_BITS, device=words.device)) & 1
    return bits.flatten(-2)[..., :n].to(torch.bool)


def count(words: Int64[Tensor, "*Q W"]) -> Int64[Tensor, "*Q"]:
    """Count the items that pass each mask."""
    library = library_for(words, _LIBRARY)
    if library is None:
        return count_reference(words)
    words, width = words.contiguous(), words.shape[-1]
    address = words.data_ptr()
    counts = [library.ziggurat_count_mask(address + row * width * 8, width) for row in range(_num_rows(words))]
    return torch.tensor(counts, dtype=torch.int64).view(words.shape[:-1])


def count_reference(words: Int64[Tensor, "*Q W"]) -> Int64[Tensor, "*Q"]:
    """Compute the result that `count` must equal."""
    return unpack_mask_reference(words, words.shape[-1] * WORD_BITS).sum(dim=-1)


def rows_of_mask(words: Int64[Tensor, "W"], *, limit: int | None = None) -> Int64[Tensor, "R"]:
    """List the numbers of the items that pass one mask, ascending.

    Args:
        words: one mask.
        limit: stop after so many.
    """
    library = library_for(words, _LIBRARY)
    if library is None:
        return rows_of_mask_reference(words, limit=limit)
    words = words.contiguous()
    room = int(library.ziggurat_count_mask(words.data_ptr(), len(words)))
    # Counted first: the kernel then writes into memory of the right size, and is done at the limit.
    room = room if limit is None else min(room, limit)
    rows = torch.empty(room, dtype=torch.int64)
    library.ziggurat_rows_of_mask(words.data_ptr(), len(words), room, rows.data_ptr())
    return rows


def rows_of_mask_reference(words: Int64[Tensor, "W"], *, limit: int | None = None) -> Int64[Tensor, "R"]:
    """Compute the result that `rows_of_mask` must equal."""
    rows = unpack_mask_reference(words, len(words) * WORD_BITS).nonzero().view(-1)
    return rows if limit is None else rows[:limit]


def mask_of_rows(rows: Int64[Tensor, "R"], *, n: int) -> Int64[Tensor, "W"]:
    """A mask of n items in which those of the given numbers pass; a number may come twice."""
    flags = torch.zeros(n, dtype=torch.bool, device=rows.device)
    # A flag for each item first: two rows of one word would otherwise overwrite each other's bit.
    flags[rows] = True
    return pack_mask(flags)


def bitmask_kernel() -> str:
    """Say which implementation serves masks on this CPU, and why; build the kernel if need be."""
    return _LIBRARY.kernel_line()


def _num_rows(tensor: Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    library.ziggurat_pack_mask.argtypes = [c_void_p, c_int64, c_void_p]
    library.ziggurat_unpack_mask.argtypes = [c_void_p, c_int64, c_void_p]
    library.ziggurat_count_mask.argtypes = [c_void_p, c_int64]
    library.ziggurat_rows_of_mask.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    for name in ("pack_mask", "unpack_mask"):
        getattr(library, f"ziggurat_{name}").restype = None
    for name in ("count_mask", "rows_of_mask"):
        getattr(library, f"ziggurat_{name}").restype = c_int64


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)

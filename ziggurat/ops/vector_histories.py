"""Pack vectors of a user into words of 32 bits a sample, and unpack them on the device.

    words   [ n │ newest vector │ the one before │ … │ 0 ]      1 + L · row_words int32, whatever the row format

A vector keeps the bytes of its row format (`ops/row_formats`), filled up to whole words. Integers and not floats:
nothing on the way (a file, a shuffle, autocast) may take bits that happen to be a NaN for a number. What is behind the
n-th vector is zero and is never read.

Cost: 2 bytes a number in BF16, 1 in INT8, on disk and on the way to the device; unpacking is one pass there.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int32, Int64, UInt8
from torch import Tensor

from ziggurat.features.inputs import VectorHistory
from ziggurat.ops.row_formats import RowFormat

_WORD_BYTES = 4


def row_words_of(format: str, dim: int) -> int:
    """Return the words of 32 bits that a vector of `dim` numbers takes in a row format."""
    return -(-_row_bytes(format, dim) // _WORD_BYTES)


def pack_histories(
    vectors_BLD: Float[Tensor, "B L D"], lengths_B: Int64[Tensor, "B"], *, history: VectorHistory
) -> Int32[Tensor, "B W"]:
    """Round vectors to the format of a history, and pack them.

    Args:
        vectors_BLD: the latest first; those behind the length of a sample are not read.
        lengths_B: of each sample, at most L.
        history: sizes and format.
    """
    num_samples, length, dim = vectors_BLD.shape
    row_format = RowFormat.named(history.format)
    rows_NW = row_format.encode(vectors_BLD.reshape(-1, dim).float())
    # Flat first: a matrix of one column may have a stride of 0, of which no bytes can be viewed.
    bytes_BLC = rows_NW.reshape(-1).view(torch.uint8).reshape(num_samples, length, _row_bytes(history.format, dim))
    return pack_rows(bytes_BLC, lengths_B, history=history)


def pack_rows(
    bytes_BLC: UInt8[Tensor, "B L C"], lengths_B: Int64[Tensor, "B"], *, history: VectorHistory
) -> Int32[Tensor, "B W"]:
    """Pack vectors that are rows of the format already.

    Args:
        bytes_BLC: the latest first; those behind the length of a sample are not read.
        lengths_B: of each sample, at most L.
        history: sizes and format.
    """
    num_samples, length, row_bytes = bytes_BLC.shape
    padded = torch.zeros(num_samples, length, history.row_words * _WORD_BYTES, dtype=torch.uint8)
    is_there_BL = torch.arange(length) < lengths_B.unsqueeze(1)
    padded[:, :, :row_bytes] = bytes_BLC * is_there_BL.unsqueeze(2)
    words_BR = padded.view(torch.int32).reshape(num_samples, length * history.row_words)
    return torch.cat([lengths_B.to(torch.int32).unsqueeze(1), words_BR], dim=1)


def unpack_histories(
    words_BW: Int32[Tensor, "B W"], *, history: VectorHistory
) -> tuple[Float[Tensor, "B L D"], Bool[Tensor, "B L"]]:
    """Return the vectors of each sample in FP32, zeros where there is none, and which there are."""
    row_format = RowFormat.named(history.format)
    rows_BLR = words_BW[:, 1:].reshape(-1, history.length, history.row_words)
    width = row_format.width(history.dim)
    rows_NW = rows_BLR.view(row_format.dtype)[:, :, :width].reshape(-1, width)
    vectors_BLD = row_format.decode(rows_NW, dim=history.dim).reshape(-1, history.length, history.dim)
    is_there_BL = torch.arange(history.length, device=words_BW.device) < words_BW[:, :1]
    return vectors_BLD.masked_fill(~is_there_BL.unsqueeze(2), 0.0), is_there_BL


def _row_bytes(format: str, dim: int) -> int:
    row_format = RowFormat.named(format)
    return row_format.width(dim) * row_format.dtype.itemsize

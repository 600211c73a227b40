"""Tables in few bits as version 1 of the model of an export kept them: codes, and a scale and an offset in FP32 beside.

    weight          (R, D) uint8, or two codes a byte          number ≈ offset + scale · code
    weight:scale    (R,)   float32
    weight:offset   (R,)   float32

Or (R, D) bfloat16. The present version keeps rows as training does (`ops/row_formats`), with which these codes do not
agree, so tables of version 1 are decoded to FP32 when they are read: an old export answers as it did.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.row_formats import RowFormat

_PARTS_OF_CODES = (":scale", ":offset")
_CODES_OF_BYTE = {"int8": 1, "int4": 2}  # of the formats that this version had; others are numbers


def layout(row_format: RowFormat, dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape of a row and dtype of each part, by what follows the table's name."""
    codes_of_byte = _CODES_OF_BYTE.get(row_format.name)
    if codes_of_byte is None:
        return {"": ((dim,), row_format.file_dtype)}
    num_bytes = -(-dim // codes_of_byte)
    return {"": ((num_bytes,), torch.uint8), **{part: ((), torch.float32) for part in _PARTS_OF_CODES}}


def parts_of(row_format: RowFormat) -> tuple[str, ...]:
    """Return what stands behind a table's name in the file, beside its rows."""
    return _PARTS_OF_CODES if row_format.name in _CODES_OF_BYTE else ()


def decoded(parts: Mapping[str, Tensor], *, dim: int) -> Float[Tensor, "N D"]:
    """Rows in FP32 from their parts."""
    codes = parts[""]
    if len(parts) == 1:
        return codes.float()
    if codes.shape[1] < dim:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :dim]
    return codes.float() * parts[":scale"].unsqueeze(1) + parts[":offset"].unsqueeze(1)

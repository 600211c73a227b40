"""Initial rows that count, in torch integers: the twin of `initial_rows.py` for rows that are drawn where they lie.

    key    = first 64 bits of sha256("initial/<seed>/<table>")
    bits   = mix(mix(key + row·G) + (column + 1)·G)
    u      = (upper 53 bits + ½) / 2^53

Torch has no unsigned 64-bit arithmetic on every device; signed products and sums wrap in the same bits, and a shift to
the right forgets the copies of the sign. What follows is float64 by the four operations, a square root and `frexp`, one
kernel an operation, each of which IEEE 754 rounds in one way: a GPU draws the bits of a CPU. Nothing may fuse a product
with a sum here, so this is never compiled.

Cost: about 70 passes over float64 numbers for normal weights, 15 for uniform ones; a table of 10⁶ x 128 on a GPU that
moves 4 TB/s takes 0.05 s, drawn in pieces that bound the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ziggurat.embeddings.config import TableInit
from ziggurat.features.schema import PADDING_ROW
from ziggurat.ops.mixed_bits import GOLDEN_SIGNED, mix, shifted, signed

if TYPE_CHECKING:
    from ziggurat.embeddings.initial_rows import InitialRows

PIECE_NUMBERS = 1 << 22


def counted_pieces(
    initial: InitialRows, rows: range, *, device: torch.device
) -> Iterator[tuple[int, Float[Tensor, "N D"]]]:
    """Consecutive rows of a part of a table, made on a device: the first row of each piece, and its weights."""
    step = max(1, PIECE_NUMBERS // max(initial.columns.stop - initial.columns.start, 1))
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        within = torch.arange(first + initial.first_row, last + initial.first_row, device=device)
        yield first, counted_rows(initial, within)


def counted_rows(initial: InitialRows, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
    """The weights of rows of the whole table, in the columns of the part, on the device of `rows_N`."""
    digest = hashlib.sha256(f"initial/{initial.seed}/{initial.table}".encode()).digest()
    key = signed(int.from_bytes(digest[:8], "little"))
    columns_D = torch.arange(initial.columns.start + 1, initial.columns.stop + 1, device=rows_N.device)
    bits_ND = mix(mix(rows_N * GOLDEN_SIGNED + key).unsqueeze(1) + columns_D * GOLDEN_SIGNED)
    uniform_ND = (shifted(bits_ND, 11).double() + 0.5) * 2.0**-53
    if initial.config.init is TableInit.UNIFORM:
        values_ND = (2.0 * uniform_ND - 1.0) * initial.shape[0] ** -0.5
    else:
        values_ND = initial.config.init_std * _normal_quantile(uniform_ND)
    return values_ND.masked_fill((rows_N == PADDING_ROW).unsqueeze(1), 0.0).float()


def _normal_quantile(probability: Float64[Tensor, "*N"]) -> Float64[Tensor, "*N"]:
    """`initial_rows.normal_quantile`, operation by operation."""
    from ziggurat.embeddings.initial_rows import FAR, MIDDLE, NEAR, ratio  # it imports this module

    centred = probability - 0.5
    tail = torch.sqrt(-_log(torch.minimum(probability, 1.0 - probability)))
    square = 0.180625 - centred * centred
    middle = centred * ratio(MIDDLE, square)
    outer = torch.where(tail <= 5.0, ratio(NEAR, tail - 1.6), ratio(FAR, tail - 5.0))
    return torch.where(centred.abs() <= 0.425, middle, torch.sign(centred) * outer)


def _log(x: Float64[Tensor, "*N"]) -> Float64[Tensor, "*N"]:
    """The natural logarithm, as `initial_rows` has it."""
    mantissa, exponent = torch.frexp(x)
    is_small = mantissa < 0.5**0.5
    mantissa = torch.where(is_small, 2.0 * mantissa, mantissa)
    exponent = exponent.double() - is_small.double()
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = torch.zeros_like(z)
    for power in range(21, 0, -2):
        series = series * square + 1.0 / power
    return exponent * 0.6931471805599453 + 2.0 * z * series

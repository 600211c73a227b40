"""pad_lists: lists one after the other become rows of one length, with zeros behind the end of each.

    values  a b c d e f,  offsets 0 3 3 6  ──►  a b c │ 0 0 0 │ d e f        L = 3, and a mask of what lies inside

Where a list ends is a number that a GPU has. How long the longest one is decides a shape, so the host must know it: it
is told, or waits for the GPU to say. Everything else is arithmetic on the device, without masks as indices.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def pad_lists(
    vectors_ND: Float[Tensor, "N D"], offsets_B1: Int64[Tensor, "B+1"], *, longest: int | None = None
) -> tuple[Float[Tensor, "B L D"], Bool[Tensor, "B L"]]:
    """Lists of vectors as (B, L, D), and the mask of what lies inside.

    Args:
        vectors_ND: one list after the other.
        offsets_B1: where lists begin, and where the last one ends.
        longest: L, no list is longer; None: the longest one, for which the host asks the device.
    """
    if longest is None:
        longest = int(offsets_B1.diff().max()) if len(offsets_B1) > 1 else 0
    places_N = padded_places(offsets_B1, num_rows=len(vectors_ND), longest=longest)
    return pad_rows(vectors_ND, places_N, num_lists=len(offsets_B1) - 1, longest=longest), inside(offsets_B1, longest)


def padded_places(offsets_B1: Int64[Tensor, "B+1"], *, num_rows: int, longest: int) -> Int64[Tensor, "N"]:
    """Return the place of each of `num_rows` rows among B · L."""
    device = offsets_B1.device
    num_lists = len(offsets_B1) - 1
    shift_B = torch.arange(num_lists, device=device) * longest - offsets_B1[:-1]
    # With `output_size` the host need not ask the device how long the result is.
    shift_N = shift_B.repeat_interleave(offsets_B1.diff(), output_size=num_rows)
    return shift_N + torch.arange(num_rows, device=device)


def pad_rows(
    values: Float[Tensor, "N *X"], places_N: Int64[Tensor, "N"], *, num_lists: int, longest: int
) -> Float[Tensor, "B L *X"]:
    """Rows at their places among zeros."""
    padded = values.new_zeros(num_lists * longest, *values.shape[1:])
    return padded.index_copy(0, places_N, values).view(num_lists, longest, *values.shape[1:])


def inside(offsets_B1: Int64[Tensor, "B+1"], longest: int) -> Bool[Tensor, "B L"]:
    """Mark the places that lists fill."""
    return torch.arange(longest, device=offsets_B1.device) < offsets_B1.diff().unsqueeze(1)

"""What vectors must be before an index is built of them."""

from __future__ import annotations

from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import DataError

_MOST_VECTORS = 2**31 - 1  # positions are stored in 32 bits


def check_vectors(vectors: Float[Tensor, "N D"]) -> None:
    """Refuse what is no matrix of finite numbers.

    Raises:
        DataError: says which row and column.
    """
    if vectors.dim() != 2 or not vectors.shape[1] or len(vectors) > _MOST_VECTORS:
        raise DataError(
            expected=f"a matrix of item vectors: at most {_MOST_VECTORS:,} rows, at least one column",
            found=f"a tensor of shape {tuple(vectors.shape)}",
            where="building a vector index",
            ways_out=("give one row an item", "divide more items among several indices"),
        )
    if not vectors.dtype.is_floating_point:
        raise DataError(
            expected="item vectors of floating-point numbers",
            found=str(vectors.dtype),
            where="building a vector index",
            ways_out="convert them: vectors.float()",
        )
    is_finite = vectors.isfinite().all(dim=1)
    if not is_finite.all():
        row = int((~is_finite).nonzero()[0])
        column = int((~vectors[row].isfinite()).nonzero()[0])
        raise DataError(
            expected="item vectors of finite numbers",
            found=f"{vectors[row, column].item()} in column {column}; {int((~is_finite).sum()):,} such rows in all",
            where=f"building a vector index, row {row}",
            ways_out=("look whether the training of the item encoder diverged", "leave these items out"),
        )


def check_numbers(numbers: Int64[Tensor, "N"], num: int) -> None:
    """Refuse names of vectors that are not one number each.

    Raises:
        DataError: says what is wrong.
    """
    fits = numbers.shape == (num,) and (num == 0 or (int(numbers.min()) >= 0 and int(numbers.max()) <= _MOST_VECTORS))
    if not fits or len(numbers.unique()) < num:
        raise DataError(
            expected=f"{num:,} different numbers from 0 to {_MOST_VECTORS:,}",
            found=f"a tensor of shape {tuple(numbers.shape)}" + (", with a number twice" if fits else ""),
            where="numbers of the vectors of an index",
            ways_out="give each vector one number of its own",
        )

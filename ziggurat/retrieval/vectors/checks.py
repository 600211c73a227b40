"""What vectors must be before an index is built of them, and questions before it answers."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import ConfigError, DataError
from ziggurat.ops.bitmask import num_words
from ziggurat.ops.scan import Masks
from ziggurat.typed import quoted

_MAX_VECTORS = 2**31 - 1  # positions are stored in 32 bits
_BLOCK = 65_536
_MAX_COLUMNS = 2**14  # products of more are no 32-bit numbers
_MAX_K = 2**20  # each query gets room for so many
_MIN_SIZE, _MAX_SIZE = 1e-30, 1e18  # of the largest number of a vector: products of two neither vanish nor overflow


def as_matrix(vectors: Any, *, argument: str) -> Tensor:
    """Return vectors of any array library (NumPy, Arrow, polars, a list of lists) as a tensor; a tensor as it is.

    Args:
        vectors: one row an item or a question.
        argument: its name in errors.

    Raises:
        DataError: they are no array of numbers.
    """
    if isinstance(vectors, Tensor):
        return vectors
    try:
        array = vectors.to_numpy() if hasattr(vectors, "to_numpy") else np.asarray(vectors)
        if array.dtype == object:  # a column of lists
            array = np.stack([np.asarray(row) for row in array])
        return torch.from_numpy(np.array(array))  # a copy: arrays of other libraries may be read-only
    except Exception as error:  # each library raises what it likes
        raise DataError(
            expected="vectors as a tensor or an array of numbers, one row each",
            found=f"{type(vectors).__name__}: {error}",
            where=f"argument {argument!r}",
            ways_out="give a tensor: torch.as_tensor(vectors)",
        ) from error


def check_vectors(vectors: Float[Tensor, "N D"]) -> None:
    """Refuse what is no matrix of finite numbers, or whose products could not be told from each other.

    Raises:
        DataError: says which row.
    """
    if vectors.dim() != 2 or not 1 <= vectors.shape[1] <= _MAX_COLUMNS or len(vectors) > _MAX_VECTORS:
        raise DataError(
            expected=f"a matrix of item vectors: at most {_MAX_VECTORS:,} rows, one column to {_MAX_COLUMNS:,}",
            found=f"a tensor of shape {tuple(vectors.shape)}",
            where="building a vector index",
            ways_out=("give one row an item", "divide more items among several indices"),
        )
    if not vectors.dtype.is_floating_point:
        raise DataError(
            expected="item vectors of floating-point numbers",
            found=str(vectors.dtype),
            where="building a vector index",
            ways_out=("a tensor: vectors.float()", 'an array of NumPy: vectors.astype("float32")'),
        )
    # In blocks: torch makes a copy of what it looks at, which would be as large as all vectors.
    sizes = torch.cat([block.abs().amax(dim=1) for block in vectors.split(_BLOCK)]) if len(vectors) else vectors[:, 0]
    is_finite = sizes.isfinite()
    if not is_finite.all():
        row = int((~is_finite).nonzero()[0])
        column = int((~vectors[row].isfinite()).nonzero()[0])
        raise DataError(
            expected="item vectors of finite numbers",
            found=f"{vectors[row, column].item()} in column {column}; {int((~is_finite).sum()):,} such rows in all",
            where=f"building a vector index, row {row}",
            ways_out=("look whether the training of the item encoder diverged", "leave these items out"),
        )
    _check_sizes(sizes)


def _check_sizes(sizes: Float[Tensor, "N"]) -> None:
    wrong = (sizes > _MAX_SIZE) | ((sizes > 0) & (sizes < _MIN_SIZE))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            expected=f"item vectors whose largest number is between {_MIN_SIZE:g} and {_MAX_SIZE:g}, or zero",
            found=f"{float(sizes[row]):g}; {int(wrong.sum()):,} such rows in all",
            where=f"building a vector index, row {row}",
            ways_out="scale all vectors by one number: the order of inner products stays",
        )


def check_numbers(numbers: Int64[Tensor, "N"], num: int) -> None:
    """Refuse names of vectors that are not one number each.

    Raises:
        DataError: says what is wrong.
    """
    fits = numbers.shape == (num,) and (num == 0 or (int(numbers.min()) >= 0 and int(numbers.max()) <= _MAX_VECTORS))
    if not fits or len(numbers.unique()) < num:
        raise DataError(
            expected=f"{num:,} different numbers from 0 to {_MAX_VECTORS:,}",
            found=f"a tensor of shape {tuple(numbers.shape)}" + (", with a number twice" if fits else ""),
            where="numbers of the vectors of an index",
            ways_out="give each vector one number of its own",
        )


def check_question(queries: Tensor, *, k: int, masks: Masks, dim: int, scales: Float[Tensor, "N"]) -> None:
    """Refuse what an index cannot answer.

    Args:
        queries: a matrix (Q, dim).
        k: positions wanted.
        masks: None, one bit a vector for all queries, or one mask each.
        dim: numbers of a vector of the index.
        scales: of the vectors of the index.

    Raises:
        ConfigError: k is impossible, or masks are of another size.
        DataError: queries are of another width, or queries or masks are on another device than the index.
    """
    if queries.dim() != 2 or queries.shape[1] != dim:
        raise DataError(
            expected=f"queries of {dim} numbers: a matrix (Q, {dim})",
            found=f"a tensor of shape {tuple(queries.shape)}",
            where="search of a vector index",
            ways_out="use the encoder whose items the index holds",
        )
    if type(k) is not int or not 1 <= k <= _MAX_K:
        check_count(k, 1, _MAX_K, name="k", ways_out="ask for at least 1 item, as a whole number, and not for more")
    _check_device(queries, scales, what="queries")
    if masks is not None:
        _check_masks(masks, len(queries), num_words(len(scales)))
        for mask in (masks,) if isinstance(masks, Tensor) else masks:
            if mask is not None:
                _check_device(mask, scales, what="masks")


def check_count(value: object, least: int, most: int, *, name: str, ways_out: str) -> None:
    """Refuse what is no whole number between two bounds.

    Raises:
        ConfigError: names the argument.
    """
    whole = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    if whole is None or not least <= whole <= most:
        raise ConfigError(
            expected=f"{name} from {least:,} to {most:,}",
            found=f"{whole:,}" if whole is not None else f"{quoted(value)} ({type(value).__name__})",
            where="search of a vector index",
            ways_out=ways_out,
        )


def _check_device(given: Tensor, scales: Tensor, *, what: str) -> None:
    if given.device != scales.device:
        raise DataError(
            expected=f"{what} on the device of the index, {scales.device}",
            found=f"{what} on {given.device}",
            where="search of a vector index",
            ways_out=(f'move them: {what}.to("{scales.device}")', "move the index: index.to(device)"),
        )


def _check_masks(masks: Masks, num: int, words: int) -> None:
    if isinstance(masks, Tensor):
        if masks.shape[-1] == words and (masks.dim() == 1 or (masks.dim() == 2 and len(masks) == num)):
            return
        found = f"a tensor of shape {tuple(masks.shape)}"
    else:
        masks = masks or ()
        if len(masks) == num and all(each is None or (each.dim() == 1 and each.numel() == words) for each in masks):
            return
        shapes = sorted({tuple(each.shape) for each in masks if each is not None})
        found = f"{len(masks)} masks of shapes {shapes}"
    raise ConfigError(
        expected=f"masks of {words} words, one for all or one for each of {num} queries",
        found=found,
        where="search of a vector index",
        ways_out="make masks with `ops.bitmask.pack_mask` or `FilterIndex.masks` of the same items",
    )

"""Slices: what repeats in encoded rows is found while they are read, and batches are made of it without copies.

Twice, because the second look is then short:

    row group    a list that equals the one before starts where that one does   `ops.rows.share_lists`
    batch        samples whose lists start at the same places are equal         `repeated_rows`, integers alone
                 the few lists that are left are compared by their values       (equal lists that lay apart)

Nothing is taken as equal by its hash: lists are compared with their neighbours, and what is left by Arrow's
dictionaries, which compare what they hash. So a batch has exactly the slices that `features.repeats.deduplicate` finds,
in the same order.

Cost: one comparison of values a row group; in a batch a comparison of integers, and the copy of U lists in place of B.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Int64

from ziggurat.features.batches.repeats import distinct_lists, joint_codes
from ziggurat.features.jagged import FeatureGroup, JaggedRows, RepeatedRows


def gather_segments(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Copy segments `values[starts[i] : starts[i] + lengths[i]]` one after the other. About 4 ns a value."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    index = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(total)
    return values.take(index)


def repeated_rows(
    group: FeatureGroup,
    *,
    single: Int64[np.ndarray, "s B"],
    starts: Int64[np.ndarray, "j B"],
    lengths: Int64[np.ndarray, "j B"],
    gather: Callable[[Int64[np.ndarray, "n"], Int64[np.ndarray, "n+1"]], Int64[np.ndarray, "N"]],
) -> RepeatedRows:
    """The slices of one group of features.

    Args:
        group: which features.
        single: their rows, for those with one row a sample.
        starts: where the lists of the others start; equal lists may share a start.
        lengths: of these lists.
        gather: copies lists, given starts and the offsets of the result.
    """
    columns_KB = np.concatenate([np.where(lengths == 0, -1, starts), single])  # empty lists are equal wherever they are
    is_new_B = np.ones(columns_KB.shape[1], dtype=np.bool_)
    is_new_B[1:] = (columns_KB[:, 1:] != columns_KB[:, :-1]).any(axis=0)
    # Neighbours of a session have the same starts: only the first of each run is compared with the others.
    heads = np.flatnonzero(is_new_B)
    codes, kept = joint_codes([np.ascontiguousarray(column) for column in columns_KB[:, heads]])
    codes = codes[np.cumsum(is_new_B) - 1]
    first = heads[kept]
    jagged = _lists(starts[:, first], lengths[:, first], gather)
    # Lists that start elsewhere may be equal all the same.
    again, kept = _equal_contents(jagged, single[:, first])
    if len(kept) < len(first):
        codes = again[codes]
        first = first[kept]
        jagged = _lists(starts[:, first], lengths[:, first], gather)
    return RepeatedRows(
        features=group,
        single=torch.from_numpy(np.ascontiguousarray(single[:, first])),
        jagged=jagged,
        inverse=torch.from_numpy(codes),
    )


def _lists(
    starts: np.ndarray, lengths: np.ndarray, gather: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> JaggedRows:
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths.ravel(), out=offsets[1:])
    values = gather(starts.ravel(), offsets) if lengths.size else np.empty(0, dtype=np.int64)
    return JaggedRows(torch.from_numpy(values), torch.from_numpy(offsets))


def _equal_contents(jagged: JaggedRows, single: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of slices by what is in them; one feature in which all differ settles it."""
    size = single.shape[1]
    values = jagged.values.numpy()
    offsets = jagged.offsets.numpy()
    parts: list[np.ndarray] = []
    for feature in range((len(offsets) - 1) // size if size else 0):
        ends = offsets[feature * size : (feature + 1) * size + 1]
        codes, first = distinct_lists(values[ends[0] : ends[-1]], ends - ends[0])
        if len(first) == size:
            return codes, first
        parts.append(codes)
    return joint_codes([*parts, *(np.ascontiguousarray(each) for each in single)])

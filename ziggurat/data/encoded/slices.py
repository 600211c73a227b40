"""Slices: what repeats in encoded rows is found while they are read, and batches are made of it without copies.

Twice, because the second look is then short:

    row group    equal lists of a column share one copy of their values         `share_equal_lists`, once a row group
    batch        samples whose lists lie at the same places are equal           `repeated_rows`, integers alone
                 the few lists that are left are compared by their values       (equal lists of several row groups)

Nothing is taken as equal by its hash: Arrow's dictionaries compare what they hash, and a batch compares what the first
look left. So a batch has exactly the slices that `ziggurat.features.repeats.deduplicate` finds, in the same order.

Cost: 40 ns a list and reading its values once a row group; in a batch 30 ns a list, and the copy of U lists in place of
B. Values that are shared take no memory in the shuffle buffer.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int32, Int64

from ziggurat.features.jagged import FeatureGroup, JaggedRows, RepeatedRows
from ziggurat.features.repeats import distinct_lists, joint_codes


def share_equal_lists(
    values: Int32[np.ndarray, "N"], lengths: Int64[np.ndarray, "n"]
) -> tuple[Int32[np.ndarray, "M"], Int64[np.ndarray, "n"]]:
    """Keep equal lists once.

    Args:
        values: all lists, one after the other.
        lengths: of each list.

    Returns:
        The values of the distinct lists, in the order of their first appearance, and where each list starts in them.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    codes, first = distinct_lists(values, offsets)
    kept = lengths[first]
    starts = np.cumsum(kept) - kept
    return gather_segments(values, offsets[first], kept), starts[codes]


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
    single: Int32[np.ndarray, "B s"],
    starts: Int64[np.ndarray, "B j"],
    lengths: Int32[np.ndarray, "B j"],
    values: Int32[np.ndarray, "N"],
) -> RepeatedRows:
    """The slices of one group of features.

    Args:
        group: which features.
        single: their rows, for those with one row a sample.
        starts: where the lists of the others start in `values`; equal lists may share a start.
        lengths: of these lists.
        values: rows of lists.
    """
    # Two lists may start at the same place if one of them is empty.
    places = [2 * starts[:, at] + (lengths[:, at] == 0) for at in range(starts.shape[1])]
    codes, first = _joint([*places, *single.T])
    rows, ends = _lists(starts[first], lengths[first], values)
    codes_of_lists = [
        distinct_lists(rows[ends[at][0] : ends[at][-1]], ends[at] - ends[at][0])[0] for at in range(len(ends))
    ]
    again, kept = _joint([*codes_of_lists, *single[first].T])
    if len(kept) < len(first):  # equal lists from several row groups
        codes, first = again[codes], first[kept]
        rows, ends = _lists(starts[first], lengths[first], values)
    offsets = np.concatenate([ends[:, :-1].ravel(), ends[-1:, -1]]) if len(ends) else np.zeros(1, dtype=np.int64)
    return RepeatedRows(
        features=group,
        single=torch.from_numpy(single[first].T.astype(np.int64)),
        jagged=JaggedRows(torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(offsets)),
        inverse=torch.from_numpy(codes),
    )


def _joint(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return joint_codes([np.ascontiguousarray(column, dtype=np.int64) for column in columns])


def _lists(starts: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lists feature after feature, and where each starts, and the last one of each feature ends: (j, n + 1)."""
    flat = lengths.T.astype(np.int64)
    rows = gather_segments(values, starts.T.ravel(), flat.ravel())
    ends = np.zeros((flat.shape[0], flat.shape[1] + 1), dtype=np.int64)
    np.cumsum(flat, axis=1, out=ends[:, 1:])
    ends += (np.cumsum(ends[:, -1]) - ends[:, -1])[:, None]
    return rows, ends

"""Finding what repeats: which samples of a batch have equal values, exactly, and which features repeat together.

Within a session most features do not change from sample to sample. A reader that sees it once saves the work behind it
(Zhao et al., RecD, MLSys 2023, arXiv 2211.05239, section 4.2). Three questions are answered here:

    distinct_lists     which lists of one feature are equal       hashed as bytes, then compared (Arrow)
    joint_codes        which samples are equal in all features    codes of two features become one, exactly
    find_groups        which features to deduplicate together     they repeat together: U of both is nearly U of one

A feature in which each of S adjacent samples of a session keeps the value before it with probability d has, in a batch
of B samples, about U = B·(1 − d·(S − 1)/S) distinct slices, so B/U tends to the *factor* 1/(1 − d·(S − 1)/S): 6.4 for
S = 16 and d = 0.9. What pays is decided by the factor that a batch really has (`MIN_FACTOR`, measured: below it, the
expansion to samples costs more than the lookups that are saved).

Codes count distinct values in the order in which they appear first, so the same batch always has the same slices.

Cost: about 40 ns a list and the reading of its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int64, Integer

from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup, JaggedRows, RepeatedRows

MIN_FACTOR = 1.5  # B/U from which on a step is faster with slices; see docs/guides/sessions.md
_MORE_SLICES = 1.15  # a feature joins a group if the group then has at most this many times its slices


def distinct_lists(
    values: Integer[np.ndarray, "N"], offsets: Int64[np.ndarray, "n+1"]
) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "U"]]:
    """Find which of n lists are equal.

    Args:
        values: all lists, one after the other.
        offsets: where each begins, from 0.

    Returns:
        (n,) the number of each list among the distinct ones, and (U,) the first list with each number.
    """
    item = values.dtype.itemsize
    data = pa.py_buffer(np.ascontiguousarray(values))
    ends = pa.py_buffer(np.ascontiguousarray(offsets * item))
    # Equal lists are equal bytes, so Arrow's dictionary of byte strings finds them in one pass.
    texts = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, ends, data])
    return _codes(texts)


def joint_codes(
    parts: Sequence[Int64[np.ndarray, "n"]],
) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "U"]]:
    """Find which positions are equal in all parts (integers ≥ 0); return what `distinct_lists` does."""
    codes, first = _codes(pa.array(parts[0]))
    for part in parts[1:]:
        # All positions differ already, and no further part can divide them.
        if len(first) == len(codes):
            break
        others, _ = _codes(pa.array(part))
        codes, first = _codes(pa.array(codes * (int(others.max(initial=0)) + 1) + others))
    return codes, first


def _codes(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values in the order of their first appearance, and where that is."""
    encoded = values.dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int64)
    first = np.empty(len(encoded.dictionary), dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # the last one written is the first one there
    return codes, first


def deduplicate(batch: Batch, groups: Sequence[FeatureGroup]) -> Batch:
    """The same batch with these groups of features in `repeated`; on the host. `Batch.expanded` undoes it.

    Args:
        batch: without `repeated`.
        groups: disjoint in their lists.
    """
    assert not batch.repeated, "deduplicated already"
    size = batch.batch_size
    repeated = []
    for group in groups:
        codes, first = joint_codes(_feature_codes(batch, group)) if size else (np.empty(0, np.int64),) * 2
        kept = torch.from_numpy(first)
        lists = [batch.jagged.of(at, batch_size=size).take(kept, batch_size=size) for at in group.jagged if size]
        repeated.append(
            RepeatedRows(
                features=group,
                single=batch.single[list(group.single)][:, kept],
                jagged=JaggedRows.joined(lists),
                inverse=torch.from_numpy(codes),
            )
        )
    gone = {at for group in groups for at in group.jagged}
    num_jagged = (len(batch.jagged.offsets) - 1) // size if size else 0
    plain = [batch.jagged.of(at, batch_size=size) for at in range(num_jagged) if at not in gone]
    return replace(batch, jagged=JaggedRows.joined(plain), repeated=tuple(repeated))


def _feature_codes(batch: Batch, group: FeatureGroup) -> list[np.ndarray]:
    """Codes of every feature of a group, lists first: they differ most."""
    codes = []
    for at in group.jagged:
        rows = batch.jagged.of(at, batch_size=batch.batch_size)
        codes.append(distinct_lists(rows.values.numpy(), rows.offsets.numpy())[0])
    return codes + [batch.single[at].numpy() for at in group.single]


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Counts of how often the values of some features repeat in a batch.

    Args:
        features: which ones.
        names: theirs.
        num_samples: B.
        num_slices: U.
        num_values: rows of their lists in the batch.
        num_kept: rows of their lists in the slices.
    """

    features: FeatureGroup
    names: tuple[str, ...]
    num_samples: int
    num_slices: int
    num_values: int = 0
    num_kept: int = 0

    @property
    def factor(self) -> float:
        """B/U, the deduplication factor."""
        return self.num_samples / max(self.num_slices, 1)


def measure_repeats(batch: Batch, inputs: InputSpec) -> list[Repeats]:
    """Measure how often each list of a batch repeats, and each feature with one row a sample; lists first."""
    groups = [FeatureGroup(jagged=(at,)) for at in range(len(inputs.jagged))]
    groups += [FeatureGroup(single=(at,)) for at in range(len(inputs.single))]
    return [_repeats(batch, inputs, group) for group in groups]


def find_groups(batch: Batch, inputs: InputSpec, *, min_factor: float = MIN_FACTOR) -> list[Repeats]:
    """Groups of features that repeat together often enough in a batch to be deduplicated.

    Every group has lists: features with one row a sample save nothing by themselves, and join where they add no slice.

    Args:
        batch: as the reader will make them: of the same size, in the same order.
        inputs: its features.
        min_factor: groups with a smaller B/U are left out.
    """
    if not batch.batch_size:
        return []
    lists = [_repeats(batch, inputs, FeatureGroup(jagged=(at,))) for at in range(len(inputs.jagged))]
    lists = [each for each in lists if each.factor >= min_factor and each.num_values]
    groups: list[Repeats] = []
    # Lists that repeat most come first, so that groups grow around them.
    for each in sorted(lists, key=lambda found: found.num_slices):
        for index, group in enumerate(groups):
            joint = FeatureGroup(jagged=tuple(sorted(group.features.jagged + each.features.jagged)))
            found = _repeats(batch, inputs, joint)
            if found.num_slices <= _MORE_SLICES * max(group.num_slices, each.num_slices):
                groups[index] = found
                break
        else:
            groups.append(each)
    groups = [group for group in groups if group.factor >= min_factor]
    for at in range(len(inputs.single)):
        for index, group in enumerate(groups):
            joint = replace(group.features, single=(*group.features.single, at))
            found = _repeats(batch, inputs, joint)
            if found.num_slices == group.num_slices:
                groups[index] = found
                break
    return groups


def _repeats(batch: Batch, inputs: InputSpec, group: FeatureGroup) -> Repeats:
    size = batch.batch_size
    codes, first = joint_codes(_feature_codes(batch, group)) if size else (np.empty(0), np.empty(0, np.int64))
    lengths = batch.jagged.lengths(num_features=len(inputs.jagged))[list(group.jagged)] if inputs.jagged else None
    return Repeats(
        features=group,
        names=tuple([inputs.single[at].name for at in group.single] + [inputs.jagged[at].name for at in group.jagged]),
        num_samples=len(codes),
        num_slices=len(first),
        num_values=0 if lengths is None else int(lengths.sum()),
        num_kept=0 if lengths is None else int(lengths[:, torch.from_numpy(first)].sum()),
    )

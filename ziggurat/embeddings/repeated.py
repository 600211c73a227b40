"""Pooled lookups of a deduplicated batch: slices are looked up and pooled once, and expanded behind it.

    plain features   (B, ·)  ──────────────────────────────►┐
    group 0          (U₀, ·) lookup, pooling ──► inverse ──►├──► pooled (B, T), columns as ever
    group 1          (U₁, ·) lookup, pooling ──► inverse ──►┘

A list is summed in the same order whether its slice stands for one sample or many, so the output has the same bits as
that of the plain batch. Gradients are summed over the samples of a slice first and over slices then (`ops/repeat.py`),
which rounds differently. What is recorded for the optimizer has U rows in place of B: the exact update sorts and sums
that many fewer.

Cost: lookups and pooling of U slices in place of B samples, forward and backward, and a copy of (B, T).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ziggurat.features.batch import Batch
from ziggurat.features.jagged import FeatureGroup, RepeatedRows
from ziggurat.ops.lookup import FieldKind, FieldSlot, LookupLayout, Lookups


@dataclass(frozen=True)
class GroupLayouts:
    """Layouts with which one group is looked up.

    Args:
        layouts: one for each storage, columns of the group alone.
        runs: (first column in the output, first column of the group, columns), for adjacent columns at once.
    """

    layouts: list[LookupLayout]
    runs: list[tuple[int, int, int]]


@dataclass(frozen=True)
class SplitLayouts:
    """The layouts of a whole lookup, split: features outside of groups, and each group."""

    plain: list[LookupLayout]
    groups: list[GroupLayouts]


class SplitLookups:
    """The lookups of batches, deduplicated or not; layouts are split once for each combination of groups.

    Args:
        layouts: of the whole lookup, one a storage.
    """

    def __init__(self, layouts: list[LookupLayout]) -> None:
        self._layouts = layouts
        self._split: dict[tuple[FeatureGroup, ...], SplitLayouts] = {}

    def of(self, batch: Batch) -> SplitLayouts:
        """The layouts of plain features, and of each group."""
        groups = tuple(group.features for group in batch.repeated)
        if groups not in self._split:
            self._split[groups] = split_layouts(self._layouts, groups)
        return self._split[groups]

    def reads(self, batch: Batch) -> list[tuple[Lookups, list[LookupLayout]]]:
        """Return the lookups of a batch, in the order in which backward passes record their gradients."""
        if not batch.repeated:
            return [(Lookups.of(batch), self._layouts)]
        split = self.of(batch)
        groups = zip(batch.repeated, split.groups, strict=True)
        return [(Lookups.of(batch), split.plain), *((lookups_of(group), each.layouts) for group, each in groups)]


def split_layouts(layouts: Sequence[LookupLayout], groups: Sequence[FeatureGroup]) -> SplitLayouts:
    """Split layouts into those of plain features, at their columns, and those of groups, at columns of their own."""
    in_groups = {(False, at) for group in groups for at in group.single}
    in_groups |= {(True, at) for group in groups for at in group.jagged}
    gone = sorted(at for is_list, at in in_groups if is_list)
    plain = []
    for layout in layouts:
        kept = [slot for slot in layout.slots if _key(slot) not in in_groups]
        slots = [
            dataclasses.replace(slot, index=slot.index - sum(at < slot.index for at in gone)) if _key(slot)[0] else slot
            for slot in kept
        ]
        plain.append(dataclasses.replace(layout, slots=tuple(slots)))
    return SplitLayouts(plain, [_group_layouts(layouts, group) for group in groups])


def _key(slot: FieldSlot) -> tuple[bool, int]:
    return slot.kind is not FieldKind.SINGLE, slot.index


def _group_layouts(layouts: Sequence[LookupLayout], group: FeatureGroup) -> GroupLayouts:
    places = {(False, at): index for index, at in enumerate(group.single)}
    places |= {(True, at): index for index, at in enumerate(group.jagged)}
    chosen = sorted(
        ((slot, layout.dim) for layout in layouts for slot in layout.slots if _key(slot) in places),
        key=lambda each: each[0].column,
    )
    columns: dict[int, int] = {}
    runs: list[tuple[int, int, int]] = []
    width = 0
    for slot, dim in chosen:
        columns[slot.column] = width
        if runs and runs[-1][0] + runs[-1][2] == slot.column:
            first, own, length = runs.pop()
            runs.append((first, own, length + dim))
        else:
            runs.append((slot.column, width, dim))
        width += dim
    new = [
        LookupLayout(
            dim=layout.dim,
            width=width,
            slots=tuple(
                dataclasses.replace(slot, index=places[_key(slot)], column=columns[slot.column])
                for slot in layout.slots
                if _key(slot) in places
            ),
        )
        for layout in layouts
    ]
    return GroupLayouts(new, runs)


def lookups_of(group: RepeatedRows) -> Lookups:
    """The rows of a group's slices, as kernels want them."""
    return Lookups(
        batch_size=group.num_slices,
        single=group.single.contiguous(),
        values=group.jagged.values,
        offsets=group.jagged.offsets,
    )

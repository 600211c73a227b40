"""SortedReads: what an update needs of the rows of a batch alone, made before there is a gradient.

    ids of step k+1      sort, find runs            on a queue of its own, while step k computes
    step k+1             lookup ── … ── backward ── sum runs, apply the rule

An update begins with a stable sort of the rows that were read, which needs no gradient: where a batch is known a step
early, it is done by then (`embeddings/sorted_ahead.py`). What was sorted travels with the lookups. An update takes it
if it reads exactly that: the same layouts and the very same tensors, in the same order, by the same kernel, with
gradients in the same places. It sorts by itself otherwise. Both ways sort the same numbers, so they have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from ziggurat.ops.lookup.kernel import KernelChoice
    from ziggurat.ops.lookup.layout import LookupLayout, Lookups


class Read(Protocol):
    """Lookups and the fields that they are for; a `GradientPart` is one with its gradient."""

    @property
    def layout(self) -> LookupLayout:
        """The fields of one storage."""
        ...

    @property
    def lookups(self) -> Lookups:
        """The rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """A read whose gradient is to come: (B, T), in memory of its own.

    Args:
        layout: the fields of one storage.
        lookups: the rows.
    """

    layout: LookupLayout
    lookups: Lookups


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedReads:
    """The sorted rows of one storage.

    Args:
        by: the kernel that made it.
        reads: what was sorted, in the order of the parts that an update will have.
        made: what the kernel keeps; no two kernels keep the same.
        tensors: of it, for whoever has to keep their memory.
    """

    by: KernelChoice
    reads: tuple[PlannedRead, ...]
    made: Any
    tensors: tuple[Tensor, ...]

    def fits(self, parts: Sequence[Read]) -> bool:
        """Return whether some parts read exactly what was sorted."""
        return len(parts) == len(self.reads) and all(map(_are_same, self.reads, parts))


@runtime_checkable
class SortsAhead(Protocol):
    """A kernel whose updates take rows that were sorted before."""

    def sorted_reads(self, reads: Sequence[PlannedRead]) -> SortedReads | None:
        """Sort the rows of one storage; None where nothing is read.

        Args:
            reads: in the order of the parts that the update will have, each with a gradient of its own.
        """
        ...


def sorted_before(parts: Sequence[Read], *, by: KernelChoice) -> SortedReads | None:
    """Return the reads that were sorted ahead for an update of these parts by this kernel; None if none fits."""
    found: Iterable[SortedReads] = parts[0].lookups.sorted_reads if parts else ()
    return next((each for each in found if each.by is by and each.fits(parts)), None)


def _are_same(one: Read, other: Read) -> bool:
    mine = one.lookups
    theirs = other.lookups
    return (
        # By identity: comparing the numbers would cost more than sorting them again.
        one.layout is other.layout
        and mine.are_checked == theirs.are_checked
        and mine.single is theirs.single
        and mine.values is theirs.values
        and mine.offsets is theirs.offsets
    )

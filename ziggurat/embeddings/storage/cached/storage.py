"""CachedStorage: hot rows in FP32, with their optimizer state, in front of rows that lie elsewhere.

    places (C + S, D)   ┌──────────────────────────────┐
    of FP32             │ 32 ways of set 0             │ ◄── find / admit (`ops/row_cache`)
                        │ 32 ways of set 1  …          │
                        ├──────────────────────────────┤
                        │ S places for conflicts       │ rows of this step that found no way
                        └───────┬──────────────▲───────┘
                        store   ▼ (rounded)    │ fetch
                        RowBacking: all R rows, in few bits or on a disk

A lookup changes nothing: rows that are held are read as FP32, the others as they lie behind the cache. So evaluation
and scoring leave the cache as it is, and several lookups of a step (views, sequences, lists) read the same numbers.

The update of a step admits its rows. A row that is not held takes the way of another, which is stored; a row that
finds no way takes a place for conflicts, is updated there by the same exact rule, and is stored right after. Compiled
code does all of that in one walk over the rows, and updates those without a way where they lie, to the same bits. Rows
of one step never displace each other. The order of sums does not depend on places, so rows that stay in the cache have
the bits of FP32 training, and the optimizer's state is exact for all rows.

What is read in chunks is what lookups read. What is written in chunks goes behind the cache; rows that would be rounded
there take ways that are free. So a checkpoint holds FP32 numbers, and the rows that the cache held come back from it as
they were. Stamps and counts of rows are part of a checkpoint (`CACHE`): a resumed run goes on with the same bits.

Reference: Yang et al., "Mixed-precision embedding using a cache", arXiv 2010.11305.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.storage.cached.backing import RowBacking
from ziggurat.embeddings.storage.cached.counts import CacheCounts
from ziggurat.embeddings.storage.cached.low_precision import LowPrecisionBacking
from ziggurat.embeddings.storage.memory import new_state
from ziggurat.embeddings.storage.table_storage import WEIGHT, TableStorage, state_keys
from ziggurat.ops.lookup import (
    GradientPart,
    KernelChoice,
    LookupKernel,
    LookupLayout,
    Lookups,
    Step,
    SummedGradient,
    TableOptimizerKind,
)
from ziggurat.ops.lookup.cpp import CppKernel
from ziggurat.ops.machine.huge_pages import advise_huge_pages
from ziggurat.ops.row_cache import HIT, NO_WAY, NUM_WAYS, Admission, CacheSize, Ways
from ziggurat.ops.row_cache.cpp import CachedRows, apply_cached, lookup_cached, update_cached, why_not_cache
from ziggurat.ops.row_formats import RowFormat, RowOrigin

CACHE = "cache"  # name of stamps and counts among the arrays of a storage


@dataclass(frozen=True, slots=True)
class _Placed:
    """Places of a step's rows, and the positions of those among them that found no way."""

    rows: Int64[Tensor, "U"]
    places: Int64[Tensor, "U"]
    conflicts: Int64[Tensor, "K"]


class CachedStorage(TableStorage):
    """Tables of one dim behind a cache of their hot rows, on the CPU.

    Args:
        backing: where all rows lie.
        cache: its share of the rows, and its policy.

    Attributes:
        backing: where all rows lie.
        cache: size and policy.
        ways: which rows the cache holds.
        counts: what updates found in it since the storage was made.
    """

    def __init__(self, backing: RowBacking, *, cache: CacheSize) -> None:
        super().__init__(backing.num_rows, backing.dim)
        self.backing = backing
        self.cache = cache
        self.ways = Ways(backing.num_rows, share=cache.share, policy=cache.policy)
        self.counts = CacheCounts()
        self._begun = 0  # number of the step all of whose rows have been admitted
        self._arrays: dict[str, Tensor] = {}  # of C + S places
        self._initial: dict[str, float] = {}
        self._tails: dict[str, tuple[int, ...]] = {WEIGHT: (self.dim,)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that kernels compute with: float32."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    @property
    def row_format(self) -> RowFormat | None:
        """The format in which rows behind the cache are kept."""
        return self.backing.row_format

    @property
    def num_bytes(self) -> int:
        """The bytes of the backing, of the places with their state, and of the record of their rows."""
        floats = sum(torch.Size(tail).numel() for tail in self._tails.values())
        return self.backing.num_bytes + self.ways.num_bytes + 4 * floats * self._num_places

    @property
    def extra_keys(self) -> tuple[str, ...]:
        """Stamps and counts, which a resumed run needs."""
        return (CACHE,)

    def name_rows(self, origins: Sequence[RowOrigin]) -> None:
        """See `TableStorage.name_rows`."""
        self.backing.name_rows(origins)

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """See `TableStorage.add_state`."""
        self.backing.add_state(kind, initial_sum=initial_sum)
        empty = torch.empty(0)
        # Made for the places: rows behind the cache have their state in the backing.
        state = new_state(kind, num_rows=self._num_places, dim=self.dim, like=empty, initial_sum=initial_sum)
        weight = self._array(WEIGHT)
        self._arrays = {WEIGHT: weight, **state}
        self._tails = {key: tuple(array.shape[1:]) for key, array in self._arrays.items()}

    # -------------------------------------------------------------------------------------------------------- reading

    def lookup(
        self, kernel: LookupKernel, *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """Pool rows where they lie with the C++ kernel; otherwise the rows of the batch are gathered first."""
        packed = self._packed_by(kernel)
        if packed is None:
            super().lookup(kernel, layout=layout, lookups=lookups, out=out)
        elif lookups.batch_size and layout.slots:
            weight = self._array(WEIGHT)
            lookup_cached(weight, packed.rows.packed, ways=self.ways, layout=layout, lookups=lookups, out=out)

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """See `TableStorage.gather`."""
        return self._laid_over(rows_N, key=key, others=lambda rows: self.backing.fetch(rows, keys=(key,))[key])

    def looked_up(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """See `TableStorage.looked_up`."""
        return self._laid_over(rows_N, key=WEIGHT, others=self.backing.looked_up)

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Consecutive rows: those that are held, laid over those behind the cache."""
        rows = torch.arange(first_row, first_row + num_rows)
        places = self.ways.find(rows)
        if key == CACHE:
            return self._remembered(rows, places)
        # −1: the cache does not hold the row.
        held = (places >= 0).nonzero().view(-1)
        values = self.backing.read(first_row, num_rows, key=key)
        return values.index_copy(0, held, self._array(key)[places[held]]) if len(held) else values

    # -------------------------------------------------------------------------------------------------------- writing

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """See `TableStorage.scatter`."""
        places = self.ways.find(rows_N)
        held = places >= 0
        self._array(key)[places[held]] = values[held]
        if not bool(held.all()):
            # Of no step: rounded to the nearest, without the noise of an update.
            self.backing.store(rows_N[~held], {key: values[~held]}, step=None)

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace rows behind the cache and in it; rows that would be rounded take ways that are free."""
        rows = torch.arange(first_row, first_row + len(values))
        places = self.ways.find(rows)
        if key == CACHE:
            self._remember(rows, places, values)
            return
        # Weights alone are rounded behind the cache; the optimizer's numbers are exact there.
        if key == WEIGHT and self._put_inexact(rows, places, values):
            places = self.ways.find(rows)  # some of them may have lost their ways to others
        self.backing.write(first_row, values, key=key)
        held = places >= 0
        self._array(key)[places[held]] = values[held]

    def about_to_load(self) -> None:
        """All rows are about to be written: those that need a way take it from rows that are not written anew."""
        self.ways.age()
        self._begun = 0  # steps may have the same numbers again

    # --------------------------------------------------------------------------------------------------------- updates

    @property
    def changes_others(self) -> bool:
        """True: what enters displaces other rows."""
        return True

    def changed_with(self, rows_U: Int64[Tensor, "U"]) -> Int64[Tensor, "N"]:
        """Return the rows that these displace: they are rounded, and read as codes from then on."""
        return self.ways.leaving(rows_U)

    def begin_update(self, kernel: LookupKernel, *, parts: Sequence[GradientPart], number: int) -> None:
        """Admit the rows of both halves at once: what leaves must not depend on which half a row belongs to."""
        # None from kernels that cannot tell: the sum of gradients knows the rows as well.
        rows = kernel.distinct_rows(parts) if isinstance(kernel, CppKernel) else None
        rows = kernel.sum_gradients(parts).rows if rows is None else rows
        if not len(rows):
            return
        admission = self.ways.admit(rows, step=number)
        self.counts += CacheCounts(len(rows), admission.hits, admission.stored, admission.conflicts)
        self._move(rows, admission, number=number)
        self._begun = number

    def update(self, kernel: LookupKernel, *, parts: Sequence[GradientPart], step: Step) -> None:
        """Sum the gradients of equal rows and apply the rule to each once, in the cache."""
        rows = kernel.distinct_rows(parts) if isinstance(kernel, CppKernel) else None
        if rows is None or not isinstance(kernel, CppKernel):
            self.apply(kernel, gradient=kernel.sum_gradients(parts), step=step)
            return
        admission = self._admit(rows, step=step)
        packed = self._packed_by(kernel)
        if packed is not None:
            update_cached(self._cached_rows(packed, rows, admission, step=step), kernel=kernel, step=step)
            return
        placed = self._place(rows, admission, step=step)
        kernel.update_places(self._array(WEIGHT), state=self._state_of(step), places_U=placed.places, step=step)
        self._store_conflicts(placed, step=step)

    def apply(self, kernel: LookupKernel, *, gradient: SummedGradient, step: Step) -> None:
        """Apply the rule to the rows of a summed gradient, in the cache."""
        if len(gradient.rows) == 0:
            return
        admission = self._admit(gradient.rows, step=step)
        packed = self._packed_by(kernel)
        if packed is not None:
            cached = self._cached_rows(packed, gradient.rows, admission, step=step)
            apply_cached(cached, sums=gradient.sums, step=step)
            return
        placed = self._place(gradient.rows, admission, step=step)
        renamed = SummedGradient(rows=placed.places, sums=gradient.sums)
        kernel.apply(self._array(WEIGHT), state=self._state_of(step), gradient=renamed, step=step)
        self._store_conflicts(placed, step=step)

    def describe(self) -> dict[str, object]:
        """Describe the cache and what is behind it for the start-up report; say where it is more than was asked for."""
        held = min(self.ways.num_places, self.num_rows)
        asked = self.cache.share * self.num_rows
        more = f"; {self.cache.share:.3g} of the rows would be {asked:,.0f}, but a cache has sets of {NUM_WAYS}"
        return {
            **self.backing.describe(),
            "cache": f"{held:,} of {self.num_rows:,} rows in FP32, {self.ways.policy.value}"
            + (more if held > 1.1 * asked else ""),
            "cache without C++": why_not_cache() or "no",
            "bytes": self.num_bytes,
        }

    # --------------------------------------------------------------------------------------------------------- details

    def _admit(self, rows: Int64[Tensor, "U"], *, step: Step) -> Admission:
        """Give the rows of a step their ways, and count what happens."""
        # `begin_update` has admitted all rows of this step: a second admission would displace them.
        if step.number_on_host == self._begun:
            places = self.ways.find(rows)
            return Admission.counted(places, torch.where(places >= 0, HIT, NO_WAY))
        admission = self.ways.admit(rows, step=step.number_on_host)
        self.counts += CacheCounts(len(rows), admission.hits, admission.stored, admission.conflicts)
        return admission

    def _cached_rows(
        self, packed: LowPrecisionBacking, rows: Int64[Tensor, "U"], admission: Admission, *, step: Step
    ) -> CachedRows:
        """Collect what compiled code needs to bring rows into the cache and to update them, there or behind it."""
        state = self._state_of(step)
        behind = {key: packed.state(key) for key in state}
        # The state behind the cache is the backing's own tensors: compiled code updates conflicts where they lie.
        table = dataclasses.replace(packed.rows.packed, state=behind, noise=packed.rows.noise)
        return CachedRows(slots=self._array(WEIGHT), state=state, table=table, rows=rows, admission=admission)

    def _place(self, rows: Int64[Tensor, "U"], admission: Admission, *, step: Step) -> _Placed:
        """Bring the rows of a step into the cache, or to places for conflicts."""
        places = admission.places
        conflicts = (admission.left == NO_WAY).nonzero().view(-1)
        if len(conflicts):
            # Places for conflicts are behind those of the ways; they last one step.
            places[conflicts] = self.ways.num_places + torch.arange(len(conflicts))
            self._make_room(len(conflicts))
        self._move(rows, admission, number=step.number_on_host)
        return _Placed(rows, places, conflicts)

    def _move(self, rows: Int64[Tensor, "U"], admission: Admission, *, number: int) -> None:
        """Store the rows that leave their places, and fetch those that have one and were not held."""
        places = admission.places
        left = admission.left
        out = left >= 0
        # Places that were free (nobody left) are fetched into, too.
        new = (left != HIT) & (places >= 0)
        if bool(out.any()):
            # Stored before others are fetched: these take the same places.
            self._store(left[out], places[out], number=number)
        if bool(new.any()):
            for key, numbers in self.backing.fetch(rows[new], keys=tuple(self._tails)).items():
                self._array(key)[places[new]] = numbers

    def _store_conflicts(self, placed: _Placed, *, step: Step) -> None:
        """Store the rows that found no way, and forget them."""
        if len(placed.conflicts):
            places = placed.places[placed.conflicts]
            self._store(placed.rows[placed.conflicts], places, number=step.number_on_host)

    def _store(self, rows: Tensor, places: Tensor, *, number: int) -> None:
        """Store rows that leave places in the step of this number."""
        values = {key: self._array(key)[places] for key in self._tails}
        self.backing.store(rows, values, step=number)

    def _put_inexact(self, rows: Tensor, places: Tensor, values: Tensor) -> bool:
        """Give rows that the backing would round ways that are free; whether any row has moved."""
        if not self.ways.has_room:
            return False
        rounded = self.backing.rounded(values)
        # The backing keeps numbers exactly, and says so by giving them back.
        if rounded is values:
            return False
        inexact = (bits_of(rounded) != bits_of(values)).any(dim=1)
        # Those that are held already stay: new stamps keep them from being displaced by the rows below.
        self.ways.refresh(places[inexact & (places >= 0)])
        new = inexact & (places < 0)
        self._put(rows, places, new)
        return bool(new.any())

    def _put(self, rows: Tensor, places: Tensor, chosen: Tensor) -> Tensor:
        """Places after some rows that are not held have taken ways, with what the backing has of them."""
        new = chosen.nonzero().view(-1)
        admission = self.ways.put(rows[new])
        gone = admission.left >= 0
        keys = tuple(self._tails)
        if bool(gone.any()):
            values = {key: self._array(key)[admission.places[gone]] for key in keys}
            self.backing.store(admission.left[gone], values, step=None)
        taken = admission.places >= 0
        if bool(taken.any()):
            for key, numbers in self.backing.fetch(rows[new[taken]], keys=keys).items():
                self._array(key)[admission.places[taken]] = numbers
        return places.index_copy(0, new, admission.places)

    def _drop(self, rows: Tensor, places: Tensor, chosen: Tensor) -> None:
        """Free the ways of some rows that are held."""
        gone = places[chosen]
        if len(gone):
            self.backing.store(rows[chosen], {key: self._array(key)[gone] for key in self._tails}, step=None)
            self.ways.free(gone)

    def _remembered(self, rows: Tensor, places: Tensor) -> Float[Tensor, "N"]:
        """Stamp + 1 of rows that are held, else 0; or count + 1 of rows that are held, else -count."""
        held = places >= 0
        counts = self.ways.counts_R
        if counts is None:
            stamps = self.ways.kept_stamps[places.clamp(min=0)]
            # One is added so that a stamp of 0 is told from a row that is not held.
            return torch.where(held, stamps + 1, 0).float()
        return torch.where(held, counts[rows] + 1, -counts[rows]).float()

    def _remember(self, rows: Tensor, places: Tensor, values: Tensor) -> None:
        """The inverse of `_remembered`; rows that were held take ways if there are any, others leave theirs."""
        numbers = values.to(torch.int32)
        self._drop(rows, places, (numbers <= 0) & (places >= 0))
        self.ways.remember(rows, torch.where(numbers > 0, numbers - 1, -numbers))
        self.ways.refresh(places[(numbers > 0) & (places >= 0)])
        if self.ways.has_room:
            places = self._put(rows, places, (numbers > 0) & (places < 0))
        chosen = (numbers > 0) & (places >= 0)
        if self.ways.counts_R is None:
            self.ways.stamps_SW.view(-1)[places[chosen]] = numbers[chosen] - 1

    def _laid_over(self, rows: Tensor, *, key: str, others: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of the cache, and `others` of those that it does not hold."""
        places = self.ways.find(rows)
        held = places >= 0
        if bool(held.all()):
            return self._array(key)[places]
        values = torch.empty(len(rows), *self._tails[key])
        values[held] = self._array(key)[places[held]]
        values[~held] = others(rows[~held])
        return values

    def _packed_by(self, kernel: LookupKernel) -> LowPrecisionBacking | None:
        """The backing, if compiled code reads and writes its rows where they lie."""
        if not isinstance(self.backing, LowPrecisionBacking):
            return None
        row_format = self.backing.row_format  # compiled code knows nothing beside rows here
        can = row_format.cpp_code and not row_format.has_beside and kernel.choice is KernelChoice.CPP
        return self.backing if can and not why_not_cache() else None

    def _state_of(self, step: Step) -> dict[str, Tensor]:
        return {key: self._array(key) for key in state_keys(step.rule.kind)}

    @property
    def _num_places(self) -> int:
        weight = self._arrays.get(WEIGHT)
        # Weights take their memory at the first use; until then there are no places for conflicts.
        return self.ways.num_places if weight is None else len(weight)

    def _array(self, key: str) -> Tensor:
        """Places of one array; those of weights take their memory at the first use."""
        if not self._arrays:
            weight = torch.empty(self.ways.num_places, self.dim)
            advise_huge_pages(weight)
            self._arrays[WEIGHT] = weight
        return self._arrays[key]

    def _make_room(self, num_conflicts: int) -> None:
        """Have places for so many conflicts; twice as many as before at least, so that it is seldom done."""
        wanted = self.ways.num_places + num_conflicts
        if wanted <= self._num_places:
            return
        # Twice as many places for conflicts: those of the ways stay as many as they are.
        wanted = max(wanted, 2 * self._num_places - self.ways.num_places)
        for key, array in list(self._arrays.items()):
            larger = array.new_empty(wanted, *array.shape[1:])
            advise_huge_pages(larger)
            larger[: len(array)] = array
            self._arrays[key] = larger


def bits_of(values: Float[Tensor, "N D"]) -> Tensor:
    """Numbers as they are stored, so that NaN equals itself and -0 is not 0."""
    return values.contiguous().view(torch.int32)

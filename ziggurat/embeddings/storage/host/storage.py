"""HostStorage: tables that lie in the memory of the host, and are looked up and updated in that of the device.

    announce   rows of the coming batch ──► those that are missing travel while a step computes (`held.py`)
    lookup     row ──► its place (one number a row, on the device) ──► any kernel, on the places
    update     the same rows, in the same places ──► any kernel ──► they go back when others need their places

Bit for bit the training of tables that lie on the device: rows are FP32 wherever they lie, and kernels sum the
gradients of equal rows in the order of the batch, which places do not change. Lookups of batches that nobody has
announced (evaluation, scoring) read rows where they lie and leave the places alone; the host waits for those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage.budget import MemoryBudget
from ziggurat.embeddings.storage.host.held import HeldRows
from ziggurat.embeddings.storage.host.places import DeviceCounts, most_places
from ziggurat.embeddings.storage.memory import MemoryStorage
from ziggurat.embeddings.storage.table_storage import WEIGHT, TableStorage, state_keys
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import (
    FieldKind,
    GradientPart,
    LookupKernel,
    LookupLayout,
    Lookups,
    Step,
    SummedGradient,
    TableOptimizerKind,
    state_shapes,
)
from ziggurat.ops.lookup.layout import check_rows
from ziggurat.ops.lookup.reference import jagged_rows, single_rows
from ziggurat.ops.machine.memory import memory_of, size_text
from ziggurat.ops.row_formats import RowOrigin

MAP_BYTES = 4  # of the device, for every row
HOST_BESIDE_BYTES = 8  # of the host, for a row that has a place: which one it is, and when it was needed


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTables:
    """Makes storages in the memory of the host: what `make_storage` wants.

    Args:
        budget: memory of the device for rows that are held there.
    """

    budget: MemoryBudget

    def __call__(self, num_rows: int, dim: int) -> TableStorage:
        """An empty storage."""
        return HostStorage(num_rows, dim, budget=self.budget)


class HostStorage(TableStorage):
    """Tables of one dim in the memory of the host.

    Args:
        num_rows: R, of all its tables.
        dim: D.
        budget: memory of the device for rows that are held there.

    Attributes:
        rows: all rows, in the memory of the host.
        num_places: how many rows are held; None: as the budget says.
        faults: () bool on the device: true from here on where a step that the host does not wait for asks for a row
            that has no place; None: nobody listens.
    """

    num_places: int | None = None
    faults: Bool[Tensor, ""] | None = None

    def __init__(self, num_rows: int, dim: int, *, budget: MemoryBudget) -> None:
        super().__init__(num_rows, dim)
        self.rows = MemoryStorage(num_rows, dim)
        self._device = torch.device("cpu")
        self._budget = budget
        self._held = None
        self._counts = DeviceCounts()
        self._padding = list[int]()
        self._keys: tuple[str, ...] = (WEIGHT,)
        self._row_numbers = dim
        budget.join(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that kernels compute with: float32."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The device where kernels find rows that are held."""
        return self._device

    @property
    def num_bytes(self) -> int:
        """The bytes of the host's memory: all rows and their state."""
        return self.rows.num_bytes

    @property
    def held_row_bytes(self) -> int:
        """The bytes of a row that is held on the device, with the optimizer's numbers."""
        return 4 * self._row_numbers

    @property
    def awaits_batches(self) -> bool:
        """Rows come to the device when their batch is announced."""
        return True

    @property
    def held(self) -> HeldRows:
        """Rows on the device; made at the first use, when it is known what state they have."""
        if self._held is None:
            # Not in the constructor: how much room a row takes is known once the optimizer has added its state.
            places = self.num_places or self._budget.places(self)
            # Before memory is taken: an allocator's error would not say what to change.
            _check_room(self, num_places=min(places, self.num_rows))
            self._held = HeldRows(
                self.rows, keys=self._keys, num_places=places, padding=self._padding, device=self._device
            )
            # The counts outlive the places: a log adds up what happened before and after they were made anew.
            self._held.places.counts = self._counts
        return self._held

    def name_rows(self, origins: Sequence[RowOrigin]) -> None:
        """Learn where tables begin: their first rows are padding, which never changes."""
        # Places that were made know other padding.
        self._forget()
        # A list that is shorter than others reads padding at every step: these rows always have a place.
        self._padding = [origin.first_row for origin in origins]

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """See `TableStorage.add_state`."""
        # Held rows have no room for the new state.
        self._forget()
        self.rows.add_state(kind, initial_sum=initial_sum)
        shapes = state_shapes(kind, num_rows=1, dim=self.dim)
        self._keys = (WEIGHT, *shapes)
        self._row_numbers = self.dim + sum(torch.Size(shape).numel() for shape in shapes.values())

    def draw(self, first_row: int, num_rows: int, *, initial: InitialRows) -> None:
        """See `TableStorage.draw`."""
        self._forget()
        self.rows.draw(first_row, num_rows, initial=initial)

    def about_to_load(self) -> None:
        """No row keeps its place."""
        self._forget()

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """See `TableStorage.gather`; the host waits for the device."""
        rows = rows_N.cpu()
        # Nothing was held yet: the host has the newest numbers of every row.
        if self._held is None:
            return self.rows.gather(rows, key=key).to(self._device)
        return self._held.gather(rows, key=key)

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """See `TableStorage.scatter`; the host waits for the device."""
        if self._held is None:
            self.rows.scatter(rows_N.cpu(), values.detach().cpu(), key=key)
        else:
            self._held.scatter(rows_N.cpu(), values.detach(), key=key)

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Consecutive rows in the memory of the host, once those that the device has changed are back there."""
        # The device may have changed rows since they came; the host's are older until these are back.
        if num_rows and self._held is not None:
            self._held.flush()
        return self.rows.read(first_row, num_rows, key=key)

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """See `TableStorage.write`."""
        self.scatter(torch.arange(first_row, first_row + len(values)), values, key=key)

    def announce(self, rows_N: Int64[Tensor, "N"]) -> None:
        """Begin to bring the rows of a coming batch to the device."""
        # The places of rows are dealt out on the host, by a table of its own.
        self.held.announce(rows_N.cpu())

    def begin(self) -> None:
        """Let the batch that was announced be computed on."""
        self.held.settle()

    def lookup(
        self, kernel: LookupKernel, *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """Pool rows in their places; where some have none, the rows of the batch are gathered first."""
        check_rows(layout, lookups)
        if not lookups.batch_size or not layout.slots:
            return
        placed = self._placed(layout, lookups)
        # A batch that nobody announced (an evaluation, the first step) finds its rows on the host.
        if placed is None:
            super().lookup(kernel, layout=layout, lookups=lookups, out=out)
        else:
            kernel.lookup(self.held.arrays[WEIGHT], layout=placed[0], lookups=placed[1], out=out)

    def update(self, kernel: LookupKernel, *, parts: Sequence[GradientPart], step: Step) -> None:
        """Sum the gradients of equal rows and apply the rule to each once, in their places."""
        parts = [part for part in parts if part.lookups.batch_size]
        placed = [self._placed(part.layout, part.lookups) for part in parts]
        found = [each for each in placed if each is not None]
        # All parts or none: equal rows of two parts must meet in one sum.
        if parts and len(found) < len(parts):
            super().update(kernel, parts=parts, step=step)
        elif parts:
            renamed = [
                GradientPart(layout=layout, lookups=lookups, grad=part.grad)
                for part, (layout, lookups) in zip(parts, found, strict=True)
            ]
            kernel.update(self.held.arrays[WEIGHT], state=self._state_of(step), parts=renamed, step=step)
            # The device has newer numbers from here on, which have to go back before others take their places.
            self.held.changed()

    def apply(self, kernel: LookupKernel, *, gradient: SummedGradient, step: Step) -> None:
        """Apply the rule to the rows of a summed gradient, in their places."""
        # `applies` is a tensor where the host does not wait for the device.
        places = self._places(gradient.rows, is_late=step.applies is not None)
        if places is None:
            super().apply(kernel, gradient=gradient, step=step)
        elif len(places):
            renamed = SummedGradient(rows=places, sums=gradient.sums)
            kernel.apply(self.held.arrays[WEIGHT], state=self._state_of(step), gradient=renamed, step=step)
            self.held.changed()

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Hold rows on another device; the others stay on the host. See `TableStorage.move` for dtypes.

        Raises:
            ConfigError: to another dtype.
        """
        # An empty tensor tells where `fn` moves things, without moving any.
        probe = fn(torch.empty(0, dtype=self.dtype, device=self._device))
        # Refused there, for every storage in the same words.
        if probe.dtype != self.dtype:
            super().move(fn)
        if probe.device != self._device:
            self._forget()
            # The flag is of the old device; whoever watches gives another one.
            self._device = probe.device
            self.faults = None

    def describe(self) -> dict[str, object]:
        """Describe where the rows lie and how many are held on the device, for the start-up report."""
        num_places = self.held.places.ways.num_places
        return {
            "rows": "host",
            **self.rows.describe(),
            "held_on": str(self._device),
            "held": self._budget.held_text(self, num_places=num_places, num_bytes=self.held.num_bytes),
        }

    def facts(self) -> DeviceCounts:
        """Announced rows since the last call."""
        if self._held is not None:
            self._held.settle()  # a thread may be counting
        found = self._counts
        # A new object, not zeros: the one that is handed out must not change.
        self._counts = DeviceCounts()
        if self._held is not None:
            self._held.places.counts = self._counts
        return found

    def _forget(self) -> None:
        """Hold nothing: all rows are back on the host."""
        if self._held is not None:
            self._held.flush()
            self._held = None

    def _state_of(self, step: Step) -> dict[str, Tensor]:
        return {key: self.held.arrays[key] for key in state_keys(step.rule.kind)}

    def _places(self, rows_N: Int64[Tensor, "N"], *, is_late: bool) -> Int64[Tensor, "N"] | None:
        """Return the places of rows on the device; None where the host is told that some have no place.

        A host that does not wait is not told: rows without a place become padding, and `faults` is raised.
        """
        if self._held is None:
            return None
        if not is_late:
            self._held.settle()  # rows that are not this step's may be leaving
        places = self._held.map[rows_N].long()
        if is_late:
            if self.faults is not None:
                self.faults |= (places < 0).any()
            # Place 0 is there in any case; what is read of it is thrown away with the step, since `faults` is raised.
            return places.clamp_(min=0)
        return places if bool((places >= 0).all()) else None

    def _placed(self, layout: LookupLayout, lookups: Lookups) -> tuple[LookupLayout, Lookups] | None:
        """The same lookups among the places; None where some rows have none."""
        num_single = len(layout.single)
        size = lookups.batch_size
        single = lookups.values.new_empty(0)
        offsets = lookups.offsets[:1]
        listed = single
        if layout.single:
            single = single_rows(layout, lookups).reshape(-1)
        if layout.jagged:
            listed, lengths_JB = jagged_rows(layout, lookups)
            offsets = F.pad(lengths_JB.reshape(-1).cumsum(0), (1, 0))
        # One question for single fields and lists together: each would wait for the device.
        places = self._places(torch.cat([single, listed]), is_late=lookups.are_checked)
        if places is None:
            return None
        renamed = Lookups(
            batch_size=size,
            single=places[: len(single)].view(num_single, size),
            values=places[len(single) :],
            offsets=offsets,
            are_checked=lookups.are_checked,
        )
        return _among_places(layout, most_places(self.num_rows), keeps_lists=lookups.are_checked), renamed


def _check_room(storage: HostStorage, *, num_places: int) -> None:
    """Refuse more places than the memory of the device has room for.

    Raises:
        ConfigError: with what the places take, and what is free.
    """
    if storage.device.type != "cuda":
        return  # on a CPU the rows themselves were compared with the memory
    memory = memory_of(storage.device)
    need = num_places * storage.held_row_bytes + storage.num_rows * MAP_BYTES
    if need > memory.free_bytes:
        raise ConfigError(
            expected=f"places for rows that fit {memory.text()}",
            found=f"{size_text(need)}: {num_places:,} rows × {storage.dim} columns with their state, and "
            f"{MAP_BYTES} bytes for each of {storage.num_rows:,} rows",
            where="tables.device-memory",
            ways_out=("--tables.device-memory with fewer bytes, or a smaller share", "fewer rows, or fewer columns"),
        )


@lru_cache(maxsize=256)
def _among_places(layout: LookupLayout, num_places: int, *, keeps_lists: bool) -> LookupLayout:
    """A layout whose fields all read one table, the places.

    Args:
        layout: of a storage.
        num_places: as many as there can be; not those that there are, so that growing makes no new layout.
        keeps_lists: lists of other layouts stay among the lookups; else the layout's own are numbered anew.
    """
    num_single = len(layout.single)
    slots = []
    for position, slot in enumerate(layout.slots):
        is_single = slot.kind is FieldKind.SINGLE
        index = position if is_single else (slot.index if keeps_lists else position - num_single)
        slots.append(dataclasses.replace(slot, index=index, first_row=0, num_rows=num_places))
    return dataclasses.replace(layout, slots=tuple(slots))


def device_facts(storages: Iterable[HostStorage]) -> dict[str, float]:
    """Return, for a training log, the share of the rows of batches that the device held already; {} for none."""
    counts = [storage.facts() for storage in storages]
    rows = sum(each.rows for each in counts)
    hits = sum(each.hits for each in counts)
    return {"device_hit_rate": round(hits / rows, 6)} if rows else {}

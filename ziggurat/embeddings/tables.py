"""EmbeddingTables: rows in, one vector for each field out; gradients recorded, not applied.

    Batch.single (S, B) ─┐    one lookup for each dim     pooled (B, T)
    Batch.jagged         ├──►  storage_0 (R, 16)       ──► [user | item | genres | …]  T = sum of field dims
                         ┘     storage_1 (R, 64)

Why the weights are not parameters. A dense gradient of a table costs memory and time for *every* row, while a batch
touches a few thousand. Torch's sparse gradients avoid that, but their optimizers are ten times slower than needed.
So the tables take part in autograd through one function whose backward keeps the gradient of its *output* (B, T)
together with the rows that were read. `TableOptimizer` turns that into the exact update of the touched rows. Until
then nothing has changed, so a step with a NaN can still be dropped, gradients clipped, and several backward passes
accumulated into one step.

With `optimizer = "adam_dense"` the tables are ordinary parameters with dense gradients (one `nn.Parameter` a table).

Cost of a step with N lookups: forward N·D numbers read; the recorded gradient is the tensor that autograd made
anyway. See `ziggurat.ops.lookup` for the kernels.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.arguments import check_arguments
from ziggurat.embeddings.announced import AnnouncedBatches
from ziggurat.embeddings.config import EmbeddingConfig, PooledDtype
from ziggurat.embeddings.contract import Embeddings, ListsOfSlices, innermost
from ziggurat.embeddings.layouts import field_layouts, field_slot
from ziggurat.embeddings.repeated import SplitLayouts, SplitLookups, lookups_of
from ziggurat.embeddings.storage import MakeStorage, MemoryStorage
from ziggurat.embeddings.storage.facts import StorageFacts
from ziggurat.embeddings.weights import TableWeights
from ziggurat.errors import BoundsError, ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, SingleSpec
from ziggurat.ops.function_ctx import Ctx
from ziggurat.ops.lookup import (
    GradientPart,
    KernelChoice,
    KernelSetting,
    LookupKernel,
    LookupLayout,
    Lookups,
)
from ziggurat.ops.lookup.choose import BatchShape, ChosenKernel, choose_kernel
from ziggurat.ops.lookup.layout import raise_out_of_bounds
from ziggurat.ops.lookup.triton import sums_without_waiting
from ziggurat.ops.repeat import sum_slices


class EmbeddingTables(ListsOfSlices, nn.Module):
    """All embedding tables of a model.

    Args:
        inputs: fields, tables and their sizes.
        config: dims, rule, kernel, initial weights.
        seed: of the initial weights; each table's depend on (seed, its name) alone. None draws none and takes no
            memory: for tables that are loaded, spread over ranks, or moved to a device first (`tables.draw`).
        make_storage: makes what holds the rows of one dim; the memory of the device by default. A `StorageByTable`
            keeps some tables as something else.

    Example:
        >>> from ziggurat.testing.batches import random_batch, small_inputs
        >>> inputs = small_inputs(num_single=2, num_jagged=1)
        >>> tables = zg.EmbeddingTables(inputs, zg.EmbeddingConfig(dim=4), seed=0)
        >>> tables(random_batch(inputs, 5)).shape
        torch.Size([5, 12])
    """

    @check_arguments
    def __init__(
        self,
        inputs: InputSpec,
        config: EmbeddingConfig,
        *,
        seed: int | None = 0,
        make_storage: MakeStorage = MemoryStorage,
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.config = config
        self.tables = TableWeights(inputs.tables, config=config, seed=seed, make_storage=make_storage)
        self.field_dims = tuple(self.tables.places[spec.table].dim for spec in inputs.fields)
        self.output_dim = sum(self.field_dims)
        self._layouts = field_layouts(inputs, self.tables)
        self._batches = AnnouncedBatches(inputs, self.tables, pooled=self._layouts)
        self._single_layouts: dict[str, list[LookupLayout]] = {}
        self._split = SplitLookups(self._layouts)
        self._facts = StorageFacts()
        self._chosen: ChosenKernel | None = None
        # Tables are no parameters, so a lookup would have no input that requires a gradient, and no backward pass.
        self._anchor = torch.zeros((), requires_grad=True)
        # Tables are made on the CPU and moved: a kernel of GPUs is asked when rows are looked up, and not here.
        if config.kernel not in (KernelChoice.AUTO, KernelChoice.TRITON):
            self.choose_kernel(BatchShape())
        self.recorded: list[list[GradientPart]] = [[] for _ in range(self.tables.num_storages)]

    def forward(self, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B T"]:
        """Look up and pool every field, in the order of `inputs.fields`.

        Args:
            batch: rows within their tables.
            dtype: of the output: float32, or bfloat16 for networks that compute in it.

        Returns:
            (B, T); with equal dims a view (B, F, D) of it is one vector a field.

        Raises:
            BoundsError: a row is outside its table.
        """
        # `_DenseLookup` knows no slices: each sample gets a row of its own.
        if batch.repeated and self.has_dense_gradients:
            batch = batch.expanded()
        lookups = Lookups.of(batch)
        if self._chosen is None:
            num_lists = max(lookups.offsets.numel() - 1, 1)
            # Rounded, so that almost equal batches ask for the same measurement.
            length = round(lookups.values.numel() / num_lists, 1)
            self.choose_kernel(BatchShape(batch_size=lookups.batch_size, list_length=length))
        if batch.repeated:
            return _RepeatedLookup.apply(self._anchor, self, batch, self._split.of(batch), dtype)
        lookups = self.tables.checked(lookups, self._layouts)
        if self.has_dense_gradients:
            weights = [self.tables.parameter(name) for name in self.tables.places]
            return _DenseLookup.apply(self, lookups, self._layouts, dtype, *weights)
        if torch.is_grad_enabled():
            return _RecordedLookup.apply(self._anchor, self, lookups, self._layouts, dtype)
        return self.look_up(lookups, self._layouts, dtype)

    def reads_of(self, batch: Batch) -> list[tuple[Lookups, list[LookupLayout]]]:
        """Return the lookups of `forward` in a batch, in the order in which backward passes record their gradients."""
        return self._split.reads(batch)

    def unpooled_slices(
        self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "N D"], Int64[Tensor, "U+1"], Int64[Tensor, "B"] | None]:
        """`unpooled` for slices: vectors, offsets, and the slice of each sample (None: one list a sample)."""
        position = self.inputs.list_position(name)
        table = self.inputs.jagged[position].table
        lists, inverse_B = batch.lists(position)
        known = None if self.tables.faults is None else self.tables.faults.list_read(batch, position)
        try:
            return self._vectors(known or self.flat(lists.values), table, dtype=dtype), lists.offsets, inverse_B
        except BoundsError:  # name the feature and the sample
            slot = field_slot(self.inputs.jagged[position], index=position, column=0, tables=self.tables)
            raise_out_of_bounds(LookupLayout(dim=0, width=0, slots=(slot,)), Lookups.of(batch.expanded()))
            raise

    def vectors(
        self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N D"]:
        """The vectors of some rows of one table; their gradients are recorded as those of `forward` are.

        Args:
            table: its name.
            rows_N: rows, any number of times each.
            dtype: of the vectors.

        Raises:
            BoundsError: a row is outside the table.
        """
        return self._vectors(self.flat(rows_N), table, dtype=dtype)

    def all_vectors(self, table: str) -> Float[Tensor, "rows D"]:
        """The vectors of all rows of one table, with a gradient as those of `vectors`; a dense table is not copied."""
        if self.has_dense_gradients:
            self.tables.check_filled()
            return self.tables.parameter(table)
        rows = torch.arange(self.tables.places[table].num_rows, device=self.tables.device)
        return self.vectors(table, rows)

    def _vectors(self, given: Lookups, table: str, *, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        layouts = self.table_layouts(table)
        flat = self.tables.checked(given, layouts)
        # Autograd reaches parameters only as arguments of the function; the kernel reads their storages.
        if self.has_dense_gradients:
            weights = [self.tables.parameter(each) for each in self.tables.places]
            return _DenseLookup.apply(self, flat, layouts, dtype, *weights)
        return _RecordedLookup.apply(self._anchor, self, flat, layouts, dtype)

    def flat_lookup(self, table: str, rows_N: Int64[Tensor, "N"]) -> tuple[Lookups, list[LookupLayout]]:
        """Return the lookup of `vectors`: rows of one table as a single field."""
        return self.tables.checked(self.flat(rows_N), self.table_layouts(table)), self.table_layouts(table)

    @staticmethod
    def flat(rows_N: Int64[Tensor, "N"]) -> Lookups:
        """Rows as a single field."""
        nothing = rows_N.new_empty(0)
        single = rows_N.view(1, -1)
        # A list of no values is described by the one offset 0.
        return Lookups(batch_size=rows_N.numel(), single=single, values=nothing, offsets=rows_N.new_zeros(1))

    def table_layouts(self, table: str) -> list[LookupLayout]:
        """Layouts that read one table as a single field, made once."""
        if table not in self._single_layouts:
            place = self.tables.places[table]
            flat = field_slot(SingleSpec(name=table, table=table), index=0, column=0, tables=self.tables)
            self._single_layouts[table] = [
                # One layout a storage, as everywhere: without slots it reads and writes nothing.
                LookupLayout(dim=place.dim, width=place.dim, slots=(flat,) if index == place.storage else ())
                for index in range(self.tables.num_storages)
            ]
        return self._single_layouts[table]

    def table(self, name: str) -> Float[Tensor, "rows D"]:
        """The weights of one table, detached.

        They share memory with it in FP32; other storages give a copy, which `tables.rows(name).write` puts back.
        """
        return self.tables.view(name).detach()

    @property
    def layouts(self) -> Sequence[LookupLayout]:
        """The layouts where every field reads and writes, one layout a storage."""
        return self._layouts

    @property
    def has_dense_gradients(self) -> bool:
        """True if tables are ordinary parameters, to be given to a torch optimizer."""
        return self.config.optimizer.is_dense

    @property
    def rounds_pooled(self) -> bool:
        """True if pooled fields are to be asked for in BF16 where the network computes in it: as asked, or on a GPU."""
        if self.config.pooled is PooledDtype.AUTO:
            return self.tables.device.type == "cuda"
        return self.config.pooled is PooledDtype.COMPUTED

    @property
    def num_weights(self) -> int:
        """Number of weights of all tables, reserved rows included."""
        return sum(place.num_rows * place.dim for place in self.tables.places.values())

    def choose_kernel(self, shape: BatchShape) -> LookupKernel:
        """Take the configured kernel, or with `auto` the fastest exact one for batches of this shape.

        The first lookup does it with its own shape if nobody has; a trainer that wants the answer in its start-up
        report calls it first.

        Raises:
            MissingDependencyError: the configured kernel is not available.
            ConfigError: the configured kernel is not exact for these tables and this rule.
        """
        # A model without tables has a dtype and a device all the same: those of the anchor.
        first = self.tables.storage(0) if self.tables.num_storages else self._anchor
        setting = KernelSetting(
            layouts=tuple(self._layouts),
            rule=self.config.rule,
            dtype=first.dtype,
            device=first.device,
            has_few_bits=any(not size.row_format.is_plain for size in self.tables.sizes.values()),
        )
        self._chosen = choose_kernel(self.config.kernel, setting=setting, shape=shape)
        return self._chosen.kernel

    @property
    def kernel(self) -> LookupKernel:
        """The implementation in use; chosen now, for batches of 2,048, if no batch came yet."""
        return self._chosen.kernel if self._chosen else self.choose_kernel(BatchShape())

    @property
    def kernel_name(self) -> KernelChoice:
        """The implementation in use; put it into `EmbeddingConfig.kernel` to repeat a run bit for bit."""
        return self.kernel.choice

    @property
    def kernel_names(self) -> list[KernelChoice]:
        """The implementation in use, as a list of one."""
        return [self.kernel_name]

    def use_kernel(self, kernel: KernelChoice) -> None:
        """Look up with this kernel; where it is in use already, the reason for it stays what it was."""
        self.config = dataclasses.replace(self.config, kernel=kernel)
        if self._chosen is None or self._chosen.kernel.choice is not kernel:
            self.choose_kernel(BatchShape())

    def facts(self) -> dict[str, float]:
        """Return what caches of hot rows, a disk and the host's memory did since the last call; {} without them."""
        return self._facts.since_last(self.tables.storages)

    def report(self) -> dict[str, object]:
        """Return what the start-up report says about tables: storages and the choice of kernel."""
        chosen = ChosenKernel(kernel=self.kernel, reason="") if self._chosen is None else self._chosen
        return {
            "kernel": chosen.kernel.choice.value,
            "why": chosen.reason,
            "measured_ms": {name: round(1e3 * seconds, 3) for name, seconds in chosen.times_s.items()},
            "not_eligible": chosen.not_eligible,
            **({"launches": chosen.launches} if chosen.launches else {}),
            "num_weights": self.num_weights,
            "storages": [
                {
                    "dim": self.tables.storage(index).dim,
                    "num_rows": self.tables.storage(index).num_rows,
                    "num_tables": len(self.tables.tables_of(index)),
                    "tables": _shown(self.tables.tables_of(index)),
                    **self.tables.storage(index).describe(),
                }
                for index in range(self.tables.num_storages)
            ],
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingTables:
        super()._apply(fn, recurse)
        self._anchor = fn(self._anchor.detach()).requires_grad_()  # where lookups end that have no table to read
        self._chosen = None  # another device or dtype may need another kernel
        if self.config.kernel is not KernelChoice.AUTO:
            self.choose_kernel(BatchShape())
        return self

    def view(self, inputs: InputSpec) -> EmbeddingTables:
        """The same tables, looked up for other fields; gradients of both are recorded in one place."""
        # Shallow: storages, anchor and what is recorded stay shared, so that one optimizer step takes both.
        other = copy.copy(self)
        other.inputs = inputs
        other._layouts = field_layouts(inputs, self.tables)
        other.field_dims = tuple(self.tables.places[spec.table].dim for spec in inputs.fields)
        other.output_dim = sum(other.field_dims)
        other._single_layouts, other._split = {}, SplitLookups(other._layouts)
        return other

    def look_up(self, lookups: Lookups, layouts: Sequence[LookupLayout], dtype: torch.dtype) -> Float[Tensor, "B T"]:
        """The columns of some layouts, one a storage; those that no layout writes are left as they come."""
        width = max((layout.width for layout in layouts), default=0)
        first = self.tables.storage(0) if self.tables.num_storages else self._anchor
        # FP32 stands for the tables' own: tables of FP64 are not to lose digits on the way.
        out_dtype = first.dtype if dtype == torch.float32 else dtype
        kernel = self.kernel
        if lookups.batch_size:  # warming up with no samples reads nothing
            self.tables.check_filled()
        # Not zeros: each layout writes all of its columns, and the others are nobody's.
        out = torch.empty(lookups.batch_size, width, dtype=out_dtype, device=first.device)
        for index, layout in enumerate(layouts):
            if layout.slots:
                self.tables.storage(index).lookup(kernel, layout=layout, lookups=lookups, out=out)
        return out

    def announce(self, *batches: Batch) -> None:
        """Say which batches come next: their rows begin to travel from a disk, or from the host to the device.

        A disk reads those of lists that are not pooled here when they are asked for.
        """
        for batch in batches:
            self._batches.announce(batch)

    def begin(self, batch: Batch) -> None:
        """Say that a training step on a batch begins: rows that travel to the device have arrived there."""
        self._batches.begin(batch)

    def drain(self) -> None:
        """Forget batches that were announced: what was read ahead of them stays until other rows take its place."""

    def settle(self) -> None:
        """Complete the last update: on one device it always is."""

    def record(self, grad: Tensor, lookups: Lookups, layouts: Sequence[LookupLayout]) -> None:
        """Keep the gradient of what `look_up` gave, for the optimizer."""
        for recorded, part in zip(self.recorded, self.parts_of(grad, lookups, layouts), strict=True):
            if part is not None:
                recorded.append(part)

    def parts_of(self, grad: Tensor, lookups: Lookups, layouts: Sequence[LookupLayout]) -> list[GradientPart | None]:
        """The gradient of each storage; None for those that the lookup did not read."""
        used = [layout for layout in layouts if layout.slots]
        if not used:
            return [None] * len(layouts)
        # Once for all storages: their layouts read columns of one gradient.
        grad = self.kernel.prepare(grad, layouts=used, lookups=lookups, dtype=self.tables.storage(0).dtype)
        return [GradientPart(layout=layout, lookups=lookups, grad=grad) if layout.slots else None for layout in layouts]


def whole_tables(embeddings: Embeddings) -> EmbeddingTables:
    """Return the tables of one device behind the objects that wrap them.

    Raises:
        ConfigError: the embeddings are spread over ranks.
    """
    found = innermost(embeddings)
    if isinstance(found, EmbeddingTables):
        return found
    raise ConfigError(
        expected="embeddings of one device, whose tables are whole",
        found=f"{type(found).__name__}, where each rank has its part",
        where="tables of a model",
        ways_out=("ask before parallelize", "load the run on one device: zg.load_run(folder).model"),
    )


class _LookupCtx(Ctx, Protocol):
    saved: tuple[EmbeddingTables, Lookups, Sequence[LookupLayout]]


class _RecordedLookup(torch.autograd.Function):
    """Lookup whose backward keeps the output gradient for `TableOptimizer`."""

    @staticmethod
    def forward(
        ctx: _LookupCtx,
        anchor: Tensor,
        tables: EmbeddingTables,
        lookups: Lookups,
        layouts: Sequence[LookupLayout],
        dtype: torch.dtype,
    ) -> Tensor:
        del anchor  # a leaf that requires a gradient, so that autograd calls backward
        ctx.saved = (tables, lookups, layouts)
        return tables.look_up(lookups, layouts, dtype)

    @staticmethod
    def backward(ctx: _LookupCtx, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        tables, lookups, layouts = ctx.saved
        tables.record(grad, lookups, layouts)
        return (None,) * 5


class _RepeatedCtx(Ctx, Protocol):
    saved: tuple[EmbeddingTables, Batch, SplitLayouts, Lookups, list[Lookups]]


class _RepeatedLookup(torch.autograd.Function):
    """Lookup of a deduplicated batch (`repeated.py`), whose backward records one gradient for each part."""

    @staticmethod
    def forward(
        ctx: _RepeatedCtx,
        anchor: Tensor,
        tables: EmbeddingTables,
        batch: Batch,
        split: SplitLayouts,
        dtype: torch.dtype,
    ) -> Tensor:
        del anchor  # a leaf that requires a gradient, so that autograd calls backward
        plain = tables.tables.checked(Lookups.of(batch), split.plain)
        groups = [
            tables.tables.checked(lookups_of(group), parts.layouts)
            for group, parts in zip(batch.repeated, split.groups, strict=True)
        ]
        ctx.saved = (tables, batch, split, plain, groups)
        out = tables.look_up(plain, split.plain, dtype)
        for group, parts, lookups in zip(batch.repeated, split.groups, groups, strict=True):
            if not parts.runs:
                continue
            try:
                pooled = tables.look_up(lookups, parts.layouts, dtype)
            except BoundsError:
                tables(batch.expanded())  # names the sample instead of the slice
                raise
            # Neighbouring fields of a group are copied as one run of columns.
            for column, own, width in parts.runs:
                out[:, column : column + width] = pooled[:, own : own + width].index_select(0, group.inverse)
        return out

    @staticmethod
    def backward(ctx: _RepeatedCtx, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        tables, batch, split, plain, groups = ctx.saved
        # In the order of `reads_of`, which sorting ahead counts on.
        tables.record(grad, plain, split.plain)
        grad = grad.float() if grad.dtype == torch.bfloat16 and split.groups else grad  # sums of slices are FP32
        for group, parts, lookups in zip(batch.repeated, split.groups, groups, strict=True):
            if parts.runs:
                pieces = [grad[:, column : column + width] for column, _, width in parts.runs]
                whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
                # Samples with the same slice add up before the lookup's own sum: as many rows as slices, not as
                # samples.
                summed = sum_slices(whole, group.inverse, num_slices=group.num_slices)
                tables.record(summed, lookups, parts.layouts)
        return (None,) * 5


class _DenseLookup(torch.autograd.Function):
    """Lookup with dense gradients for tables that are parameters."""

    @staticmethod
    def forward(
        ctx: _LookupCtx,
        tables: EmbeddingTables,
        lookups: Lookups,
        layouts: Sequence[LookupLayout],
        dtype: torch.dtype,
        *weights: Tensor,
    ) -> Tensor:
        del weights  # views of the storages, which the kernel reads
        ctx.saved = (tables, lookups, layouts)
        return tables.look_up(lookups, layouts, dtype)

    @staticmethod
    def backward(ctx: _LookupCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tables, lookups, layouts = ctx.saved
        weights = tables.tables
        whole = [weights.storage(index).tensor() for index in range(weights.num_storages)]
        dense = [torch.zeros_like(tensor) for tensor in whole if tensor is not None]  # all are in memory
        for index, part in enumerate(tables.parts_of(grad, lookups, layouts)):
            if part is not None:
                is_late = part.lookups.are_checked
                summed = sums_without_waiting(tables.kernel, [part]) if is_late else tables.kernel.sum_gradients([part])
                # Rows are distinct, or row 0 with zeros: a copy is enough, and has one order.
                dense[index].index_copy_(0, summed.rows, summed.sums)
        gradients = [dense[place.storage][place.rows] for place in weights.places.values()]
        return (None, None, None, None, *gradients)


def _shown(names: Sequence[str], *, most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

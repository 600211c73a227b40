"""Embeddings: the contract of what a model looks its features up in, and of objects that wrap it.

    model.embeddings ──► Counted ──► Deduplicated ──► PrioritisedExchange ──► ShardedEmbeddings ──► ShardedTables
                         (yours)     └──────────────── put there by `parallelize` ───────────────┘
    model.embeddings ──► Counted ──► EmbeddingTables ──► TableWeights                      (on one device)

An object of the contract promises:

1. *Same rows, same vectors.* A call gives (B, T): columns in the order of `inputs.fields`, as wide as `field_dims`
   says. With towers on many ranks it gives what that rank's `TowerTransform` takes. Rows outside of a table raise
   `BoundsError`.
2. *Nothing changes before the optimizer's step.* A backward pass records the gradients of the rows that were read;
   where `has_dense_gradients`, it leaves them in `parameters()`.
3. *Words about coming batches change no number.* `announce`, `begin` and `drain` may be called or left out. What was
   announced is known again by the object: the same `Batch`, in the order of the announcement.
4. *Nothing is under way after `settle`.* Weights and the optimizer's state may then be read as a whole.
5. *Names of weights are those of one device*, `tables.NAME.weight`, however many objects stand before the tables.

On many ranks lookups and words about batches are collective, `settle` too. An object that wraps another derives from
`EmbeddingsWrapper`, which passes everything on, and overrides what it changes: `changed` alone where it looks up other
rows. `parallelize` changes the innermost object for one that is spread over ranks, and leaves those that wrap it where
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self
from weakref import ref

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings.config import EmbeddingConfig
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.ops.lookup import KernelChoice
from ziggurat.ops.lookup.choose import BatchShape
from ziggurat.ops.pad_lists import pad_lists
from ziggurat.ops.repeat import expand_lists

Slices = tuple[Float[Tensor, "N D"], Int64[Tensor, "U+1"], Int64[Tensor, "B"] | None]


class Embeddings(Protocol):
    """Gives the rows of a batch their vectors. The module's docstring is the contract."""

    @property
    def inputs(self) -> InputSpec:
        """The features."""
        ...

    @property
    def config(self) -> EmbeddingConfig:
        """Dims, rule, kernel."""
        ...

    @property
    def tables(self) -> Any:
        """The weights by table: `draw`, `mark_filled`, and on one device all of `TableWeights`."""
        ...

    @property
    def field_dims(self) -> tuple[int, ...]:
        """Numbers of each field that a call gives, in their order."""
        ...

    @property
    def has_dense_gradients(self) -> bool:
        """True if tables are ordinary parameters, to be given to a torch optimizer."""
        ...

    @property
    def rounds_pooled(self) -> bool:
        """True if pooled fields are to be asked for in BF16 where the network computes in it."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """All modules that it is made of, itself first."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Tables that are ordinary parameters; none elsewhere."""
        ...

    def __call__(self, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Any:
        """Look up and pool every field: (B, T)."""
        ...

    def unpooled(
        self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "N D"], Int64[Tensor, "B+1"]]:
        """The vectors of a list feature, one for each row, and the offsets that cut them into lists."""
        ...

    def unpooled_slices(self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32) -> Slices:
        """`unpooled` for slices: vectors, offsets, and the slice of each sample (None: one list a sample)."""
        ...

    def sequence(
        self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "B L D"], Bool[Tensor, "B L"]]:
        """`unpooled` with lists of one length, and what lies inside of them."""
        ...

    def vectors(
        self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N D"]:
        """The vectors of some rows of one table."""
        ...

    def all_vectors(self, table: str) -> Float[Tensor, "rows D"]:
        """The vectors of all rows of one table, with a gradient as those of `vectors`."""
        ...

    def table(self, name: str) -> Float[Tensor, "rows D"]:
        """The weights of one table, detached; refused where this rank may not have all of them."""
        ...

    def announce(self, *batches: Batch) -> None:
        """Say which batches come next, in their order."""
        ...

    def begin(self, batch: Batch) -> None:
        """Say that a training step on a batch begins."""
        ...

    def drain(self) -> None:
        """Forget batches that were announced and will not come."""
        ...

    def settle(self) -> None:
        """Complete the last update."""
        ...

    def choose_kernel(self, shape: BatchShape) -> object:
        """Choose the kernel that is fastest for batches of this shape, where the config leaves it open."""
        ...

    def use_kernel(self, kernel: KernelChoice) -> None:
        """Look up with this kernel."""
        ...

    @property
    def kernel_names(self) -> list[KernelChoice]:
        """The kernels in use; none where there is nothing to look up."""
        ...

    def report(self) -> dict[str, object]:
        """Return what the start-up report says about the tables and their kernel."""
        ...

    def facts(self) -> dict[str, float]:
        """Return what a training log says of lookups since the last call; {} for none."""
        ...


class ListsOfSlices:
    """Gives lists that are not pooled from those of slices; on many ranks collective, as `unpooled_slices` is."""

    def unpooled(
        self: Embeddings, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "N D"], Int64[Tensor, "B+1"]]:
        """The vectors of a list feature for the samples of this batch, one for each row, not pooled.

        Args:
            batch: rows within their tables.
            name: a jagged feature, whatever its pooling.
            dtype: of the vectors.

        Returns:
            (N, D) vectors, sample after sample, and (B + 1,) offsets from 0 to N that cut them into lists.
        """
        vectors_ND, offsets_U1, inverse_B = self.unpooled_slices(batch, name, dtype=dtype)
        if inverse_B is None:
            return vectors_ND, offsets_U1
        sizes = batch.sizes(self.inputs.list_position(name))
        return expand_lists(vectors_ND, offsets_U1, inverse_B, num_rows=None if sizes is None else sizes.num_rows)

    def sequence(
        self: Embeddings, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "B L D"], Bool[Tensor, "B L"]]:
        """`unpooled` with lists of one length, the longest of this batch; see `pad_lists`."""
        sizes = batch.sizes(self.inputs.list_position(name))
        return pad_lists(*self.unpooled(batch, name, dtype=dtype), longest=None if sizes is None else sizes.longest)


class EmbeddingsWrapper(ListsOfSlices, nn.Module):
    """Passes every call on to the embeddings that it wraps; derive from it, and override what is to change.

    What it wraps is no submodule of it: names of weights stay as they are.

    Args:
        inner: what it wraps.

    Example:
        >>> from ziggurat.embeddings.contract import EmbeddingsWrapper
        >>> from ziggurat.testing.batches import random_batch, small_inputs
        >>> inputs = small_inputs(num_single=2, num_jagged=1)
        >>> tables = zg.EmbeddingTables(inputs, zg.EmbeddingConfig(dim=4), seed=0)
        >>> EmbeddingsWrapper(tables)(random_batch(inputs, 5)).shape
        torch.Size([5, 12])
    """

    def __init__(self, inner: Embeddings) -> None:
        super().__init__()
        self._changed: dict[int, tuple[ref[Batch], Batch | None]] = {}  # None: as it was
        self.wrap_around(inner)

    def changed(self, batch: Batch) -> Batch:
        """The batch that is looked up in place of this one; override it to change rows, not sizes.

        It is asked once for each `Batch` object, where that is announced or looked up first.
        """
        return batch

    @property
    def inner(self) -> Embeddings:
        """The embeddings that it wraps."""
        return self._inner[0]

    def wrap_around(self, inner: Embeddings) -> Self:
        """Wrap these embeddings from now on.

        Raises:
            ConfigError: they are no module.
        """
        if not isinstance(inner, nn.Module):
            raise ConfigError(
                expected="embeddings that are a torch.nn.Module, whose weights have names in checkpoints",
                found=f"{type(inner).__name__}, which is none",
                where=f"{type(self).__name__}, a wrapper of embeddings",
                ways_out=(
                    "EmbeddingsWrapper as its base class, which passes everything on",
                    "nn.Module as its base class",
                ),
            )
        self._inner: tuple[Embeddings] = (inner,)  # in a tuple: not a submodule
        # Shared, not copied: names of weights stay those of one device, however many objects stand before the tables.
        self._inner_module: tuple[nn.Module] = (inner,)
        self._modules = inner._modules
        self._parameters = inner._parameters
        self._buffers = inner._buffers
        return self

    # ------------------------------------------------------------------------------------------------------- lookups

    def forward(self, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Any:
        """Look up and pool every field."""
        return self.inner(self._of(batch), dtype=dtype)

    def unpooled_slices(self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32) -> Slices:
        """`unpooled` for slices."""
        return self.inner.unpooled_slices(self._of(batch), name, dtype=dtype)

    def vectors(
        self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N D"]:
        """The vectors of some rows of one table."""
        return self.inner.vectors(table, rows_N, dtype=dtype)

    def all_vectors(self, table: str) -> Float[Tensor, "rows D"]:
        """The vectors of all rows of one table."""
        return self.inner.all_vectors(table)

    def start(self, batch: Batch) -> Any:
        """Begin the lookup of a part of a batch, on many ranks; see `parallel/pipeline.py`."""
        spread: Any = self.inner
        return spread.start(self._of(batch))

    # ------------------------------------------------------------------------------------------------ coming batches

    def announce(self, *batches: Batch) -> None:
        """Say which batches come next, in their order."""
        self.inner.announce(*map(self._of, batches))

    def send_ahead(self, upcoming: Batch | None) -> None:
        """Send what can be sent of announced batches, on many ranks; see `parallel/pipeline.py`."""
        spread: Any = self.inner
        spread.send_ahead(None if upcoming is None else self._of(upcoming))

    def begin(self, batch: Batch) -> None:
        """Say that a training step on a batch begins."""
        self.inner.begin(self._of(batch))

    def drain(self) -> None:
        """Forget batches that were announced and will not come."""
        self.inner.drain()

    def settle(self) -> None:
        """Complete the last update."""
        self.inner.settle()

    # --------------------------------------------------------------------------------------------- tables and kernels

    @property
    def inputs(self) -> InputSpec:
        """The features."""
        return self.inner.inputs

    @property
    def config(self) -> EmbeddingConfig:
        """Dims, rule, kernel."""
        return self.inner.config

    @property
    def tables(self) -> Any:
        """The weights by table."""
        return self.inner.tables

    @property
    def field_dims(self) -> tuple[int, ...]:
        """Numbers of each field that a call gives, in their order."""
        return self.inner.field_dims

    @property
    def has_dense_gradients(self) -> bool:
        """True if tables are ordinary parameters."""
        return self.inner.has_dense_gradients

    @property
    def rounds_pooled(self) -> bool:
        """True if pooled fields are to be asked for in BF16 where the network computes in it."""
        return self.inner.rounds_pooled

    def table(self, name: str) -> Float[Tensor, "rows D"]:
        """The weights of one table, detached."""
        return self.inner.table(name)

    def choose_kernel(self, shape: BatchShape) -> object:
        """Choose the kernel that is fastest for batches of this shape."""
        return self.inner.choose_kernel(shape)

    def use_kernel(self, kernel: KernelChoice) -> None:
        """Look up with this kernel."""
        self.inner.use_kernel(kernel)

    @property
    def kernel_names(self) -> list[KernelChoice]:
        """The kernels in use."""
        return self.inner.kernel_names

    def report(self) -> dict[str, object]:
        """Return what the start-up report says about the tables and their kernel."""
        return self.inner.report()

    def facts(self) -> dict[str, float]:
        """Return what a training log says of lookups since the last call."""
        return self.inner.facts()

    def __getattr__(self, name: str) -> Any:
        """Find what is no part of the contract in the embeddings that it wraps."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(inner[0], name)

    def _of(self, batch: Batch) -> Batch:
        """The changed batch, the same object each time: what was announced is known by it."""
        if type(self).changed is EmbeddingsWrapper.changed:
            return batch
        known = self._changed.get(id(batch))
        if known is not None and known[0]() is batch:
            return batch if known[1] is None else known[1]
        changed = self.changed(batch)
        key = id(batch)
        forget = ref(batch, lambda gone: self._forget(key, gone))
        self._changed[key] = forget, None if changed is batch else changed
        return changed

    def _forget(self, key: int, gone: ref[Batch]) -> None:
        """Let a changed batch go with the one that it was made of; another may have its number by now."""
        if key in self._changed and self._changed[key][0] is gone:
            del self._changed[key]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._inner_module[0]._apply(fn, recurse)
        return self


def innermost(embeddings: Embeddings) -> Embeddings:
    """Return the embeddings that others wrap."""
    while isinstance(embeddings, EmbeddingsWrapper):
        embeddings = embeddings.inner
    return embeddings


def with_innermost(embeddings: Embeddings, tables: Embeddings) -> Embeddings:
    """Let the objects that wrap the innermost embeddings wrap others; return the outermost."""
    if not isinstance(embeddings, EmbeddingsWrapper):
        return tables
    return embeddings.wrap_around(with_innermost(embeddings.inner, tables))

"""InputSpec: what a model sees of a data set, after preprocessing was fitted. Plain data.

The schema speaks of columns; the spec speaks of tensors: the order of the dense columns, which features carry one
row a sample (`single`) or a list (`jagged`), which table each looks up and how many rows that table has. Models
and embeddings are built from it, and from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from ziggurat.features.growing import Growing
from ziggurat.features.items import Items
from ziggurat.features.labels import Outcomes, with_outcomes
from ziggurat.features.pooling import Pooling
from ziggurat.features.tasks import USUAL, Task
from ziggurat.plain import JSON, as_group, as_list, as_text
from ziggurat.typed import Dim, DimOrDefault, Length, PositiveFloat, Rows, checked


@dataclass(frozen=True, kw_only=True)
@checked
class TableSpec:
    """An embedding table after fitting. `num_rows` counts the three reserved rows too.

    Of a growing one encoded data holds numbers of ids (`features/growing.py`), which become rows before a model sees
    them.
    """

    name: str
    num_rows: Rows
    embedding_dim: DimOrDefault = 0  # 0: the model's
    growing: Growing | None = None


@dataclass(frozen=True, kw_only=True)
class NumberSpec:
    """A feature that is one number a sample; `InputSpec.dense` lists their names."""

    name: str


@dataclass(frozen=True, kw_only=True)
@checked
class SingleSpec:
    """A feature with exactly one row a sample."""

    name: str
    table: str


@dataclass(frozen=True, kw_only=True)
@checked
class JaggedSpec:
    """A feature with any number of rows a sample; `ordered` tells sequences from multi-hot lists."""

    name: str
    table: str
    pooling: Pooling = Pooling.MEAN
    ordered: bool = False
    max_length: Length = 1000


class HistoryPooling(StrEnum):
    """Ways to make one vector of a history of vectors."""

    MEAN = "mean"  # of those there are
    ATTENTION = "attention"  # the mean, and beside it a sum weighted by what the sample itself is about


# A pool divides vectors by their deviation, of which FP32 must hold the square.
LARGEST_OF_VECTORS = 1e15


@dataclass(frozen=True, kw_only=True)
@checked
class VectorHistory:
    """Up to `length` vectors a sample, the latest first, in the bytes in which they were logged.

    A batch has them as (B, `words`) int32: how many there are, then `length` rows of `row_words`; what lies behind the
    last vector is zero. `ops/vector_histories.py` packs and unpacks them.

    Args:
        length: most vectors of a sample.
        dim: D, numbers of a vector.
        format: row format of the vectors.
        row_words: 4 bytes each, of a vector in this format.
        pooling: what a model makes of them.
    """

    length: Length
    dim: Dim
    format: str
    row_words: Dim
    pooling: HistoryPooling = HistoryPooling.ATTENTION

    @property
    def words(self) -> int:
        """Numbers of 4 bytes that a sample has in encoded data and in a batch."""
        return 1 + self.length * self.row_words

    @property
    def pooled_dim(self) -> int:
        """Numbers that the dense network reads: pooled vectors, and how many there were."""
        return (self.dim if self.pooling is HistoryPooling.MEAN else 2 * self.dim) + 1


@dataclass(frozen=True, kw_only=True)
@checked
class VectorSpec:
    """A vector of `dim` floats a sample: pretrained, or what a model pools of a history of vectors.

    Args:
        name: of the feature.
        dim: numbers that the dense network reads.
        history: what a batch holds in place of the vector; None: the vector itself, in float32.
    """

    name: str
    dim: Dim
    history: VectorHistory | None = None

    @property
    def width(self) -> int:
        """Numbers of 4 bytes that a sample has in encoded data and in a batch."""
        return self.dim if self.history is None else self.history.words


@dataclass(frozen=True, kw_only=True)
@checked
class MomentsSpec:
    """A list of times a sample, at most `max_length` of them; in a batch `sequences[name].values["time"]`."""

    name: str
    max_length: Length = 1000


@dataclass(frozen=True, kw_only=True)
@checked
class ExtraSpec:
    """A column that a loss reads, in a batch `extras[name]`: (B,) where `dim` is 0, else (B, dim)."""

    name: str
    dim: DimOrDefault = 0


@dataclass(frozen=True, kw_only=True)
@checked
class LabelSpec:
    """A label column as a model sees it; its numbers and its outcomes as in `schema.Label`.

    Args:
        offset: mean of the training rows of a label that is a number: what a model says that has learned nothing.
        scale: their standard deviation; a network computes in units of it, and its loss is in units of its square.
    """

    name: str
    task: Task = USUAL
    offset: float = 0.0
    scale: PositiveFloat = 1.0
    weight: PositiveFloat = 1.0
    positive_weight: float = 1.0
    negative_rate: float = 1.0
    outcomes: Outcomes = Outcomes.ANY


@dataclass(frozen=True, kw_only=True)
@checked
class InputSpec:
    """Names, order and sizes of everything in a `Batch`.

    `Batch.dense` has its columns in the order of `dense`, `Batch.single` its first axis in the order of `single`,
    `Batch.jagged` its features in the order of `jagged`, `Batch.labels` its columns in the order of `labels`.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> inputs = small_inputs(num_dense=2, num_single=1)
        >>> inputs.dense, inputs.single[0].name, inputs.tables[0].num_rows
        (('dense0', 'dense1'), 'single0', 12)
    """

    dense: tuple[str, ...] = ()
    single: tuple[SingleSpec, ...] = ()
    jagged: tuple[JaggedSpec, ...] = ()
    vectors: tuple[VectorSpec, ...] = ()
    tables: tuple[TableSpec, ...] = ()
    labels: tuple[LabelSpec, ...] = ()
    has_weights: bool = False
    has_groups: bool = False
    moments: tuple[MomentsSpec, ...] = ()
    has_sessions: bool = False  # encoded data knows the session of each row; a batch does not
    items: Items | None = None  # which features describe the item
    extras: tuple[ExtraSpec, ...] = ()  # in batches with labels alone

    def table(self, name: str) -> TableSpec:
        """The table called `name`; KeyError if there is none."""
        return self._table_of[name]

    @cached_property
    def numbered(self) -> frozenset[str]:
        """Features whose encoded data are numbers of ids, of 62 bits, and not yet rows: those of tables that grow."""
        return frozenset(spec.name for spec in self.lookups if self.table(spec.table).growing is not None)

    @cached_property
    def has_number_labels(self) -> bool:
        """True if a label is a number: labels are then FP64, from the raw file to the metric.

        FP32 knows every whole number up to 16.8 million only: of a label around 1e9 it keeps the multiples of 64.
        """
        return any(label.task.is_number for label in self.labels)

    @cached_property
    def _table_of(self) -> dict[str, TableSpec]:
        return {table.name: table for table in self.tables}

    def table_columns(self, dim: int, *, extra: int = 0) -> dict[str, int]:
        """Columns of every table: as the schema says, else `dim`; and `extra` more."""
        return {table.name: (table.embedding_dim or dim) + extra for table in self.tables}

    def list_position(self, name: str) -> int:
        """Return the position of a list feature in `jagged`."""
        return [spec.name for spec in self.jagged].index(name)

    @property
    def lookups(self) -> tuple[SingleSpec | JaggedSpec, ...]:
        """Every feature with an embedding, in canonical order: all single ones, then all jagged ones."""
        return (*self.single, *self.jagged)

    @property
    def fields(self) -> tuple[SingleSpec | JaggedSpec, ...]:
        """Every feature with one pooled embedding a sample, in canonical order."""
        return (*self.single, *(spec for spec in self.jagged if spec.pooling is not Pooling.NONE))

    @property
    def vector_histories(self) -> tuple[VectorSpec, ...]:
        """Every vector that a model pools of a history of vectors."""
        return tuple(spec for spec in self.vectors if spec.history is not None)

    @property
    def sequences(self) -> tuple[JaggedSpec, ...]:
        """Every list whose embeddings are not pooled."""
        return tuple(spec for spec in self.jagged if spec.pooling is Pooling.NONE)


def labels_with_outcomes(inputs: dict[str, JSON]) -> dict[str, JSON]:
    """Plain data of an InputSpec as it is written now, from files whose labels did not say their outcomes."""
    moments = [as_text(as_group(spec)["name"]) for spec in as_list(inputs.get("moments", []))]
    return {**inputs, "labels": with_outcomes(as_list(inputs.get("labels", [])), moments=moments)}

"""Feature: what a column means to a model, and everything that follows from it.

Each feature of a schema is an object with the settings that the schema gives it; its class is its *kind*. The rest of
the package asks the object

    what it reads       `reads_numbers`, `is_id`, `id_lists`       readers of files, inspection, exports
    what it looks up    `table_name`, `default_table`, `num_rows`  tables, vocabularies, plans
    what a batch holds  `spec`                                     inputs of models, encoded data, loaders
    from cells          `parse`                                    preprocessing: bad cells are named here
    what is learned     `fitted_numbers`                           fitting, in one pass over the training rows
    to tensors          `encode`                                   training, evaluation, prediction, serving
    a request           `of_request`, `request_type`, `json_schema`  servers
    and for people      `state`, `pooled`                          fingerprints, baselines

and never which kind it is. A value goes this way, in training and in serving alike:

    raw cells ──parse──► parsed: numbers, ids, lists, vectors, times ──encode──► one encoded column ──► a tensor

The encoded column has the name of the feature and one of five forms, which `spec` chooses:

    NumberSpec     a number a sample                      (N,) float32
    SingleSpec     a row of a table a sample              (N,) int32
    JaggedSpec     any number of rows of a table          values and lengths
    VectorSpec     `dim` numbers a sample                 (N, dim) float32; of a history of vectors (N, W) int32
    MomentsSpec    any number of times                    values and lengths, int64

Loaders, caches, exchanges between ranks and models know these forms alone, so a kind that is added from outside needs
nothing of them. The arithmetic over many cells at once (canonical texts, hashes, exact statistics) is the reader's,
`Cells` and `Fitted`, which `data/preprocess` gives; a kind says which of it is wanted, or brings its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from ziggurat.config import JSON, to_json
from ziggurat.errors import ConfigError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.inputs import JaggedSpec, MomentsSpec, NumberSpec, SingleSpec, VectorHistory, VectorSpec
from ziggurat.features.tables import Table
from ziggurat.specification import Family

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    from jaxtyping import Float32, Float64, Int32

    from ziggurat.features.kinds.id_lists import IdLists
    from ziggurat.features.kinds.numbers import FittedNumbers

# The values of a feature in a chunk of rows, in one of the forms that `Feature.parse` names.
Parsed: TypeAlias = Any
# What `encode` makes of them: (N,) numbers or rows, (N, dim) vectors, or lists as (values, lengths).
Encoded: TypeAlias = Any
# A type of polars, as the class itself or made with its settings: both stand for a column.
ColumnType: TypeAlias = "pl.DataType | type[pl.DataType]"
Spec: TypeAlias = NumberSpec | SingleSpec | JaggedSpec | VectorSpec | MomentsSpec


class Cells(Protocol):
    """The raw column of one feature in a chunk of N rows, and ways to read it.

    Every way names the cells that it cannot read, whose rows are then bad rows; a column of a type that it cannot read
    at all is a `SchemaError`.
    """

    @property
    def series(self) -> pl.Series:
        """The raw column, of whatever type the file has; texts that mean nothing are null."""
        ...

    def numbers(self) -> Float64[np.ndarray, " N"]:
        """Return a number a row, NaN where missing."""
        ...

    def ids(self) -> Parsed:
        """Return an id a row, by its canonical text."""
        ...

    def ids_of_buckets(self, numbers: Float64[np.ndarray, " N"]) -> Parsed:
        """Return the bucket of each number as an id, by the transform that `fitted_numbers` names."""
        ...

    def id_lists(self, settings: IdLists, *, keep_last: bool, lists: pl.Series | None = None) -> Parsed:
        """Return a list of ids a row: `values`, the ids of all lists, and `lengths`, (N,) int64.

        Args:
            settings: say how texts are divided, and how many ids a list keeps (`max_length`); a kind that derives from
                `IdLists` gives itself.
            keep_last: a longer list keeps its last ids; else its first.
            lists: lists of the kind's own, one for each of the N rows: a column of lists of texts, integers or
                booleans. None: the raw column.
        """
        ...

    def vectors(self, dim: int) -> Float32[np.ndarray, "N dim"]:
        """Return a vector a row, zeros where missing."""
        ...

    def vector_histories(self, history: VectorHistory) -> Int32[np.ndarray, "N W"]:
        """Return the packed vectors of each row, none where missing; of what the join made, or of lists of vectors."""
        ...

    def times(self, *, max_length: int, seen: tuple[int, ...], date_order: DateOrder = DateOrder.AUTO) -> Parsed:
        """Return a list of times a row, cut to its last times; dates count microseconds."""
        ...

    def refuse(self, row: int, *, expected: str, ways_out: tuple[str, ...] = ()) -> None:
        """Note that the cell in a row cannot be read: its row is a bad row."""
        ...


class Fitted(Protocol):
    """Give what was learned from the training rows, for one feature."""

    def rows(self, ids: Parsed) -> np.ndarray:
        """Return the rows of ids in the table of the feature."""
        ...

    def transformed(self, numbers: Float64[np.ndarray, " N"]) -> Float32[np.ndarray, " N"]:
        """Return numbers after the transform that `fitted_numbers` names."""
        ...

    def bucket_rows(self, numbers: Float64[np.ndarray, " N"]) -> np.ndarray:
        """Return the rows of the quantile buckets that numbers fall into."""
        ...


class RequestReader(Protocol):
    """Ways to read one value of a request; what they cannot read is a `RequestError` that names the column."""

    def number(self, value: object) -> float | None:
        """Return the number that a value of any type that JSON has means."""
        ...

    def id(self, value: object) -> str | None:
        """Return the text of an id of any type that JSON has."""
        ...

    def ids(self, value: object, *, separator: str) -> list[str | None] | None:
        """Return the texts of the ids of a list, or of a text that is divided."""
        ...

    def numbers(self, value: object) -> list[float | None]:
        """Return the numbers of a list."""
        ...

    def times(
        self, value: object, *, feature: str, seen: tuple[int, ...], date_order: DateOrder = DateOrder.AUTO
    ) -> list[int | None]:
        """Return the times of a list; dates count microseconds."""
        ...

    def refused(self, value: object, *, expected: str) -> Exception:
        """Return the error for a value that cannot be, to be raised."""
        ...


@dataclass(frozen=True, kw_only=True)
class Feature(Family, ABC, family="kind of feature"):
    """A feature of a schema. See the module's docstring.

    Args:
        kind: the name of the class in schemas and files.
        name: unique among features.
        column: the raw column; "" is the name.

    Attributes:
        reads_numbers: the column is numbers, read as such and as nothing else.
        is_id: the column is one id a row.
        holds_times: the feature is a list of times.
        json_schema: what values a request may have, as JSON Schema says it.
    """

    kind: str = ""
    name: str
    column: str = ""

    reads_numbers: ClassVar[bool] = False
    is_id: ClassVar[bool] = False
    holds_times: ClassVar[bool] = False
    json_schema: ClassVar[dict[str, JSON]] = {}

    @property
    def id_lists(self) -> IdLists | None:
        """Settings of lists of ids, of features that are one."""
        return None

    @property
    def about(self) -> str:
        """The raw column that says what the values describe: its own, or that of whom they are joined to."""
        return self.column or self.name

    @property
    def table_name(self) -> str:
        """The table that the feature looks up, or "" for none."""
        return ""

    @property
    def owns_table(self) -> bool:
        """True if nothing else may look up the table, whose rows are no ids of a raw column."""
        return False

    @property
    def num_rows(self) -> int | None:
        """Rows of the table (but the reserved ones), where the feature says it and no vocabulary is fitted."""
        return None

    def doubts(self) -> list[str]:
        """Say what a schema sets of the feature without any effect; training warns of it."""
        return []

    def default_table(self) -> Table:
        """Return the table that the feature looks up where the schema lists none of that name."""
        return Table(name=self.table_name)

    @abstractmethod
    def spec(self) -> Spec:
        """Say what the feature is in a batch."""

    @abstractmethod
    def parse(self, cells: Cells) -> Parsed:
        """Read the raw cells of a chunk of N rows.

        Returns:
            One of six forms, whose values `encode` is given; everything else is refused with a `SchemaError`:

                a number a row      (N,) float64, NaN where missing; of one's own, or `cells.numbers()`
                a vector a row      (N, dim) float32; of one's own, or `cells.vectors(dim)`
                vectors a row       what `cells.vector_histories(history)` returned
                an id a row         what `cells.ids()` or `cells.ids_of_buckets(numbers)` returned
                a list of ids       what `cells.id_lists(settings, keep_last=…)` returned; with `lists=…` of lists that
                                    the kind itself made of the cells
                a list of times     what `cells.times(…)` returned

            `encode` makes rows of ids by `fitted.rows(parsed)`, and of lists `fitted.rows(parsed.values)` beside
            `parsed.lengths`.
        """

    @property
    def fitted_numbers(self) -> FittedNumbers | None:
        """Name what is to be learned of the parsed numbers from the training rows; None: nothing."""
        return None

    def encode(self, parsed: Parsed, fitted: Fitted) -> Encoded:
        """Return the encoded column of parsed values; by default they are it."""
        del fitted
        return parsed

    @abstractmethod
    def of_request(self, value: object, read: RequestReader) -> object:
        """Return a value of a request, which is not None, as a cell that `parse` reads."""

    @abstractmethod
    def request_type(self) -> ColumnType:
        """Return the polars type of a column of such cells."""

    def pooled(self) -> Feature:
        """Return the feature for models that read no sequences."""
        return self

    @property
    def seen_times(self) -> tuple[int, ...]:
        """The earliest and the latest time of training, of features that hold times and know it."""
        return ()

    def with_seen_times(self, seen: tuple[int, ...]) -> Feature:
        """Return the feature with what training has seen of its times, if it holds any."""
        del seen
        return self

    @property
    def seen_date_order(self) -> DateOrder:
        """The order in which training has read dates like 01/03/2024, of features that hold times and know it."""
        return DateOrder.AUTO

    def with_seen_date_order(self, order: DateOrder) -> Feature:
        """Return the feature with the order in which training has read the dates of its times, if it holds any."""
        del order
        return self

    @classmethod
    def try_out(cls) -> None:
        """Refuse a kind that leaves a question open, or that says what it is in a batch in a form that nobody knows."""
        if cls.__abstractmethods__:
            raise ConfigError(
                expected="a kind of feature with answers to all that has no usual one",
                found=f"no {', no '.join(sorted(cls.__abstractmethods__))}",
                where=f"{cls.__module__}.{cls.__qualname__}",
                ways_out="write the method; docs/guides/extending.md says what it is asked",
            )
        needed = [each for each in fields(cls) if each.default is MISSING is each.default_factory]
        if [each.name for each in needed] != ["name"]:
            return  # nobody else knows what its settings might be
        tried = cls(name="tried")
        if not isinstance(tried.table_name, str):
            raise ConfigError(
                expected="`table_name`: a property that returns the name of a table, or an empty text for none",
                found="a method" if callable(tried.table_name) else repr(tried.table_name),
                where=f"{cls.__module__}.{cls.__qualname__}.table_name",
                ways_out="write @property above def table_name(self) -> str",
            )
        spec = tried.spec()
        if not isinstance(spec, Spec) or spec.name != "tried":
            raise ConfigError(
                expected="a NumberSpec, SingleSpec, JaggedSpec, VectorSpec or MomentsSpec with the name of the feature",
                found=repr(spec),
                where=f"{cls.__module__}.{cls.__qualname__}.spec",
                ways_out="return NumberSpec(name=self.name), or another of these",
            )
        looked_up = spec.table if isinstance(spec, SingleSpec | JaggedSpec) else ""
        if looked_up != tried.table_name:
            raise ConfigError(
                expected="one table in `spec` and in `table_name`, which fitting and plans ask for",
                found=f"table {looked_up!r} in `spec`, and table_name {tried.table_name!r}",
                where=f"{cls.__module__}.{cls.__qualname__}",
                ways_out="let `table_name` be a property that returns the table, and name it in `spec`: "
                "SingleSpec(name=self.name, table=self.table_name)",
            )

    def state(self) -> dict[str, JSON]:
        """Return plain data that fingerprints are made of: all that decides what is encoded."""
        return to_json(self)

"""Schema: what every column of a table means. Plain data, TOML in and out (`schema_io.py`).

A schema names *features* (model inputs), *labels* (what is predicted) and a few columns with a role: `weight`, `group`
(for GAUC), `session`, `time`. It says nothing about a model. It is written by hand or guessed by
`ziggurat data inspect FILE --write-schema my.toml`, and saved with every run, so that evaluation, prediction and
serving turn the same raw values into the same rows.

Words: an *id* is the raw value in the file; a *row* is where it lands in its embedding table. The first three rows
of every table are reserved, whatever the encoding:

    row 0  padding   its embedding is zero and is never trained
    row 1  unknown   ids never seen in training, or seen fewer than `min_count` times
    row 2  missing   null in a scalar column (a null or empty *list* is an empty list, with no rows)
    row 3… the ids   by falling count for a vocabulary, 3 + hash mod for hashing, 3 + id for identity,
                     as they come and go in training for a growing one
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from ziggurat.config import to_json
from ziggurat.errors import SchemaError
from ziggurat.features.events import Events
from ziggurat.features.growing import Evict
from ziggurat.features.items import Items, Repeats
from ziggurat.features.labels import Label as Label
from ziggurat.features.labels import MissingLabel as MissingLabel
from ziggurat.features.labels import Outcomes as Outcomes
from ziggurat.features.labels import Task as Task
from ziggurat.features.labels import is_what_came_next
from ziggurat.features.schema_checks import (
    refuse_doubles,
    refuse_impossible_table,
    refuse_our_columns,
    refuse_too_many_columns,
)
from ziggurat.typed import Buckets, Count, Dim, DimOrDefault, Float32, Length, Rows, checked

# Texts that people and programs write for "no value". Schemas in TOML, and guessed ones, take them as null unless they
# say otherwise (`missing = [...]`); a Schema made in Python names its own.
MISSING_TEXTS = ("NULL", "null", "N/A", "n/a", "NA", "NaN", "nan", "None", "\\N", "-")

PADDING_ROW = 0
UNKNOWN_ROW = 1
MISSING_ROW = 2
NUM_RESERVED_ROWS = 3


_checked = functools.partial(checked, error=SchemaError)


class Encoding(StrEnum):
    """Ways in which a table turns raw ids into rows."""

    VOCABULARY = "vocabulary"  # fitted on the training data: one row for each id seen min_count times
    HASHING = "hashing"  # a stable 64-bit hash modulo num_rows; no fitting, collisions possible
    IDENTITY = "identity"  # the ids are already 0 … num_rows-1
    GROWING = "growing"  # training admits ids as they come, num_rows at a time; see docs/guides/growing-vocabularies.md


class OutOfRange(StrEnum):
    """Ways to treat an id outside 0 … num_rows-1 of an `identity` table."""

    ERROR = "error"
    UNKNOWN = "unknown"  # counted, and sent to the unknown row
    CLAMP = "clamp"  # counted, and moved to the nearest valid id


class NumericTransform(StrEnum):
    """Transforms of a number before it reaches the model."""

    IDENTITY = "identity"
    LOG1P = "log1p"  # sign(x)·ln(1+|x|)
    STANDARDISE = "standardise"  # (x − mean) / sd of the training data
    LOG1P_STANDARDISE = "log1p_standardise"
    QUANTILE = "quantile"  # rank in the training data, uniform in [0, 1]
    QUANTILE_BUCKETS = "quantile_buckets"  # becomes a categorical field of num_buckets rows
    CRITEO_BUCKETS = "criteo_buckets"  # floor(ln(x)²) for x > 2, else int(x); a categorical field with a vocabulary

    @property
    def makes_rows(self) -> bool:
        """True if the feature becomes a field with an embedding table, instead of a number."""
        return self in (NumericTransform.QUANTILE_BUCKETS, NumericTransform.CRITEO_BUCKETS)


class Pooling(StrEnum):
    """Ways to pool the embeddings of a list into one."""

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"  # not at all: a model that reads sequences gets one vector for each row


class Spaces(StrEnum):
    """Ways to treat spaces around the ids of a list."""

    KEEP = "keep"  # they are part of the ids
    STRIP = "strip"


@dataclass(frozen=True, kw_only=True)
@_checked
class Table:
    """An embedding table with the rows that one or more features share.

    Args:
        name: unique among tables.
        encoding: see `Encoding`.
        num_rows: rows for ids (without the reserved ones); refused for vocabulary, needed for all others.
        min_count: a vocabulary keeps ids seen at least this often in the training data; a growing one admits an id when
            training has seen it so often.
        max_rows: a vocabulary keeps at most this many ids, the most frequent ones. 0: no limit.
        out_of_range: what an `identity` table does with ids outside its range.
        embedding_dim: columns of this table; 0 takes the model's.
        evict: which id of a full growing table makes room for another one.

    Example:
        >>> zg.Table(name="item", min_count=5).min_count
        5
    """

    name: str
    encoding: Encoding = Encoding.VOCABULARY
    num_rows: Rows = 0
    min_count: Count = 1
    max_rows: Rows = 0
    out_of_range: OutOfRange = OutOfRange.ERROR
    embedding_dim: DimOrDefault = 0
    evict: Evict = Evict.LEAST_FREQUENT

    def __post_init__(self) -> None:
        refuse_impossible_table(self)


@dataclass(frozen=True, kw_only=True)
@_checked
class Dense:
    """A feature that is a number. Null and NaN become `missing` before the transform; infinities are bad rows.

    Example:
        >>> zg.Dense(name="price", missing=1.0).kind
        'dense'
    """

    kind: Literal["dense"] = "dense"
    name: str
    column: str = ""
    transform: NumericTransform = NumericTransform.LOG1P_STANDARDISE
    missing: Float32 = 0.0
    num_buckets: Buckets = 64
    min_count: Count = 1  # for criteo_buckets


@dataclass(frozen=True, kw_only=True)
@_checked
class Categorical:
    """One id a row: string, integer, boolean or categorical column. `table` defaults to one of its own.

    Example:
        >>> zg.Categorical(name="item", table="items").kind
        'categorical'
    """

    kind: Literal["categorical"] = "categorical"
    name: str
    column: str = ""
    table: str = ""


@dataclass(frozen=True, kw_only=True)
@_checked
class MultiHot:
    """A list of ids a row, order without meaning; a list column, or text split at `separator`.

    Lists longer than `max_length` keep their first ids. Pooled inside the lookup, unless `pooling` is none. An id
    `padding` at the ends of a list fills it up, and is none of its ids.

    Example:
        >>> zg.MultiHot(name="tags", separator="|").kind
        'multi_hot'
    """

    kind: Literal["multi_hot"] = "multi_hot"
    name: str
    column: str = ""
    table: str = ""
    separator: str = ""
    max_length: Length = 1000
    pooling: Pooling = Pooling.MEAN
    padding: str = ""
    spaces: Spaces = Spaces.KEEP


@dataclass(frozen=True, kw_only=True)
@_checked
class Sequence:
    """A list of ids a row in order of time, latest last. Lists longer than `max_length` keep their last ids.

    An id `padding` at the ends of a list fills it up, and is none of its ids.

    Example:
        >>> zg.Sequence(name="history", table="item", max_length=50).kind
        'sequence'
    """

    kind: Literal["sequence"] = "sequence"
    name: str
    column: str = ""
    table: str = ""
    separator: str = ""
    max_length: Length = 100
    pooling: Pooling = Pooling.MEAN
    padding: str = ""
    spaces: Spaces = Spaces.KEEP


@dataclass(frozen=True, kw_only=True)
@_checked
class Vector:
    """A pretrained vector a row: a (fixed-size) list column of `dim` floats. Null becomes zeros.

    Example:
        >>> zg.Vector(name="title", dim=384).dim
        384
    """

    kind: Literal["vector"] = "vector"
    name: str
    column: str = ""
    dim: Dim


@dataclass(frozen=True, kw_only=True)
@_checked
class Moments:
    """A list of times a row, latest last: whole numbers of 64 bits, kept exactly, with no table and no embedding.

    Lists longer than `max_length` keep their last times. `seen` is the earliest and the latest time of training, where
    that is known: a time of another unit, by its size, is then a bad row.
    """

    kind: Literal["moments"] = "moments"
    name: str
    column: str = ""
    max_length: Length = 1000
    seen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.seen and (len(self.seen) != 2 or self.seen[0] > self.seen[1]):
            raise SchemaError(
                expected="the earliest and the latest time that training has seen, or nothing",
                found=f"seen = {list(self.seen)}",
                where=f"moments {self.name!r}",
                ways_out=("seen = [978300760, 1046454590]", "leave it out"),
            )


Feature = Dense | Categorical | MultiHot | Sequence | Vector | Moments


@dataclass(frozen=True, kw_only=True)
@_checked
class Schema:
    """Features, tables and labels of one data set, checked to agree.

    Tables that are not listed are made with the defaults of `Table`, one for each categorical, multi-hot or
    sequence feature that names none. Two features that name the same table share its vocabulary and its rows.

    Args:
        features: in the order in which models see them.
        labels: at least one for training; prediction ignores them.
        tables: those that differ from the defaults, or are shared.
        weight: column of sample weights (>= 0), or "".
        group: column that groups samples for GAUC (usually the user), or "".
        session: column that groups samples of one request or session, or "". A shuffle can keep its rows together
            (`shuffle = session_lanes`), so that what repeats in them is read, sent and looked up once.
        time: column with the order of events (integer, float, date or datetime), or "".
        missing_texts: whole cells of these texts are null, in every column that the schema reads, and so are numbers
            and truth values that would be such a text in a CSV file. `missing` in TOML, where the default is
            `MISSING_TEXTS`.
        items: which features describe the item; None where nobody said so.
        events: the rows are events of users, of which sequences are made; None: they are samples.

    Example:
        >>> schema = zg.Schema(
        ...     features=(zg.Categorical(name="user"), zg.Dense(name="price")),
        ...     labels=(zg.Label(name="click"),),
        ...     time="at",
        ... )
        >>> schema.columns
        ('user', 'price', 'click', 'at')
    """

    features: tuple[Feature, ...]
    labels: tuple[Label, ...] = ()
    tables: tuple[Table, ...] = ()
    weight: str = ""
    group: str = ""
    session: str = ""
    time: str = ""
    missing_texts: tuple[str, ...] = ()
    items: Items | None = None
    events: Events | None = None
    _by_name: dict[str, Feature] = field(init=False, repr=False, compare=False, hash=False)
    _tables: dict[str, Table] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        refuse_too_many_columns(len(self.features), what="features", where="schema")
        refuse_doubles("feature", [feature.name for feature in self.features])
        refuse_doubles("label", [label.name for label in self.labels])
        refuse_doubles("table", [table.name for table in self.tables])
        refuse_our_columns([feature.name for feature in self.features])
        if not self.features:
            raise SchemaError(
                expected="at least one feature",
                found="none",
                where="schema",
                ways_out="let `ziggurat data inspect FILE --write-schema my.toml` guess one",
            )
        if self.items is not None:
            self.items.check({feature.name: feature.kind for feature in self.features})
        if self.events is not None:
            roles = {"group": self.group, "time": self.time}
            taken = {"weight": bool(self.weight), "session": bool(self.session)}
            kinds = {feature.name: feature.kind for feature in self.features}
            columns, labels = ({each.name: column_of(each) for each in some} for some in (self.features, self.labels))
            self.events.check(kinds, items=self.items, roles=roles, taken=taken, labels=labels, columns=columns)
        object.__setattr__(self, "_by_name", {feature.name: feature for feature in self.features})
        object.__setattr__(self, "_tables", {table.name: table for table in self.tables})
        used = {table_of(feature) for feature in self.features}
        for table in self.tables:
            if table.name not in used:
                raise SchemaError(
                    expected="every table to be used by a feature",
                    found=f"table {table.name!r} is used by none; features use {sorted(used - {''})}",
                    where="schema, tables",
                    ways_out=(f'add table = "{table.name}" to a feature', "remove the table", "correct its name"),
                )

    def feature(self, name: str) -> Feature:
        """The feature called `name`; KeyError if there is none."""
        return self._by_name[name]

    def table(self, name: str) -> Table:
        """The settings of table `name`, with defaults where the schema lists none."""
        if name in self._tables:
            return self._tables[name]
        feature = self._by_name.get(name)
        if isinstance(feature, Dense):
            return Table(name=name, min_count=feature.min_count)
        return Table(name=name)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of the raw data that the schema reads, without doubles."""
        roles = [self.weight, self.group, self.session, self.time]
        named = [column_of(item) for item in (*self.features, *self.labels)] + [role for role in roles if role]
        return tuple(dict.fromkeys(named))

    def to_state(self) -> dict[str, Any]:
        """Plain data that fingerprints are made of: settings younger than the first release count only when used."""
        state = to_json(self)
        for name in ("missing_texts", "items", "events"):
            if not state[name]:
                del state[name]
        if self.items is not None and self.items.repeats is Repeats.LEAVE_OUT_BUT_TARGET:
            del state["items"]["repeats"]
        if self.events is not None:
            state["events"] = self.events.to_state()
        for table in state["tables"]:
            if table["encoding"] != Encoding.GROWING:
                del table["evict"]
        for feature in state["features"]:
            if feature.get("padding") == "":
                del feature["padding"]
            if feature.get("spaces") == Spaces.KEEP:
                del feature["spaces"]
        moments = [feature for feature in state["features"] if feature["kind"] == "moments"]
        for feature in moments:
            del feature["seen"]  # of the data, whose files count anyway
        for label in state["labels"]:
            if label["outcomes"] == Outcomes.ANY or is_what_came_next(
                label["name"], moments=[feature["name"] for feature in moments]
            ):
                del label["outcomes"]
            for name in ("positive", "negative"):
                if not label[name]:
                    del label[name]
            for name in ("positive_weight", "negative_rate", "weight"):
                if label[name] == 1.0:
                    del label[name]
            if label["missing"] == MissingLabel.BAD_ROW:
                del label["missing"]
        return state


def column_of(item: Feature | Label) -> str:
    """The raw column of a feature or label: its own name if none is given."""
    return item.column or item.name


def table_of(feature: Feature) -> str:
    """The embedding table of a feature, or "" for features without one."""
    if isinstance(feature, Dense):
        return feature.name if feature.transform.makes_rows else ""
    if isinstance(feature, Vector | Moments):
        return ""
    return feature.table or feature.name

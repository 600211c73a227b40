"""Schema: what every column of a table means. Plain data, TOML in and out (`schema_io.py`).

A schema names *features* (model inputs), *labels* (what is predicted) and a few columns with a role: `weight`, `group`
(for GAUC), `session`, `time`. It says nothing about a model. It is written by hand or guessed by
`ziggurat data inspect FILE --write-schema my.toml`, and saved with every run, so that evaluation, prediction and
serving turn the same raw values into the same rows.

What a feature may be, `kinds/` says, a file each; what a table is, `tables.py`.

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

from ziggurat.config import to_json
from ziggurat.errors import SchemaError
from ziggurat.features.events import Events
from ziggurat.features.extras import Extra as Extra
from ziggurat.features.items import Items, Repeats
from ziggurat.features.kinds import Categorical as Categorical
from ziggurat.features.kinds import Dense as Dense
from ziggurat.features.kinds import Feature as Feature
from ziggurat.features.kinds import Moments as Moments
from ziggurat.features.kinds import MultiHot as MultiHot
from ziggurat.features.kinds import NumericTransform as NumericTransform
from ziggurat.features.kinds import Sequence as Sequence
from ziggurat.features.kinds import Spaces as Spaces
from ziggurat.features.kinds import Vector as Vector
from ziggurat.features.labels import Label as Label
from ziggurat.features.labels import MissingLabel as MissingLabel
from ziggurat.features.labels import Outcomes as Outcomes
from ziggurat.features.labels import is_what_came_next
from ziggurat.features.number_marks import NumberColumn as NumberColumn
from ziggurat.features.pooling import Pooling as Pooling
from ziggurat.features.schema_checks import refuse_doubles, refuse_our_columns, refuse_too_many_columns
from ziggurat.features.tables import MISSING_ROW as MISSING_ROW
from ziggurat.features.tables import NUM_RESERVED_ROWS as NUM_RESERVED_ROWS
from ziggurat.features.tables import PADDING_ROW as PADDING_ROW
from ziggurat.features.tables import UNKNOWN_ROW as UNKNOWN_ROW
from ziggurat.features.tables import Encoding as Encoding
from ziggurat.features.tables import OutOfRange as OutOfRange
from ziggurat.features.tables import Table as Table
from ziggurat.features.tasks import Task as Task
from ziggurat.plain import JSON
from ziggurat.specification import origin_of
from ziggurat.typed import CLASS, checked

# Texts that people and programs write for "no value". Schemas in TOML, and guessed ones, take them as null unless they
# say otherwise (`missing = [...]`); a Schema made in Python names its own.
MISSING_TEXTS = ("NULL", "null", "N/A", "n/a", "NA", "NaN", "nan", "None", "\\N", "-")


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
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
        extras: further columns, which a loss reads and no model.
        numbers: columns of text whose numbers are written in another way than those of the others.

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
    extras: tuple[Extra, ...] = ()
    numbers: tuple[NumberColumn, ...] = ()
    _by_name: dict[str, Feature] = field(init=False, repr=False, compare=False, hash=False)
    _tables: dict[str, Table] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        refuse_too_many_columns(len(self.features), what="features", where="schema")
        refuse_doubles("feature", [feature.name for feature in self.features])
        refuse_doubles("label", [label.name for label in self.labels])
        refuse_doubles("table", [table.name for table in self.tables])
        refuse_doubles("extra", [extra.name for extra in self.extras])
        refuse_doubles(
            "number",
            [each.column for each in self.numbers],
            ways_out=("keep one [[number]] a column, which names it: column = …", "remove the others"),
        )
        refuse_our_columns([feature.name for feature in self.features], extras=[extra.name for extra in self.extras])
        if not self.features:
            raise SchemaError(
                expected="at least one feature",
                found="none",
                where="schema",
                ways_out="let `ziggurat data inspect FILE --write-schema my.toml` guess one",
            )
        by_name = {feature.name: feature for feature in self.features}
        if self.items is not None:
            self.items.check(by_name)
        if self.events is not None:
            roles = {"group": self.group, "time": self.time}
            taken = {"weight": bool(self.weight), "session": bool(self.session), "extras": bool(self.extras)}
            columns, labels = ({each.name: column_of(each) for each in some} for some in (self.features, self.labels))
            self.events.check(by_name, items=self.items, roles=roles, taken=taken, labels=labels, columns=columns)
        object.__setattr__(self, "_by_name", by_name)
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
        return Table(name=name) if feature is None or feature.table_name != name else feature.default_table()

    @property
    def event_settings(self) -> Events:
        """The settings of events, of a schema whose rows are events.

        Raises:
            SchemaError: they are samples.
        """
        if self.events is None:
            raise SchemaError(
                expected="a schema whose rows are events",
                found="no [events]",
                where="schema",
                ways_out="add [events] to the schema: docs/guides/long-histories.md shows one",
            )
        return self.events

    @property
    def item_settings(self) -> Items:
        """The settings of items, of a schema that says which features describe them; one with events does.

        Raises:
            SchemaError: it does not.
        """
        if self.items is None:
            raise SchemaError(
                expected="a schema that says which features describe the item",
                found="no [items]",
                where="schema",
                ways_out="add [items] to the schema, with id and features",
            )
        return self.items

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of the raw data that features, labels and roles read, without doubles."""
        roles = [self.weight, self.group, self.session, self.time]
        named = [column_of(item) for item in (*self.features, *self.labels)] + [role for role in roles if role]
        return tuple(dict.fromkeys(named))

    @property
    def training_columns(self) -> tuple[str, ...]:
        """Every column of the raw data that training reads: those of `columns` and of the extras."""
        return tuple(dict.fromkeys((*self.columns, *(column_of(extra) for extra in self.extras))))

    @property
    def number_columns(self) -> tuple[str, ...]:
        """Every column of the raw data that is read as numbers, one a row: by features, labels, extras, the weight."""
        features = [column_of(each) for each in self.features if each.reads_numbers]
        labels = [column_of(each) for each in self.labels if not each.positive]
        extras = [column_of(each) for each in self.extras if not each.dim]
        return tuple(dict.fromkeys((*features, *labels, *extras, *([self.weight] if self.weight else []))))

    def to_state(self) -> dict[str, JSON]:
        """Plain data that fingerprints are made of: settings younger than the first release count only when used."""
        state = to_json(self)
        for name in ("missing_texts", "items", "events", "extras", "numbers"):
            if not state[name]:
                del state[name]
        if self.items is not None and self.items.repeats is Repeats.LEAVE_OUT_BUT_TARGET:
            del state["items"]["repeats"]
        if self.events is not None:
            state["events"] = self.events.to_state()
        for table in state["tables"]:
            if table["encoding"] != Encoding.GROWING:
                del table["evict"]
        state["features"] = [feature.state() for feature in self.features]
        times = [feature.name for feature in self.features if feature.holds_times]
        for label in state["labels"]:
            if label["outcomes"] == Outcomes.ANY or is_what_came_next(label["name"], moments=times):
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


def column_of(item: Feature | Label | Extra) -> str:
    """The raw column of a feature, label or extra: its own name if none is given."""
    return item.column or item.name


def schema_to_json(schema: Schema) -> dict[str, JSON]:
    """Return a schema as plain data; kinds from outside the package have their class beside their kind.

    So a program that has not imported their module can name it.
    """
    data: dict[str, JSON] = to_json(schema)
    features = [
        to_json(feature)
        if type(feature).__module__.startswith("ziggurat.")
        else {"kind": feature.kind, CLASS: origin_of(type(feature)), **to_json(feature)}
        for feature in schema.features
    ]
    return {**data, "features": features}


def table_of(feature: Feature) -> str:
    """The embedding table of a feature, or "" for features without one."""
    return feature.table_name

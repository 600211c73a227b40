"""What a ranker on events needs of the log that a next-item run retrieves from: one log, read for both of them.

    [events] of the run     actions = ["verb"]                  read for both    actions = ["verb", "tossed"]
             of the ranker  actions = ["verb", "tossed"]  ──►   a row a user     history_verb, history_tossed, country
                            context = ["country"]                                country: at the user's latest event

Both runs have to mean the same by user, time, item and each name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from ziggurat.data.events.log import EventLog
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Schema, column_of


def schema_for_both(schema: Schema, ranker: Schema, *, where: str) -> Schema:
    """The schema of a log with what a ranker reads of its events and their items; context is none of it.

    Args:
        schema: of the events of the run that retrieves.
        ranker: of the events of the run that ranks.
        where: for errors.

    Raises:
        ConfigError: they do not go together: samples here and events there, another user, item or time, another column
            by the same name, histories in pools.
    """
    if schema.events is None or ranker.events is None or schema.items is None or ranker.items is None:
        raise ConfigError(
            expected="a run on an event log that retrieves, for a ranker on events: both read what users did",
            found="samples, which have no histories for the ranker",
            where=where,
            ways_out=(
                "retrieve by a next_item: ziggurat train table_hstu --data.train FILE --schema events.toml",
                "export the ranker alone, and let requests bring histories",
            ),
        )
    ids = [
        (each.group, each.time, id_of, column_of(each.feature(id_of)))
        for each, id_of in ((schema, schema.items.id), (ranker, ranker.items.id))
    ]
    mine = {each.name: column_of(each) for each in schema.features}
    added = [each for each in ranker.features if each.name not in ranker.events.context]
    differs = [each.name for each in ranker.features if mine.get(each.name, column_of(each)) != column_of(each)]
    if ids[0] != ids[1] or differs or ranker.events.pools:
        raise ConfigError(
            expected="a ranker whose events have the same user, time and item, under the same names, and one history",
            found=f"user, time and item {', '.join(ids[0][:3])} and {', '.join(ids[1][:3])}"
            + (f"; other columns for {', '.join(differs)}" if differs else "")
            + (f"; a history for each of {', '.join(ranker.events.pools)}" if ranker.events.pools else ""),
            where=where,
            ways_out=(
                "train the ranker with [roles] and [items] of the run that retrieves, and without pools",
                "export the ranker alone, and let requests bring histories",
            ),
        )
    features = {each.name: each for each in (*added, *schema.features)}
    of_items = tuple(dict.fromkeys((*schema.items.features, *ranker.items.features)))
    actions = tuple(name for name in dict.fromkeys((*schema.events.actions, *ranker.events.actions)))
    actions = tuple(name for name in actions if name not in of_items)
    length = max(schema.events.max_length, ranker.events.max_length)
    # Only the log is read by it: tables, which each run has of its own, play no part.
    return replace(
        schema,
        features=tuple(replace(features[name], table="") for name in (*of_items, *actions)),
        tables=(),
        items=replace(schema.items, features=of_items),
        events=replace(schema.events, actions=actions, max_length=length),
    )


def context_columns(ranker: Schema) -> dict[str, str]:
    """The raw column of each feature of a ranker's context."""
    events = ranker.events
    return {} if events is None else {name: column_of(ranker.feature(name)) for name in events.context}


def refuse_absent(schema: Schema, ranker: Schema, *, columns: Collection[str], where: str) -> None:
    """Refuse a log that lacks what the ranker reads; before it is read.

    Args:
        schema: of the run that retrieves.
        ranker: of the run that ranks.
        columns: of the log of the run that retrieves.
        where: for errors.

    Raises:
        ConfigError: a column is absent; or as `schema_for_both`.
    """
    needed = dict.fromkeys((*schema_for_both(schema, ranker, where=where).columns, *context_columns(ranker).values()))
    if absent := [name for name in needed if name not in columns]:
        raise ConfigError(
            expected=f"a log of the run that retrieves with all that the ranker reads of events: {', '.join(needed)}",
            found=f"no column {', '.join(absent)}",
            where=where,
            ways_out=("train both runs on one log", "export each of them alone"),
        )


def with_context(
    tables: Iterator[pa.Table], log: EventLog, context: Mapping[str, str], *, places: Int64[np.ndarray, " N"]
) -> Iterator[pa.Table]:
    """Samples with what was known at an event of each.

    Args:
        tables: of the samples.
        log: with the columns of context carried.
        context: raw column of each feature.
        places: the event of each sample, in the order of all tables.
    """
    first = 0
    for table in tables:
        some = places[first : first + table.num_rows]
        first += table.num_rows
        known = {name: log.carried[column].gather(some).to_arrow() for name, column in context.items()}
        yield pa.Table.from_arrays([*table.columns, *known.values()], names=[*table.column_names, *known])

"""Recognise a log of what users did: a user, an item and an order, and no label.

    user_id  movie_id  timestamp      group = user_id, time = timestamp, [items] id = movie_id, [events]
    pid      track     pos            a playlist: the position is the order
    session  item      time           sessions without users: each is a user of its own
    user     item                     no order: nothing can come next; what was chosen is told from what was not

Such a table needs no label. With `[events]` a sample is a history and the question what came next; without an order a
label that is 1 in every row (`outcomes = "positive_only"`) says that each row was chosen, and the model draws what was
not. Names decide which column is which; the values are asked whether they can be that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from ziggurat.data.inspect.column_facts import ColumnFacts, Values, short_number
from ziggurat.data.inspect.column_rules import FeatureGuess, words
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.kinds import feature_of_ids
from ziggurat.features.schema import Label, Outcomes, Schema

_ITEMS = (
    *("item", "product", "sku", "asin", "movie", "film", "video", "track", "song", "music", "book", "isbn", "article"),
    *("news", "story", "game", "show", "episode", "business", "poi", "venue", "hotel", "listing", "recipe", "course"),
    *("app", "post", "pin", "content", "document", "doc", "page", "artist", "ad"),
)
_WHOSE = ("playlist", "session", "basket", "cart", "visit", "trip", "pid", "sid")
_ENDS = ("id", "ids", "key", "hash", "code", "uri", "url", "nr")
_PLACES = frozenset(["position", "pos", "index", "idx", "step", "seq", "sequence", "rank", "place", "turn", "order"])
_ACTIONS = frozenset(["event", "action", "behavior", "behaviour", "verb", "type"])
_COUNTS = frozenset(["count", "counts", "plays", "times", "quantity", "qty", "weight", "listens", "num"])
_MAX_ACTIONS = 50
_MAX_REPEATED = 0.01  # share of rows whose item has two values of a column, or whose user has a position twice
TIMES, POSITIONS = "table_hstu", "table_sasrec"
PAIRS = "table_two_tower"


@dataclass(frozen=True)
class InteractionLog:
    """A table without a label, described as a log.

    Args:
        schema: ready for `recipe`.
        recipe: that learns from it.
        becomes: by column, what it becomes, and why.
        note: the whole in a sentence.
    """

    schema: Schema
    recipe: str
    becomes: Mapping[str, tuple[str, str]]
    note: str


def find_log(
    columns: Sequence[ColumnFacts],
    *,
    user: str,
    time: str,
    guesses: Mapping[str, FeatureGuess],
    missing_texts: tuple[str, ...],
) -> InteractionLog | None:
    """Recognise a log; None where user or item are not among the columns.

    Args:
        columns: of the table.
        user: column of the user, "" if none is called so: playlists and sessions have none.
        time: column of the time, or "".
        guesses: what the columns would be as features.
        missing_texts: of the schema.
    """
    by_name = {facts.name: facts for facts in columns}
    user = user or _named_ids(columns, _WHOSE)
    item = _named_ids([facts for facts in columns if facts.name != user], _ITEMS)
    if not user or not item:
        return None
    others = [facts for facts in columns if facts.name not in (user, item, time)]
    order = time or _position(others, users=by_name[user].values)
    others = [facts for facts in others if facts.name != order]
    becomes = {
        user: ("group", "whose the rows are: histories are made of them"),
        item: ("item, categorical", "what was acted on, by the name; [items] names it"),
    }
    if not order:
        return _pairs(item, user, others, becomes=becomes, missing_texts=missing_texts)
    becomes[order] = ("time", "the order of a user's rows" + ("" if time else ", by the name and the values"))
    actions = [facts.name for facts in others if _is_action(facts, guesses.get(facts.name))]
    for name in actions:
        becomes[name] = ("action, categorical", "what was done, by the name; a history has it, a question does not")
    side = [
        facts.name
        for facts in others
        if facts.name not in actions and _tells_of_item(facts, guesses.get(facts.name), item=by_name[item])
    ]
    for name in side:
        becomes[name] = ("of the item, categorical", "one value for each item: side information in [items]")
    for facts in others:
        becomes.setdefault(facts.name, ("left out", "events know who, what, when and what was done; nothing else"))
    schema = Schema(
        features=tuple(feature_of_ids(name) for name in (item, *side, *actions)),
        items=Items(id=item, features=(item, *side)),
        events=Events(actions=tuple(actions)),
        group=user,
        time=order,
        missing_texts=missing_texts,
    )
    recipe = TIMES if time else POSITIONS
    note = (
        f"no label found: taken for a log of what users did ({user!r} is the user, {item!r} the item, {order!r} the "
        f"order); with [events] and [items] {recipe} learns what comes next, which needs no label "
        f"({_other(recipe)}; docs/guides/long-histories.md). To predict a column instead, name it: --label COLUMN"
    )
    return InteractionLog(schema=schema, recipe=recipe, becomes=becomes, note=note)


def _other(recipe: str) -> str:
    if recipe == TIMES:
        return (
            f"{POSITIONS} does, too, and does not look at times; {PAIRS} finds items by a label that is positive_only"
        )
    return f"{TIMES} looks at times, too, and a position is none; {PAIRS} finds items by a label that is positive_only"


def _pairs(
    item: str,
    user: str,
    others: Sequence[ColumnFacts],
    *,
    becomes: dict[str, tuple[str, str]],
    missing_texts: tuple[str, ...],
) -> InteractionLog | None:
    """Users and items without an order: what was chosen, where a column of numbers above 0 says that it was."""
    counts = [facts for facts in others if _is_count(facts)]
    if not counts:
        return None
    chosen = counts[0]
    becomes[user] = ("categorical, group", "the user: what users had is told apart by it")
    becomes[chosen.name] = (
        "label",
        f"{short_number(chosen.minimum)} or more in every row: each was chosen (positive_only)",
    )
    for facts in others:
        becomes.setdefault(facts.name, ("left out", "add it to the schema if it describes the user or the item"))
    label = Label(name="chosen", column=chosen.name, positive_from=chosen.minimum, outcomes=Outcomes.POSITIVE_ONLY)
    schema = Schema(
        features=(feature_of_ids(user), feature_of_ids(item)),
        labels=(label,),
        items=Items(id=item),
        group=user,
        missing_texts=missing_texts,
    )
    note = (
        f"no label found: taken for a log of what users chose ({user!r} is the user, {item!r} the item), without an "
        f"order; with [items] and a label whose outcomes are positive_only {PAIRS} finds items for users "
        "(docs/guides/two-tower.md). To predict a column instead, name it: --label COLUMN"
    )
    return InteractionLog(schema=schema, recipe=PAIRS, becomes=becomes, note=note)


def _named_ids(columns: Sequence[ColumnFacts], names: Sequence[str]) -> str:
    """Return the column of ids that come back under one of some names, the first name first; "" for none."""
    for name in names:
        for facts in columns:
            parts = words(facts.name)
            is_named = (name in parts and (parts[-1] in _ENDS or parts == [name])) or parts == [f"{name}id"]
            is_ids = facts.kind in (Values.WHOLE, Values.TEXT) and facts.num_distinct > 2
            if is_named and is_ids and facts.null_share < 0.5 and facts.distinct_share < 0.9:
                return facts.name
    return ""


def _position(columns: Sequence[ColumnFacts], *, users: pl.Series) -> str:
    """Return the column that counts the rows of a user, each place once; "" for none."""
    for facts in columns:
        if facts.kind is not Values.WHOLE or facts.null_share or not set(words(facts.name)) & _PLACES:
            continue
        pairs = pl.DataFrame({"user": users.cast(pl.String), "place": facts.values.cast(pl.String)})
        if pairs.height - pairs.n_unique() <= _MAX_REPEATED * pairs.height:
            return facts.name
    return ""


def _is_action(facts: ColumnFacts, guess: FeatureGuess | None) -> bool:
    is_id = guess is not None and guess.feature is not None and guess.feature.is_id
    return is_id and bool(set(words(facts.name)) & _ACTIONS) and facts.num_distinct <= _MAX_ACTIONS


def _tells_of_item(facts: ColumnFacts, guess: FeatureGuess | None, *, item: ColumnFacts) -> bool:
    """Return whether a column says something of the item: one value for each item, and not its name once more."""
    if guess is None or guess.feature is None or not guess.feature.is_id or facts.num_distinct >= item.num_distinct:
        return False
    pairs = pl.DataFrame({"item": item.values.cast(pl.String), "value": facts.values.cast(pl.String)})
    several = pairs.group_by("item").agg(pl.col("value").n_unique().alias("values"), pl.len().alias("rows"))
    of_several = several.filter(pl.col("values") > 1)["rows"].sum()
    return bool(of_several <= _MAX_REPEATED * pairs.height)


def _is_count(facts: ColumnFacts) -> bool:
    numbers = facts.kind in (Values.WHOLE, Values.NUMBERS) and facts.null_share == 0
    return numbers and facts.minimum > 0 and bool(set(words(facts.name)) & _COUNTS)

"""MovieLens-1M as an event log: who rated which film when. The rating itself is no action: liked or not, it was seen.
To rank films (`candidates_schema`) it is: a history says how each was rated, and a like is what is predicted.

The file is that of `movielens-1m`. Of its ratings 529,046 have the time of the one before of their user: they stay in
the order of `ratings.dat`, as every published figure with a stable sort has them.
"""

from __future__ import annotations

from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, Schema

NAME = "movielens-1m-events"


def events_schema() -> Schema:
    """Users, films and times; histories of 200."""
    return Schema(
        features=(Categorical(name="movie_id"),),
        group="user_id",
        time="timestamp",
        items=Items(id="movie_id"),
        events=Events(max_length=200),
    )


def candidates_schema() -> Schema:
    """Films to rank by what a user rated before, and how: histories of 100, ten candidates a question."""
    names = ("movie_id", "rating", "gender", "age", "occupation")
    return Schema(
        features=tuple(Categorical(name=name) for name in names),
        labels=(Label(name="like", column="rating", positive_from=4.0),),
        group="user_id",
        time="timestamp",
        items=Items(id="movie_id"),
        events=Events(actions=("rating",), context=names[2:], max_length=100, candidates=10),
    )

"""MovieLens-1M as an event log: who rated which film when. The rating itself is no action: liked or not, it was seen.

The file is that of `movielens-1m`. Of its ratings 529,046 have the time of the one before of their user: they stay in
the order of `ratings.dat`, as every published figure with a stable sort has them.
"""

from __future__ import annotations

from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Schema

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

"""Items: which features of a schema describe the item; all others describe the user and the moment.

    [items]
    id = "movie_id"
    features = ["year", "genres"]

Ranking models need no such line. Models that give users and items a vector each (`two_tower`), catalogues, exports and
the retrieval index do: they compute an item from its own features alone, before any user asks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ziggurat.errors import SchemaError
from ziggurat.typed import checked, nearest


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Items:
    """Which features describe the item.

    Args:
        id: the categorical feature that names the item.
        features: all features that describe it; `id` belongs to them, and stands first where it is not among them.
    """

    id: str
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.id not in self.features:
            object.__setattr__(self, "features", (self.id, *self.features))

    def check(self, kinds: Mapping[str, str]) -> None:
        """Refuse items that the features do not have.

        Args:
            kinds: the kind of every feature, by name.

        Raises:
            SchemaError: a name is no feature, or stands twice, or `id` is no categorical feature.
        """
        where = "schema, items"
        for name in self.features:
            if name not in kinds:
                raise SchemaError(
                    expected="names of features: " + ", ".join(list(kinds)[:20]),
                    found=f"{name!r}",
                    where=where,
                    ways_out=nearest(name, kinds, instead=f"take {name!r} out, or add a feature of that name"),
                )
        if len(set(self.features)) < len(self.features):
            raise SchemaError(
                expected="each feature of the item once",
                found=", ".join(map(repr, self.features)),
                where=where,
                ways_out="name each feature once",
            )
        if kinds[self.id] != "categorical":
            raise SchemaError(
                expected="id = the name of a categorical feature: one id for each item",
                found=f"id = {self.id!r}, which is {kinds[self.id]}",
                where=where,
                ways_out=("name the feature with the item's id", f'make {self.id!r} kind = "categorical"'),
            )

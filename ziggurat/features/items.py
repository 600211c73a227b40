"""Items: which features of a schema describe the item; all others describe the user and the moment.

    [items]
    id = "movie_id"
    features = ["year", "genres"]

Ranking models need no such line. Models that give users and items a vector each (`two_tower`), catalogues, exports and
the retrieval index do: they compute an item from its own features alone, before any user asks.

Whether a user may be given again what that user had is one setting, for evaluation and for answers:

    repeats = "allow"
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ziggurat.errors import SchemaError
from ziggurat.typed import checked, nearest

if TYPE_CHECKING:
    from ziggurat.features.kinds import Feature


class Repeats(StrEnum):
    """Protocols for the items that a user had before, in evaluation (full ranking) and in answers.

                              evaluation: a target that the user had      answers
        leave_out             is left out too, so it counts as missed     leave out what the user had
        allow                 competes with all other items               may hold what the user had
        leave_out_but_target  competes with items that are new alone      leave out what the user had

    Under the first two, evaluation measures the answers that are given. The third is the protocol of RecBole's full
    ranking: nothing that a right answer could be confused with competes, and no answer can repeat it. It says the same
    as `leave_out` where no target was had before, as in MovieLens.
    """

    LEAVE_OUT = "leave_out"
    ALLOW = "allow"
    LEAVE_OUT_BUT_TARGET = "leave_out_but_target"

    @property
    def answers_leave_out(self) -> bool:
        """Return whether answers leave out what the user had."""
        return self is not Repeats.ALLOW

    @property
    def target_can_win(self) -> bool:
        """Return whether evaluation ranks a target that the user had before."""
        return self is not Repeats.LEAVE_OUT

    @property
    def of_evaluation(self) -> str:
        """Say what takes part in an evaluation, for people."""
        return {
            Repeats.LEAVE_OUT: "items that a user had are left out, targets among them (missed)",
            Repeats.ALLOW: "all items compete, those that a user had among them",
            Repeats.LEAVE_OUT_BUT_TARGET: "items that a user had are left out, but for the target (as RecBole does)",
        }[self]

    @property
    def of_answers(self) -> str:
        """Say what answers hold, for people."""
        return "answers leave out what a user had" if self.answers_leave_out else "answers may repeat what a user had"


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Items:
    """Features that describe the item, and whether users take an item again.

    Args:
        id: the categorical feature that names the item.
        features: all features that describe it; `id` belongs to them, and stands first where it is not among them.
        repeats: what becomes of the items that a user had, in evaluation and in answers.

    Example:
        >>> zg.Items(id="movie", features=("movie", "genres")).id
        'movie'
    """

    id: str
    features: tuple[str, ...] = ()
    repeats: Repeats = Repeats.LEAVE_OUT_BUT_TARGET

    def __post_init__(self) -> None:
        if self.id not in self.features:
            object.__setattr__(self, "features", (self.id, *self.features))

    def check(self, by_name: Mapping[str, Feature]) -> None:
        """Refuse items that the features do not have.

        Args:
            by_name: every feature.

        Raises:
            SchemaError: a name is no feature, or stands twice, or `id` is no categorical feature.
        """
        where = "schema, items"
        for name in self.features:
            if name not in by_name:
                raise SchemaError(
                    expected="names of features: " + ", ".join(list(by_name)[:20]),
                    found=f"{name!r}",
                    where=where,
                    ways_out=nearest(name, by_name, instead=f"take {name!r} out, or add a feature of that name"),
                )
        if len(set(self.features)) < len(self.features):
            raise SchemaError(
                expected="each feature of the item once",
                found=", ".join(map(repr, self.features)),
                where=where,
                ways_out="name each feature once",
            )
        if not by_name[self.id].is_id:
            raise SchemaError(
                expected="id = the name of a categorical feature: one id for each item",
                found=f"id = {self.id!r}, which is {by_name[self.id].kind}",
                where=where,
                ways_out=("name the feature with the item's id", f'make {self.id!r} kind = "categorical"'),
            )

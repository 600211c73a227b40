"""Does a ranker know the items and users of the export that it is to score for? Asked before an export is published.

A ranker of other data scores every item as one that nobody has seen: all alike, and without a word. So the ids of the
catalogue and of the known users are looked up in its vocabularies.

    ids of the catalogue ──► those that the encoder knows (all, where it has no vocabulary of them)
                              └──► how many of these the ranker knows, too ──► at least a half of the items, a tenth of
                                                                               the users
Only what the encoder knows counts, since ids that are rarer than `min_count`, or new in a catalogue of one's own, both
may lack. Users come and go faster than items, and runs may be trained on different months; hence the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import polars as pl

from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.vocabulary import Ids
from ziggurat.errors import DataError, ExportError, RequestError, SchemaError
from ziggurat.features.schema import NUM_RESERVED_ROWS, column_of, table_of
from ziggurat.serving.answering.item_catalogue import ItemCatalogue, KnownUsers

MIN_ITEMS = 0.5
MIN_USERS = 0.1


@dataclass(frozen=True, kw_only=True)
class KnownShare:
    """Counts how many of some ids a ranker knows.

    Args:
        what: "items" or "users".
        column: of the ids.
        known: ids that the ranker knows.
        of: ids that were looked up.
        least: share that it has to know.
    """

    what: str
    column: str
    known: int
    of: int
    least: float

    @property
    def share(self) -> float:
        """Known ids among all of them; 1 where there are none."""
        return self.known / self.of if self.of else 1.0

    def line(self) -> str:
        """The share for people, in one line."""
        return f"the ranker knows {self.known:,} of {self.of:,} {self.what} ({self.share:.1%}, column {self.column!r})"

    def to_json(self) -> dict[str, object]:
        """The share as plain data."""
        return {"column": self.column, "known": self.known, "of": self.of}


def known_shares(
    ranker: Preprocessing, *, encoder: Preprocessing, catalogue: ItemCatalogue, users: KnownUsers | None
) -> list[KnownShare]:
    """Count the items and users of an export that a ranker knows; none where it looks neither up in a vocabulary.

    Args:
        ranker: what was fitted for it.
        encoder: the same of the run that retrieves.
        catalogue: items.
        users: known users, or None.
    """
    asked = [("items", catalogue.columns.id, catalogue.ids, MIN_ITEMS)]
    if users is not None:
        asked.append(("users", users.id_column, users.ids, MIN_USERS))
    found = []
    for what, column, ids, least in asked:
        of_ranker = _known(ranker, column, ids)
        if of_ranker is not None:
            of_encoder = _known(encoder, column, ids)
            # Only ids that the encoder knows: of one that came after both were trained, a ranker can know nothing.
            counted = pl.repeat(True, len(ids), eager=True) if of_encoder is None else of_encoder
            known = int((of_ranker & counted).sum())
            found.append(KnownShare(what=what, column=column, known=known, of=int(counted.sum()), least=least))
    return found


def refuse_stranger(shares: list[KnownShare], *, ranker: str, allow: bool) -> None:
    """Refuse a ranker that knows few of the items or users.

    Args:
        shares: what it knows.
        ranker: folder of its run.
        allow: take it all the same.

    Raises:
        ExportError: it knows too few; says how many.
    """
    for each in shares:
        if each.share < each.least and not allow:
            raise ExportError(
                expected=f"a ranker of the same {each.what}, which knows at least {each.least:.0%} of them",
                found=f"{each.line()}; it would score all others alike, as {each.what} that nobody has seen",
                where=f"{ranker}, --ranker",
                ways_out=(
                    "name the run of a ranker that was trained on the same data",
                    "train the ranker on the data of the first run, and export again",
                    "take it all the same: --allow",
                ),
            )


@contextmanager
def named_ranker(ranker: str, *, main: str) -> Iterator[None]:
    """Name both runs where the ranker cannot read the rows of the other: an item or a user says neither run nor file.

    Args:
        ranker: folder of its run.
        main: folder of the run whose items and users it reads.

    Raises:
        ExportError: in place of the error of a row.
    """
    try:
        yield
    except (DataError, RequestError, SchemaError) as error:
        raise ExportError(
            expected=f"a ranker that can read the items and users of {main}; {error.expected}",
            found=error.found,
            where=f"{ranker}, --ranker; {error.where}",
            ways_out=(
                "name the run of a ranker that was trained on the same data",
                "train the ranker on the data of the first run, and export again",
                "give the column one type in both data sets, and train again",
            ),
        ) from error


def refuse_blind(ranker: Preprocessing, *, catalogue: ItemCatalogue, folder: str) -> None:
    """Refuse a ranker that reads no column of the items: it would score all items of a user alike.

    Raises:
        ExportError: it reads none; names its columns.
    """
    columns = list(dict.fromkeys(column_of(feature) for feature in ranker.schema.features))
    if not set(columns) & set(catalogue.columns.features):
        raise ExportError(
            expected=f"a ranker that reads columns of the item: {', '.join(catalogue.columns.features)}",
            found=f"one that reads {', '.join(columns)[:300]}; it would score all items of a user alike",
            where=f"{folder}, --ranker",
            ways_out=(
                "name the run of a ranker that was trained on the same data",
                "rename the columns of one of the data sets, and train again",
            ),
        )


def _known(preprocessing: Preprocessing, column: str, ids: pl.Series) -> pl.Series | None:
    """Mark the ids that a model has rows of their own for; None where it looks none up in a vocabulary."""
    for feature in preprocessing.schema.features:
        if feature.is_id and column_of(feature) == column:
            vocabulary = preprocessing.vocabularies.get(table_of(feature))
            if vocabulary is not None:
                return pl.Series(vocabulary.rows(Ids.of(ids)) >= NUM_RESERVED_ROWS)
    return None

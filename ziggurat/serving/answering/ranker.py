"""The ranker of an export: scores of raw rows, and of users with items of the catalogue.

    rows (user and item in one)    ──► the run's preprocessing ──► model ──► scores        as `ziggurat predict`
    users × items of the catalogue ──► two sides, joined ─────────► model ──► scores        the same numbers

Items of the catalogue are encoded when the export is loaded; a request encodes its user alone (`sides.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

import polars as pl
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ziggurat.data.raw.written_numbers import PLAIN_NUMBERS, WrittenNumbers
from ziggurat.features.batch import Batch
from ziggurat.features.schema import Schema
from ziggurat.models.contract.losses import scores_from_logits
from ziggurat.serving.answering.sides import EncodedSide, Side, encode_frame, join, stacked
from ziggurat.serving.answering.unknown_of_rows import UnknownOfRow, unknown_of_rows
from ziggurat.serving.export.packed_model import PackedModel
from ziggurat.serving.request_rows import frame_of, placed_in_request

CHUNK_PAIRS = 16_384  # scored at once, whatever requests ask for, so that memory is bounded


class Ranker:
    """Scores users with items.

    Args:
        packed: the model.
        item_columns: columns that describe the item; a feature that reads one of them belongs to the item.
    """

    def __init__(self, packed: PackedModel, *, item_columns: Collection[str]) -> None:
        self.packed = packed
        self.schema = packed.preprocessing.schema
        self.inputs = packed.preprocessing.inputs
        self.labels = tuple(label.name for label in self.inputs.labels)
        of_item = [each.name for each in self.schema.features if each.about in item_columns]
        of_user = {each.name for each in self.schema.features} - set(of_item)
        self.items = Side(packed.preprocessing, names=of_item, histories=packed.histories)
        self.users = Side(packed.preprocessing, names=of_user, histories=packed.histories)
        self._encoded_items: EncodedSide | None = None
        self._row_of_item: Tensor | None = None  # in the encoded items; None: items are where their numbers are

    @property
    def num_encoded(self) -> int:
        """Rows of items that are kept encoded, those of earlier states included."""
        return 0 if self._encoded_items is None else self._encoded_items.batch.batch_size

    def encode_items(self, frame: pl.DataFrame) -> None:
        """Encode the catalogue, whose rows `score_pairs` then knows by number."""
        self._encoded_items = encode_frame(self.items, frame)

    def with_items(self, numbers: Int64[Tensor, "M"], *, frame: pl.DataFrame) -> Ranker:
        """A ranker that knows these items as well, or as they are now; this one stays as it is.

        Args:
            numbers: known ones, or those that follow.
            frame: their rows.
        """
        old = self._known_items().batch
        new = encode_frame(self.items, frame).batch
        rows = torch.arange(old.batch_size) if self._row_of_item is None else self._row_of_item
        grown = torch.cat([rows, rows.new_zeros(max(0, int(numbers.max()) + 1 - len(rows)))])
        # Rows of earlier states stay where they are, and `grown` says which row is an item's now.
        grown[numbers] = torch.arange(old.batch_size, old.batch_size + len(numbers))
        ranker = copy.copy(self)
        ranker._encoded_items = EncodedSide(inputs=self.items.inputs, batch=stacked([old, new]))
        ranker._row_of_item = grown
        return ranker

    def encode_users(self, rows: Sequence[Mapping[str, object]]) -> EncodedSide:
        """Users of requests, by their raw columns; raises RequestError."""
        side = self.users
        frame = pl.DataFrame() if side.preprocessing is None else self._frame_of(rows, side.preprocessing.schema)
        with placed_in_request(lambda row, column: "user"):
            return EncodedSide(inputs=side.inputs, batch=side.encode(frame, num_rows=len(rows)))

    def score_pairs(
        self, users: EncodedSide, *, pairs: tuple[Int64[Tensor, "P"], Int64[Tensor, "P"]]
    ) -> Float32[Tensor, "P L"]:
        """Scores of pairs (number of the user, number of the item in the catalogue)."""
        known_items = self._known_items()
        # Items that were changed are encoded in later rows than their numbers.
        if self._row_of_item is not None:
            pairs = (pairs[0], self._row_of_item[pairs[1]])
        found = []
        for first in range(0, len(pairs[0]), CHUNK_PAIRS):
            chunk = (pairs[0][first : first + CHUNK_PAIRS], pairs[1][first : first + CHUNK_PAIRS])
            found.append(self.score_batch(join(self.inputs, users=users, items=known_items, pairs=chunk)))
        return torch.cat(found) if found else torch.empty(0, len(self.labels))

    def score_rows(
        self, rows: Sequence[Mapping[str, object]], *, unknown: list[UnknownOfRow] | None = None
    ) -> Float[Tensor, "N L"]:
        """Scores of whole rows of requests: columns of the user and of the item in one.

        Args:
            rows: raw columns.
            unknown: gets what training did not know of each row.
        """
        return self.score_frame(self._frame_of(rows, self.schema), unknown=unknown)

    def score_frame(
        self,
        frame: pl.DataFrame,
        *,
        unknown: list[UnknownOfRow] | None = None,
        numbers: WrittenNumbers = PLAIN_NUMBERS,
    ) -> Float[Tensor, "N L"]:
        """Scores of raw rows, as `ziggurat predict` gives them.

        Args:
            frame: the columns of the schema's features.
            unknown: as in `score_rows`.
            numbers: how numbers are written in columns of text.
        """
        parts: list[Tensor] = []
        for number, part in enumerate(frame.iter_slices(CHUNK_PAIRS)):
            # Errors name the row of the whole frame, not of this part.
            part = self.packed.histories.added_to(part)
            batch = self.packed.preprocessing.batch(part, first_row=number * CHUNK_PAIRS, numbers=numbers)
            if unknown is not None:
                unknown += unknown_of_rows(batch, self.inputs)
            parts.append(self.score_batch(batch))
        return torch.cat(parts) if parts else torch.empty(0, len(self.labels))

    @torch.no_grad()
    def score_batch(self, batch: Batch) -> Float32[Tensor, "B L"]:
        """Probabilities of binary labels, values of the others."""
        return scores_from_logits(self.packed.model(batch), inputs=self.inputs)

    def _known_items(self) -> EncodedSide:
        assert self._encoded_items is not None, "encode_items comes first"
        return self._encoded_items

    def _frame_of(self, rows: Sequence[Mapping[str, object]], schema: Schema) -> pl.DataFrame:
        return frame_of(rows, schema, joined=self.packed.model.joined_lists)

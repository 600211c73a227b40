"""The retriever of an export: the vector of a user, and the items of the index that go best with it.

    user ──► encoder ──► (B, D) ──► index: filter, search, without what was seen ──► candidates of the catalogue

The encoder is a model with `user_vectors` and `item_vectors` (`models/retrieval/two_tower.py`). Item vectors were
computed for the whole catalogue when the export was made; a request computes the user's alone. Where each task has a
vector of its own, a user has several, and the index is asked for all of them together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import polars as pl
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.features.schema import column_of
from ziggurat.models import Model
from ziggurat.models.retrieval.over_arch import OverArch
from ziggurat.serving.answering.sides import EncodedSide, Side, encode_frame, join
from ziggurat.serving.export.packed_model import PackedModel
from ziggurat.serving.request_rows import frame_of, placed_in_request

_CHUNK_ITEMS = 16_384  # at once, so that memory is bounded


@runtime_checkable
class VectorModel(Protocol):
    """A model that gives users and items vectors whose inner product says how well they go together."""

    def user_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the users of a batch; what it says of items does not matter."""
        ...

    def item_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the items of a batch; what it says of users does not matter."""
        ...


def task_names(model: Model) -> list[str]:
    """List the names of each task's inner products in formulas; none where all tasks share the vector of a user."""
    several = getattr(model, "num_vectors", 1) > 1
    return [f"retrieval_{label.name}" for label in model.inputs.labels] if several else []


class VectorEncoder:
    """Vectors of users and items from their raw columns.

    Args:
        packed: a model with `user_vectors` and `item_vectors`.
        item_columns: columns that describe the item.
    """

    def __init__(self, packed: PackedModel, *, item_columns: Collection[str]) -> None:
        assert isinstance(packed.model, VectorModel), "checked by who exports and loads"
        self.packed = packed
        self._model: VectorModel = packed.model
        self.inputs = packed.preprocessing.inputs
        features = packed.preprocessing.schema.features
        of_item = [each.name for each in features if column_of(each) in item_columns]
        self.items = Side(packed.preprocessing, names=of_item)
        self.users = Side(packed.preprocessing, names={each.name for each in features} - set(of_item))
        self.tasks = tuple(task_names(packed.model))
        self._nobody = _empty(self.users)
        self._nothing = _empty(self.items)

    @property
    def over_arch(self) -> OverArch | None:
        """The module that scores pairs of the encoder's vectors anew, where the model has one."""
        return getattr(self._model, "over_arch", None)

    def encode_users(self, rows: Sequence[Mapping[str, object]]) -> EncodedSide:
        """Users of requests, by their raw columns; raises RequestError."""
        assert self.users.preprocessing is not None, "a model of vectors has features of the user"
        frame = frame_of(rows, self.users.preprocessing.schema, joined=self.packed.model.joined_lists)
        with placed_in_request(lambda row, column: "user"):
            return EncodedSide(inputs=self.users.inputs, batch=self.users.encode(frame, num_rows=len(rows)))

    @torch.no_grad()
    def user_vectors(self, users: EncodedSide, numbers: Int64[Tensor, "N"]) -> Float32[Tensor, "N D"]:
        """Vectors of some encoded users."""
        # The same empty item stands beside every user.
        pairs = (numbers, torch.zeros_like(numbers))
        return self._model.user_vectors(join(self.inputs, users=users, items=self._nothing, pairs=pairs)).float()

    @torch.no_grad()
    def task_vectors(self, users: EncodedSide, numbers: Int64[Tensor, "N"]) -> Float32[Tensor, "N V D"]:
        """All vectors of some encoded users, one for each task; one where tasks share it."""
        if not self.tasks:
            return self.user_vectors(users, numbers).unsqueeze(1)
        pairs = (numbers, torch.zeros_like(numbers))
        batch = join(self.inputs, users=users, items=self._nothing, pairs=pairs)
        return cast(Any, self._model).task_vectors(batch).float()

    @torch.no_grad()
    def item_vectors(self, frame: pl.DataFrame) -> Float32[Tensor, "N D"]:
        """Vectors of all items of a catalogue."""
        items = encode_frame(self.items, frame)
        found = []
        for numbers in torch.arange(frame.height).split(_CHUNK_ITEMS):
            pairs = (torch.zeros_like(numbers), numbers)
            batch = join(self.inputs, users=self._nobody, items=items, pairs=pairs)
            found.append(self._model.item_vectors(batch).float())
        return torch.cat(found)

    def vectors_of_rows(self, rows: Sequence[Mapping[str, object]]) -> Float32[Tensor, "N D"]:
        """Vectors of items of requests, by their raw columns; raises RequestError, DataError, BoundsError."""
        assert self.items.preprocessing is not None, "a model of vectors has features of the item"
        return self.item_vectors(frame_of(rows, self.items.preprocessing.schema, joined=self.packed.model.joined_lists))


def _empty(side: Side) -> EncodedSide:
    """One sample of a side whose columns are all missing."""
    # A column that no feature reads gives the frame its one row.
    return encode_frame(side, pl.DataFrame({"nothing:": [None]}))

"""SpreadFields: the pooled fields of a model on many ranks, looked up at once or started ahead.

    model.fields(batch) ──► slots.fields ──► model.embeddings ──► TowerTransform, if the plan has towers ──► (B, X)

`parallelize` puts it into the slot that a model declares for lookup and towers, and the model stays as it is: its
towers are still those of one device, of which a rank holds its own. A pipeline that cuts a batch starts the fields of
all parts (`start`), and has the dense network read those of one part when they have arrived (`arrived`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.models import Model
from ziggurat.models.contract.model import look_up_pooled
from ziggurat.parallel.exchange.in_flight import InFlight
from ziggurat.parallel.tables.embeddings import SpreadEmbeddings
from ziggurat.parallel.towers import TowerTransform


class SpreadFields:
    """Gives the pooled fields of this rank's samples; collective over all ranks.

    Args:
        model: whose embeddings are spread.
        embeddings: of the model.
        towers: behind them; None for a flat plan.
    """

    def __init__(self, model: Model, embeddings: SpreadEmbeddings, *, towers: TowerTransform | None) -> None:
        self._model = model
        self._embeddings = embeddings
        self.towers = towers
        self._arrived: Tensor | None = None

    @property
    def field_dims(self) -> tuple[int, ...]:
        """Numbers of each field."""
        return self._embeddings.field_dims if self.towers is None else self.towers.field_dims

    def __call__(self, batch: Batch) -> Float[Tensor, "B X"]:
        """Return the fields that have arrived, or look them up."""
        if self._arrived is not None:
            return self._arrived
        pooled = look_up_pooled(self._model, batch)
        return pooled if self.towers is None else self.towers(pooled)

    def start(self, batch: Batch) -> InFlight:
        """Look up, compute towers, and send over the last hop."""
        if self.towers is None:
            return self._embeddings.start(batch)
        return self.towers.start(self._embeddings(batch))

    @contextlib.contextmanager
    def arrived(self, fields_BX: Float[Tensor, "B X"]) -> Iterator[None]:
        """Give these fields, which were started, to whoever asks in here."""
        self._arrived = fields_BX
        try:
            yield
        finally:
            self._arrived = None

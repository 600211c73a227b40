"""Hide features from a model: what does it lose without them, with all else as it was?

Rows of hidden features are looked up as padding, so they add zeros and learn nothing. The model keeps its shape, its
weights their names, and one run can hide and show a feature (`names` may change between two steps).

    model.embeddings = HiddenFeatures(model.embeddings, names=("genres",))
    zg.Trainer(model, …)                                  # on one device, or after zg.parallelize on many ranks

`parallelize` spreads the tables behind it, and leaves it where it is. It counts the rows that it hid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ziggurat.embeddings.contract import Embeddings, EmbeddingsWrapper
from ziggurat.features.batch import Batch
from ziggurat.features.jagged import JaggedRows
from ziggurat.features.schema import PADDING_ROW


class HiddenFeatures(EmbeddingsWrapper):
    """Looks up padding in place of the rows of some features.

    Args:
        inner: the embeddings of a model.
        names: the features.

    Attributes:
        hidden: rows that were hidden on this rank, by feature.
    """

    def __init__(self, inner: Embeddings, *, names: Sequence[str]) -> None:
        super().__init__(inner)
        known = {spec.name for spec in inner.inputs.lookups}
        if unknown := sorted(set(names) - known):
            raise ValueError(f"expected features that are looked up ({', '.join(sorted(known))}), found {unknown}")
        self.names = tuple(names)
        self.hidden = Counter[str]()

    def changed(self, batch: Batch) -> Batch:
        """The batch with padding in place of hidden rows; lists keep their lengths."""
        batch = batch.expanded()  # a hidden feature may be in a group of features that repeat
        single = batch.single.clone()
        for index, spec in enumerate(self.inputs.single):
            if spec.name in self.names:
                single[index] = PADDING_ROW
                self.hidden[spec.name] += batch.batch_size
        values = batch.jagged.values.clone()
        offsets = batch.jagged.offsets
        for index, spec in enumerate(self.inputs.jagged):
            if spec.name in self.names:
                begin = int(offsets[index * batch.batch_size])
                end = int(offsets[(index + 1) * batch.batch_size])
                values[begin:end] = PADDING_ROW
                self.hidden[spec.name] += end - begin
        return replace(batch, single=single, jagged=JaggedRows(values, offsets))

    def facts(self) -> dict[str, float]:
        """Add a line to the training log: rows hidden so far."""
        return super().facts() | {f"hidden/{name}": float(count) for name, count in sorted(self.hidden.items())}

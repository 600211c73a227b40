"""Hide features from a model: what does it lose without them, with all else as it was?

Rows of hidden features are looked up as padding, so they add zeros and learn nothing. The model keeps its shape, its
weights their names.

    model.embeddings = HiddenFeatures(model.embeddings, names=("genres",))
    zg.Trainer(model, …)                                  # on one device, or after zg.parallelize on many ranks

`parallelize` spreads the tables behind it, and leaves it where it is. It counts the samples that it hid a feature of
(a step that is one CUDA graph counts when it is recorded), and asks no device for anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

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
        hidden: samples of this rank, by feature.
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
        values = batch.jagged.values
        offsets = batch.jagged.offsets
        places = torch.arange(len(values), device=values.device)
        for index, spec in enumerate(self.inputs.jagged):
            if spec.name in self.names:
                begin = offsets[index * batch.batch_size]
                end = offsets[(index + 1) * batch.batch_size]
                values = torch.where((places >= begin) & (places < end), PADDING_ROW, values)
                self.hidden[spec.name] += batch.batch_size
        return replace(batch, single=single, jagged=JaggedRows(values, offsets))

    def facts(self) -> dict[str, float]:
        """Add a line to the training log: samples hidden so far."""
        return super().facts() | {f"hidden/{name}": float(count) for name, count in sorted(self.hidden.items())}

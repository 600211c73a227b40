"""FLOPs of a sample of some data, for studies that set models beside each other.

A model without histories has the same FLOPs for every sample, which `flops_per_sample` counts of shapes alone. A model
that reads lists event by event costs what its samples' lists are long, and one that computes a history once for the
candidates of a question costs a share of it. So its FLOPs are those of the mean sample among the first `NUM_SAMPLES`
training rows, in the order in which a run with seed 0 reads them: the same samples for every model and every size.
"""

from __future__ import annotations

import dataclasses
import functools

from ziggurat.data.encoded.loader import Dataset, Loader, LoaderConfig
from ziggurat.features.batch import Batch
from ziggurat.models import Model, flops_per_sample
from ziggurat.models.costs.model_cost import Flops, flops_of_batch

NUM_SAMPLES = 128


class CountedSamples:
    """Hold the samples that FLOPs are counted on; they are read when the first model with histories asks.

    Args:
        dataset: training rows.
        loader: as runs read them; its order is kept, since candidates of a question share a history as neighbours.
    """

    def __init__(self, dataset: Dataset, *, loader: LoaderConfig) -> None:
        self._dataset = dataset
        self._loader = loader

    @functools.cached_property
    def batch(self) -> Batch:
        """The samples."""
        # Read by this thread: nothing is left running when the first batch is there.
        config = dataclasses.replace(self._loader, batch_size=NUM_SAMPLES, seed=0, prefetch=0)
        return next(iter(Loader(self._dataset, config=config).batches(epoch=0)))

    def flops(self, model: Model, *, backward: bool = True) -> Flops:
        """Return the FLOPs of a model for the mean sample.

        Args:
            model: on one device.
            backward: whether it is counted; 0 otherwise.
        """
        if not model.inputs.sequences:
            return flops_per_sample(model, backward=backward)
        return flops_of_batch(model, self.batch, backward=backward)

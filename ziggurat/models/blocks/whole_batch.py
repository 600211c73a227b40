"""Share a base among layers whose result depends on all samples of a batch, on whatever rank they are.

    each rank    sums over its samples  ──► world_sum ──►  the sums of the batch: the same bits on every rank

A model is written for one device, and such a layer as if the batch were there: on many ranks `parallelize` gives it a
function that adds up over all of them, differentiably (`parallel/whole_batch.py`). The layer itself knows nothing of
processes. A batch that is cut into parts is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class WholeBatch:
    """A base, beside `nn.Module`, of layers that look at the whole batch.

    Attributes:
        world_sum: adds up a vector over all ranks, differentiably and with the same bits on each; collective. None: one
            device has the whole batch.
    """

    world_sum: Callable[[Tensor], Tensor] | None = None

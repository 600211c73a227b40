"""Time the dense network of a model by each of a few dispatch plans, in turns.

    batch ─► lookup, towers ─► dense network, loss, their backward pass        the clock runs from the network on
                               by plan 1, by plan 2, …, by plan 1, …

A plan that is best product by product need not be best as a whole: conversions between products, norms and activations
in BF16 or FP32, and fused kernels that a dispatched product takes away stand in no table of kernels. So the plans of
`precision/dispatch.py` are compared here, on batches of the run's own rows. Nothing of the model changes.

The median of all turns counts; optimizers and tables, which compute the same in all plans, are not among them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

import torch

from ziggurat.features.batch import Batch
from ziggurat.models.contract.model import Model
from ziggurat.models.probed import dense_pass, left_as_it_is
from ziggurat.ops.machine.turns import seconds_in_turns, time_on
from ziggurat.precision.dispatch import DispatchPlan
from ziggurat.precision.precision import Precision
from ziggurat.precision.products import exchanged, products_of

_TURNS = 9
_TURN_BUDGET_S = 20.0  # of all turns; at least three are made


def seconds_of_plans(model: Model, plans: Sequence[DispatchPlan], *, batches: Sequence[Batch]) -> list[float]:
    """Return the median time of the dense network's forward and backward pass, by plan.

    Args:
        model: on one device.
        plans: of its products.
        batches: on the device of the model, as large as those of training.
    """
    was_training = model.training
    model.train()
    try:
        with left_as_it_is(model):
            times_s = seconds_in_turns(
                [functools.partial(_seconds, model, plan, batches) for plan in plans],
                turns=_TURNS,
                budget_s=_TURN_BUDGET_S,
            )
    finally:
        model.train(was_training)
    return [statistics.median(each) for each in times_s]


def _seconds(model: Model, plan: DispatchPlan, batches: Sequence[Batch], turn: int) -> float:
    batch = batches[turn % len(batches)]
    device = batch.labels.device
    activations = Precision(plan.whole.precision)
    with exchanged(products_of(model), plan.arithmetic):
        with torch.no_grad(), activations.autocast(device):
            embedded = model.embed(batch)
        begin_s = time_on(device)
        dense_pass(model, embedded, batch, loss=model.loss, activations=activations)
        return time_on(device) - begin_s

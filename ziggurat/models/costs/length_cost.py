"""The cost of a sample by the lengths of its lists, counted from the model: what plans of balance start from.

The FLOPs of the dense network are counted three times for each list that is not pooled, with 1, 2 and 3 events:

    F(L) = a + b·L + c·L²        c = (F(3) − 2·F(2) + F(1)) / 2        b = F(2) − F(1) − 3·c

So a model need not say which terms it has: target attention (DIN) shows b alone, attention of events to each other c as
well. What `flop_counter` does not see (a kernel of your own) is not counted; give the coefficients then.

Lists that have one length in every sample (`Model.joined_lists`) are one list here: the first of them has the terms.

Lookups are bound by memory and count as `LOOKUP_FLOPS` for each number of a looked-up row, pooled or not: gathering,
pooling, the gradient's way back and the update of a row take about as long as so many operations of a matrix product.
It weighs lists against each other, and matters to no plan where a model has one list.
"""

from __future__ import annotations

from ziggurat.data.balance.cost import LengthCost, SampleCost
from ziggurat.errors import ZigguratError
from ziggurat.models.contract.model import Model
from ziggurat.models.costs.model_cost import flops_per_sample

# For each number of a row: gathered, pooled, its gradient and its update (see the top).
LOOKUP_FLOPS = 50


def length_cost(model: Model) -> tuple[SampleCost, str]:
    """FLOPs of a training step by the lengths of a sample's lists, and how they were found.

    Args:
        model: on one device, before `parallelize`.
    """
    inputs = model.inputs
    places = model.embeddings.tables.places
    lookups = {spec.name: float(LOOKUP_FLOPS * places[spec.table].dim) for spec in inputs.jagged}
    counted = {name for group in model.joined_lists for name in group[1:]}  # with the first list of each
    unpooled = [spec.name for spec in inputs.sequences if spec.name not in counted]
    if not lookups:
        return SampleCost(fixed=1.0), "the model has no lists"
    try:
        one = flops_per_sample(model).total
        network = {name: _terms(model, name, one=one) for name in unpooled}
    except (RuntimeError, LookupError, ZigguratError) as error:  # LookupError: a batch of a source of its own
        lists = tuple(LengthCost(name=name, per_event=value) for name, value in lookups.items())
        return SampleCost(fixed=1.0, lists=lists), f"lookups alone: FLOPs cannot be counted ({error})"
    lists = tuple(
        LengthCost(name=name, per_event=value + network.get(name, (0, 0))[0], per_square=network.get(name, (0, 0))[1])
        for name, value in lookups.items()
    )
    fixed = one - sum(linear + square for linear, square in network.values())
    fixed += sum(LOOKUP_FLOPS * places[spec.table].dim for spec in inputs.single)
    return SampleCost(fixed=max(fixed, 1.0), lists=lists), "FLOPs of the model, counted"


def _terms(model: Model, name: str, *, one: int) -> tuple[float, float]:
    """FLOPs an event, and a pair of events."""
    two, three = (flops_per_sample(model, lengths={name: length}).total for length in (2, 3))
    # Second difference of three counts: the coefficient of L², times 2.
    square = (three - 2 * two + one) / 2
    return max(two - one - 3 * square, 0.0), max(square, 0.0)

"""What stands in for parts of a model stands in its slots: methods stay the model's own."""

import pytest
import torch
from torch import Tensor

from tests.parallel.test_parity import build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.models import Embedded, Outputs
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.pipeline import Pipeline
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks

METHODS = ("forward_dense", "outputs_of", "fields", "embed", "dense_outputs", "loss")


def test_a_network_in_the_slot_is_called_and_a_method_is_not_replaced() -> None:
    model = build(towers=None, optimizer="sgd")
    batch = random_batch(inputs(), 5)
    wanted = model(batch)
    calls: list[Embedded] = []

    def network(embedded: Embedded) -> Outputs:
        calls.append(embedded)
        return Outputs(logits=model.forward_dense(embedded).logits + 1)

    model.slots.network = network
    assert torch.equal(model(batch), wanted + 1)
    assert len(calls) == 1
    assert torch.equal(model.forward_dense(model.embed(batch)).logits, wanted)


def steps(rank: int, plan: object, dense: str) -> None:
    model = build(towers=None, optimizer="sgd")
    config = ParallelConfig(dense=DenseParallelism(dense), num_parts=2)
    parallel = parallelize(model, from_json(Plan, plan, where="test"), Topology.create(), config=config)
    assert not set(METHODS) & set(vars(model))
    assert model.slots.network is not None
    batch = random_batch(inputs(), 6, seed=rank)
    seen: list[bool] = []

    def loss_of(outputs: Outputs, part: object) -> Tensor:
        seen.append(model.slots.fields is None and not set(METHODS) & set(vars(model)))
        return outputs.logits.sum()

    Pipeline(model, parallel, num_parts=2).step(batch, loss_of=loss_of)
    assert seen == [True, True]
    assert model.slots.fields is None


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_ranks_fill_slots_and_leave_methods(dense: str) -> None:
    run_ranks(steps, 2, to_json(placed(2, Placement.TABLE_WISE)), dense)

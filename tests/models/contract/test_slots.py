"""What stands in for parts of a model stands in its slots: methods stay the model's own."""

import pytest
import torch
from torch import Tensor

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
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


def steps(rank: int, plan_json: object, dense: str) -> None:
    plan = from_json(Plan, plan_json, where="test")
    model = build(towers=plan.towers, optimizer="sgd")
    towers = model.towers
    config = ParallelConfig(dense=DenseParallelism(dense), num_parts=2)
    topology = Topology.create(tower_size=plan.ranks_per_group)
    parallel = parallelize(model, plan, topology, config=config)
    assert not set(METHODS) & set(vars(model))
    assert model.slots.network is not None
    assert model.slots.fields is parallel.fields
    assert model.towers is towers  # and its rank has the weights of its own towers alone
    if towers is not None:
        own = topology.towers_of(topology.group_index, num_towers=len(towers.towers))
        assert list(towers.modules_of_towers) == [str(tower) for tower in own]
        with pytest.raises(ConfigError, match="lives on the ranks of another tower group"):
            towers.module(next(tower for tower in range(len(towers.towers)) if tower not in own))
    filled = vars(model.slots).copy()
    batch = random_batch(inputs(), 6, seed=rank)
    seen: list[bool] = []

    def loss_of(outputs: Outputs, part: object) -> Tensor:
        seen.append(vars(model.slots) == filled and not set(METHODS) & set(vars(model)))
        return outputs.logits.sum()

    Pipeline(model, parallel, num_parts=2).step(batch, loss_of=loss_of)
    assert seen == [True, True]
    assert vars(model.slots) == filled


@pytest.mark.parametrize(("dense", "towers"), [("ddp", False), ("fsdp", False), ("ddp", True)])
def test_parallelize_fills_slots_once_and_leaves_methods_and_towers(dense: str, towers: bool) -> None:
    given = {"towers": TOWERS, "tower_size": 1} if towers else {}
    run_ranks(steps, 2, to_json(placed(2, Placement.TABLE_WISE, **given)), dense)

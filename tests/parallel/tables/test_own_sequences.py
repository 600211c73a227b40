"""Groups of sequences in a batch, looked up by a model's own `embed`: each once, on two ranks as on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.models.own_model import OwnConfig, OwnModel
from tests.parallel.test_parity import inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.errors import BoundsError
from ziggurat.features.batch import Batch, SequenceGroup
from ziggurat.models import Embedded, Outputs, Unpooled, build_model
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

KINDS = (Placement.TABLE_WISE, Placement.ROW_WISE)


class Histories(OwnModel):
    """Adds the mean of a history's items to the logits."""

    def embed(self, batch: Batch) -> Embedded:
        history = batch.sequences["history"]
        values = self.embeddings.vectors("item", history.values["item"])
        means = Unpooled(values=values, offsets=history.offsets).mean()
        mine = means if history.inverse is None else means[history.inverse]
        return dataclasses.replace(super().embed(batch), vectors={"history": mine})

    def forward_dense(self, embedded: Embedded) -> Outputs:
        outputs = super().forward_dense(embedded)
        return dataclasses.replace(
            outputs, logits=outputs.logits + embedded.vectors["history"].sum(dim=1, keepdim=True)
        )


class HistoriesConfig(OwnConfig):
    """Settings of `Histories`."""

    def build(self, inputs: Any, *, embeddings: Any, towers: Any) -> Histories:
        return Histories(self, inputs, embeddings=embeddings, towers=towers)


def model() -> Histories:
    config = HistoriesConfig(embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    built = build_model(config, inputs(), seed=3)
    assert isinstance(built, Histories)
    return built


def samples() -> Batch:
    """Thirteen samples that share three histories, an empty one among them."""
    items, offsets = torch.tensor([2, 5, 5, 16, 3]), torch.tensor([0, 3, 3, 5])
    inverse = torch.arange(13) % 3
    group = SequenceGroup(values={"item": items}, offsets=offsets, inverse=inverse)
    return dataclasses.replace(random_batch(inputs(), 13, seed=1), sequences={"history": group})


def check(rank: int, plans: list[Any]) -> str:
    """Runs on every rank."""
    del rank
    for num_parts, each in enumerate(plans, start=1):
        plan = from_json(Plan, each, where="test")
        cuts = [8] * (plan.world_size - 1)
        assert_same_as_single_device(model, plan, batch=samples(), num_parts=num_parts, cuts=cuts)
    many = model()
    parallelize(many, from_json(Plan, plans[0], where="test"), Topology.create())
    with pytest.raises(BoundsError) as caught:
        many.embeddings.vectors("item", torch.tensor([1, 99]))
    return str(caught.value)


def test_histories_of_a_batch_on_two_ranks_equal_one_device() -> None:
    for said in run_ranks(check, 2, [to_json(placed(2, kind)) for kind in KINDS]):
        assert "99" in said


def test_a_history_that_samples_share_is_looked_up_once() -> None:
    single, batch = model(), samples()
    written_out = {name: group.expanded() for name, group in batch.sequences.items()}
    torch.testing.assert_close(single(batch), single(dataclasses.replace(batch, sequences=written_out)))
    single.embeddings.recorded = [[] for _ in single.embeddings.recorded]
    single(batch).sum().backward()
    read = [part.lookups.batch_size for parts in single.embeddings.recorded for part in parts]
    assert 5 in read  # rows of three histories, not of thirteen samples

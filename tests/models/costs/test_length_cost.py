"""The terms of a model in the lengths of its lists are found by counting, whatever its network does."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from tests.models.test_din import CONFIG, INPUTS
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.schema import Pooling
from ziggurat.models import DLRMConfig, Embedded, Model, Outputs, build_model
from ziggurat.models.costs.length_cost import LOOKUP_FLOPS, length_cost
from ziggurat.testing.batches import small_inputs

DIM = 4


class EveryEventSeesEveryOther(Model):
    """One layer of attention over clicks."""

    def __init__(self) -> None:
        lists = tuple(
            dataclasses.replace(spec, pooling=Pooling.NONE if spec.name == "clicks" else Pooling.SUM)
            for spec in INPUTS.jagged
        )
        inputs = dataclasses.replace(INPUTS, jagged=lists)
        super().__init__(inputs, embeddings=EmbeddingTables(inputs, EmbeddingConfig(dim=DIM)))
        self.query, self.top = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        events_BTD, _ = embedded.sequences["clicks"].padded()
        seen_BTD: Tensor = (self.query(events_BTD) @ events_BTD.transpose(1, 2)).softmax(2) @ events_BTD
        return Outputs(logits=self.top(seen_BTD.sum(1)))


def test_target_attention_is_linear() -> None:
    cost, source = length_cost(build_model(CONFIG, INPUTS, seed=0))
    found = {each.name: (each.per_event, each.per_square) for each in cost.lists}
    mlp = 2 * DIM * 5 + 5  # what depends on the target alone is computed once a sample
    lookup = LOOKUP_FLOPS * DIM
    assert found == {"tags": (lookup, 0), "clicks": (lookup + 6 * mlp, 0), "skips": (lookup + 6 * mlp, 0)}
    assert "counted" in source


def test_attention_of_events_has_a_square() -> None:
    cost, _ = length_cost(EveryEventSeesEveryOther())
    found = {each.name: (each.per_event, each.per_square) for each in cost.lists}
    products = 2 * (2 * DIM) * 3  # scores and their sum, forward and twice backward
    assert found["clicks"] == (LOOKUP_FLOPS * DIM + 6 * DIM * DIM, products)
    assert found["skips"] == (LOOKUP_FLOPS * DIM, 0)


def test_models_without_lists_have_nothing_to_balance() -> None:
    model = build_model(DLRMConfig(embedding_dim=4), small_inputs(num_jagged=0), seed=0)
    assert length_cost(model)[0].is_constant

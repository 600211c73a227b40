"""FLOPs are counted, not declared: also of a model that Ziggurat does not know."""

from __future__ import annotations

import pytest
import torch

from tests.models.own_model import OwnConfig, OwnModel
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableOptimizerKind
from ziggurat.features.batch import Batch
from ziggurat.models import DLRMConfig, Embedded, MLPConfig, Outputs, build_model, flops_per_sample
from ziggurat.testing.batches import small_inputs

INPUTS = small_inputs()
WIDTH = len(INPUTS.dense) + 8 * len(INPUTS.fields)


class Squares(OwnModel):
    """Products that are no `nn.Linear`, after an `embed` of its own and a shape that depends on values."""

    def embed(self, batch: Batch) -> Embedded:
        return super().embed(batch)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        assert int(embedded.fields.detach().abs().sum()) >= 0  # no meta tensor has a value
        both = torch.cat([embedded.dense, embedded.fields], dim=1)
        return Outputs(logits=(both @ self.mlp.weight.T).square() @ self.mlp.weight[:, :1])


@pytest.mark.parametrize("cls", [OwnModel, Squares])
def test_products_of_an_own_model_are_counted_and_leave_no_trace(cls: type[OwnModel]) -> None:
    model = cls(
        OwnConfig(),
        INPUTS,
        embeddings=EmbeddingTables(INPUTS, build_model(OwnConfig(), INPUTS, seed=0).embeddings.config),
        towers=None,
    )
    state = torch.get_rng_state()
    found = flops_per_sample(model)
    last = 2 * 5 * (2 if cls is OwnModel else 1)
    assert found.forward == 2 * WIDTH * 5 + last
    assert found.backward == 2 * found.forward
    forward = flops_per_sample(model, backward=False)
    assert (forward.forward, forward.backward) == (found.forward, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None and not weight.is_meta for weight in model.parameters())
    assert not any(model.embeddings.recorded)


def test_zeros_that_align_memory_are_no_work() -> None:
    """Fifteen fields of 16 and their pairs are 121 columns wide, twenty 206: the second is padded to 208."""
    inputs = small_inputs(num_dense=3, num_single=19, num_jagged=0)
    mlp = MLPConfig(hidden_dims=(8,))
    found = flops_per_sample(build_model(DLRMConfig(embedding_dim=16, bottom=mlp, top=mlp), inputs, seed=0))
    assert found.forward == 2 * (3 * 8 + 8 * 16) + 2 * 20**2 * 16 + 2 * (206 * 8 + 8)


@pytest.mark.parametrize("draw_tables", [True, False])
def test_tables_that_are_parameters_are_left_alone(draw_tables: bool) -> None:
    dense = EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE)
    mlp = MLPConfig(hidden_dims=(8,))
    found = [
        flops_per_sample(
            build_model(DLRMConfig(bottom=mlp, top=mlp, embedding=embedding), INPUTS, seed=0, draw_tables=draw_tables)
        )
        for embedding in (EmbeddingConfig(), dense)
    ]
    assert found[0] == found[1]

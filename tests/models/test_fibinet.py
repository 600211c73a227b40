"""FiBiNET against its equations, pair by pair."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.models.as_written import Given, assert_as_written
from ziggurat.errors import ConfigError
from ziggurat.models import BilinearKind, DNNConfig, FiBiNETConfig, MLPConfig, WideDeepConfig, build_model
from ziggurat.testing.batches import small_inputs

D = 4
MLP = MLPConfig(hidden_dims=(6, 5))


def pairs(parts: Given, name: str, fields: torch.Tensor, kind: BilinearKind) -> torch.Tensor:
    weight = parts[f"{name}.map.weight"]
    found = []
    for place, (i, j) in enumerate(itertools.combinations(range(fields.shape[1]), 2)):
        # A map that all fields share is kept as a linear map keeps it, (out, in), others as (in, out) of each.
        matrix = weight.T if kind is BilinearKind.ALL else weight[i if kind is BilinearKind.EACH else place]
        found.append((fields[:, i] @ matrix) * fields[:, j])
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("kind", list(BilinearKind))
def test_logits_and_gradients_are_those_of_the_equations(kind: BilinearKind) -> None:
    def written(parts: Given) -> torch.Tensor:
        fields = parts.stacked(D)
        squeezed = parts.linear("importance.squeeze", fields.mean(dim=2)).clamp(min=0)
        scales = parts.linear("importance.excite", squeezed).clamp(min=0)
        assert 0 < int((scales > 0).sum()) < scales.numel()  # both sides of the ReLU are seen
        both = [pairs(parts, "pairs", fields, kind), pairs(parts, "scaled_pairs", fields * scales.unsqueeze(2), kind)]
        return parts.first_order(D) + parts.mlp("deep.networks.0", torch.cat(both, dim=1))

    model = assert_as_written(FiBiNETConfig(embedding_dim=D, bilinear=kind, reduction=2, deep=MLP), written)
    assert model.importance.squeeze.out_features == 3  # of six fields


def test_a_lone_field_is_refused_with_ways_out_that_work() -> None:
    alone = small_inputs(num_dense=0, num_single=1, num_jagged=0)
    with pytest.raises(ConfigError, match="a bilinear product takes two") as caught:
        build_model(FiBiNETConfig(), alone, seed=0)
    assert "wide_deep or dnn" in str(caught.value)
    for config in (WideDeepConfig(), DNNConfig()):
        build_model(config, alone, seed=0)
    build_model(FiBiNETConfig(), small_inputs(num_dense=0, num_single=2, num_jagged=0), seed=0)


def test_no_field_stays_left_of_nothing() -> None:
    """The last field stands on no left side, so no matrix is kept for it that would never learn."""
    model = build_model(FiBiNETConfig(bilinear=BilinearKind.EACH), small_inputs(num_dense=0), seed=0)
    assert model.pairs.map.weight.shape[0] == model.stack.num_fields - 1

"""Wide & Deep against its equation."""

from __future__ import annotations

import pytest
import torch

from tests.models.as_written import Given, assert_as_written
from ziggurat.errors import ConfigError
from ziggurat.models import HeadSharing, LogisticRegressionConfig, MLPConfig, WideDeepConfig

D = 4
MLP = MLPConfig(hidden_dims=(6, 5))


def test_logits_and_gradients_are_those_of_the_equation() -> None:
    def written(parts: Given) -> torch.Tensor:
        return parts.first_order(D) + parts.mlp("deep.networks.0", parts.flat(D))

    assert_as_written(WideDeepConfig(embedding_dim=D, deep=MLP), written)


def test_each_label_may_have_a_deep_part_of_its_own() -> None:
    def written(parts: Given) -> torch.Tensor:
        deep = [parts.mlp(f"deep.networks.{label}", parts.flat(D)) for label in range(2)]
        return parts.first_order(D) + torch.cat(deep, dim=1)

    assert_as_written(WideDeepConfig(embedding_dim=D, deep=MLP, heads=HeadSharing.SEPARATE), written)


def test_without_a_deep_part_it_is_refused_with_ways_out_that_work() -> None:
    with pytest.raises(ConfigError, match="take logistic_regression"):
        WideDeepConfig(deep=MLPConfig(hidden_dims=()))
    assert LogisticRegressionConfig().kind == "logistic_regression"

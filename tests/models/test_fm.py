"""FM against its equation, and against DeepFM without hidden layers."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.models.as_written import INPUTS, Given, assert_as_written
from ziggurat.errors import ConfigError
from ziggurat.models import DeepFMConfig, FMConfig, MLPConfig, NumericInput, build_model, flops_per_sample
from ziggurat.testing.batches import random_batch, small_inputs

D = 4


def written(parts: Given) -> torch.Tensor:
    fields = parts.stacked(D).unbind(dim=1)
    pairs = [(left * right).sum(dim=1, keepdim=True) for left, right in itertools.combinations(fields, 2)]
    return parts.first_order(D) + torch.stack(pairs).sum(dim=0)


def test_logits_and_gradients_are_those_of_the_equation() -> None:
    assert_as_written(FMConfig(embedding_dim=D), written)


def test_it_is_deepfm_without_hidden_layers() -> None:
    batch = random_batch(INPUTS, 9)
    twin = DeepFMConfig(embedding_dim=D, deep=MLPConfig(hidden_dims=()))
    found, wanted = (build_model(config, INPUTS, seed=1) for config in (FMConfig(embedding_dim=D), twin))
    assert torch.equal(found(batch), wanted(batch))


def test_ids_alone_need_no_matrix_product() -> None:
    model = build_model(FMConfig(embedding_dim=D), small_inputs(num_dense=0), seed=0)
    assert flops_per_sample(model).total == 0


def test_numbers_beside_the_fields_are_refused_with_ways_out_that_work() -> None:
    with pytest.raises(ConfigError, match="FM settings"):
        FMConfig(numeric=NumericInput.CONCAT)
    assert FMConfig(numeric=NumericInput.FIELDS).numeric is not FMConfig(numeric=NumericInput.BOTTOM_MLP).numeric

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import (
    DNN,
    DNNConfig,
    HeadSharing,
    LogisticRegression,
    LogisticRegressionConfig,
    MLPConfig,
    NumericInput,
    build_model,
)
from ziggurat.testing.batches import random_batch, small_inputs


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def test_dnn_is_an_mlp_on_everything_side_by_side():
    inputs = small_inputs(num_vectors=1)
    model = build_model(DNNConfig(embedding_dim=3, deep=MLPConfig(hidden_dims=(5,))), inputs, seed=1)
    assert isinstance(model, DNN)
    batch = random_batch(inputs, 4)
    pooled = torch.randn(4, 12)
    network = model.heads.networks[0]
    numeric = array(batch.dense)[:, :, None] * array(model.flat.dense.numeric_fields.weight)
    vector = array(batch.vectors["vector0"]) @ array(model.flat.dense.vector_fields[0].weight).T
    x0 = np.concatenate([numeric.reshape(4, -1), array(pooled), vector], axis=1)
    hidden = np.maximum(x0 @ array(network.layers[0].weight).T + array(network.layers[0].bias), 0)
    expected = hidden @ array(network.output.weight).T + array(network.output.bias)
    np.testing.assert_allclose(
        array(model.interact(batch.dense, pooled, batch.vectors)), expected, rtol=1e-4, atol=1e-5
    )


def test_dnn_bottom_mlp_makes_one_field_and_separate_heads_one_network_each():
    inputs = small_inputs(num_labels=2)
    config = DNNConfig(embedding_dim=3, numeric=NumericInput.BOTTOM_MLP, heads=HeadSharing.SEPARATE)
    model = build_model(config, inputs, seed=1)
    assert isinstance(model, DNN)
    assert model.flat.output_dim == 3 + 4 * 3
    assert len(model.heads.networks) == 2


def test_logistic_regression_is_a_sum_of_weights():
    inputs = small_inputs(num_dense=2, num_single=2, num_jagged=0, num_vectors=1, num_labels=2)
    model = build_model(LogisticRegressionConfig(), inputs, seed=1)
    assert isinstance(model, LogisticRegression)
    batch = random_batch(inputs, 5)
    numbers = np.concatenate([array(batch.dense), array(batch.vectors["vector0"])], axis=1)
    expected = numbers @ array(model.linear.weight).T + array(model.linear.bias)
    for index, spec in enumerate(inputs.single):
        expected += array(model.embeddings.table(spec.table))[batch.single[index].numpy()]
    np.testing.assert_allclose(array(model(batch)), expected, rtol=1e-5, atol=1e-6)


def test_logistic_regression_without_numbers_has_a_bias_of_its_own():
    inputs = small_inputs(num_dense=0)
    model = build_model(LogisticRegressionConfig(), inputs, seed=1)
    assert isinstance(model, LogisticRegression)
    with torch.no_grad():
        model.bias.fill_(2.5)
    pooled = torch.tensor([[0.5, 1.0, 0.25, 0.25]])
    assert model.interact(torch.empty(1, 0), pooled, {}).item() == 4.5


def test_logistic_regression_ignores_the_schemas_table_sizes():
    inputs = InputSpec(
        single=(SingleSpec(name="a", table="a"),),
        tables=(TableSpec(name="a", num_rows=5, embedding_dim=8),),
        labels=(LabelSpec(name="y"),),
    )
    model = build_model(LogisticRegressionConfig(), inputs, seed=1)
    assert model.embeddings.field_dims == (1,)
    assert model.inputs is inputs


def test_logistic_regression_on_numbers_alone():
    inputs = dataclasses.replace(small_inputs(num_single=0, num_jagged=0), labels=(LabelSpec(name="y"),))
    model = build_model(LogisticRegressionConfig(), inputs, seed=1)
    batch = random_batch(inputs, 3)
    assert isinstance(model, LogisticRegression)
    torch.testing.assert_close(model(batch), model.linear(batch.dense))

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DLRM, DLRMConfig, HeadSharing, Interaction, MLPConfig, NumericInput, build_model
from ziggurat.models.blocks.mlp import Activation
from ziggurat.models.dlrm import TopStart
from ziggurat.testing.batches import random_batch, small_inputs

SMALL = DLRMConfig(embedding_dim=4, bottom=MLPConfig(hidden_dims=(6,)), top=MLPConfig(hidden_dims=(5, 3)))


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def build(config: DLRMConfig, inputs: InputSpec) -> DLRM:
    model = build_model(config, inputs, seed=7)
    assert isinstance(model, DLRM)
    return model


def mlp(network, values: np.ndarray, *, last_activated: bool = False) -> np.ndarray:
    """ReLU hidden layers and a linear output, sample by sample."""
    for layer in network.layers:
        values = np.maximum(array(layer.weight) @ values + array(layer.bias), 0)
    values = array(network.output.weight) @ values + array(network.output.bias)
    return np.maximum(values, 0) if last_activated else values


def dots(fields: list[np.ndarray]) -> list[float]:
    return [fields[i] @ fields[j] for i in range(len(fields)) for j in range(i + 1, len(fields))]


def fields_of(model: DLRM, pooled: np.ndarray) -> list[np.ndarray]:
    return list(pooled.reshape(-1, model.config.embedding_dim))


def check(model: DLRM, equation, *, size: int = 4) -> None:
    """Compare `interact` with an equation from (dense, pooled, vectors) of one sample to the logits."""
    batch = random_batch(model.inputs, size)
    pooled = torch.randn(size, sum(model.embeddings.field_dims))
    found = array(model.interact(batch.dense, pooled, batch.vectors))
    expected = [
        equation(
            array(batch.dense[sample]),
            array(pooled[sample]),
            [array(batch.vectors[spec.name][sample]) for spec in model.inputs.vectors],
        )
        for sample in range(size)
    ]
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-4, atol=1e-5)


def test_equation_of_the_paper():
    model = build(SMALL, small_inputs())

    def equation(dense, pooled, _):
        bottom = mlp(model.dense_inputs.bottom, dense, last_activated=True)
        pairs = dots([bottom, *fields_of(model, pooled)])
        return mlp(model.top.networks[0], np.array([*bottom, *pairs]))

    check(model, equation)


def test_pretrained_vectors_are_projected_to_fields():
    model = build(SMALL, small_inputs(num_vectors=2))

    def equation(dense, pooled, vectors):
        bottom = mlp(model.dense_inputs.bottom, dense, last_activated=True)
        projected = [array(p.weight) @ v for p, v in zip(model.dense_inputs.vector_fields, vectors, strict=True)]
        pairs = dots([bottom, *fields_of(model, pooled), *projected])
        return mlp(model.top.networks[0], np.array([*bottom, *pairs]))

    check(model, equation)


def test_cat_has_no_products():
    model = build(dataclasses.replace(SMALL, interaction=Interaction.CAT), small_inputs())

    def equation(dense, pooled, _):
        bottom = mlp(model.dense_inputs.bottom, dense, last_activated=True)
        return mlp(model.top.networks[0], np.array([*bottom, *pooled]))

    check(model, equation)


def test_numbers_as_fields():
    model = build(dataclasses.replace(SMALL, numeric=NumericInput.FIELDS), small_inputs())

    def equation(dense, pooled, _):
        numeric = [x * w for x, w in zip(dense, array(model.dense_inputs.numeric_fields.weight), strict=True)]
        return mlp(model.top.networks[0], np.array(dots([*numeric, *fields_of(model, pooled)])))

    check(model, equation)


def test_numbers_beside_the_products():
    model = build(dataclasses.replace(SMALL, numeric=NumericInput.CONCAT), small_inputs())
    check(
        model,
        lambda dense, pooled, _: mlp(model.top.networks[0], np.array([*dense, *dots(fields_of(model, pooled))])),
    )


@pytest.mark.parametrize("interaction", list(Interaction))
def test_without_numbers(interaction):
    model = build(dataclasses.replace(SMALL, interaction=interaction), small_inputs(num_dense=0))

    def equation(_, pooled, __):
        inputs = dots(fields_of(model, pooled)) if interaction is Interaction.DOT else pooled
        return mlp(model.top.networks[0], np.array(inputs))

    check(model, equation)


def test_numbers_alone():
    model = build(SMALL, small_inputs(num_single=0, num_jagged=0))
    check(
        model,
        lambda dense, _, __: mlp(model.top.networks[0], mlp(model.dense_inputs.bottom, dense, last_activated=True)),
    )


def test_tables_of_other_sizes_are_projected():
    inputs = InputSpec(
        single=tuple(SingleSpec(name=name, table=name) for name in "abc"),
        tables=tuple(
            TableSpec(name=name, num_rows=9, embedding_dim=dim) for name, dim in zip("abc", (2, 0, 7), strict=True)
        ),
        labels=(LabelSpec(name="y"),),
    )
    model = build(SMALL, inputs)

    def equation(_, pooled, __):
        a, b, c = pooled[:2], pooled[2:6], pooled[6:]
        project_a, project_c = (array(p.weight) for p in model.alignment.projections)
        return mlp(model.top.networks[0], np.array(dots([project_a @ a, b, project_c @ c])))

    check(model, equation)
    assert model(random_batch(inputs, 3)).shape == (3, 1)


@pytest.mark.parametrize("sharing", list(HeadSharing))
def test_heads(sharing):
    model = build(dataclasses.replace(SMALL, heads=sharing), small_inputs(num_labels=3))
    assert len(model.top.networks) == (1 if sharing is HeadSharing.SHARED else 3)

    def equation(dense, pooled, _):
        bottom = mlp(model.dense_inputs.bottom, dense, last_activated=True)
        inputs = np.array([*bottom, *dots([bottom, *fields_of(model, pooled)])])
        return np.concatenate([mlp(network, inputs) for network in model.top.networks])

    check(model, equation)


def test_a_lone_field_under_dot_products_is_refused():
    lone = small_inputs(num_dense=2, num_single=1, num_jagged=0)
    with pytest.raises(ConfigError, match="two fields"):
        build(dataclasses.replace(SMALL, numeric=NumericInput.CONCAT), lone)
    assert build(SMALL, lone)(random_batch(lone, 2)).shape == (2, 1)  # with the bottom MLP's they are two


def test_columns_of_zeros_before_the_top_change_nothing():
    names = [f"c{index}" for index in range(17)]
    inputs = InputSpec(
        dense=("x",),
        single=tuple(SingleSpec(name=name, table=name) for name in names),
        tables=tuple(TableSpec(name=name, num_rows=9) for name in names),
        labels=(LabelSpec(name="y"),),
    )
    model = build(SMALL, inputs)
    width = 4 + 18 * 17 // 2
    assert model.top_padding == -width % 8 == 3
    assert model.state_dict()["top.networks.0.layers.0.weight"].shape == (5, width)
    batch = random_batch(inputs, batch_size=6, seed=1)
    results = {}
    for padding in (3, 0):
        model.top_padding = padding
        model.zero_grad()
        logits = model(batch)
        logits.sum().backward()
        results[padding] = logits, {name: value.grad for name, value in model.named_parameters()}
    torch.testing.assert_close(results[3], results[0])


def test_no_other_width_passes_for_padding():
    model = build(SMALL, small_inputs())
    first = model.top.networks[0].layers[0]
    assert isinstance(first, torch.nn.Linear)
    with pytest.raises(AssertionError, match="columns for"):
        model.top(torch.zeros(2, first.in_features + 1))


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.GELU, Activation.SILU])
@pytest.mark.parametrize("hidden", [(), (5,), (6, 4, 3)])
@pytest.mark.parametrize("sharing", list(HeadSharing))
def test_a_top_that_starts_as_a_sum_adds_every_product_with_a_weight_of_one(
    activation: Activation, hidden: tuple[int, ...], sharing: HeadSharing
) -> None:
    inputs = dataclasses.replace(small_inputs(), labels=(LabelSpec(name="click"), LabelSpec(name="buy")))
    top = MLPConfig(hidden_dims=hidden, activation=activation)
    config = dataclasses.replace(SMALL, top=top, heads=sharing, top_start=TopStart.SUM_OF_PAIRS)
    model = build(config, inputs)
    batch = random_batch(inputs, 4)
    pooled = torch.randn(4, sum(model.embeddings.field_dims))
    with torch.no_grad():
        whole = model.interact(batch.dense, pooled, batch.vectors)
        for network in model.top.networks:
            weight = network.output.weight  # pyright: ignore[reportAttributeAccessIssue]
            if hidden:
                weight[:, :2] = 0.0
            else:
                weight[:, -model.dot.num_pairs :] = 0.0  # pyright: ignore[reportOptionalMemberAccess]
        drawn = model.interact(batch.dense, pooled, batch.vectors)
        numbers = model.dense_inputs.numbers(batch.dense)
        numeric = [numbers] if model.dense_inputs.num_numeric_fields else []
        flat = [*numeric, *model.alignment(pooled), *model.dense_inputs.vectors(batch.vectors)]
        fields = torch.cat([piece.reshape(4, -1, config.embedding_dim) for piece in flat], dim=1)
        products = fields @ fields.transpose(1, 2)
        sums = torch.triu(products, diagonal=1).sum(dim=(1, 2))
    torch.testing.assert_close(whole - drawn, sums.unsqueeze(1).expand(4, 2), rtol=1e-4, atol=1e-4)


def test_a_start_as_a_sum_leaves_narrow_layers_and_concatenation_as_they_are() -> None:
    for config in (
        dataclasses.replace(SMALL, top=MLPConfig(hidden_dims=(5, 1))),
        dataclasses.replace(SMALL, interaction=Interaction.CAT),
    ):
        plain = build(config, small_inputs()).state_dict()
        summed = build(dataclasses.replace(config, top_start=TopStart.SUM_OF_PAIRS), small_inputs()).state_dict()
        for name, value in plain.items():
            torch.testing.assert_close(value, summed[name], rtol=0, atol=0)

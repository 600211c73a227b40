"""Models with towers: the flat model in another order, training, checkpoints, figures, and what they refuse."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ziggurat.config import from_json, override, to_json
from ziggurat.embeddings import EmbeddingConfig, TableOptimizer
from ziggurat.errors import ConfigError, PlanError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import (
    CrossConfig,
    DCNv2Config,
    DHENConfig,
    DLRMConfig,
    DNNConfig,
    Interaction,
    LogisticRegressionConfig,
    MLPConfig,
    NumericInput,
    RankingModel,
    TowerLayer,
    TowerModuleConfig,
    TowerModuleKind,
    WukongConfig,
    build_model,
    build_tower_module,
    flops_per_sample,
    num_parameters,
)
from ziggurat.models.contract.losses import loss_of
from ziggurat.plan import Towers
from ziggurat.testing.batches import random_batch, small_inputs

MLP = MLPConfig(hidden_dims=(8, 4))
IDENTITY = TowerModuleConfig(kind=TowerModuleKind.IDENTITY)
INPUTS = small_inputs(num_vectors=1, num_labels=2)
CANONICAL = Towers(towers=(("single0", "single1"), ("single2", "jagged0")))
CROSSED = Towers(towers=(("jagged0", "single1"), ("single2",), ("single0",)))
MODELS = {
    "dlrm": DLRMConfig(embedding_dim=4, bottom=MLP, top=MLP),
    "dlrm-cat": DLRMConfig(embedding_dim=4, interaction=Interaction.CAT, numeric=NumericInput.FIELDS, top=MLP),
    "dcn_v2": DCNv2Config(embedding_dim=4, cross=CrossConfig(num_layers=2), deep=MLP),
    "dnn": DNNConfig(embedding_dim=4, deep=MLP, numeric=NumericInput.CONCAT),
    "wukong": WukongConfig(  # wider: layer norm leaves fields of two numbers a sign each
        embedding_dim=12, num_layers=2, num_fm=(2,), num_linear=(2,), rank=(3,), mlp=MLP, bottom=MLP, head=MLP
    ),
    "dhen": DHENConfig(embedding_dim=12, num_layers=2, num_outputs=(3,), mlp=MLP, bottom=MLP, head=MLP),
}
every_model = pytest.mark.parametrize("name", list(MODELS))
every_kind = pytest.mark.parametrize("kind", list(TowerModuleKind))


def build(name: str, module: TowerModuleConfig, towers: Towers | None = CROSSED, *, inputs: InputSpec = INPUTS):
    return build_model(dataclasses.replace(MODELS[name], tower_module=module), inputs, seed=3, towers=towers)


def module_of(kind: TowerModuleKind, **settings) -> TowerModuleConfig:
    compression = 1.0 if kind is TowerModuleKind.IDENTITY else 2.0
    return TowerModuleConfig(kind=kind, compression=compression, **settings)


# ---------------------------------------------------------------------------------- towers and flat are the same model


@every_model
def test_identity_towers_in_canonical_order_are_the_flat_model(name):
    flat, towers = build(name, IDENTITY, None), build(name, IDENTITY, CANONICAL)
    assert flat.state_dict().keys() == towers.state_dict().keys()
    batch = random_batch(INPUTS, 7)
    left, right = flat(batch), towers(batch)
    assert torch.equal(left, right)
    left.square().sum().backward()
    right.square().sum().backward()
    for (key, one), (_, other) in zip(flat.named_parameters(), towers.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), key
    for optimizer in (TableOptimizer(flat.embeddings), TableOptimizer(towers.embeddings)):
        optimizer.step(0.1)
    for table in INPUTS.tables:
        assert torch.equal(flat.embeddings.table(table.name), towers.embeddings.table(table.name))


@every_model
def test_identity_towers_in_any_order_are_the_flat_model_with_fields_in_that_order(name):
    """Also with tables of different sizes: the fields that `interact` sees are permuted, and nothing else."""
    tables = tuple(dataclasses.replace(table, embedding_dim=4 + 2 * (i % 2)) for i, table in enumerate(INPUTS.tables))
    inputs = dataclasses.replace(INPUTS, tables=tables)
    flat, towers = build(name, IDENTITY, None, inputs=inputs), build(name, IDENTITY, CROSSED, inputs=inputs)
    order = [[spec.name for spec in inputs.fields].index(feature) for feature in CROSSED.features]
    batch = random_batch(inputs, 7)
    pieces = flat.fields(batch).split(flat.field_dims, dim=1)
    assert towers.field_dims == tuple(flat.field_dims[index] for index in order)
    assert torch.equal(towers.fields(batch), torch.cat([pieces[index] for index in order], dim=1))


def test_dlrm_logits_are_the_same_up_to_the_order_of_features():
    """The first top layer's columns belong to pairs of fields: permuted alike, the logits agree."""
    flat, towers = build("dlrm", IDENTITY, None), build("dlrm", IDENTITY, CROSSED)
    names = [spec.name for spec in INPUTS.fields]
    order = [0, *(1 + names.index(feature) for feature in CROSSED.features), 1 + len(names)]
    num_fields = len(order)
    pair = {}
    for first in range(num_fields):
        for second in range(first + 1, num_fields):
            pair[first, second] = pair[second, first] = len(pair) // 2
    state = flat.state_dict()
    weight = state["top.networks.0.layers.0.weight"]
    columns = [4 + pair[order[i], order[j]] for i in range(num_fields) for j in range(i + 1, num_fields)]
    state["top.networks.0.layers.0.weight"] = weight[:, [*range(4), *columns]]
    towers.load_state_dict(state)
    batch = random_batch(INPUTS, 9)
    torch.testing.assert_close(towers(batch), flat(batch))


# -------------------------------------------------------------------------------------------------- the layer itself


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.permutations(range(5)),
    st.lists(st.integers(1, 4), max_size=3, unique=True),
    st.sampled_from(list(TowerModuleKind)),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([0, 1, 6]),
)
def test_any_grouping_any_module_any_batch(order, cuts, kind, name, batch_size):
    inputs = small_inputs(num_single=3, num_jagged=2)
    names = [inputs.fields[index].name for index in order]
    edges = [0, *sorted(cuts), 5]
    towers = Towers(towers=tuple(tuple(names[a:b]) for a, b in itertools.pairwise(edges)))
    model = build(name, module_of(kind), towers, inputs=inputs)
    batch = random_batch(inputs, batch_size)
    fields = model.fields(batch)
    assert fields.shape == (batch_size, sum(model.field_dims))
    pooled = model.embeddings(batch)
    pieces = dict(
        zip([spec.name for spec in inputs.fields], pooled.split(model.embeddings.field_dims, dim=1), strict=True)
    )
    expected = [
        model.towers.module(index)(torch.cat([pieces[feature] for feature in tower], dim=1))
        for index, tower in enumerate(towers.towers)
    ]
    torch.testing.assert_close(fields, torch.cat(expected, dim=1))
    for index, tower in enumerate(towers.towers):
        columns = [column for each in model.towers.columns(index) for column in each]
        assert torch.equal(pooled[:, columns], torch.cat([pieces[feature] for feature in tower], dim=1))
    loss_of(model(batch), batch.labels, inputs=inputs).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@every_kind
def test_a_rank_that_builds_one_tower_gets_the_weights_of_the_whole_model(kind):
    model = build("dlrm", module_of(kind, c=1))
    for tower, features in enumerate(CROSSED.towers):
        alone = build_tower_module(
            model.towers.config, field_dims=(4,) * len(features), dim=4, tower=tower, seed=3
        ).state_dict()
        prefix = f"towers.modules_of_towers.{tower}."
        whole = {key.removeprefix(prefix): value for key, value in model.state_dict().items() if key.startswith(prefix)}
        assert whole.keys() == alone.keys()
        assert all(torch.equal(whole[key], alone[key]) for key in alone)


def test_weights_above_and_beside_do_not_depend_on_towers():
    one = build("dcn_v2", module_of(TowerModuleKind.CROSS)).state_dict()
    other = build("dcn_v2", module_of(TowerModuleKind.LINEAR)).state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one if not key.startswith("towers."))
    regrouped = Towers(towers=(CROSSED.towers[0], ("single0", "single2")))
    again = build("dcn_v2", module_of(TowerModuleKind.CROSS), regrouped).state_dict()
    first = [key for key in one if key.startswith("towers.modules_of_towers.0.")]
    assert first
    assert all(torch.equal(one[key], again[key]) for key in first)


def test_report():
    model = build("dlrm", TowerModuleConfig(c=1, p=1, compression=2))
    assert isinstance(model.towers, TowerLayer)
    first = model.towers.report()[0]
    assert first.features == ("jagged0", "single1")
    assert (first.input_dim, first.output_dim, first.compression_ratio) == (8, 6, 8 / 6)
    assert first.num_parameters == 8 * 2 + 2 * 4 * 2
    assert "jagged0, single1: 8 numbers in, 6 out, compression 1.33, 32 weights" in first.text()
    assert [report.tower for report in model.towers.report()] == [0, 1, 2]
    assert model.towers.compression_ratio == 16 / 14
    assert model.field_dims == (2,) * 7


# ------------------------------------------------------------------------------------- cost, precision, compilation


@every_kind
@every_model
def test_flops_and_parameters_are_counted(name, kind):
    model = build(name, module_of(kind))
    batch = random_batch(INPUTS, 6)
    pooled = model.embeddings(batch)
    with FlopCounterMode(display=False) as forward:
        logits = model.interact(batch.dense, model.towers(pooled), batch.vectors)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    flops = flops_per_sample(model)
    assert forward.get_total_flops() == 6 * flops.forward
    assert backward.get_total_flops() == 6 * flops.backward
    assert num_parameters(model).dense == sum(weight.numel() for weight in model.parameters())


@every_kind
def test_bf16_covers_the_towers_and_not_the_lookup(kind):
    model = build("dlrm", module_of(kind))
    batch = random_batch(INPUTS, 8)
    seen = []
    model.towers.register_forward_hook(lambda _, inputs, outputs: seen.append((inputs[0].dtype, outputs.dtype)))
    exact = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(batch)
    inner = torch.float32 if kind is TowerModuleKind.IDENTITY else torch.bfloat16
    assert seen == [(torch.float32, torch.float32), (torch.float32, inner)]
    assert (rounded.float() - exact).abs().max() < 0.1 * (1 + exact.abs().max())
    rounded.float().sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())


@every_model
def test_interact_compiles_as_one_graph(name):
    model = build(name, module_of(TowerModuleKind.LINEAR, p=1))
    batch = random_batch(INPUTS, 6)
    torch.compiler.reset()
    compiled = torch.compile(model.interact, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(batch.dense, model.fields(batch), batch.vectors), model(batch))


# ------------------------------------------------------------------------------------------------ learning, keeping


@every_kind
@every_model
def test_tower_models_learn_by_heart(name, kind):
    inputs = small_inputs(num_dense=2, num_single=2, num_jagged=0)
    config = dataclasses.replace(MODELS[name], tower_module=module_of(kind))
    config = override(config, {"embedding.init": "normal", "embedding.init-std": "0.3"})
    towers = Towers(towers=(("single1",), ("single0",)))
    model = build_model(config, inputs, seed=1, towers=towers)
    batch = random_batch(inputs, 8, seed=5)
    batch = dataclasses.replace(batch, single=torch.stack([torch.arange(8) + 3, batch.single[1]]))
    learn(model, batch, steps=150)
    with torch.no_grad():
        assert loss_of(model(batch), batch.labels, inputs=inputs) < 0.2


def learn(model: RankingModel, batch, *, steps: int) -> None:
    dense, tables = torch.optim.Adam(model.parameters(), lr=0.02), TableOptimizer(model.embeddings)
    for _ in range(steps):
        dense.zero_grad()
        tables.zero_grad()
        loss_of(model(batch), batch.labels, inputs=model.inputs).backward()
        dense.step()
        tables.step(0.2)


def test_state_dict_is_keyed_by_tower_and_survives_a_round_trip():
    model, other = build("dlrm", module_of(TowerModuleKind.LINEAR)), build("dlrm", module_of(TowerModuleKind.LINEAR))
    batch = random_batch(INPUTS, 5)
    learn(model, batch, steps=2)
    assert not torch.equal(model(batch), other(batch))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), other(batch))
    numbers = {key.split(".")[2] for key in model.state_dict() if key.startswith("towers.")}
    assert numbers == {"0", "1", "2"}


def test_config_round_trip_and_overrides():
    config = override(DLRMConfig(), {"tower-module.kind": "cross", "tower-module.compression": "4"})
    assert config.tower_module == TowerModuleConfig(kind=TowerModuleKind.CROSS, compression=4)
    assert from_json(DLRMConfig, to_json(config), where="test") == config
    assert DCNv2Config().tower_module.kind is TowerModuleKind.CROSS
    old = {key: value for key, value in to_json(DLRMConfig()).items() if key != "tower_module"}
    assert from_json(DLRMConfig, old, where="test") == DLRMConfig()


# ---------------------------------------------------------------------------------------------------------- errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatConfig:
    """A config of a user's own that has no place for towers."""

    kind: str = "flat"
    embedding_dim: int = 4
    embedding: EmbeddingConfig = dataclasses.field(default_factory=EmbeddingConfig)

    def table_columns(self, inputs):
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs, *, embeddings, towers):
        raise AssertionError("it is refused before")


def test_refusals():
    with pytest.raises(ConfigError, match="interaction above the towers"):
        build_model(LogisticRegressionConfig(), INPUTS, seed=0, towers=CROSSED)
    with pytest.raises(ConfigError, match="interaction above the towers") as refused:
        build_model(FlatConfig(), INPUTS, seed=0, towers=CROSSED)
    assert refused.value.ways_out[0].startswith("give FlatConfig tower_module: TowerModuleConfig = ")
    with pytest.raises(PlanError, match="missing: single0"):
        build("dlrm", IDENTITY, Towers(towers=CROSSED.towers[:2]))
    with pytest.raises(PlanError, match="unknown: age"):
        build("dlrm", IDENTITY, Towers(towers=(*CROSSED.towers, ("age",))))
    with pytest.raises(ConfigError, match="N = 4: 1, 2, 4"):
        build("dnn", TowerModuleConfig(compression=3))
    shared = dataclasses.replace(
        INPUTS, single=(INPUTS.single[0], dataclasses.replace(INPUTS.single[1], table="single0"), INPUTS.single[2])
    )
    with pytest.raises(PlanError, match="share a table"):
        build("dlrm", IDENTITY, CROSSED, inputs=shared)


def test_one_field_left_has_nothing_to_interact_with():
    inputs = small_inputs(num_dense=0, num_single=2, num_jagged=0)
    towers = Towers(towers=(("single0", "single1"),))
    with pytest.raises(ConfigError, match="two fields or more"):
        build("dlrm", TowerModuleConfig(c=0, p=1), towers, inputs=inputs)

"""What holds for every ranking model, whatever its settings and inputs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ziggurat.config import from_json, override, to_json
from ziggurat.embeddings import EmbeddingConfig, TableOptimizer
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batch import validate_batch
from ziggurat.features.schema import Task
from ziggurat.models import (
    Activation,
    AFNConfig,
    AttentionConfig,
    AutoIntConfig,
    BilinearKind,
    Blocks,
    Bridge,
    BuiltInConfig,
    CrossConfig,
    CrossKind,
    DCNv2Config,
    DeepFMConfig,
    DHENConfig,
    DHENModule,
    DLRMConfig,
    DNNConfig,
    EDCNConfig,
    Ensemble,
    FCNConfig,
    FiBiNETConfig,
    FinalMLP,
    FinalMLPConfig,
    FinalNetConfig,
    FMConfig,
    FMKind,
    Gating,
    GDCNConfig,
    HeadSharing,
    Init,
    Interaction,
    LogisticRegressionConfig,
    MaskNetConfig,
    MaskStructure,
    MLPConfig,
    MMoEConfig,
    Normalization,
    NumericInput,
    PEPNetConfig,
    PLEConfig,
    QNNConfig,
    RankingModel,
    Residual,
    SecondHalf,
    Selection,
    Structure,
    Supervision,
    Wide,
    WideDeepConfig,
    WukongConfig,
    XDeepFMConfig,
    build_model,
    flops_per_sample,
    num_parameters,
)
from ziggurat.models.contract.losses import loss_of
from ziggurat.testing.batches import random_batch, small_inputs

MLP = MLPConfig(hidden_dims=(8, 4))
BARS = MLPConfig(hidden_dims=(8, 4), normalization=Normalization.BATCH, dropout=0.2)
LINEAR = MLPConfig(hidden_dims=(8, 4), activation=Activation.IDENTITY)
LAYER_NORM = MLPConfig(hidden_dims=(8, 4), normalization=Normalization.LAYER, activation=Activation.GELU)
WUKONG = WukongConfig(
    embedding_dim=4,
    num_layers=2,
    num_fm=(2,),
    num_linear=(2,),
    rank=(3,),
    mlp=MLP,
    attention=MLP,
    num_attention_fields=2,
    bottom=MLP,
    num_bottom_fields=2,
    head=MLP,
)
DHEN = DHENConfig(
    embedding_dim=4,
    num_layers=2,
    num_outputs=(2,),
    mlp=MLP,
    attention=AttentionConfig(dim=6, num_heads=2),
    attention_hidden_dim=5,
    fm_rank=3,
    bottom=MLP,
    num_bottom_fields=2,
    head=MLP,
)
EXPERTS = CrossConfig(num_layers=3, rank=2, num_experts=2)

CONFIGS: dict[str, BuiltInConfig] = {
    **{
        f"dlrm-{interaction}-{numeric}": DLRMConfig(
            embedding_dim=4, interaction=interaction, numeric=numeric, bottom=MLP, top=MLP
        )
        for interaction in Interaction
        for numeric in NumericInput
    },
    "dlrm-separate": DLRMConfig(embedding_dim=4, bottom=MLP, top=MLP, heads=HeadSharing.SEPARATE),
    "dlrm-bars": DLRMConfig(embedding_dim=4, bottom=BARS, top=BARS, init=Init.XAVIER_NORMAL),
    **{
        f"dcn_v2-{structure}-{kind}": DCNv2Config(
            embedding_dim=4, structure=structure, cross=dataclasses.replace(EXPERTS, kind=kind), deep=MLP, bottom=MLP
        )
        for structure in Structure
        for kind in CrossKind
    },
    "dcn_v2-concat": DCNv2Config(embedding_dim=4, cross=EXPERTS, deep=MLP, numeric=NumericInput.CONCAT),
    "dcn_v2-mixture-concat": DCNv2Config(
        embedding_dim=4,
        cross=dataclasses.replace(EXPERTS, kind=CrossKind.MIXTURE),
        deep=MLP,
        numeric=NumericInput.CONCAT,
    ),
    "dcn_v2-separate": DCNv2Config(embedding_dim=4, cross=EXPERTS, deep=MLP, heads=HeadSharing.SEPARATE),
    "dcn_v2-bars": DCNv2Config(embedding_dim=4, cross=EXPERTS, deep=BARS, init=Init.XAVIER_NORMAL),
    "dnn": DNNConfig(embedding_dim=4, deep=MLP),
    "dnn-bottom": DNNConfig(embedding_dim=4, deep=MLP, bottom=MLP, numeric=NumericInput.BOTTOM_MLP),
    "dnn-bars": DNNConfig(embedding_dim=4, deep=BARS, numeric=NumericInput.CONCAT, heads=HeadSharing.SEPARATE),
    "logistic_regression": LogisticRegressionConfig(),
    "deepfm": DeepFMConfig(embedding_dim=4, deep=MLP),
    "deepfm-only-fm": DeepFMConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=())),
    "deepfm-bars": DeepFMConfig(
        embedding_dim=4, deep=BARS, numeric=NumericInput.BOTTOM_MLP, bottom=MLP, init=Init.XAVIER_NORMAL
    ),
    "xdeepfm": XDeepFMConfig(embedding_dim=4, cin=(3, 2), deep=MLP, heads=HeadSharing.SEPARATE),
    "xdeepfm-bars": XDeepFMConfig(embedding_dim=4, cin=(3,), deep=MLPConfig(hidden_dims=()), init=Init.XAVIER_NORMAL),
    "autoint": AutoIntConfig(embedding_dim=4, attention=AttentionConfig(dim=6, num_heads=2), deep=MLP),
    "autoint-bars": AutoIntConfig(
        embedding_dim=4,
        attention=AttentionConfig(dim=4, scaled=False, layer_norm=True, dropout=0.1),
        deep=BARS,
        wide=Wide.LINEAR,
        init=Init.XAVIER_NORMAL,
    ),
    "autoint-no-deep": AutoIntConfig(
        embedding_dim=4, attention=AttentionConfig(dim=6), deep=MLPConfig(hidden_dims=()), num_layers=1
    ),
    "masknet-serial": MaskNetConfig(embedding_dim=4, deep=MLP),
    "masknet-parallel": MaskNetConfig(
        embedding_dim=4, structure=MaskStructure.PARALLEL, deep=MLP, num_blocks=2, block_dim=5, reduction_ratio=0.5
    ),
    "masknet-bars": MaskNetConfig(
        embedding_dim=4,
        structure=MaskStructure.PARALLEL,
        deep=BARS,
        block_norm=Normalization.NONE,
        field_norm=Normalization.NONE,
        heads=HeadSharing.SEPARATE,
        init=Init.XAVIER_NORMAL,
    ),
    "finalmlp": FinalMLPConfig(embedding_dim=4, first=MLP, second=MLP, gate=MLP, num_heads=2),
    "finalmlp-bars": FinalMLPConfig(
        embedding_dim=4, first=BARS, second=MLP, selection=Selection.NONE, init=Init.XAVIER_NORMAL
    ),
    "finalmlp-concat": FinalMLPConfig(
        embedding_dim=4, first=MLP, second=MLP, selection=Selection.NONE, numeric=NumericInput.CONCAT
    ),
    "finalnet": FinalNetConfig(embedding_dim=4, first=LINEAR, second=MLP),
    "finalnet-sum": FinalNetConfig(embedding_dim=4, first=MLP, second=MLP, residual=Residual.SUM, gating=Gating.FIELDS),
    "finalnet-bars": FinalNetConfig(embedding_dim=4, first=BARS, second=BARS, init=Init.XAVIER_NORMAL),
    "fm": FMConfig(embedding_dim=4),
    "fm-bottom": FMConfig(embedding_dim=4, numeric=NumericInput.BOTTOM_MLP, bottom=MLP, init=Init.XAVIER_NORMAL),
    "wide_deep": WideDeepConfig(embedding_dim=4, deep=MLP, heads=HeadSharing.SEPARATE),
    "wide_deep-bars": WideDeepConfig(embedding_dim=4, deep=BARS, init=Init.XAVIER_NORMAL, numeric=NumericInput.CONCAT),
    **{f"fibinet-{kind}": FiBiNETConfig(embedding_dim=4, bilinear=kind, deep=MLP) for kind in BilinearKind},
    "fibinet-bars": FiBiNETConfig(
        embedding_dim=4, bilinear=BilinearKind.ALL, reduction=2, deep=BARS, init=Init.XAVIER_NORMAL
    ),
    **{
        f"gdcn-{structure}": GDCNConfig(embedding_dim=4, structure=structure, num_layers=2, deep=MLP)
        for structure in Structure
    },
    "gdcn-bars": GDCNConfig(embedding_dim=4, deep=BARS, heads=HeadSharing.SEPARATE, init=Init.XAVIER_NORMAL),
    "afn": AFNConfig(embedding_dim=4, num_neurons=5, deep=MLP, beside=MLPConfig(hidden_dims=())),
    "afn-plus": AFNConfig(embedding_dim=4, num_neurons=5, deep=MLP, beside=MLP),
    "afn-bars": AFNConfig(embedding_dim=4, num_neurons=5, deep=BARS, beside=BARS, init=Init.XAVIER_NORMAL),
    **{f"edcn-{bridge}": EDCNConfig(embedding_dim=4, num_layers=2, bridge=bridge) for bridge in Bridge},
    "edcn-no-gates": EDCNConfig(
        embedding_dim=4, num_layers=2, regulation=False, residual=False, numeric=NumericInput.FIELDS
    ),
    "edcn-bars": EDCNConfig(embedding_dim=4, norm=Normalization.BATCH, dropout=0.2, init=Init.XAVIER_NORMAL),
    **{
        f"fcn-{kind}": FCNConfig(embedding_dim=4, exponential_layers=2, linear_layers=2, second_half=kind, dropout=0.0)
        for kind in SecondHalf
    },
    "fcn-heads": FCNConfig(
        embedding_dim=4, exponential_layers=1, linear_layers=2, num_heads=2, dropout=0.0, supervision=Supervision.NONE
    ),
    "fcn-bars": FCNConfig(embedding_dim=4, exponential_layers=2, linear_layers=2, init=Init.XAVIER_NORMAL),
    "qnn": QNNConfig(embedding_dim=4, num_layers=2, num_rows=2, dropout=0.0),
    "qnn-heads": QNNConfig(embedding_dim=4, num_layers=1, num_rows=2, num_heads=2, dropout=0.0),
    "qnn-bars": QNNConfig(
        embedding_dim=4, num_layers=2, num_rows=2, norm=Normalization.BATCH, dropout=0.1, init=Init.XAVIER_NORMAL
    ),
    "mmoe": MMoEConfig(embedding_dim=4, num_experts=3, expert=MLP, head=MLP),
    "mmoe-gates": MMoEConfig(embedding_dim=4, num_experts=2, expert=LAYER_NORM, gate=MLP, head=LINEAR),
    "mmoe-shared-bottom": MMoEConfig(embedding_dim=4, num_experts=1, expert=MLP, head=MLP),
    "pepnet": PEPNetConfig(embedding_dim=4, deep=MLP, gate_dim=5),
    "pepnet-bars": PEPNetConfig(embedding_dim=4, deep=BARS, gate_dim=3, init=Init.XAVIER_NORMAL),
    "ple": PLEConfig(embedding_dim=4, expert=MLP, head=MLP),
    "ple-one-level": PLEConfig(embedding_dim=4, num_levels=1, num_own_experts=1, expert=BARS, gate=MLP, head=MLP),
    "finalnet-one": FinalNetConfig(embedding_dim=4, first=LAYER_NORM, blocks=Blocks.ONE),
    **{f"wukong-{fm}": dataclasses.replace(WUKONG, fm=fm) for fm in FMKind},
    **{
        f"dhen-{module}": dataclasses.replace(DHEN, modules=(module,), num_outputs=(3,), num_layers=1)
        for module in DHENModule
    },
    "dhen-all": dataclasses.replace(DHEN, modules=tuple(DHENModule), num_layers=1),
    "dhen-sum": dataclasses.replace(DHEN, num_outputs=(3,), ensemble=Ensemble.SUM, numeric=NumericInput.FIELDS),
    "dhen-weighted": dataclasses.replace(
        DHEN, ensemble=Ensemble.WEIGHTED_SUM, mlp=BARS, head=BARS, init=Init.XAVIER_NORMAL, num_outputs=(3, 2)
    ),
    "wukong-fields": dataclasses.replace(WUKONG, numeric=NumericInput.FIELDS, embeddings_per_feature=2),
    "wukong-no-linear": dataclasses.replace(WUKONG, num_linear=(0,), num_fm=(3,), heads=HeadSharing.SEPARATE),
    "wukong-bars": dataclasses.replace(
        WUKONG, mlp=BARS, head=LAYER_NORM, init=Init.XAVIER_NORMAL, input_dropout=0.1, num_layers=1
    ),
}
every_config = pytest.mark.parametrize("name", list(CONFIGS))
COMPILED = (
    *("dlrm-dot-bottom_mlp", "dcn_v2-parallel-full", "dcn_v2-cross_only-mixture", "dnn-bars"),
    "wukong-optimized",
)
compiled_configs = pytest.mark.parametrize(
    "name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
RICH = small_inputs(num_vectors=1, num_labels=2)


def build(name: str, inputs=RICH, *, seed: int = 0) -> RankingModel:
    return build_model(CONFIGS[name], inputs, seed=seed)


def parts(model: RankingModel, size: int, *, seed: int = 0):
    batch = random_batch(model.inputs, size, seed=seed)
    pooled = torch.randn(size, sum(model.embeddings.field_dims), requires_grad=True)
    return batch.dense, pooled, batch.vectors


def learning(model):
    """The weights of a model that learn, by name: all but those whose gradient is zero by construction."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.tuples(*[st.integers(0, 3)] * 4, st.integers(1, 3)),
    st.sampled_from([0, 1, 2, 7]),
    st.booleans(),
)
@example("dlrm-bars", (0, 1, 0, 0, 1), 2, True)  # a lone field under dot products
@example("dcn_v2-bars", (3, 3, 3, 3, 3), 1, True)  # batch norm of one sample
def test_any_inputs_any_batch(name, sizes, batch_size, training):
    num_dense, num_single, num_jagged, num_vectors, num_labels = sizes
    inputs = small_inputs(
        num_dense=num_dense,
        num_single=num_single,
        num_jagged=num_jagged,
        num_vectors=num_vectors,
        num_labels=num_labels,
    )
    batch = validate_batch(random_batch(inputs, batch_size), inputs)
    try:
        model = build(name, inputs).train(training)
    except SchemaError:
        assert num_dense + num_single + num_jagged + num_vectors == 0
        return
    except ConfigError as error:
        if "product takes two" not in str(error):
            raise
        return
    logits = model(batch)
    assert logits.shape == (batch_size, num_labels)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    loss_of(logits, batch.labels, inputs=inputs).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for _, weight in learning(model))


@every_config
def test_weights_are_drawn_from_generators_of_their_own(name):
    before = torch.get_rng_state()
    weights = build(name).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    # Dropout of a model that trains in another thread draws from the global one, wherever that stands.
    torch.manual_seed(12345)
    again = build(name).state_dict()
    assert all(torch.equal(weight, again[each]) for each, weight in weights.items())


@every_config
def test_samples_do_not_influence_each_other_when_scoring(name):
    model = build(name).eval()
    dense, pooled, vectors = parts(model, 6)
    together = model.interact(dense, pooled, vectors)
    alone = [
        model.interact(dense[i : i + 1], pooled[i : i + 1], {k: v[i : i + 1] for k, v in vectors.items()})
        for i in range(6)
    ]
    torch.testing.assert_close(torch.cat(alone), together)


@every_config
def test_a_label_that_is_a_number_is_predicted_from_its_mean_on(name):
    inputs = small_inputs()
    labels = tuple(dataclasses.replace(label, task=Task.REGRESSION) for label in inputs.labels)
    plain = dataclasses.replace(inputs, labels=labels)
    moved = tuple(dataclasses.replace(label, offset=40_000.0, scale=12_000.0) for label in labels)
    models = [
        build_model(CONFIGS[name], each, seed=1).eval() for each in (plain, dataclasses.replace(inputs, labels=moved))
    ]
    batch = random_batch(inputs, batch_size=5)
    computed, found = (model(batch) for model in models)
    torch.testing.assert_close(found, 40_000.0 + 12_000.0 * computed.double(), rtol=1e-5, atol=0.1)


@every_config
def test_gradient_reaches_every_parameter_and_every_input(name):
    model = build(name)
    dense, pooled, vectors = parts(model, 64)
    dense.requires_grad_()
    for vector in vectors.values():
        vector.requires_grad_()
    model.interact(dense, pooled, vectors).square().sum().backward()
    for key, parameter in learning(model):
        assert parameter.grad is not None, key
        # FinalMLP's gates without a context read a learned vector that starts with zeros.
        assert parameter.grad.any() or key.startswith("gates."), key
    columns = torch.cat([values.grad.abs().sum(dim=0) for values in (dense, pooled, *vectors.values())])
    assert (columns > 0).all()


@every_config
def test_one_step_lowers_the_loss_and_many_learn_by_heart(name):
    inputs = small_inputs(num_dense=2, num_single=2, num_jagged=0)
    config = override(CONFIGS[name], {"embedding.init": "normal", "embedding.init-std": "0.1"})
    model = build_model(config, inputs, seed=1)
    batch = random_batch(inputs, 8, seed=5)
    # Eight users of their own, so that even logistic regression can tell them apart.
    batch = dataclasses.replace(batch, single=torch.stack([torch.arange(8) + 3, batch.single[1]]))
    dense, tables = torch.optim.Adam(model.parameters(), lr=0.02), TableOptimizer(model.embeddings)

    def step() -> None:
        dense.zero_grad()
        tables.zero_grad()
        loss_of(model(batch), batch.labels, inputs=inputs).backward()
        dense.step()
        tables.step(0.2)

    def loss() -> float:
        model.eval()
        with torch.no_grad():
            value = loss_of(model(batch), batch.labels, inputs=inputs).item()
        model.train()
        return value

    torch.manual_seed(0)
    # The first step sets batch norm's running statistics, which AFN always has, and dropout is noise.
    if "bars" not in name and not name.startswith("afn"):
        before = loss()
        step()
        assert loss() < before
    for made in range(1, 101):
        step()
        if made % 10 == 0 and loss() < 0.2:
            return
    pytest.fail(f"a loss of {loss()} after 100 steps")


def compile_interact(model: RankingModel, *, backend: str):
    torch.compiler.reset()  # torch compiles one function at most 8 times: enough for a run, not for all models here
    return torch.compile(model.interact, fullgraph=True, dynamic=False, backend=backend)


@compiled_configs
def test_compiled_as_one_graph_it_computes_the_same(name):
    model = build(name).eval()
    # With inductor's decompositions: plain "aot_eager" of torch 2.13 fails on layer norms whose gradient is transposed.
    compiled = compile_interact(model, backend="aot_eager_decomp_partition")
    inputs, twins = parts(model, 5), parts(model, 5)
    twins[1].data.copy_(inputs[1].data)
    expected, found = model.interact(*inputs), compiled(*twins)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    gradients = {key: parameter.grad.clone() for key, parameter in learning(model)}
    model.zero_grad()
    found.square().sum().backward()
    torch.testing.assert_close(twins[1].grad, inputs[1].grad)
    for key, parameter in learning(model):
        torch.testing.assert_close(parameter.grad, gradients[key])


@every_config
def test_bf16_autocast_is_close_and_its_gradients_fp32(name):
    check_bf16(build(name).eval(), compiled=False)


@pytest.mark.parametrize(
    "name", [name if name == COMPILED[0] else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_bf16_autocast_compiled_too(name):
    check_bf16(build(name).eval(), compiled=True)


def check_bf16(model: RankingModel, *, compiled: bool) -> None:
    interact = compile_interact(model, backend="aot_eager") if compiled else model.interact
    inputs = parts(model, 32)
    exact = model.interact(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = interact(*inputs)
    assert (rounded.float() - exact).abs().max() < 0.1 * (1 + exact.abs().max())
    rounded.float().sum().backward()
    assert inputs[1].grad is not None
    assert inputs[1].grad.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.float32 for _, parameter in learning(model))


def flops_of_learned_gates(model: RankingModel) -> int:
    """What FinalMLP's gates without a context compute, once a batch."""
    gates = model.gates if isinstance(model, FinalMLP) else []
    return sum(2 * layer.weight.numel() for gate in gates for layer in gate.modules() if isinstance(layer, nn.Linear))


@every_config
@pytest.mark.parametrize("sizes", [{}, {"num_dense": 0}, {"num_single": 0, "num_jagged": 0}])
def test_flops_are_torchs_count(name, sizes):
    # Counting is slow: vectors in turn, so that each kind of model has all three sizes with them and without.
    num_vectors = 2 * ((list(CONFIGS).index(name) + len(sizes)) % 2)
    model = build(name, small_inputs(**sizes, num_vectors=num_vectors, num_labels=2))
    batch = random_batch(model.inputs, 6)
    pooled = model.embeddings(batch)
    with FlopCounterMode(display=False) as forward:
        logits = model.interact(batch.dense, pooled, batch.vectors)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    flops, a_batch = flops_per_sample(model), flops_of_learned_gates(model)
    assert forward.get_total_flops() == 6 * flops.forward + a_batch
    assert backward.get_total_flops() == 6 * flops.backward + 2 * a_batch
    assert flops.total == flops.forward + flops.backward


@every_config
def test_seed_decides_all_weights_and_nothing_else_is_touched(name):
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    one, same, other = (
        build(name, seed=4).state_dict(),
        build(name, seed=4).state_dict(),
        build(name, seed=5).state_dict(),
    )
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[key], same[key]) for key in one)
    weights = [key for key in one if key.endswith("weight") and "norm" not in key and "gate.mix" not in key]
    assert all(not torch.equal(one[key], other[key]) for key in weights)


def test_dense_weights_do_not_depend_on_table_sizes():
    large = dataclasses.replace(RICH, tables=tuple(dataclasses.replace(table, num_rows=99) for table in RICH.tables))
    one, other = build("dlrm-bars", RICH).state_dict(), build("dlrm-bars", large).state_dict()
    dense = [key for key in one if not key.startswith("embeddings.")]
    assert all(torch.equal(one[key], other[key]) for key in dense)


@every_config
def test_parameters_are_counted(name):
    model = build(name)
    count = num_parameters(model)
    assert count.dense == sum(value.numel() for value in model.parameters())
    assert count.embedding == sum(model.embeddings.table(table.name).numel() for table in RICH.tables)
    assert count.total == count.dense + count.embedding


def test_shared_tables_are_counted_once():
    inputs = small_inputs(num_single=2, num_jagged=0)
    shared = dataclasses.replace(
        inputs,
        single=(inputs.single[0], dataclasses.replace(inputs.single[1], table="single0")),
        tables=inputs.tables[:1],
    )
    assert num_parameters(build("dnn", shared)).embedding == 12 * 4


KEYS = {
    "dlrm-dot-bottom_mlp": {"dense_inputs.bottom.layers.0", "dense_inputs.bottom.output", "top.networks.0.layers.1"},
    "dlrm-bars": {"top.networks.0.norms.0", "dense_inputs.vector_fields.0"},
    "dlrm-dot-fields": {"dense_inputs.numeric_fields"},
    "dlrm-separate": {"top.networks.1.output"},
    "dcn_v2-parallel-full": {"cross.layers.0", "deep.0.layers.0", "outputs.0", "flat.dense.numeric_fields"},
    "dcn_v2-stacked-low_rank": {"cross.down.0", "cross.up.0", "stacked.networks.0.output"},
    "dcn_v2-cross_only-mixture": {"cross.gate", "cross.cores.0", "outputs.0"},
    "dnn": {"heads.networks.0.layers.0", "heads.networks.0.output"},
    "logistic_regression": {"linear"},
    "wukong-optimized": {
        "stack.dense.bottom.output",
        "layers.0.fm.products",
        "layers.0.fm.norm",
        "layers.1.fm.mlp.layers.0",
        "layers.1.fm.mlp.output",
        "layers.0.linear",
        "layers.0.residual",
        "layers.1.norm",
        "heads.networks.0.output",
    },
    "wukong-attentive": {"layers.0.fm.products.compress", "layers.0.fm.products.attention.output"},
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_bias_of_the_output_moves_the_logits_of_a_label_alike(name):
    model = build(name).eval()
    batch = random_batch(RICH, 6)
    shifts = [-2.0 - index for index in range(len(RICH.labels))]
    with torch.no_grad():
        before = model(batch)
        biases = model.output_biases()
        for bias, shift in zip(biases, shifts, strict=bool(biases)):
            bias.add_(shift)
        after = model(batch)
    # The mean of two networks, each of which is taught by itself: no bias of one moves the whole by 1.
    assert bool(biases) is not name.startswith(("final", "fcn"))
    wanted = before + torch.tensor(shifts) if biases else before
    torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(KEYS))
def test_names_of_weights_stay(name):
    """Checkpoints are keyed by them: a renamed module makes saved runs unreadable."""
    keys = set(build(name).state_dict())
    missing = {f"{module}.weight" for module in KEYS[name]} - keys
    assert not missing, keys


@dataclass(frozen=True, kw_only=True)
class Run:
    model: BuiltInConfig


@every_config
def test_config_survives_a_file(name):
    run = Run(model=CONFIGS[name])
    assert from_json(Run, json.loads(json.dumps(to_json(run))), where="test") == run


def test_command_line_overrides():
    changed = override(
        Run(model=DLRMConfig()),
        {"model.embedding-dim": "32", "model.top.hidden-dims": "400,400", "model.numeric": "fields"},
    )
    assert changed.model == DLRMConfig(
        embedding_dim=32, top=MLPConfig(hidden_dims=(400, 400)), numeric=NumericInput.FIELDS
    )
    assert build_model(changed.model, RICH, seed=0).embeddings.field_dims == (32,) * 4


def test_two_sizes_for_tables_are_refused():
    with pytest.raises(ConfigError, match="set once"):
        build_model(DLRMConfig(embedding_dim=8, embedding=EmbeddingConfig(dim=4)), RICH, seed=0)
    build_model(DLRMConfig(embedding_dim=8, embedding=EmbeddingConfig(dim=8)), RICH, seed=0)


def test_nothing_to_predict_or_to_predict_from_is_refused():
    with pytest.raises(SchemaError, match="label"):
        build_model(DNNConfig(), dataclasses.replace(RICH, labels=()), seed=0)
    with pytest.raises(SchemaError, match="feature"):
        build_model(DNNConfig(), small_inputs(num_dense=0, num_single=0, num_jagged=0), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm-dot-bottom_mlp", "dcn_v2-parallel-full", "dcn_v2-bars"])
def test_inductor_computes_the_same(name):
    model = build(name).eval()
    compiled = compile_interact(model, backend="inductor")
    inputs, twins = parts(model, 16), parts(model, 16)
    twins[1].data.copy_(inputs[1].data)
    expected, found = model.interact(*inputs), compiled(*twins)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(twins[1].grad, inputs[1].grad)


BATCH = Normalization.BATCH
NORMED_OVER_BATCHES = {
    "wukong": dataclasses.replace(WUKONG, norm=BATCH),
    "wukong-attentive": dataclasses.replace(WUKONG, norm=BATCH, input_norm=BATCH, fm=FMKind.ATTENTIVE),
    "wukong-mlp": dataclasses.replace(WUKONG, mlp=BARS),
    "wukong-head": dataclasses.replace(WUKONG, head=BARS),
    **{f"dhen-{kind}": dataclasses.replace(DHEN, norm=BATCH, input_norm=BATCH, modules=(kind,)) for kind in DHENModule},
    "dhen-all": dataclasses.replace(DHEN, modules=tuple(DHENModule), mlp=BARS, head=BARS),
}


@pytest.mark.parametrize("name", list(NORMED_OVER_BATCHES))
def test_no_weight_learns_from_rounding_alone(name):
    """In FP64 a gradient is some share of the largest, or zero by construction, and then the weight is frozen."""
    inputs = small_inputs()
    model = build_model(NORMED_OVER_BATCHES[name], inputs, seed=1).double()
    batch = random_batch(inputs, 64, seed=3)
    vectors = {key: value.double() for key, value in batch.vectors.items()}
    embedded = model.embed(dataclasses.replace(batch, dense=batch.dense.double(), vectors=vectors))
    embedded = dataclasses.replace(embedded, fields=30.0 * embedded.fields.double())
    logits = model.forward_dense(embedded).logits
    losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.nan_to_num(0.0).double())
    learning = {key: value for key, value in model.named_parameters() if value.requires_grad}
    found = torch.autograd.grad(losses, list(learning.values()), allow_unused=True)
    sizes = {key: float(each.abs().max()) for key, each in zip(learning, found, strict=True) if each is not None}
    assert [key for key, size in sizes.items() if 0.0 < size < 1e-11 * max(sizes.values())] == []

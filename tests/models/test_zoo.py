"""DeepFM, xDeepFM, AutoInt, MaskNet, FinalMLP and FinalNet against their equations, written as loops over samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ziggurat.embeddings import EmbeddingConfig, TableOptimizer
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import (
    Activation,
    AttentionConfig,
    AutoIntConfig,
    Blocks,
    DeepFMConfig,
    DHENConfig,
    DHENModule,
    Embedded,
    FinalMLP,
    FinalMLPConfig,
    FinalNetConfig,
    FMKind,
    Gating,
    MaskNetConfig,
    MaskStructure,
    MLPConfig,
    ModelConfig,
    NumericInput,
    RankingModel,
    Residual,
    Wide,
    WukongConfig,
    XDeepFMConfig,
    build_model,
    num_parameters,
)
from ziggurat.models.blocks.extra_columns import ExtraColumns
from ziggurat.models.contract.losses import loss_of
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.plan import Towers
from ziggurat.testing.batches import random_batch, small_inputs

D = 4
MLP = MLPConfig(hidden_dims=(6, 4))
PLAIN = small_inputs(num_dense=2, num_single=2, num_jagged=1)
F_ALL = 5


def build(config: ModelConfig, inputs: InputSpec = PLAIN) -> RankingModel:
    """FP64, with random numbers in every weight."""
    model = build_model(config, inputs, seed=3).double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model.eval()


def parts(model: RankingModel, size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    width = sum(model.field_dims)
    return (
        torch.randn(size, len(model.inputs.dense), generator=generator, dtype=torch.float64),
        torch.randn(size, width, generator=generator, dtype=torch.float64),
    )


def array(tensor) -> np.ndarray:
    return tensor.detach().numpy()


def mlp(x: np.ndarray, network) -> np.ndarray:
    for layer in network.layers:
        x = np.maximum(array(layer.weight) @ x + array(layer.bias), 0)
    return x if network.output is None else array(network.output.weight) @ x + array(network.output.bias)


def fields(model, dense: torch.Tensor, main: np.ndarray) -> np.ndarray:
    """X of one sample: each number times its vector, then the embeddings."""
    numbers = array(dense)[:, None] * array(model.stack.dense.numeric_fields.weight)
    return np.concatenate([numbers, main.reshape(-1, D)])


def rows(pooled: torch.Tensor, extra: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Vectors, and extra columns, of one sample."""
    both = array(pooled).reshape(-1, D + extra)
    return both[:, :D], both[:, D:]


def first_order(model, dense: torch.Tensor, weights: np.ndarray) -> float:
    return float(
        weights.sum() + array(model.first_order.linear.weight)[0] @ array(dense) + array(model.first_order.bias)[0]
    )


@pytest.mark.parametrize("deep", [MLP, MLPConfig(hidden_dims=())])
def test_deepfm(deep):
    model: RankingModel = build(DeepFMConfig(embedding_dim=D, deep=deep))
    dense, pooled = parts(model)
    found = model.interact(dense, pooled, {})
    for sample in range(3):
        main, weights = rows(pooled[sample])
        x = fields(model, dense[sample], main)
        expected = first_order(model, dense[sample], weights)
        expected += sum(x[i] @ x[j] for i in range(F_ALL) for j in range(i + 1, F_ALL))
        if deep.hidden_dims:
            expected += mlp(x.reshape(-1), model.deep.networks[0])[0]
        assert found[sample].item() == pytest.approx(expected, rel=1e-9)


def test_xdeepfm():
    model = build(XDeepFMConfig(embedding_dim=D, cin=(3, 2), deep=MLP))
    dense, pooled = parts(model)
    found = model.interact(dense, pooled, {})
    for sample in range(3):
        main, weights = rows(pooled[sample])
        x = fields(model, dense[sample], main)
        crossed, sums = x, []
        for layer in model.cin.layers:
            maps = array(layer.weight).reshape(-1, F_ALL, len(crossed))
            following = np.zeros((len(maps), D))
            for o in range(len(maps)):
                for h in range(F_ALL):
                    for m in range(len(crossed)):
                        following[o] += maps[o, h, m] * x[h] * crossed[m]
                following[o] += array(layer.bias)[o]
            crossed = following
            sums.append(crossed.sum(axis=1))
        out = array(model.cin_output.weight)[0] @ np.concatenate(sums) + array(model.cin_output.bias)[0]
        expected = first_order(model, dense[sample], weights) + out + mlp(x.reshape(-1), model.deep.networks[0])[0]
        assert found[sample].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("wide", list(Wide))
def test_autoint_is_layers_and_mlp_and_first_order(wide):
    """The layer itself: `test_dhen.py`."""
    config = AutoIntConfig(embedding_dim=D, attention=AttentionConfig(dim=6, num_heads=2), deep=MLP, wide=wide)
    model = build(config)
    dense, pooled = parts(model)
    found = model.interact(dense, pooled, {})
    for sample in range(3):
        main, weights = rows(pooled[sample], extra=1 if wide is Wide.LINEAR else 0)
        x = fields(model, dense[sample], main)
        attended = torch.from_numpy(x)[None]
        for layer in model.layers:
            attended = layer(attended)
        expected = array(model.output.weight)[0] @ array(attended).reshape(-1) + array(model.output.bias)[0]
        expected += mlp(x.reshape(-1), model.deep.networks[0])[0]
        if wide is Wide.LINEAR:
            expected += first_order(model, dense[sample], weights)
        assert found[sample].item() == pytest.approx(expected, rel=1e-9)
    assert [layer.residual is None for layer in model.layers] == [False, True]


def norm(x: np.ndarray, scale=1.0, shift=0.0) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift


def mask_block(x0: np.ndarray, h: np.ndarray, block) -> np.ndarray:
    hidden = np.maximum(array(block.mask_in.weight) @ x0 + array(block.mask_in.bias), 0)
    mask = array(block.mask_out.weight) @ hidden + array(block.mask_out.bias)
    out = array(block.linear.weight) @ (mask * h)
    return np.maximum(norm(out, array(block.norm.weight), array(block.norm.bias)), 0)


@pytest.mark.parametrize("structure", list(MaskStructure))
def test_masknet(structure):
    config = MaskNetConfig(
        embedding_dim=D, structure=structure, deep=MLP, num_blocks=2, block_dim=5, reduction_ratio=0.5
    )
    model = build(config)
    dense, pooled = parts(model)
    found = model.interact(dense, pooled, {})
    for sample in range(3):
        x = fields(model, dense[sample], array(pooled[sample]))
        flat = x.reshape(-1)
        h = norm(x, array(model.field_norm.scale), array(model.field_norm.shift)).reshape(-1)
        if structure is MaskStructure.SERIAL:
            for block in model.blocks:
                h = mask_block(flat, h, block)
            expected = array(model.output.weight) @ h + array(model.output.bias)
        else:
            h = np.concatenate([mask_block(flat, h, block) for block in model.blocks])
            expected = mlp(h, model.output.networks[0])
        np.testing.assert_allclose(array(found[sample]), expected, rtol=1e-9)
    assert model.blocks[0].mask_in.out_features == F_ALL * D // 2


CONTEXTS = FinalMLPConfig(
    embedding_dim=D,
    first=MLP,
    second=MLPConfig(hidden_dims=(8,)),
    gate=MLPConfig(hidden_dims=(3,)),
    first_context=("single1", "dense0"),
    second_context=("jagged0", "single1"),
    num_heads=2,
)


@pytest.mark.parametrize("num_labels", [1, 2])
def test_finalmlp(num_labels):
    inputs = small_inputs(num_dense=2, num_single=2, num_jagged=1, num_labels=num_labels)
    model = build(CONTEXTS, inputs)
    assert isinstance(model, FinalMLP)
    assert model.field_dims == (D, 3 * D, 2 * D)
    dense, pooled = parts(model)
    found = model.interact(dense, pooled, {})
    for sample in range(3):
        a, b, b_first, b_second, c, c_second = array(pooled[sample]).reshape(6, D)
        numbers = array(dense[sample])[:, None] * array(model.flat.dense.numeric_fields.weight)
        flat = np.concatenate([numbers.reshape(-1), a, b, c])
        own = array(dense[sample])[0] * array(model.gates[0].numeric.weight)[0]
        contexts = np.concatenate([own, b_first]), np.concatenate([b_second, c_second])
        gates = [2 / (1 + np.exp(-mlp(x, gate.mlp))) for x, gate in zip(contexts, model.gates, strict=True)]
        first, second = mlp(flat * gates[0], model.first), mlp(flat * gates[1], model.second)
        fusion = model.fusion
        expected = array(fusion.first.weight) @ first + array(fusion.first.bias)
        expected += array(fusion.second.weight) @ second + array(fusion.second.bias)
        for head in range(2):
            weight = array(fusion.weight[head]).reshape(2, num_labels, 4)
            expected += np.einsum("x,xly,y->l", first.reshape(2, 2)[head], weight, second.reshape(2, 4)[head])
        np.testing.assert_allclose(array(found[sample]), expected, rtol=1e-9)


def test_finalmlp_without_context_reads_a_learned_vector():
    model = build(dataclasses.replace(CONTEXTS, first_context=(), second_context=()))
    dense, pooled = parts(model)
    gate = 2 / (1 + np.exp(-mlp(array(model.gates[0].learned)[0], model.gates[0].mlp)))
    found = model.gates[0](dense, pooled)
    np.testing.assert_allclose(array(found)[0], gate, rtol=1e-9)


def test_finalmlp_refuses_unknown_contexts_and_heads_that_do_not_divide():
    with pytest.raises(ConfigError, match="nobody"):
        build(dataclasses.replace(CONTEXTS, first_context=("nobody",)))
    with pytest.raises(ConfigError, match="divides"):
        build(dataclasses.replace(CONTEXTS, num_heads=3))


@pytest.mark.parametrize("residual", list(Residual))
@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize("blocks", list(Blocks))
def test_finalnet(residual, gating, blocks):
    linear = dataclasses.replace(MLP, activation=Activation.IDENTITY)
    config = FinalNetConfig(embedding_dim=D, blocks=blocks, first=linear, second=MLP, residual=residual, gating=gating)
    model = build(config)
    dense, pooled = parts(model)
    found = model.interact(dense, pooled, {})

    def block(x, network, activated):
        for layer in network.layers:
            kept, factor = np.split(array(layer.weight) @ x + array(layer.bias), 2)
            x = kept + kept * factor if residual is Residual.SUM else np.concatenate([kept, kept * factor])
            x = np.maximum(x, 0) if activated else x
        return array(network.output.weight) @ x + array(network.output.bias)

    for sample in range(3):
        x = fields(model, dense[sample], array(pooled[sample]))
        gated = x
        if gating is Gating.FIELDS:
            gates = array(model.gate.mix.weight) @ x + array(model.gate.bias)
            gated = np.concatenate([x, x * gates])
        expected = block(gated.reshape(-1), model.first, activated=False)
        if blocks is Blocks.TWO:
            expected = (expected + block(x.reshape(-1), model.second, activated=True)) / 2
        np.testing.assert_allclose(array(found[sample]), expected, rtol=1e-9)


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_finalnet_trains_with_the_papers_three_losses(labels):
    """Gradients of all parameters, with weights and a missing label, against the losses written out."""
    inputs = dataclasses.replace(PLAIN, has_weights=True)
    model = build(FinalNetConfig(embedding_dim=D, first=MLP, second=MLP), inputs).float().train()
    batch = random_batch(inputs, 32)
    if labels == "soft":
        batch.labels.uniform_(0, 1)
    batch.labels[3] = torch.nan
    pooled = torch.randn(32, 3 * D)
    outputs = model.forward_dense(Embedded(dense=batch.dense, fields=pooled))
    reported = model.loss(outputs, batch).mean()
    plain = loss_of(outputs.logits, batch.labels, batch.weights, inputs=inputs)
    assert torch.equal(reported, plain)  # what is reported stays comparable with other models
    reported.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    x = model.stack(batch.dense, pooled, {}).flatten(1)
    first, second = model.first(x), model.second(x)
    mean = (first + second) / 2
    teacher = mean.sigmoid().detach()
    known = batch.labels.isnan().logical_not()
    assert batch.weights is not None
    weights = batch.weights.unsqueeze(1) * known
    losses = F.binary_cross_entropy_with_logits(mean, batch.labels.nan_to_num(), reduction="none")
    for student in (first, second):
        losses = losses + F.binary_cross_entropy_with_logits(student, teacher, reduction="none")
    ((losses * weights).sum() / weights.sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        DeepFMConfig(embedding_dim=D, deep=MLP),
        XDeepFMConfig(embedding_dim=D, deep=MLP),
        AutoIntConfig(embedding_dim=D, attention=AttentionConfig(dim=6, dropout=0.1), deep=MLP, wide=Wide.LINEAR),
        MaskNetConfig(embedding_dim=D, deep=MLP),
        CONTEXTS,
        DHENConfig(embedding_dim=8, num_layers=1, modules=tuple(DHENModule), input_dropout=0.1),
        WukongConfig(embedding_dim=8, num_layers=1, fm=FMKind.ATTENTIVE, input_dropout=0.1),
        FinalNetConfig(embedding_dim=D, first=MLP, second=MLP, gating=Gating.FIELDS),
    ],
    ids=lambda config: config.kind,
)
def test_training_compiles_as_one_graph(config):
    torch.compiler.reset()
    model = build_model(config, PLAIN, seed=0).train()
    batch = random_batch(PLAIN, 6)
    compiled = torch.compile(model.interact, fullgraph=True, dynamic=False, backend="eager")
    compiled(batch.dense, torch.randn(6, sum(model.field_dims)), {}).sum().backward()


def test_first_order_weights_are_columns_of_the_tables():
    inputs = small_inputs(num_labels=2)
    model = build_model(DeepFMConfig(embedding_dim=D), inputs, seed=0)
    assert model.field_dims == (D + 2,) * 4
    assert model.inputs == inputs
    rows_ = sum(table.num_rows for table in inputs.tables)
    assert num_parameters(model).embedding == rows_ * (D + 2)


def test_first_order_columns_stand_beside_widths_of_the_schema():
    tables = tuple(
        dataclasses.replace(table, embedding_dim=2 if table.name == "single1" else 0) for table in PLAIN.tables
    )
    model = build(DeepFMConfig(embedding_dim=D, deep=MLP), dataclasses.replace(PLAIN, tables=tables))
    assert model.field_dims == (D + 1, 3, D + 1)
    _, pooled = parts(model)
    main, weights = model.columns(pooled)
    torch.testing.assert_close(weights, pooled[:, [4, 7, 12]])
    torch.testing.assert_close(main, pooled[:, [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]])


@pytest.mark.parametrize("optimizer", [TableOptimizerKind.ADAM_DENSE, TableOptimizerKind.SGD])
def test_extra_columns_train_exactly_as_a_table_of_their_own(optimizer):
    """A table of D + 1 columns against two tables, for rules that treat every number alone."""
    embedding = EmbeddingConfig(optimizer=optimizer)
    one_table = small_inputs(num_dense=0, num_single=1, num_jagged=0)
    model = build_model(DeepFMConfig(embedding_dim=D, deep=MLP, embedding=embedding), one_table, seed=0)
    vectors, weights = model.embeddings.table("single0").clone().split([D, 1], dim=1)
    vectors.requires_grad_()
    weights.requires_grad_()
    twin = build_model(DeepFMConfig(embedding_dim=D, deep=MLP), one_table, seed=0)
    if optimizer is TableOptimizerKind.ADAM_DENSE:
        ours = torch.optim.Adam(model.parameters(), lr=0.1)
        theirs = torch.optim.Adam([vectors, weights, *twin.parameters()], lr=0.1)
    else:
        ours = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs = torch.optim.SGD([vectors, weights, *twin.parameters()], lr=0.1)
    tables = None if model.embeddings.has_dense_gradients else TableOptimizer(model.embeddings)
    for step in range(3):
        batch = random_batch(one_table, 16, seed=step)
        batch.single.clamp_(min=1)  # row 0 is padding, and never learns
        both = torch.cat([vectors[batch.single[0]], weights[batch.single[0]]], dim=1)
        for logits, optim in ((model(batch), ours), (twin.interact(batch.dense, both, {}), theirs)):
            optim.zero_grad()
            loss_of(logits, batch.labels, inputs=one_table).backward()
            optim.step()
        if tables is not None:
            tables.step(0.1)
            tables.zero_grad()
    torch.testing.assert_close(model.embeddings.table("single0"), torch.cat([vectors, weights], dim=1).detach())


def test_columns_are_cut_the_same_whether_fields_are_alike_or_not():
    regular = ExtraColumns((5, 5), extra_dims=(1, 1))
    assert regular.is_regular
    irregular = ExtraColumns((5, 5), extra_dims=(1, 1))
    irregular.is_regular = False
    values = torch.arange(20.0).view(2, 10)
    for ours, theirs in zip(regular(values), irregular(values), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: XDeepFMConfig(cin=()),
        lambda: AutoIntConfig(num_layers=0),
        lambda: MaskNetConfig(deep=MLPConfig(hidden_dims=())),
        lambda: FinalMLPConfig(first=MLPConfig(hidden_dims=())),
        lambda: FinalNetConfig(first=MLPConfig(hidden_dims=(5,))),
        lambda: DeepFMConfig(numeric=NumericInput.CONCAT),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ConfigError, match="settings"):
        make()


def test_models_that_need_their_embeddings_whole_refuse_towers():
    towers = Towers(towers=(("single0", "single1"), ("jagged0",)))
    with pytest.raises(ConfigError, match="wukong, dhen"):
        build_model(DeepFMConfig(), PLAIN, seed=0, towers=towers)

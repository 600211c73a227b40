"""Networks without biases, with norms of blocks and hard swish: as plain torch computes them, alone and together."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.test_parity import placed
from tests.parallel.test_parity_of_models import CONFIGS, Case, run
from tests.serving.test_dense_program import check as check_program
from ziggurat.config import from_json, override, to_json
from ziggurat.errors import ConfigError
from ziggurat.models import (
    Activation,
    BuiltInConfig,
    CrossConfig,
    CrossKind,
    DCNv2Config,
    DHENConfig,
    DHENModule,
    DLRMConfig,
    FinalMLPConfig,
    FinalNetConfig,
    MaskNetConfig,
    MLPConfig,
    Normalization,
    Structure,
    WukongConfig,
    build_model,
)
from ziggurat.models.blocks.block_norm import BlockNorm
from ziggurat.models.blocks.mlp import MLP
from ziggurat.models.dlrm import TopStart
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.placements import Placement
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

ALL = MLPConfig(
    hidden_dims=(8, 6), activation=Activation.HARD_SWISH, normalization=Normalization.BLOCK, dropout=0.0, bias=False
)
WUKONG = WukongConfig(
    embedding_dim=8,
    num_layers=2,
    num_fm=(2,),
    num_linear=(2,),
    rank=(3,),
    mlp=ALL,
    bottom=ALL,
    head=ALL,
    norm=Normalization.BLOCK,
    input_norm=Normalization.BLOCK,
)
MODELS: dict[str, BuiltInConfig] = {
    "dlrm": DLRMConfig(embedding_dim=8, bottom=ALL, top=ALL),
    "dcn_v2": DCNv2Config(
        embedding_dim=8, structure=Structure.STACKED, cross=CrossConfig(num_layers=2, bias=False), deep=ALL, bottom=ALL
    ),
    "wukong": WUKONG,
    "dhen": DHENConfig(
        embedding_dim=8,
        num_layers=2,
        modules=(DHENModule.DOT, DHENModule.FM, DHENModule.LINEAR),
        num_outputs=(2,),
        mlp=ALL,
        bottom=ALL,
        head=ALL,
        norm=Normalization.BLOCK,
    ),
    "masknet": MaskNetConfig(
        embedding_dim=8, field_norm=Normalization.NONE, block_norm=Normalization.NONE, deep=ALL, bottom=ALL
    ),
    "finalmlp": FinalMLPConfig(embedding_dim=8, first=ALL, second=ALL, gate=ALL, bottom=ALL),
    "finalnet": FinalNetConfig(embedding_dim=8, first=ALL, second=ALL, bottom=ALL),
}


def root_mean_square(block: Tensor) -> Tensor:
    return block / (block.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("width", "blocks"), [(8, [8]), (256, [256]), (300, [300]), (512, [256, 256]), (600, [256, 344])]
)
def test_a_block_is_divided_by_its_root_mean_square(width: int, blocks: list[int]) -> None:
    norm = BlockNorm(eps=1e-5)
    inputs = torch.randn(3, width) * torch.linspace(1e-3, 10.0, width) + 1.0
    expected = torch.cat([root_mean_square(block) for block in inputs.split(blocks, dim=1)], dim=1)
    torch.testing.assert_close(norm(inputs), expected)
    assert norm(inputs[:0]).shape == (0, width)
    assert not list(norm.parameters())


def test_fields_lie_side_by_side_in_blocks() -> None:
    fields = torch.randn(3, 64, 8)
    flat = fields.flatten(1)
    expected = torch.cat([root_mean_square(block) for block in flat.split(256, dim=1)], dim=1)
    torch.testing.assert_close(BlockNorm(eps=1e-5, num_dims=2)(fields), expected.view_as(fields))


@pytest.mark.parametrize(
    ("bias", "has_norm", "is_hard"), [each for each in itertools.product((True, False), repeat=3) if each != (1, 0, 0)]
)
def test_an_mlp_with_options_alone_and_together_is_that_of_plain_torch(
    bias: bool, has_norm: bool, is_hard: bool
) -> None:
    config = MLPConfig(
        hidden_dims=(512, 6),
        activation=Activation.HARD_SWISH if is_hard else Activation.RELU,
        normalization=Normalization.BLOCK if has_norm else Normalization.NONE,
        bias=bias,
    )
    mlp = MLP(5, config=config, output_dim=2)
    inputs = torch.randn(4, 5)
    hidden = inputs
    for layer in mlp.layers:
        assert isinstance(layer, nn.Linear)
        assert (layer.bias is not None) == bias
        hidden = hidden @ layer.weight.T + (0.0 if layer.bias is None else layer.bias)
        if has_norm:
            hidden = torch.cat([root_mean_square(block) for block in hidden.split(256, dim=1)], dim=1)
        hidden = hidden * F.relu6(hidden + 3) / 6 if is_hard else hidden.clamp(min=0)
    assert mlp.output is not None
    expected = hidden @ mlp.output.weight.T + mlp.output.bias
    torch.testing.assert_close(mlp(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_only_the_bias_of_its_logits_trains_and_restores(name: str) -> None:
    config = MODELS[name]
    assert from_json(type(config), to_json(config), where="test") == config
    inputs = small_inputs(num_vectors=0)
    model = build_model(config, inputs, seed=0)
    # What is added once, to logits: outputs of the networks, and constant terms of products of logits.
    biases = {each: value for each, value in model.named_parameters() if "bias" in each.rpartition(".")[2]}
    assert biases
    assert all(value.numel() == len(inputs.labels) for value in biases.values()), list(biases)
    step = TrainStep(model, TrainingConfig(precision=Precision.FP32))
    losses = [step(random_batch(inputs, 16, seed=1)).loss for _ in range(8)]
    assert losses[-1] < losses[0]
    other = build_model(config, inputs, seed=1)
    other.load_state_dict(model.state_dict())
    batch = random_batch(inputs, 16, seed=2)
    with torch.no_grad():
        assert torch.equal(other.eval()(batch), model.eval()(batch))


@pytest.mark.parametrize("kind", list(CrossKind))
def test_a_cross_network_without_bias_is_one_whose_biases_are_zero(kind: CrossKind) -> None:
    cross = CrossConfig(num_layers=2, kind=kind, rank=3, num_experts=2)
    config = DCNv2Config(embedding_dim=4, cross=cross, deep=MLPConfig(hidden_dims=(6,)))
    inputs = small_inputs(num_vectors=0)
    batch = random_batch(inputs, 9)
    found = []
    plain = build_model(config, inputs, seed=0)
    for each in plain.state_dict():
        if each.startswith("cross.") and each.endswith(".bias"):
            plain.get_parameter(each).data.zero_()
    without = build_model(dataclasses.replace(config, cross=dataclasses.replace(cross, bias=False)), inputs, seed=0)
    assert not [each for each in without.state_dict() if each.startswith("cross.") and each.endswith(".bias")]
    without.load_state_dict({each: plain.state_dict()[each] for each in without.state_dict()})
    for model in (plain, without):
        model.loss(model.forward_dense(model.embed(batch)), batch).mean().backward()
        found.append({each: value.grad for each, value in model.named_parameters() if value.grad is not None})
    assert found[1]
    for each, gradient in found[1].items():
        torch.testing.assert_close(gradient, found[0][each])


def test_the_bias_of_a_convolution_learns_before_a_norm_of_blocks() -> None:
    modules = (DHENModule.CONVOLUTION, DHENModule.LINEAR)
    for norm, learns in ((Normalization.LAYER, False), (Normalization.BLOCK, True)):
        model = build_model(DHENConfig(modules=modules, norm=norm), small_inputs(num_vectors=0), seed=0)
        found = [value.requires_grad for each, value in model.named_parameters() if "convolution.bias" in each]
        assert found
        assert set(found) == {learns}


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.HARD_SWISH])
def test_a_top_without_biases_starts_as_the_sum_of_pairs(activation: Activation) -> None:
    config = DLRMConfig(
        embedding_dim=8,
        top=MLPConfig(hidden_dims=(8, 6), activation=activation, bias=False),
        top_start=TopStart.SUM_OF_PAIRS,
    )
    inputs = small_inputs(num_vectors=0)
    batch = random_batch(inputs, 5)
    model = build_model(config, inputs, seed=0)
    assert torch.isfinite(model(batch)).all()


def test_a_norm_of_blocks_is_refused_where_masks_know_none() -> None:
    with pytest.raises(ConfigError, match="block"):
        MaskNetConfig(block_norm=Normalization.BLOCK)


def test_settings_of_the_command_line_reach_the_options() -> None:
    given = {"mlp.bias": "false", "mlp.activation": "hard_swish", "norm": "block", "head.normalization": "block"}
    config = override(WukongConfig(), given)
    assert not config.mlp.bias
    assert config.mlp.activation is Activation.HARD_SWISH
    assert (config.norm, config.head.normalization) == (Normalization.BLOCK, Normalization.BLOCK)


def test_a_network_with_all_options_compiles_without_a_break() -> None:
    inputs = small_inputs(num_vectors=0)
    model = build_model(WUKONG, inputs, seed=0)
    torch.compiler.reset()  # torch compiles one function at most 8 times
    batch = random_batch(inputs, 16)
    embedded = model.embed(batch)
    compiled = torch.compile(model.forward_dense, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(embedded).logits, model.forward_dense(embedded).logits)


@pytest.mark.parametrize("name", ["dcn_v2", "wukong"])
def test_a_network_with_all_options_becomes_a_program(name: str, tmp_path: Path) -> None:
    check_program(MODELS[name], tmp_path / "dense.pt2")


def test_on_ranks_as_on_one_device() -> None:
    tables = CONFIGS[0].embedding
    models = [dataclasses.replace(MODELS[name], embedding=tables) for name in ("dcn_v2", "wukong")]
    run(placed(2, Placement.TABLE_WISE), [Case(model=each, dense=DenseParallelism.FSDP) for each in models])

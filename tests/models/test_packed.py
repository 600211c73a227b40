"""Packed products: which they are, that each is the product of its rounded operands, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.sequence.test_next_item import INPUTS as NEXT_ITEM_INPUTS
from tests.models.sequence.test_next_item import SMALL, batch_of
from tests.models.test_converted import RICH
from tests.parallel.test_parity import TOWERS, build
from tests.training.test_late_steps import with_history
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError, NumericsError
from ziggurat.features.batch import Batch
from ziggurat.models import DCNv2Config, DINConfig, DLRMConfig, Model, ModelConfig, WukongConfig, build_model
from ziggurat.models.blocks.mlp import MLP, Activation, MLPConfig, Normalization, padding_columns
from ziggurat.models.contract.wrapped import wrap
from ziggurat.models.costs.model_cost import flops_per_sample
from ziggurat.models.packed import pack_products, take_bits
from ziggurat.numerics import BlockFormat, quantise_reference
from ziggurat.numerics.linear import PackedChain, linear_chain, linear_chain_reference, linear_reference, pack_linear
from ziggurat.precision import NATIVE, DenseProducts, Linear, packed
from ziggurat.precision.packed import PackedArithmetic
from ziggurat.testing.batches import random_batch

FORMATS = pytest.mark.parametrize("name", ["int8", "mx6", "mx9"])


def ranker(config: ModelConfig) -> tuple[Model, Batch]:
    model = build_model(config, RICH, seed=0).eval()
    return model, random_batch(RICH, 7, seed=1)


def with_target() -> tuple[Model, Batch]:
    model = build_model(DINConfig(), with_history(), seed=0).eval()
    return model, random_batch(model.inputs, 7, seed=1)


def next_item() -> tuple[Model, Batch]:
    return build_model(SMALL, NEXT_ITEM_INPUTS, seed=0).eval(), batch_of([3, 0, 6, 1])


MODELS: dict[str, Callable[[], tuple[Model, Batch]]] = {
    "dlrm": lambda: ranker(DLRMConfig()),
    "dcn_v2": lambda: ranker(DCNv2Config()),
    "wukong": lambda: ranker(WukongConfig()),
    "din": with_target,
    "next_item": next_item,
}


def packed_modules(model: Model) -> dict[str, DenseProducts]:
    modules = {name: each for name, each in model.named_modules() if isinstance(each, DenseProducts)}
    return {name: each for name, each in modules.items() if isinstance(each.arithmetic, PackedArithmetic)}


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, *, levels: float) -> Tensor:
    """The product of a rounded weight and of rows rounded to so many levels above zero, in FP64."""
    rows = x.flatten(0, -2)
    largest = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    rounded = (rows * (levels / largest)).round().double() * (largest.double() / levels)
    product = rounded @ weight.double().T + (0 if bias is None else bias.double())
    return product.view(*x.shape[:-1], -1)


@FORMATS
@pytest.mark.parametrize("model_name", MODELS)
def test_each_packed_product_is_that_of_its_rounded_operands(model_name: str, name: str) -> None:
    format = BlockFormat.named(name)
    model, batch = MODELS[model_name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = pack_products(model, format)
    modules = packed_modules(model)
    assert modules.keys() == found.bits.keys()
    seen = dict[str, float]()

    def compare(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, which: str) -> None:
        weight = quantise_reference(before[f"{which}.weight"], format, 1)
        assert torch.equal(module.get_parameter("weight"), weight), (
            which
        )  # whoever reads it past the product sees the same numbers
        x = inputs[0][..., : weight.shape[1]]
        expected = by_hand(x, weight, before.get(f"{which}.bias"), levels=32767.0 if name == "mx9" else 127.0)
        # Relative to the terms of the sums, which may cancel.
        terms = (x.flatten(0, -2).abs() @ weight.abs().T).max().clamp(min=1e-6)
        seen[which] = float((output - expected).abs().max() / terms)

    for which, module in modules.items():
        module.register_forward_hook(lambda *it, which=which: compare(*it, which=which))
    with torch.no_grad():
        logits = model(batch)
    assert bool(logits.isfinite().all())
    # DIN and next-item models call some modules past `forward`, through their arithmetic.
    assert len(seen) >= len(modules) - 2
    assert max(seen.values()) < 2e-6, seen
    unpacked = {key for key in before if key.removesuffix(".weight") not in found.bits}
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in unpacked)


@FORMATS
@pytest.mark.parametrize("model_name", MODELS)
def test_bits_give_the_same_scores_by_the_kernel_and_without_it(
    model_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = BlockFormat.named(name)
    model, batch = MODELS[model_name]()
    found = pack_products(model, format)
    with torch.no_grad():
        expected = model(batch)
        again, _ = MODELS[model_name]()
        take_bits(again, found.formats, found.bits)
        assert torch.equal(again(batch), expected)
        monkeypatch.setattr(packed, "linear", linear_reference)
        monkeypatch.setattr(packed, "linear_chain", linear_chain_reference)
        assert torch.equal(again(batch), expected)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"bias": False}])
@pytest.mark.parametrize("output_activation", [None, Activation.RELU])
def test_an_mlp_is_one_call_with_the_bits_of_its_layers(
    options: dict[str, Any], output_activation: Activation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MLPConfig(**({"hidden_dims": (40, 24)} | options))
    mlp = MLP(130, config=config, output_dim=3, output_activation=output_activation).eval()
    for module in mlp.modules():
        if isinstance(module, Linear):
            map = pack_linear(module.weight, BlockFormat.named("mx9"), bias=module.bias)
            module.arithmetic = PackedArithmetic(map)
    calls = list[int]()

    def counted(x: Tensor, chain: PackedChain) -> Tensor:
        calls.append(len(chain.maps))
        return linear_chain(x, chain)

    monkeypatch.setattr(packed, "linear_chain", counted)
    x = torch.randn(5, 130, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (0, padding_columns(130)))
    assert padded.shape[1] > 130
    with torch.no_grad():
        found = mlp(x)
        assert torch.equal(mlp(padded), found)
        assert calls == [1 + len(config.hidden_dims)] * 2
        # Who listens to a layer makes it one of several calls, as does another arithmetic among them.
        heard = list[Tensor]()
        assert mlp.output is not None
        hook = mlp.output.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
        assert torch.equal(mlp(x), found)
        assert len(heard) == 1
        hook.remove()
        mlp.output.arithmetic = NATIVE
        assert mlp(x).shape == found.shape
    assert len(calls) == 2
    with pytest.raises(ConfigError, match="weights in few bits are for scoring"):
        mlp(x.requires_grad_())


def test_a_batch_that_trains_norms_or_other_activations_are_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "linear_chain", None)  # nobody calls it
    for config in (
        MLPConfig(hidden_dims=(8,), activation=Activation.HARD_SWISH),
        MLPConfig(hidden_dims=(8,), normalization=Normalization.BLOCK),
    ):
        mlp = MLP(16, config=config, output_dim=2).eval()
        for module in mlp.modules():
            if isinstance(module, Linear):
                module.arithmetic = PackedArithmetic(pack_linear(module.weight, BlockFormat.named("int8")))
        with torch.no_grad():
            assert mlp(torch.ones(2, 16)).isfinite().all()


def test_what_is_packed_and_what_is_not_is_named() -> None:
    model, _ = MODELS["wukong"]()
    found = pack_products(model, BlockFormat.named("mx6"))
    assert "heads.networks.0.output" in found.bits
    assert found.left["layers.0.linear"] == "weights that are no single matrix"
    assert f"packed in {len(found.bits)} modules" in found.line()
    assert "layers.0" in found.line()
    dlrm, _ = MODELS["dlrm"]()
    left = pack_products(dlrm, BlockFormat.named("mx6")).left
    assert left == {"dot": "products of two activations"}
    din, _ = MODELS["din"]()
    left = pack_products(din, BlockFormat.named("int8")).left
    assert left == {"attentions.0.layers.0": "multiplies by parts of its weight, or by another module's"}


def test_bits_take_the_bytes_of_their_format() -> None:
    weights = {"mx9": 9 / 8, "mx6": 6 / 8, "int8": 1.0}
    for name, num_bytes in weights.items():
        model, _ = MODELS["dcn_v2"]()
        rows = pack_products(model, BlockFormat.named(name)).bits["deep.0.layers.1"]
        outputs, inputs = model.get_parameter("deep.0.layers.1.weight").shape
        assert rows.numel() == pytest.approx(outputs * inputs * num_bytes, rel=0.02)


class Hidden(nn.Module):
    """Multiplies by a weight that no arithmetic sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingTables(RICH, config=EmbeddingConfig(dim=4))
        self.weight = nn.Parameter(torch.ones(sum(self.tables.field_dims), 2))

    def forward(self, batch: Batch) -> Tensor:
        return self.tables(batch) @ self.weight


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    model, batch = MODELS["dlrm"]()
    with torch.no_grad():
        before = model(batch)
    with pytest.raises(ConfigError, match="mx6"):
        pack_products(model, BlockFormat.named("mxfp8_e4m3"))
    with torch.no_grad():
        assert torch.equal(model(batch), before)
    pack_products(model, BlockFormat.named("mx6"))
    with pytest.raises(ConfigError, match="packed already"):
        pack_products(model, BlockFormat.named("mx9"))
    with pytest.raises(ConfigError, match="network"):
        pack_products(wrap(Hidden()), BlockFormat.named("mx6"))
    broken, _ = MODELS["dlrm"]()
    with torch.no_grad():
        broken.get_parameter("top.networks.0.layers.0.weight")[0, 0] = math.nan
    with pytest.raises(NumericsError, match=r"top\.networks\.0\.layers\.0\.weight"):
        pack_products(broken, BlockFormat.named("mx6"))
    other, _ = MODELS["dcn_v2"]()
    with pytest.raises(ConfigError, match="bottom"):
        take_bits(
            other,
            {"bottom.layers.0": BlockFormat.named("mx6")},
            {"bottom.layers.0": torch.zeros(1, 1, dtype=torch.uint8)},
        )


def test_a_packed_model_scores_alone_and_is_not_trained() -> None:
    model, batch = MODELS["dlrm"]()
    flops = flops_per_sample(model)
    pack_products(model, BlockFormat.named("mx6"))
    with pytest.raises(ConfigError, match="for scoring"):
        model(batch)
    assert flops_per_sample(model).forward < flops.forward  # integers are no FLOPs
    with torch.no_grad():
        batch.dense[2, 0] = math.inf
        logits = model(batch)
    assert logits[2].isnan().all()
    assert logits[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_a_short_row_of_bits_is_laid_out_as_its_weight_is() -> None:
    from tests.numerics.tensors import same_bits
    from ziggurat.numerics.linear import linear_of_bits, pack_linear
    from ziggurat.numerics.packing import pack

    generator = torch.Generator().manual_seed(3)
    for name in ("int8", "mx6", "mx9", "mxint8", "mx4"):
        format = BlockFormat.named(name)
        for outputs, inputs in ((1, 1), (3, 5), (17, 16), (20, 20), (33, 100)):
            weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 6, outputs).unsqueeze(1)
            ours = linear_of_bits(pack(weight, format, 1))
            theirs = pack_linear(weight, format)
            assert torch.equal(ours.codes, theirs.codes), (name, outputs, inputs)
            for mine, other in ((ours.exponents, theirs.exponents), (ours.scales, theirs.scales)):
                assert (mine is None) == (other is None)
                assert mine is None or other is None or same_bits(mine.float(), other.float())


def test_modules_of_towers_are_packed_too_or_named() -> None:
    dlrm = build(towers=TOWERS, optimizer="rowwise_adagrad")
    left = pack_products(dlrm, BlockFormat.named("mx9")).left
    # Its towers have a map for each field.
    assert left["towers.modules_of_towers.0.alone.groups.0"] == "weights that are no single matrix"
    model = build(towers=TOWERS, optimizer="rowwise_adagrad", kind="dcn_v2").eval()
    batch = random_batch(model.inputs, 6, seed=2)
    found = pack_products(model, BlockFormat.named("mx9"))
    assert len([name for name in found.bits if name.startswith("towers.")]) >= 4, found.line()
    with torch.no_grad():
        expected = model(batch)
        again = build(towers=TOWERS, optimizer="rowwise_adagrad", kind="dcn_v2").eval()
        take_bits(again, found.formats, found.bits)
        assert torch.equal(again(batch), expected)

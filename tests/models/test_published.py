"""Published implementations with the weights of our models give the same numbers, where torch-rechub is installed.

FM and Wide&Deep as they are; of FiBiNET and EDCN the layers, since torch-rechub shares one bilinear layer for both sets
of pairs and leaves out the linear term, and its gates are a softmax over one number, which is 1.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.as_written import random_model
from ziggurat.models import BilinearKind, Bridge, FMConfig, MLPConfig, WideDeepConfig
from ziggurat.models.blocks.interactions.bilinear_pairs import BilinearPairs
from ziggurat.models.blocks.interactions.squeeze_excitation import SqueezeExcitation
from ziggurat.models.edcn import BridgeModule, CrossLayer
from ziggurat.testing.batches import small_inputs

layers = pytest.importorskip("torch_rechub.basic.layers", reason="pip install --no-deps torch-rechub")
N, D = 5, 4
IDS = small_inputs(num_dense=0, num_single=N, num_jagged=0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def copy(theirs: torch.nn.Module, ours: torch.Tensor) -> None:
    with torch.no_grad():
        theirs.weight.copy_(ours)


def test_factorization_machine() -> None:
    model = random_model(FMConfig(embedding_dim=D), IDS)
    rows = draw(7, N, D + 1)
    theirs = layers.FM(reduce_sum=True)(rows[:, :, :D]) + rows[:, :, D:].sum(dim=1) + model.first_order.bias
    torch.testing.assert_close(model.interact(draw(7, 0), rows.flatten(1), {}), theirs)


def test_wide_and_deep() -> None:
    model = random_model(WideDeepConfig(embedding_dim=D, deep=MLPConfig(hidden_dims=(6, 3))), IDS)
    wide = layers.LR(N).double()
    # Its MLP has batch norms, which in evaluation do nothing with fresh statistics but for their ε.
    deep = layers.MLP(N * D, output_layer=True, dims=[6, 3]).double().eval()
    own = model.deep.networks[0]
    linears = [each for each in deep.mlp if isinstance(each, torch.nn.Linear)]
    for theirs, ours in zip(linears, [*own.layers, own.output], strict=True):
        theirs.load_state_dict(ours.state_dict())
    for norm in deep.mlp:
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.running_var.fill_(1.0 - norm.eps)
    with torch.no_grad():
        wide.fc.weight.fill_(1.0)
        wide.fc.bias.copy_(model.first_order.bias)
    rows = draw(7, N, D + 1)
    theirs = wide(rows[:, :, D]) + deep(rows[:, :, :D].flatten(1))
    torch.testing.assert_close(model.interact(draw(7, 0), rows.flatten(1), {}), theirs)


@pytest.mark.parametrize("kind", list(BilinearKind))
def test_layers_of_fibinet(kind: BilinearKind) -> None:
    fields = draw(7, N, D)
    ours = BilinearPairs(N, dim=D, kind=kind).double()
    name = {BilinearKind.ALL: "field_all", BilinearKind.EACH: "field_each", BilinearKind.PAIR: "field_interaction"}[
        kind
    ]
    theirs = layers.BiLinearInteractionLayer(D, N, name).double()
    if kind is BilinearKind.ALL:
        copy(theirs.bilinear_layer, ours.map.weight)
    else:
        # Ours has no map of the last field, which stands on no left side.
        for linear, weight in zip(theirs.bilinear_layer, ours.map.weight, strict=False):
            copy(linear, weight.T)
    torch.testing.assert_close(ours(fields), theirs(fields))

    importance = SqueezeExcitation(N, reduction=2).double()
    squeeze = layers.SENETLayer(N, reduction_ratio=2).double()
    copy(squeeze.mlp[0], importance.squeeze.weight)
    copy(squeeze.mlp[2], importance.excite.weight)
    torch.testing.assert_close(importance(fields), squeeze(fields))


@pytest.mark.parametrize("kind", list(Bridge))
def test_layers_of_edcn(kind: Bridge) -> None:
    edcn = pytest.importorskip("torch_rechub.models.ranking.edcn")
    name = {
        Bridge.PRODUCT: "hadamard_product",
        Bridge.SUM: "pointwise_addition",
        Bridge.CONCAT: "concatenation",
        Bridge.ATTENTION: "attention_pooling",
    }[kind]
    ours = BridgeModule(kind, dim=D).double()
    theirs = edcn.BridgeModule(D, name).double()
    if ours.concat is not None:
        theirs.concat_pooling[0].load_state_dict(ours.concat.state_dict())
    for network, own in zip(
        (getattr(theirs, f"attention_{each}", None) for each in "xh"), ours.attention, strict=False
    ):
        network[0].load_state_dict(own.layers[0].state_dict())
        network[2].load_state_dict(own.output.state_dict())
    crossed, hidden, first = draw(7, D), draw(7, D).cos(), draw(7, D).sin()
    torch.testing.assert_close(ours(crossed, hidden), theirs(crossed, hidden))
    cross = CrossLayer(D, residual=False).double()
    published = layers.CrossLayer(D).double()
    copy(published.w, cross.weight.weight)
    with torch.no_grad():
        published.b.copy_(cross.bias.normal_())
    torch.testing.assert_close(cross(first, crossed), published(first, crossed))

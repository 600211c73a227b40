"""Another arithmetic for dense products reaches every product of every model, forward and backward, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_every_model import CONFIGS
from tests.training.test_late_steps import CLICK_MODELS, HISTORY_MODELS, with_history
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models import Model, build_model
from ziggurat.models.contract.wrapped import wrap
from ziggurat.models.converted import convert
from ziggurat.precision import NATIVE, Arithmetic, DenseProducts, Linear, RoundedArithmetic
from ziggurat.testing.batches import random_batch, small_inputs

RICH = small_inputs(num_vectors=1, num_labels=2)


class Counted(Arithmetic):
    """Multiplies as torch does, but by no fused kernel, and counts."""

    name = "counted"

    def __init__(self) -> None:
        self.calls = 0

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        self.calls += 1
        return torch.matmul(left, right)


class Halves(RoundedArithmetic):
    """Rounds operands to multiples of 1/2: coarse enough to be seen in every product."""

    name = "halves"

    def rounded(self, operand: Tensor, *, dim: int) -> Tensor:
        return torch.round(operand * 2) / 2


def gradients(model: Model, batch: Batch) -> dict[str, Tensor]:
    outputs = model(batch)
    loss = (outputs if isinstance(outputs, Tensor) else outputs.logits).square().sum()
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), **found}


CASES: dict[str, Callable[[], Model]] = {
    **{name: lambda name=name: build_model(CONFIGS[name], RICH, seed=0) for name in CONFIGS},
    **{f"{each.kind}-default": lambda each=each: build_model(each, RICH, seed=0) for each in CLICK_MODELS},
    **{f"{each.kind}-default": lambda each=each: build_model(each, with_history(), seed=0) for each in HISTORY_MODELS},
}


@pytest.mark.parametrize("name", list(CASES))
def test_every_product_of_every_model_goes_through_it_and_gives_the_same(name: str) -> None:
    model = CASES[name]().eval()
    other = CASES[name]().eval()
    counted = Counted()
    converted = convert(other, counted)
    assert all("attention" in why for why in converted.native.values())
    batch = random_batch(model.inputs, 5, seed=1)
    expected = gradients(model, batch)
    counted.calls = 0
    found = gradients(other, batch)
    assert counted.calls
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        error = (found[key] - gradient).norm()
        assert error <= 1e-5 * gradient.norm() + 1e-7, key


def test_a_model_is_native_until_it_is_converted_and_a_checkpoint_does_not_know() -> None:
    model = build_model(CONFIGS["dlrm-dot-bottom_mlp"], RICH, seed=0)
    before = model.state_dict()
    assert all(each.arithmetic is NATIVE for each in model.modules() if isinstance(each, DenseProducts))
    converted = convert(model, Halves())
    assert set(converted.modules.values()) == {"halves"}
    assert converted.native == {}
    assert converted.line() == f"halves in {len(converted.modules)} modules"
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_each_module_may_have_its_own() -> None:
    model = build_model(CONFIGS["dlrm-dot-bottom_mlp"], RICH, seed=0)
    halves = Halves()
    converted = convert(model, lambda name, module: halves if "bottom" in name else NATIVE)
    assert {each for name, each in converted.modules.items() if "bottom" in name} == {"halves"}
    assert {each for name, each in converted.modules.items() if "bottom" not in name} == {"native"}


def test_operands_of_all_three_products_are_rounded() -> None:
    linear = Linear(2, 2, bias=False)
    linear.arithmetic = Halves()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.6, 1.1], [-0.4, 0.2]]))
    inputs = torch.tensor([[1.2, 0.3], [0.7, -0.8]], requires_grad=True)
    outputs = linear(inputs)
    x = torch.tensor([[1.0, 0.5], [0.5, -1.0]])
    w = torch.tensor([[0.5, 1.0], [-0.5, 0.0]])
    torch.testing.assert_close(outputs, x @ w.t())
    outputs.backward(torch.tensor([[0.9, 0.3], [-0.6, 1.4]]))
    g = torch.tensor([[1.0, 0.5], [-0.5, 1.5]])
    torch.testing.assert_close(inputs.grad, g @ w)
    torch.testing.assert_close(linear.weight.grad, g.t() @ x)


def test_a_matrix_that_is_broadcast_gets_the_sum_of_its_gradients() -> None:
    torch.manual_seed(0)
    for left_shape, right_shape in (((2, 3), (5, 3, 4)), ((5, 2, 3), (3, 4)), ((6, 1, 2, 3), (1, 5, 3, 4))):
        left = torch.randn(left_shape, requires_grad=True)
        right = torch.randn(right_shape, requires_grad=True)
        exact = torch.matmul(left, right)
        expected = torch.autograd.grad(exact.square().sum(), (left, right))

        class Exact(RoundedArithmetic):
            name = "exact"

            def rounded(self, operand: Tensor, *, dim: int) -> Tensor:
                return operand

        found = torch.autograd.grad(Exact().matmul(left, right).square().sum(), (left, right))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


class Own(nn.Module):
    """A network of one's own, with one plain linear map and what an argument adds."""

    def __init__(self, more: nn.Module | None = None) -> None:
        super().__init__()
        self.tables = EmbeddingTables(small_inputs(), EmbeddingConfig(dim=4))
        self.first = nn.Linear(sum(self.tables.field_dims), 8)
        self.more = more
        self.last = nn.Linear(8, 1)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.first(self.tables(batch)).relu()
        if self.more is not None:
            hidden = self.more(hidden)
        return self.last(hidden)


class Past(nn.Module):
    """Multiplies by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


class Attending(nn.Module):
    """Attention of torch, whose projections are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden[:, None], hidden[:, None], hidden[:, None])[0][:, 0]


def test_plain_linear_maps_of_ones_own_model_are_reached() -> None:
    model = wrap(Own())
    batch = random_batch(model.inputs, 4)
    before = model(batch)
    weights = {name: each for name, each in model.named_parameters()}
    counted = Counted()
    convert(model, counted)
    counted.calls = 0
    torch.testing.assert_close(model(batch), before)
    assert counted.calls == 2
    assert {name: each for name, each in model.named_parameters()} == weights  # the same tensors: optimizers keep them


@pytest.mark.parametrize(("more", "named"), [(Past, "more (Past)"), (Attending, "more.attention (MultiheadAttention)")])
def test_a_product_that_cannot_be_reached_is_refused_by_name(more: type[nn.Module], named: str) -> None:
    model = wrap(Own(more()))
    with pytest.raises(ConfigError, match="every dense product") as caught:
        convert(model, Halves())
    assert named in str(caught.value)
    assert not any(isinstance(each, DenseProducts) for each in model.modules())  # as it was


def test_products_that_say_why_they_stay_are_reported() -> None:
    class Stays(DenseProducts, Past):
        native_products = "a probe must not change"

    converted = convert(wrap(Own(Stays())), Halves())
    assert list(converted.native.values()) == ["a probe must not change"]
    assert "native in 1 (a probe must not change)" in converted.line()


class Wide(RoundedArithmetic):
    """Rounds to another dtype than it got."""

    name = "wide"

    def rounded(self, operand: Tensor, *, dim: int) -> Tensor:
        return operand.double()


class Lost(Arithmetic):
    """Loses the gradient."""

    name = "lost"

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left.detach(), right.detach())


class Raising(Arithmetic):
    """Fails."""

    name = "raising"

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        raise RuntimeError("no such format")


@pytest.mark.parametrize(
    ("arithmetic", "found"),
    [
        (Wide(), "torch.float64"),
        (Lost(), "a product without gradient"),
        (Raising(), "RuntimeError: no such format"),
        (Halves, "the class Halves"),
    ],
)
def test_an_arithmetic_that_breaks_its_promise_is_refused_and_changes_nothing(
    arithmetic: Arithmetic, found: str
) -> None:
    model = build_model(CONFIGS["dnn"], RICH, seed=0)
    with pytest.raises(ConfigError) as caught:
        convert(model, arithmetic)
    assert found in str(caught.value)
    assert all(each.arithmetic is NATIVE for each in model.modules() if isinstance(each, DenseProducts))

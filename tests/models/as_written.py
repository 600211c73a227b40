"""Hold a ranking model to its equations in plain torch: logits, and gradients of all weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.features.inputs import InputSpec
from ziggurat.models import ModelConfig, RankingModel, build_model
from ziggurat.testing.batches import small_inputs

INPUTS = small_inputs(num_dense=2, num_single=2, num_jagged=1, num_vectors=1, num_labels=2)


@dataclass(frozen=True)
class Given:
    """What a model computes from, all leaves of their own in FP64.

    Args:
        weights: of the dense network, and running statistics, by their names in the model.
        dense: (B, N) numbers.
        fields: (B, columns) of each field, extra columns included.
        vector: (B, dim), the only pretrained vector.
    """

    weights: dict[str, Tensor]
    dense: Tensor
    fields: Sequence[Tensor]
    vector: Tensor

    def stacked(self, dim: int) -> Tensor:
        """X (B, n, dim) of `StackedInputs` from the first columns of fields: numbers, embeddings, the vector."""
        return self.stacked_from(0, dim, at="stack")

    def stacked_from(self, begin: int, dim: int, *, at: str) -> Tensor:
        """The same of other columns, and of the `StackedInputs` of another name."""
        numbers = [self.dense[:, i : i + 1] * row for i, row in enumerate(self[f"{at}.dense.numeric_fields.weight"])]
        rows = [field[:, begin : begin + dim] for field in self.fields]
        return torch.stack([*numbers, *rows, self.vector @ self[f"{at}.dense.vector_fields.0.weight"].T], dim=1)

    def flat(self, dim: int) -> Tensor:
        """x₀ of `FlatInputs`."""
        return self.stacked_from(0, dim, at="flat").flatten(1)

    def first_order(self, dim: int) -> Tensor:
        """Σ_f w_f + ⟨v, numbers⟩ + b, the weights behind `dim` columns."""
        numbers = torch.cat([self.dense, self.vector], dim=1)
        rows = torch.stack([field[:, dim:] for field in self.fields]).sum(dim=0)
        return rows + numbers @ self["first_order.linear.weight"].T + self["first_order.bias"]

    def linear(self, name: str, values: Tensor) -> Tensor:
        """W x + b of a linear map; without b where it has none."""
        product = values @ self[f"{name}.weight"].T
        return product + self[f"{name}.bias"] if f"{name}.bias" in self.weights else product

    def mlp(self, name: str, values: Tensor, *, layers: int = 2) -> Tensor:
        """Layers with ReLU, and a closing map where there is one."""
        for layer in range(layers):
            values = self.linear(f"{name}.layers.{layer}", values).clamp(min=0)
        return self.linear(f"{name}.output", values) if f"{name}.output.weight" in self.weights else values

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]


def random_model(config: ModelConfig, inputs: InputSpec = INPUTS) -> RankingModel:
    """A model in FP64 with random numbers in every weight, which trains."""
    model = build_model(config, inputs, seed=3).double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.5)
    assert isinstance(model, RankingModel)
    return model.train()


def given(model: RankingModel, *, size: int = 7) -> Given:
    """Random inputs for a model, and copies of its weights."""
    generator = torch.Generator().manual_seed(2)

    def draw(columns: int) -> Tensor:
        return torch.randn(size, columns, generator=generator, dtype=torch.float64).requires_grad_()

    kept = [*model.named_parameters(), *model.named_buffers()]
    weights = {
        name: value.detach().clone().requires_grad_(value.is_floating_point())
        for name, value in kept
        if not name.startswith("embeddings.")
    }
    (vector,) = model.inputs.vectors
    fields = tuple(draw(columns) for columns in model.field_dims)
    return Given(weights=weights, dense=draw(len(model.inputs.dense)), fields=fields, vector=draw(vector.dim))


def interact(model: RankingModel, parts: Given) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The logits of a model for copies of inputs, and these copies."""
    dense, fields, vector = (
        each.detach().clone().requires_grad_()
        for each in (parts.dense, torch.cat(list(parts.fields), dim=1), parts.vector)
    )
    return model.interact(dense, fields, {model.inputs.vectors[0].name: vector}), (dense, fields, vector)


def assert_as_written(
    config: ModelConfig, written: Callable[[Given], Tensor], *, inputs: InputSpec = INPUTS, training: bool = True
) -> RankingModel:
    """Compare logits and all gradients of a model with those of its equations; return the model.

    Args:
        config: of the model; without dropout.
        written: its logits, in plain torch.
        inputs: of the model; two labels or one, and a pretrained vector.
        training: whether batches are normalised by their own moments.
    """
    model = random_model(config, inputs).train(training)
    parts = given(model)
    found, (dense, fields, vector) = interact(model, parts)
    wanted = written(parts)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found.backward(upstream)
    wanted.backward(upstream)
    torch.testing.assert_close(dense.grad, parts.dense.grad, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(vector.grad, parts.vector.grad, rtol=1e-8, atol=1e-9)
    of_fields = torch.cat([field.grad for field in parts.fields if field.grad is not None], dim=1)
    torch.testing.assert_close(fields.grad, of_fields, rtol=1e-8, atol=1e-9)
    for name, weight in model.named_parameters():
        if weight.requires_grad and not name.startswith("embeddings."):
            torch.testing.assert_close(
                weight.grad, parts[name].grad, rtol=1e-8, atol=1e-9, msg=lambda text, n=name: n + text
            )
    return model

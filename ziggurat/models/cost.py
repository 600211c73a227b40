"""What a model costs: parameters, and the FLOPs of its dense network and towers, forward and backward, exactly.

Only matrix products count (as in `torch.utils.flop_counter`, with which a test compares): 2·in·out for a linear map
and sample. Backward, each product has two: the gradient of the weight and the gradient of the input. Two exceptions
make "backward is twice forward" wrong by several percent for small models: a linear map on raw numbers needs no
gradient of its input, and the pairwise dot product of `dot.py` uses the symmetry of X Xᵀ and pays once.

What runs once a batch and not once a sample (a gate of FinalMLP that reads nothing of the sample) does not count.
Columns of zeros that only align memory (`mlp.py`) are no work asked for and do not count. Lookups, pooling,
activations and norms are not matrix products; they are bound by memory and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ziggurat.models.blocks.cross import CrossNetMix, ExpertCores
from ziggurat.models.blocks.dot import PairwiseDot
from ziggurat.models.blocks.fieldwise import CountsFlops
from ziggurat.models.contract.model import Model
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.finalmlp import ContextGate


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations a sample; a multiplication and an addition are two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Forward and backward: one training step a sample."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Learned numbers of a model."""

    embedding: int
    dense: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.dense


def num_parameters(model: Model) -> ParameterCount:
    """Parameters in tables (rows × columns, reserved rows too) and in the dense network, tower modules included."""
    tables, open_dim = model.embeddings.inputs.tables, model.embeddings.config.dim
    embedding = sum(table.num_rows * (table.embedding_dim or open_dim) for table in tables)
    dense = [p for name, p in model.named_parameters() if not name.startswith("embeddings.")]
    return ParameterCount(embedding=embedding, dense=sum(parameter.numel() for parameter in dense))


def flops_per_sample(model: Model) -> Flops:
    """FLOPs of the matrix products of the towers and of `model.forward_dense` for one sample."""
    return flops_of(model.modules(), on_raw_inputs=raw_linears(model))


def raw_linears(model: Model) -> list[nn.Module]:
    """Linear maps on raw inputs; those of a built-in model."""
    return model.linears_on_raw_inputs() if isinstance(model, RankingModel) else []


def flops_of(modules: Iterable[nn.Module], *, on_raw_inputs: Sequence[nn.Module] = ()) -> Flops:
    """FLOPs of the matrix products of some modules (children are modules of their own) for one sample.

    Args:
        modules: each counts for what it computes itself.
        on_raw_inputs: linear maps whose input needs no gradient.
    """
    modules = list(modules)
    without_input_gradient = {id(linear) for linear in on_raw_inputs}
    gates = [each for each in modules if isinstance(each, ContextGate) and each.learned is not None]
    once_a_batch = {id(each) for gate in gates for each in gate.modules()}
    forward = backward = 0
    for module in modules:
        if id(module) in once_a_batch:
            continue
        uses = 1
        if isinstance(module, nn.Linear):
            cost = 2 * module.in_features * module.out_features
            products = 1 if id(module) in without_input_gradient else 2
        elif isinstance(module, PairwiseDot):
            cost = 2 * module.num_fields**2 * module.dim if module.num_pairs else 0
            products = 1
        elif isinstance(module, ExpertCores):
            cost, products = 2 * module.num_experts * module.rank**2, 2
        elif isinstance(module, CountsFlops):
            cost, products = module.forward_flops, 2
        else:
            cost, products = 0, 0
        if isinstance(module, CrossNetMix):  # its gate runs once a layer; modules() shows it once
            uses = len(module.down) - 1
            cost, products = 2 * module.gate.in_features * module.gate.out_features, 2
        forward += uses * cost
        backward += uses * products * cost
    return Flops(forward=forward, backward=backward)

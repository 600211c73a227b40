"""The biases of an output: parameters whose change by 1 moves the logit of a label by 1 in every sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ziggurat.models.blocks.extra_columns import FirstOrder
from ziggurat.models.blocks.funnel import conditional_logits
from ziggurat.models.blocks.heads import Heads
from ziggurat.models.blocks.mlp import MLP


def biases_of(outputs: Iterable[nn.Module | None]) -> list[Tensor]:
    """Return a view of the bias of each label, in the order of the linear maps that give the logits."""
    linear = [output for output in outputs if isinstance(output, nn.Linear)]
    return [bias for output in linear if output.bias is not None for bias in output.bias.unbind()]


def output_biases_of(model: nn.Module, *, num_labels: int) -> list[Tensor]:
    """Return those of the first-order term of a model, else of its heads; none where it has several, or neither."""
    first = [module for module in model.modules() if isinstance(module, FirstOrder)]
    if len(first) == 1:
        return list(first[0].bias.unbind())
    heads = [module for module in model.modules() if isinstance(module, Heads)]
    if first or len(heads) != 1:
        return []
    found = biases_of(network.output for network in heads[0].networks if isinstance(network, MLP))
    return found if len(found) == num_labels else []


def starting_biases_of(model: nn.Module, logits: Sequence[float]) -> Sequence[float]:
    """Return what the biases of a model's heads become for logits of the labels: conditional ones of a funnel."""
    is_funnel = any(module.is_funnel for module in model.modules() if isinstance(module, Heads))
    return conditional_logits(logits) if is_funnel else logits

"""First check of what a model of one's own gives: `Outputs` with logits of shape (samples, labels), in four parts.

A network that gives (B,) or (1, B) fails far from its cause, in a loss or a metric, or is broadcast into a number that
means nothing. `zg.wrap`, the training step and evaluation ask the same question here. Cost: two comparisons of shapes.
"""

from __future__ import annotations

from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.models.contract.model import Model, Outputs


def checked_outputs(found: object, *, model: Model, num_samples: int, where: str) -> Outputs:
    """Return what a dense network gave as `Outputs`, if its logits have the shape that losses and metrics read.

    A model with a `loss` of its own may train on other logits; it is asked for `Outputs` alone.

    Args:
        found: what `forward_dense` returned.
        model: whose network it was.
        num_samples: of the batch.
        where: of the network, for the error.

    Raises:
        ConfigError: it is something else.
    """
    shape = (num_samples, len(model.inputs.labels))
    # A loss of the model's own may read logits of any shape.
    is_free = type(model).loss is not Model.loss
    if isinstance(found, Outputs) and (is_free or found.logits.shape == shape):
        return found
    if isinstance(found, Tensor):
        is_good = found.shape == shape
        raise ConfigError(
            expected=f"zg.Outputs with logits of shape {shape}, (samples, labels)",
            found=f"a tensor of shape {tuple(found.shape)}",
            where=where,
            ways_out="return zg.Outputs(logits=logits)" if is_good else _outputs_of(found, shape),
        )
    if isinstance(found, Outputs):
        raise ConfigError(
            expected=f"logits of shape {shape}, (samples, labels)",
            found=f"shape {tuple(found.logits.shape)}",
            where=where,
            ways_out=_outputs_of(found.logits, shape),
        )
    raise ConfigError(
        expected=f"zg.Outputs with logits of shape {shape}, (samples, labels)",
        found=type(found).__name__,
        where=where,
        ways_out="return zg.Outputs(logits=…, named={…}): named holds further tensors that a loss reads",
    )


def check_logits(logits: Tensor, *, model: Model, num_samples: int) -> None:
    """Refuse logits that metrics cannot read: those of a model whose own loss takes others.

    Raises:
        ConfigError: they are not of shape (samples, labels).
    """
    shape = (num_samples, len(model.inputs.labels))
    if tuple(logits.shape) != shape:
        raise ConfigError(
            expected=f"logits of shape {shape}, (samples, labels), of which scores and metrics are made",
            found=f"shape {tuple(logits.shape)}",
            where=f"{type(model).__name__}, evaluation",
            ways_out=_outputs_of(logits, shape),
        )


def _outputs_of(logits: Tensor, shape: tuple[int, int]) -> tuple[str, ...]:
    """Say how logits of another shape become those that are wanted."""
    num_samples, num_labels = shape
    given = tuple(logits.shape)
    if given == (num_samples,) and num_labels == 1:
        return ("return zg.Outputs(logits=logits.unsqueeze(1))",)
    if given == (num_labels, num_samples):
        return ("return zg.Outputs(logits=logits.T)",)
    if given == (num_samples, num_labels, 1) or given == (num_samples, 1, num_labels):
        return (f"return zg.Outputs(logits=logits.reshape(-1, {num_labels}))",)
    return (f"let the last layer give {num_labels} numbers a sample: nn.Linear(…, len(inputs.labels))",)

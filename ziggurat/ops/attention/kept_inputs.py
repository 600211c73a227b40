"""Let both fast kernels of attention keep for their backward pass the same inputs in the same way."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from ziggurat.ops.function_ctx import Ctx

_NUM_TENSORS: Final = 11  # of the inputs of `attention_op` and `attention_triton_op`
# Queries, keys, values and offsets are always there; what follows them depends on the layout and the biases.
_Given = Tensor | None
_Inputs = tuple[
    Tensor, Tensor, Tensor, Tensor, _Given, _Given, _Given, _Given, _Given, _Given, _Given, *tuple[float | str, ...]
]


class AttentionCtx(Ctx, Protocol):
    """Ctx of an attention; see `keep_inputs`."""

    options: tuple[float | str, ...]  # numbers and the form, behind the tensors

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors of the inputs, the output and its logarithms."""
        ...


def keep_inputs(ctx: AttentionCtx, inputs: _Inputs, output: tuple[Tensor, Tensor]) -> None:
    """Keep inputs and output for the backward pass."""
    # The logarithms are an output only because backward reads them.
    ctx.mark_non_differentiable(output[1])
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output)

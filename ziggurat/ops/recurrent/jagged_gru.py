"""Gated recurrent units over jagged sequences, with or without attention in the update gate; nothing is padded.

    u = σ(x_u + U_u h + b_u)      r = σ(x_r + U_r h + b_r)      c = tanh(x_c + r ⊙ (U_c h + b_c))
    h' = (1 − w) ⊙ h + w ⊙ c        gru     w = u
                                    augru   w = a·u         a: the attention of the event, one number
                                    agru    w = a

x_u, x_r, x_c are what the events give (one product of matrices for all of them, made before). h starts as zeros.

Sequences are taken by falling length, so those that still run at step t are the first n_t, and all rows of a step lie
side by side: step t is one product of (n_t, D) by (D, 3 D). The backward pass is written out; the gradient of U is one
product over all rows at the end. FP32, whatever the dtype of the network.

`jagged_gru_reference` is the definition, sequence by sequence and event by event.

Cost: 6·D² FLOPs an event forward, twice that backward; one step for each event of the longest sequence.

Sources: GRU: Cho et al., arXiv 1406.1078, in the form of torch (the reset gate after U_c); AGRU, AUGRU: Zhou et al.,
"Deep Interest Evolution Network", arXiv 1809.03672, equations 11 to 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ziggurat.errors import DataError
from ziggurat.ops.function_ctx import SavedCtx


class UpdateGate(StrEnum):
    """Choice of the amount by which the state moves: w."""

    GRU = "gru"  # u
    AUGRU = "augru"  # a·u
    AGRU = "agru"  # a


def jagged_gru_reference(
    inputs_NG: Float[Tensor, "N 3D"],
    weight_GD: Float[Tensor, "3D D"],
    bias_G: Float[Tensor, "3D"],
    *,
    offsets: Int64[Tensor, "B+1"],
    attention_N: Float[Tensor, "N"] | None = None,
    gate: UpdateGate = UpdateGate.GRU,
) -> Float[Tensor, "N D"]:
    """States after each event, one event after the other.

    Args:
        inputs_NG: x_u, x_r and x_c of each event side by side.
        weight_GD: U_u, U_r, U_c below each other.
        bias_G: of them.
        offsets: where sequences begin.
        attention_N: a; unused by gru.
        gate: what the state moves by.
    """
    weights_N = inputs_NG.new_ones(len(inputs_NG)) if attention_N is None else attention_N
    states: list[Tensor] = []
    for begin, end in zip(offsets.tolist()[:-1], offsets.tolist()[1:], strict=True):
        state = inputs_NG.new_zeros(weight_GD.shape[1])
        for event in range(begin, end):
            x_u, x_r, x_c = inputs_NG[event].chunk(3)
            h_u, h_r, h_c = (weight_GD @ state + bias_G).chunk(3)
            # w of the formula above.
            share = torch.sigmoid(x_u + h_u)
            if gate is not UpdateGate.GRU:
                share = weights_N[event] * (share if gate is UpdateGate.AUGRU else torch.ones_like(share))
            state = (1 - share) * state + share * torch.tanh(x_c + torch.sigmoid(x_r + h_r) * h_c)
            states.append(state)
    return torch.stack(states) if states else inputs_NG[:, : weight_GD.shape[1]]


def jagged_gru(
    inputs_NG: Float[Tensor, "N 3D"],
    weight_GD: Float[Tensor, "3D D"],
    bias_G: Float[Tensor, "3D"],
    *,
    offsets: Int64[Tensor, "B+1"],
    attention_N: Float[Tensor, "N"] | None = None,
    gate: UpdateGate = UpdateGate.GRU,
    longer: Sequence[int] | None = None,
    linear: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Float[Tensor, "N D"]:
    """`jagged_gru_reference`, all sequences at once; one operation, `ziggurat::jagged_gru`, in compiled graphs.

    Args:
        inputs_NG: x_u, x_r and x_c of each event side by side.
        weight_GD: U_u, U_r, U_c below each other.
        bias_G: of them.
        offsets: where sequences begin.
        attention_N: a; unused by gru.
        gate: what the state moves by.
        longer: how many sequences have more than t events, for t = 0 …, as the host knows it of right offsets on a
            GPU; None: it asks.
        linear: computes x Wᵀ + b of states, `weight_GD` and `bias_G` in another arithmetic than torch's own, step by
            step under autograd; None: torch's own, in one operation.
    """
    attention_N = inputs_NG.new_ones(inputs_NG.shape[0]) if attention_N is None else attention_N
    # The recurrence multiplies errors step by step: it stays in FP32 under autocast.
    inputs_NG = inputs_NG.float()
    weight_GD = weight_GD.float()
    bias_G = bias_G.float()
    attention_N = attention_N.float()
    if linear is not None:
        return _gru_by(linear, inputs_NG, weight_GD, bias_G, attention_N, offsets, gate=gate, longer=longer)
    longer_list = None if longer is None else list(longer)
    return _gru(inputs_NG, weight_GD, bias_G, attention_N, offsets, gate.value, longer_list)[0]


def _gru_by(
    linear: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs_NG: Tensor,
    weight_GD: Tensor,
    bias_G: Tensor,
    attention_N: Tensor,
    offsets: Tensor,
    *,
    gate: UpdateGate,
    longer: Sequence[int] | None,
) -> Tensor:
    """Compute the states of `_gru` by operations that autograd differentiates."""
    dim = weight_GD.shape[1]
    if longer is None:
        _check_offsets(offsets, len(inputs_NG))
    places, counts = _steps(offsets, longer)
    packed_NG = inputs_NG[places]
    attention_N1 = attention_N[places].unsqueeze(1)
    state_ND = inputs_NG.new_zeros(counts[0] if counts else 0, dim)
    states: list[Tensor] = []
    begin = 0
    for count in counts:
        rows = slice(begin, begin + count)
        # Sequences that have ended are the last rows, since lengths fall.
        state_ND = state_ND[:count]
        x_u, x_r, x_c = packed_NG[rows].chunk(3, dim=1)
        h_u, h_r, h_c = linear(state_ND, weight_GD, bias_G).chunk(3, dim=1)
        candidate_ND = torch.tanh(x_c + torch.sigmoid(x_r + h_r) * h_c)
        state_ND = torch.lerp(state_ND, candidate_ND, _share(torch.sigmoid(x_u + h_u), attention_N1[rows], gate))
        states.append(state_ND)
        begin += count
    ordered_ND = torch.cat(states) if states else inputs_NG[:, :dim]
    # Back from the order of the steps to that of the events.
    return torch.empty_like(ordered_ND).index_copy(0, places, ordered_ND)


@torch.library.custom_op("ziggurat::jagged_gru", mutates_args=())
def _gru(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    attention: Tensor,
    offsets: Tensor,
    gate: str,
    longer: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """States (N, D), and what the backward pass needs, step by step: u, r, c, U_c h + b_c and h."""
    dim = weight.shape[1]
    num_events = inputs.shape[0]
    if longer is None:
        _check_offsets(offsets, num_events)
    places, counts = _steps(offsets, longer)
    packed = inputs[places]
    weights = attention[places].unsqueeze(1)
    states = inputs.new_empty(num_events, dim)
    kept = inputs.new_empty(num_events, 5 * dim)
    state = inputs.new_zeros(counts[0] if counts else 0, dim)
    begin = 0
    for count in counts:
        rows = slice(begin, begin + count)
        # Sequences that have ended are the last rows, since lengths fall.
        state = state[:count]
        hidden = torch.addmm(bias, state, weight.t())
        update, reset = (packed[rows, : 2 * dim] + hidden[:, : 2 * dim]).sigmoid_().chunk(2, dim=1)
        candidate = torch.addcmul(packed[rows, 2 * dim :], reset, hidden[:, 2 * dim :]).tanh_()
        # In one row of `kept` for each event, so that the backward pass reads them side by side.
        torch.cat([update, reset, candidate, hidden[:, 2 * dim :], state], dim=1, out=kept[rows])
        state = torch.lerp(state, candidate, _share(update, weights[rows], gate))
        states[rows] = state
        begin += count
    return torch.empty_like(states).index_copy_(0, places, states), kept


def _check_offsets(offsets: Tensor, num_events: int) -> None:
    if int(offsets[0]) != 0 or int(offsets[-1]) != num_events or bool((offsets.diff() < 0).any()):
        raise DataError(
            expected=f"offsets that start at 0, never fall and end at {num_events} (number of events)",
            found=str(offsets.tolist()[:20]),
            where="jagged GRU",
            ways_out="build offsets with torch.cumsum over the lengths",
        )


def _share(update: Tensor, weights: Tensor, gate: str) -> Tensor:
    """Return the amount by which a state moves: w."""
    if gate == UpdateGate.GRU:
        return update
    return weights * update if gate == UpdateGate.AUGRU else weights.expand_as(update)


def _steps(offsets: Tensor, longer: Sequence[int] | None) -> tuple[Tensor, Sequence[int]]:
    """Events in the order of the steps, sequences by falling length; and how many each step has."""
    lengths = offsets.diff()
    device = offsets.device
    # Where the host was not told, it waits for the device here.
    longest = len(longer) if longer is not None else int(lengths.max()) if len(lengths) else 0
    counts = (lengths.unsqueeze(0) > torch.arange(longest, device=device).unsqueeze(1)).sum(1)
    longer = counts.tolist() if longer is None else longer
    num_events = sum(longer)
    # Falling lengths: those that still run at a step are then the first rows, and a slice selects them.
    order = torch.argsort(lengths, descending=True, stable=True)
    # `output_size` spares the host a question to the device.
    steps = torch.arange(longest, device=device).repeat_interleave(counts, output_size=num_events)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=num_events)
    # Place of each event within its step, which is the rank of its sequence by length.
    ranks = torch.arange(num_events, device=device) - first
    return offsets[order[ranks]] + steps, longer


@torch.library.custom_op("ziggurat::jagged_gru_backward", mutates_args=())
def _gru_backward(
    grad: Tensor,
    kept: Tensor,
    weight: Tensor,
    attention: Tensor,
    offsets: Tensor,
    gate: str,
    longer: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of what events give, of U, of b, and of the attention."""
    dim = weight.shape[1]
    num_events = grad.shape[0]
    places, counts = _steps(offsets, longer)
    packed = grad[places]
    weights = attention[places].unsqueeze(1)
    d_inputs, d_hidden = (grad.new_empty(num_events, 3 * dim) for _ in range(2))
    d_weights = grad.new_zeros(num_events)
    # ∂h of sequences that run on; those that end at a step join with zeros, going backwards.
    carried = grad.new_zeros(counts[0] if counts else 0, dim)
    end = num_events
    for count in reversed(counts):
        rows = slice(end - count, end)
        update, reset, candidate, inner, state = kept[rows].split(dim, dim=1)
        share = _share(update, weights[rows], gate)
        # Of the state itself, and of the states that follow from it.
        d_state = packed[rows] + carried[:count]
        d_share = d_state * (candidate - state)
        d_candidate = d_state * share * (1 - candidate * candidate)
        d_update = torch.zeros_like(d_share) if gate == UpdateGate.AGRU else d_share * update * (1 - update)
        if gate != UpdateGate.GRU:
            # w = a·u, or a itself: the gradient of a is that of w times u, or that of w.
            d_weights[rows] = (d_share if gate == UpdateGate.AGRU else d_share * update).sum(dim=1)
            d_update = d_update * weights[rows]
        d_reset = d_candidate * inner * reset * (1 - reset)
        torch.cat([d_update, d_reset, d_candidate], dim=1, out=d_inputs[rows])
        # Differs from the line above in the candidate alone, whose hidden part went through the reset gate.
        torch.cat([d_update, d_reset, d_candidate * reset], dim=1, out=d_hidden[rows])
        # Past the event (1 − w), and through the gates.
        carried[:count] = torch.addmm(d_state * (1 - share), d_hidden[rows], weight)
        end -= count
    of_inputs = torch.empty_like(d_inputs).index_copy_(0, places, d_inputs)
    of_attention = torch.empty_like(d_weights).index_copy_(0, places, d_weights)
    # One product over all events, instead of a small one at each step.
    return of_inputs, d_hidden.t() @ kept[:, 4 * dim :], d_hidden.sum(dim=0), of_attention


@_gru.register_fake
def _(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    attention: Tensor,
    offsets: Tensor,
    gate: str,
    longer: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    del bias, attention, offsets, gate, longer
    size = inputs.shape[0]
    dim = weight.shape[1]
    return inputs.new_empty(size, dim), inputs.new_empty(size, 5 * dim)


@_gru_backward.register_fake
def _(
    grad: Tensor,
    kept: Tensor,
    weight: Tensor,
    attention: Tensor,
    offsets: Tensor,
    gate: str,
    longer: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del kept, offsets, gate, longer
    size = grad.shape[0]
    width = weight.shape[0]
    return grad.new_empty(size, width), torch.empty_like(weight), weight.new_empty(width), torch.empty_like(attention)


class _GRUCtx(SavedCtx, Protocol):
    gate: str
    longer: Sequence[int] | None


def _keep(
    ctx: _GRUCtx,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, str, Sequence[int] | None],
    output: tuple[Tensor, Tensor],
) -> None:
    _, weight, _, attention, offsets, gate, ctx.longer = inputs
    # It is kept for the backward pass; nobody differentiates by it.
    ctx.mark_non_differentiable(output[1])
    ctx.gate = gate
    ctx.save_for_backward(output[1], weight, attention, offsets)


def _differentiate(ctx: _GRUCtx, grad: Tensor, _grad_kept: Tensor | None) -> tuple[Tensor | None, ...]:
    kept, weight, attention, offsets = ctx.saved_tensors
    of_inputs, of_weight, of_bias, of_attention = _gru_backward(
        grad.contiguous(), kept, weight, attention, offsets, ctx.gate, ctx.longer
    )
    return of_inputs, of_weight, of_bias, of_attention, None, None, None


_gru.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.ziggurat.jagged_gru)
def _flops(inputs: Sequence[int], weight: Sequence[int], *others: object, **named: object) -> int:
    """FLOPs of the products with U."""
    del others, named
    return 2 * inputs[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.ziggurat.jagged_gru_backward)
def _flops_backward(
    grad: Sequence[int], kept: Sequence[int], weight: Sequence[int], *others: object, **named: object
) -> int:
    """FLOPs backward: gradients of states and of U."""
    del kept, others, named
    return 4 * grad[0] * weight[0] * weight[1]

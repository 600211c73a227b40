"""`jagged_gru` against `jagged_gru_reference`: states and gradients, whatever the lengths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.errors import DataError
from ziggurat.ops.recurrent.jagged_gru import UpdateGate, jagged_gru, jagged_gru_reference

DIM = 3


@pytest.mark.parametrize("linear", [None, F.linear], ids=["one operation", "by a product of its own"])
@pytest.mark.parametrize("gate", UpdateGate)
@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 7]), max_size=5), knows_lengths=st.booleans())
def test_states_and_gradients_are_those_of_the_reference(gate, linear, lengths, knows_lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    num_events = int(offsets[-1])
    shapes = ((num_events, 3 * DIM), (3 * DIM, DIM), (3 * DIM,), (num_events,))
    ours = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    theirs = [each.detach().double().requires_grad_() for each in ours]
    longer = [sum(length > step for length in lengths) for step in range(max(lengths, default=0))]
    found = jagged_gru(
        *ours[:3],
        offsets=offsets,
        attention_N=ours[3],
        gate=gate,
        longer=longer if knows_lengths else None,
        linear=linear,
    )
    expected = jagged_gru_reference(*theirs[:3], offsets=offsets, attention_N=theirs[3], gate=gate)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=generator)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs_ in zip(ours, theirs, strict=True):
        gradient = torch.zeros_like(mine) if mine.grad is None else mine.grad
        reference = torch.zeros_like(mine) if theirs_.grad is None else theirs_.grad.float()
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_offsets_that_leave_events_out_are_refused():
    inputs = torch.zeros(4, 3 * DIM)
    with pytest.raises(DataError, match="end at 4"):
        jagged_gru(inputs, torch.zeros(3 * DIM, DIM), torch.zeros(3 * DIM), offsets=torch.tensor([0, 2, 3]))

"""The C++ mix of fields and sum with layer norm against their references in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ziggurat.ops.interactions.fields as ops_fields
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.ops.interactions.fields import (
    field_mix,
    field_mix_reference,
    fields_kernel,
    sum_norm,
    sum_norm_reference,
    why_not,
)

needs_kernel = pytest.mark.skipif(not fields_kernel().startswith("C++"), reason=fields_kernel())
dtypes = st.sampled_from([torch.float32, torch.float64])


def close(found, expected) -> None:
    exact = expected.dtype is torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-10 if exact else 1e-4, atol=1e-10 if exact else 1e-4)


def compare(function, reference, inputs) -> None:
    """Outputs and the gradients of every input."""
    twins = [each.detach().clone().requires_grad_() for each in inputs]
    for each in inputs:
        each.requires_grad_()
    found, expected = function(*inputs), reference(*twins)
    close(found, expected)
    gradient = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, twins, gradient), strict=True
    ):
        close(ours, theirs)


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 35), st.integers(1, 21), st.integers(1, 21), st.integers(1, 18), dtypes)
def test_mix_equals_the_reference_and_so_do_its_gradients(size, num_fields, outputs, vectors, dtype):
    fields = torch.randn(size, num_fields, 8 * vectors, dtype=dtype)
    weight = torch.randn(outputs, num_fields, dtype=dtype)
    assert not why_not(fields, weight)
    compare(field_mix, field_mix_reference, [fields, weight])


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 35), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), dtypes)
def test_sum_norm_equals_the_reference_and_so_do_its_gradients(size, first, second, vectors, dtype):
    dim = 8 * vectors
    shapes = [(size, first, dim), (size, second, dim), (size, first + second, dim), (dim,), (dim,)]
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]

    def called(function):
        def call(first, second, kept, weight, bias):
            parts = (first, second) if second.shape[1] else (first,)
            total = function(parts, kept, weight_D=weight, bias_D=bias, eps=1e-5)
            return total + 0.0 * second.sum()

        return call

    compare(called(sum_norm), called(sum_norm_reference), inputs)


@needs_kernel
def test_inputs_that_are_views():
    fields = torch.randn(5, 16, 3).transpose(1, 2)
    weight = torch.randn(3, 4).t()
    compare(field_mix, field_mix_reference, [fields, weight])
    expanded = field_mix(torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3)).sum()
    expanded.backward()  # its gradient is an expanded number


@needs_kernel
def test_second_derivatives():
    fields = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(field_mix, (fields, weight))
    parts = [torch.randn(2, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    kept = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def call(first, second, kept, weight, bias):
        return sum_norm((first, second), kept, weight_D=weight, bias_D=bias, eps=1e-5)

    assert torch.autograd.gradgradcheck(call, (*parts, kept, scale, shift))


@needs_kernel
def test_results_do_not_depend_on_threads():
    fields, weight = torch.randn(50, 7, 16), torch.randn(6, 7)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        leaf, matrix = fields.clone().requires_grad_(), weight.clone().requires_grad_()
        out = field_mix(leaf, matrix)
        out.square().sum().backward()
        results.append((out, leaf.grad, matrix.grad))
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_what_the_kernel_does_not_serve_goes_to_the_reference():
    weight = torch.randn(2, 3)
    for fields in (torch.randn(2, 3, 5), torch.randn(2, 3, 8, dtype=torch.bfloat16)):
        matrix = weight.to(fields.dtype)
        assert why_not(fields, matrix)
        assert torch.equal(field_mix(fields, matrix), field_mix_reference(fields, matrix))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert field_mix(torch.randn(2, 3, 8), weight).dtype is torch.bfloat16


def test_without_a_compiler_the_reference_runs(monkeypatch):
    monkeypatch.setattr(ops_fields, "_LIBRARY", CppLibrary.missing("no compiler"))
    assert fields_kernel() == "torch, slower: C++ is not available: no compiler"
    fields, weight = torch.randn(2, 3, 8), torch.randn(2, 3)
    assert torch.equal(field_mix(fields, weight), field_mix_reference(fields, weight))

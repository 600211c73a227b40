"""Linear maps in few bits: the weights that the format holds, sums to the bit, and what rounded activations cost."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import platform

import pytest
import torch

from tests.numerics.tensors import same_bits
from ziggurat.errors import ConfigError, NumericsError
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.numerics.linear import (
    SOURCE,
    PackedChain,
    PackedLinear,
    declare,
    integers_of,
    linear,
    linear_chain,
    linear_chain_reference,
    linear_reference,
    pack_linear,
)
from ziggurat.ops.cpp_build import CppLibrary

NARROW = ("mx6", "mx4", "mxint8", "msfp16", "int8")
FORMATS = pytest.mark.parametrize("name", [*NARROW, "mx9"])
INSTRUCTIONS = {
    "native": ((), None),
    "AVX2": (("-mno-avx512f",), 1),
    "plain": (("-mno-avx512f", "-mno-avx2", "-mno-avx"), 0),
}


@functools.cache
def build(instructions: str) -> CppLibrary:
    """Return a build for one set of instructions; skip where the processor has no such set."""
    flags, path = INSTRUCTIONS[instructions]
    if path is not None and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the processor has one set of instructions")
    library = CppLibrary(dataclasses.replace(SOURCE, flags=(*SOURCE.flags, *flags)), declare=declare)
    if library.reason:
        pytest.skip(library.reason)
    assert path is None or library.needed().ziggurat_linear_path() == path
    return library


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@FORMATS
def test_the_kernel_gives_the_bits_of_the_reference(name: str, instructions: str) -> None:
    library = build(instructions)
    # Shapes whose last panel, block and tile of rows are not full; 70 outputs are more than a thread takes at once.
    for seed, (batch, inputs, outputs) in enumerate([(1, 16, 16), (13, 131, 70), (3, 5, 1), (8, 64, 33), (0, 7, 3)]):
        weight = normal(outputs, inputs, seed=seed) * torch.logspace(-6, 6, outputs).unsqueeze(1)
        bias = normal(outputs, seed=seed + 9) if seed % 2 else None
        map = pack_linear(weight, BlockFormat.named(name), bias=bias)
        x = normal(batch, inputs, seed=seed + 5) * torch.logspace(-3, 3, batch).unsqueeze(1)
        if batch > 2:
            x[1] = 0
            x[2, 3] = math.inf
        found = linear(x, map, library=library)
        assert same_bits(found, linear_reference(x, map)), (batch, inputs, outputs)
        if batch > 2:
            assert found[2].isnan().all()
            assert found[0].isfinite().all()
            assert torch.equal(found[1], torch.zeros(outputs) if bias is None else bias)


def layers(name: str, *widths: int) -> tuple[PackedLinear, ...]:
    """Packed maps of these widths, every other one with a bias."""
    return tuple(
        pack_linear(
            normal(outputs, inputs, seed=inputs),
            BlockFormat.named(name),
            bias=normal(outputs, seed=outputs) if outputs % 2 else None,
        )
        for inputs, outputs in itertools.pairwise(widths)
    )


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@FORMATS
def test_a_chain_gives_the_bits_of_its_maps_and_relu_in_turns(name: str, instructions: str) -> None:
    library = build(instructions)
    maps = layers(name, 37, 70, 33, 5)
    for batch in (0, 1, 3, 17):
        x = normal(batch, 37, seed=batch)
        if batch > 2:
            x[1, 4] = math.nan
            x[2] = -0.0
        for relu_last in (False, True):
            chain = PackedChain(maps=maps, relu_last=relu_last)
            expected = x
            for index, map in enumerate(maps):
                expected = linear(expected, map, library=library)
                if relu_last or index < 2:
                    expected = torch.relu(expected)
            assert same_bits(linear_chain(x, chain, library=library), expected)
            assert same_bits(linear_chain_reference(x, chain), expected)


def test_a_chain_reads_no_column_behind_its_inputs_and_refuses_too_few() -> None:
    chain = PackedChain(maps=layers("mx9", 20, 33, 4), relu_last=False)
    x = normal(9, 28)
    expected = linear_chain(x[:, :20].contiguous(), chain)
    assert same_bits(linear_chain(x[:, :20], chain), expected)
    x[:, 20:] = math.nan
    assert same_bits(linear_chain(x, chain), expected)
    assert same_bits(linear_chain(x.T.contiguous().T, chain), expected)
    assert same_bits(linear_chain(x, chain, library=CppLibrary.missing("no compiler")), expected)
    with pytest.raises(ConfigError, match="20 inputs, as the weight has"):
        linear_chain(x[:, :19], chain)


@FORMATS
def test_weights_are_those_that_the_format_holds(name: str) -> None:
    format = BlockFormat.named(name)
    weight = normal(21, 83) * torch.logspace(-9, 9, 83)
    weight[0, :16] = 0
    weight[1] = 0
    map = pack_linear(weight, format)
    # A row of the unit matrix is exact in integers: the largest level, and zeros.
    found = linear_reference(torch.eye(83), map).T
    assert torch.allclose(found, quantise(weight, format, 1), rtol=3e-7, atol=0)
    assert integers_of(map).abs().amax() <= (254 if map.is_wide else 127)


@FORMATS
def test_rounded_activations_cost_half_a_level(name: str) -> None:
    format = BlockFormat.named(name)
    weight = normal(40, 256)
    map = pack_linear(weight, format)
    x = normal(32, 256, seed=1)
    held = quantise(weight, format, 1).double()
    error = (linear(x, map).double() - x.double() @ held.T).abs()
    half_level = x.abs().amax(dim=1, keepdim=True).double() / (32767 if map.is_wide else 127) / 2
    assert (error <= 1.01 * half_level * held.abs().sum(dim=1) + 1e-4).all()
    # A typical error is far below that bound: errors of levels are independent.
    assert error.pow(2).mean().sqrt() < (1e-3 if map.is_wide else 0.15)


def test_bytes_are_those_of_codes_and_scales() -> None:
    weight = normal(64, 256)
    assert pack_linear(weight, BlockFormat.named("int8")).num_bytes == 64 * 256 + 64 * 4
    assert pack_linear(weight, BlockFormat.named("mx6")).num_bytes == 64 * 256 * 17 // 16
    assert pack_linear(weight, BlockFormat.named("mx9")).num_bytes == 64 * 256 * 33 // 16


def test_blocks_of_weights_too_small_for_a_power_of_two_are_zero() -> None:
    weight = normal(2, 32)
    weight[0, :16] *= 1e-42
    found = linear(torch.eye(32), pack_linear(weight, BlockFormat.named("mx9"))).T
    assert torch.equal(found[0, :16], torch.zeros(16))
    assert torch.allclose(found[0, 16:], quantise(weight, BlockFormat.named("mx9"), 1)[0, 16:])


def test_leading_axes_threads_and_layouts_change_nothing() -> None:
    map = pack_linear(normal(200, 300), BlockFormat.named("mx6"))
    x = normal(4, 30, 300)
    found = linear(x, map)
    assert found.shape == (4, 30, 200)
    assert same_bits(linear(x.permute(1, 0, 2), map), found.permute(1, 0, 2).contiguous())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert same_bits(linear(x, map), found)
    finally:
        torch.set_num_threads(threads)


def test_without_a_compiler_torch_computes_the_same() -> None:
    map = pack_linear(normal(5, 40), BlockFormat.named("mx6"), bias=normal(5))
    x = normal(3, 40)
    assert same_bits(linear(x, map, library=CppLibrary.missing("no compiler")), linear(x, map))


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3_row", "vsq8", "mxfp4", "fp8_e4m3_tensor"])
def test_a_format_without_integers_in_blocks_is_refused_with_ways_that_work(name: str) -> None:
    with pytest.raises(ConfigError, match="integers of at most 8 bits") as refused:
        pack_linear(normal(4, 16), BlockFormat.named(name))
    for way in refused.value.ways_out:
        format = BlockFormat.named(way.split("'")[1])
        assert pack_linear(normal(4, 16), format).format is format


def test_weights_that_no_format_holds_are_refused_by_product_and_magnitude() -> None:
    weight = normal(4, 16)
    weight[2, 3] = -math.inf
    with pytest.raises(NumericsError, match=r"-inf at \[2, 3\](.|\n)*top\.0"):
        pack_linear(weight, BlockFormat.named("mx6"), name="top.0")
    weight[2, 3] = math.nan
    with pytest.raises(NumericsError, match=r"NaN, 1 times(.|\n)*top\.0"):
        pack_linear(weight, BlockFormat.named("int8"), name="top.0")


def test_other_shapes_are_refused() -> None:
    mx6 = BlockFormat.named("mx6")
    for shape in ((3,), (0, 4), (4, 0), (1, 2**16 + 1)):
        with pytest.raises(ConfigError, match="1 to 65,536 inputs"):
            pack_linear(torch.zeros(shape), mx6)
    with pytest.raises(ConfigError, match="16 inputs, as the weight has"):
        linear(normal(2, 15), pack_linear(normal(4, 16), mx6))

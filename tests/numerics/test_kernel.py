"""The kernel gives the bits of the reference: every format, shape and set of instructions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import platform

import pytest
import torch

from tests.numerics.tensors import hard_numbers, same_bits
from ziggurat.errors import NumericsError
from ziggurat.numerics import BlockFormat, Rounding, quantise, quantise_reference
from ziggurat.numerics.catalogue import E2M1
from ziggurat.numerics.kernel import SOURCE, declare, pack_fast, quantise_fast, unpack_fast
from ziggurat.numerics.packing import pack_reference, unpack_reference
from ziggurat.ops.cpp_build import CppLibrary

INSTRUCTIONS = {
    "native": (),
    "AVX2": ("-mno-avx512f",),
    "plain": ("-mno-avx512f", "-mno-avx2", "-mno-avx"),
}
MX9 = BlockFormat.named("mx9")
ODD = (
    dataclasses.replace(MX9, name="odd_lengths", k1=24, k2=4, d1=5, d2=2),
    dataclasses.replace(MX9, name="wide_second", k1=64, k2=32, d2=3),
    dataclasses.replace(MX9, name="no_power_of_two", k1=30, k2=3),
    dataclasses.replace(MX9, name="deep_second", k1=32, k2=2, d2=6),
    dataclasses.replace(MX9, name="truncated", rounding=Rounding.TRUNCATE),
    dataclasses.replace(BlockFormat.named("mxfp6_e2m3"), name="floats_with_two_levels", k1=16, k2=2, d2=1),
    dataclasses.replace(BlockFormat.named("vsq8"), name="floats_with_factors", element=E2M1),
)
FORMATS = pytest.mark.parametrize("format", [*BlockFormat.listed(), *ODD], ids=str)


@functools.cache
def build(instructions: str) -> CppLibrary:
    """Return a build for one set of instructions; skip where the processor has no such set."""
    if instructions != "native" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the processor has one set of instructions")
    source = dataclasses.replace(SOURCE, flags=(*SOURCE.flags, *INSTRUCTIONS[instructions]))
    library = CppLibrary(source, declare=declare)
    if library.reason:
        pytest.skip(library.reason)
    return library


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@FORMATS
def test_bits_of_the_reference(format: BlockFormat, instructions: str) -> None:
    library = build(instructions)
    for seed, shape in enumerate([(16, 64), (9, 37), (40, 33), (1, 1), (3, 5, 130), (2, 70, 3), (300,)]):
        x = hard_numbers(format, *shape, seed=seed)
        if seed == 1:
            x[3, 20] = torch.nan
        for axis in range(x.dim()):
            found = quantise_fast(x, format, axis, library=library)
            assert found is not None
            assert same_bits(found, quantise_reference(x, format, axis)), (shape, axis)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@FORMATS
def test_packed_bits_of_the_reference(format: BlockFormat, instructions: str) -> None:
    library = build(instructions)
    for seed, shape in enumerate([(16, 64), (9, 37), (1, 1), (15, 130), (2, 1030)]):
        x = hard_numbers(format, *shape, seed=seed)
        if seed == 1:
            x[3, 20] = torch.nan
        expected = pack_reference(x, format, 1)
        count, row_bytes = expected.rows.shape
        rows = x.view(count, -1)
        found = pack_fast(rows, format, row_bytes=row_bytes, library=library)
        assert found is not None
        assert torch.equal(found, expected.rows), shape
        unpacked = unpack_fast(found, format, n=rows.shape[1], library=library)
        assert unpacked is not None
        assert same_bits(unpacked.view(shape), unpack_reference(expected)), shape


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("name", ["mx9", "mxfp8_e4m3", "vsq8"])
def test_results_that_are_written_past_the_caches_have_the_same_bits(name: str, instructions: str) -> None:
    library = build(instructions)
    format = BlockFormat.named(name)
    # 8 MiB and more, a last block that is shorter, and rows that end inside a group of columns.
    x = torch.randn(1973, 1072, generator=torch.Generator().manual_seed(0))
    x[40, 70] = torch.nan
    x[100:200, 300] = 1e-42
    x[300, 1000] = 1e30
    x[600:700, 512:528] = 0.0
    found = quantise_fast(x, format, 0, library=library)
    assert found is not None
    # Of few columns the results are small, and are held to the reference above.
    for columns in (slice(0, 128), slice(290, 310), slice(500, 628), slice(990, 1072)):
        expected = quantise_fast(x[:, columns].contiguous(), format, 0, library=library)
        assert expected is not None
        assert same_bits(found[:, columns].contiguous(), expected), columns
    x[1900, 1071] = torch.inf
    assert quantise_fast(x, format, 0, library=library) is None


def test_builds_differ_in_their_instructions() -> None:
    lanes = [build(each).needed().ziggurat_block_lanes() for each in INSTRUCTIONS]
    assert lanes == sorted(lanes, reverse=True)
    assert lanes[-1] == 4


@FORMATS
def test_transposed_and_strided_tensors(format: BlockFormat) -> None:
    x = hard_numbers(format, 4, 50, 36)
    for view, axis in itertools.product((x.mT, x[:, ::2], x.movedim(0, 2)), (0, 1, 2)):
        assert same_bits(quantise(view, format, axis), quantise_reference(view.contiguous(), format, axis))


@FORMATS
def test_threads_change_no_bit(format: BlockFormat) -> None:
    x = torch.randn(130, 1030)
    expected = [quantise(x, format, axis) for axis in (0, 1)]
    torch.set_num_threads(2)
    assert all(same_bits(quantise(x, format, axis), expected[axis]) for axis in (0, 1))


@pytest.mark.parametrize("name", ["mx9", "mxfp8_e4m3", "fp8_e4m3_tensor", "fp16"])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_infinity_anywhere_is_refused(name: str, axis: int) -> None:
    for place in ((0, 0), (31, 17), (39, 49)):
        x = torch.randn(40, 50)
        x[place] = -torch.inf
        with pytest.raises(NumericsError, match=f"-inf at \\[{place[0]}, {place[1]}\\]"):
            quantise(x, BlockFormat.named(name), axis)


def test_without_a_compiler_torch_gives_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 48)
    expected = quantise(x, MX9, 1)
    monkeypatch.setattr("ziggurat.numerics.kernel._LIBRARY", CppLibrary.missing("no compiler"))
    assert quantise_fast(x, MX9, 1) is None
    assert same_bits(quantise(x, MX9, 1), expected)

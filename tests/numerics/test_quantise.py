"""Rounding to block formats: torch's own dtypes as oracles, numbers done by hand, edges, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.numerics.tensors import hard_numbers, same_bits
from ziggurat.errors import ConfigError, NumericsError
from ziggurat.numerics import BlockFormat, Element, Rounding, ScaleRule, Scope, quantise

ALL = pytest.mark.parametrize("format", BlockFormat.listed(), ids=str)
MX9 = BlockFormat.named("mx9")
MXFP4 = BlockFormat.named("mxfp4")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_formats_without_scales_equal_the_dtypes_of_torch(name: str, dtype: torch.dtype) -> None:
    format = BlockFormat.named(name)
    x = hard_numbers(format, 200, 501)
    x[0, :3] = torch.tensor([torch.nan, format.element.largest, -format.element.largest])
    assert same_bits(quantise(x, format, 1), x.to(dtype).float())


def test_every_code_of_an_element_equals_the_dtype_of_torch() -> None:
    codes = torch.arange(256).to(torch.uint8)
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        element = BlockFormat.named(name).element
        values = codes.view(dtype).float()
        for code in range(element.code(element.largest) + 1):
            assert element.magnitude(code) == float(values[code])
            assert element.code(float(values[code])) == code


def test_truncation_cuts_the_bits_of_bf16() -> None:
    x = hard_numbers(BlockFormat.named("bf16"), 50, 300)
    cut = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert same_bits(quantise(x, BlockFormat.named("bf16_truncated"), 1), cut)


def test_mx9_by_hand() -> None:
    x = torch.zeros(16)
    x[0], x[1] = 1.0, 1 / 128  # the pair's step is 1/64, of which 1/128 is half: to the even integer, 0
    x[2], x[3] = 0.5, 1 / 128  # a lower pair: its step is 1/128
    x[4], x[5] = 3 / 128, -3 / 512  # two binades lower, and one bit cannot say it: 1/128 still
    expected = torch.zeros(16)
    expected[0] = 1.0
    expected[2], expected[3] = 0.5, 1 / 128
    expected[4], expected[5] = 3 / 128, -1 / 128
    assert same_bits(quantise(x, MX9, 0), expected)


def test_integers_saturate_and_do_not_move_the_block() -> None:
    x = torch.tensor([1.999, 1.0] + [0.0] * 14)
    assert quantise(x, BlockFormat.named("mx4"), 0).tolist()[:2] == [1.5, 1.0]


def test_scale_rules_by_hand() -> None:
    x = torch.zeros(32)
    x[0], x[1] = 7.0, 1.0
    found = {}
    for rule in ScaleRule:
        q = quantise(x, dataclasses.replace(MXFP4, scale_rule=rule), 0)
        found[rule] = q[:2].tolist()
    # The largest code is 6. FLOOR divides by 1 and saturates; EVEN rounds 7 to 8, and RCEIL makes room: by 2.
    assert found[ScaleRule.FLOOR] == [6.0, 1.0]
    assert found[ScaleRule.CEIL] == [8.0, 1.0]  # 7 / 2 = 3.5: a tie, to the even 4
    assert found[ScaleRule.EVEN] == [8.0, 1.0]
    assert found[ScaleRule.RCEIL] == [8.0, 1.0]


def test_integers_with_an_fp32_scale_are_the_usual_ones() -> None:
    x = torch.randn(40, 300)
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    assert torch.equal(quantise(x, BlockFormat.named("int8"), 1), (x / scale).round() * scale + 0.0)


@pytest.mark.parametrize("format", [each for each in BlockFormat.listed() if not each.has_integer_factors], ids=str)
def test_numbers_of_a_format_stay(format: BlockFormat) -> None:
    x = hard_numbers(format, 64, 150)
    once = quantise(x, format, 1)
    assert same_bits(quantise(once, format, 1), once)


@ALL
def test_each_number_is_as_near_as_its_block_allows(format: BlockFormat) -> None:
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(3))
    error = (quantise(x, format, 1) - x).abs()
    largest = x.abs().amax()
    # One step of the largest binade, which is what saturation and rounding may cost.
    assert bool((error <= largest * 2.0**-format.element.fraction_bits).all())
    assert bool((error[x == 0] == 0).all())


@ALL
def test_blocks_lie_along_any_axis(format: BlockFormat) -> None:
    x = hard_numbers(format, 5, 7, 41)
    last = quantise(x, format, -1)
    if format.k1 is not Scope.TENSOR:
        for row in (0, 3):
            assert same_bits(quantise(x[2, row], format, 0), last[2, row])
    assert same_bits(quantise(x.movedim(-1, 0), format, 0), last.movedim(-1, 0))
    assert same_bits(quantise(x.transpose(1, 2), format, 1), last.transpose(1, 2))


@pytest.mark.parametrize("name", ["mx9", "mxfp8_e4m3", "vsq8", "fp8_e4m3_128"])
def test_the_last_block_is_shorter(name: str) -> None:
    format = BlockFormat.named(name)
    x = torch.randn(3, 150)
    k1 = 150 if isinstance(format.k1, Scope) else format.k1
    parts = [quantise(part.contiguous(), format, 1) for part in x.split(k1, dim=1)]
    assert same_bits(quantise(x, format, 1), torch.cat(parts, dim=1))


def test_rounding_and_transposing_do_not_commute() -> None:
    x = torch.randn(64, 64)
    assert not torch.equal(quantise(x, MX9, 0), quantise(x, MX9, 1))


@ALL
def test_nan_stays_with_all_that_share_its_scale(format: BlockFormat) -> None:
    x = torch.randn(2, 300)
    x[1, 40] = torch.nan
    q = quantise(x, format, 1)
    shared = torch.zeros(2, 300, dtype=torch.bool)
    if format.k1 is Scope.TENSOR:
        shared[:] = True
    elif format.k1 is Scope.AXIS:
        shared[1] = True
    else:
        start = 40 // format.k1 * format.k1
        shared[1, start : start + format.k1] = True
    assert torch.equal(q.isnan(), shared)


@ALL
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinities_are_refused_by_name(format: BlockFormat, value: float) -> None:
    x = torch.randn(4, 70)
    x[2, 65] = value
    x[2, 64] = torch.nan
    with pytest.raises(NumericsError) as caught:
        quantise(x, format, 1, name="gradient of mlp.0")
    assert caught.value.where.startswith("gradient of mlp.0")
    assert caught.value.found == f"{value} at [2, 65]"


def test_what_fp16_cannot_hold_is_refused_and_its_limit_is_held() -> None:
    fp16 = BlockFormat.named("fp16")
    held = torch.tensor([65519.996])
    assert quantise(held, fp16, 0).item() == 65504.0 == held.half().item()
    with pytest.raises(NumericsError, match="65520"):
        quantise(torch.tensor([65520.0]), fp16, 0)
    assert torch.tensor([65520.0]).half().isinf()
    assert quantise(torch.tensor([65520.0]), BlockFormat.named("bf16"), 0).isfinite()  # the way out


def test_the_largest_fp32_number_stays_finite() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.full((64,), largest)
    for format in BlockFormat.listed():
        if format.has_scale:
            assert quantise(x, format, 0).isfinite().all(), format


def test_empty_tensors_and_other_dtypes() -> None:
    assert quantise(torch.zeros(0, 5), MX9, 1).shape == (0, 5)
    assert quantise(torch.zeros(5, 0), MX9, 1).shape == (5, 0)
    half = torch.randn(4, 32).bfloat16()
    assert same_bits(quantise(half, MX9, 1), quantise(half.float(), MX9, 1))
    with pytest.raises(ConfigError, match="float64"):
        quantise(torch.zeros(4, dtype=torch.float64), MX9, 0)
    with pytest.raises(ConfigError, match="axis 1"):
        quantise(torch.zeros(4), MX9, 1)


def test_the_input_is_left_as_it_is() -> None:
    x = torch.randn(4, 40)
    before = x.clone()
    quantise(x, MX9, 1)
    assert torch.equal(x, before)


def test_formats_are_found_by_name_and_added_from_outside() -> None:
    mine = BlockFormat(name="mine_for_a_test", element=Element.integer(5), k1=24, k2=4, d1=6, d2=2)
    assert mine.bits_per_element == 6 + 6 / 24 + 2 / 4
    try:
        assert BlockFormat.add(mine) is mine
        assert BlockFormat.add(dataclasses.replace(mine)) is mine
        assert BlockFormat.named("mine_for_a_test") is mine
        with pytest.raises(ConfigError, match="two unlike"):
            BlockFormat.add(dataclasses.replace(mine, k1=48))
    finally:
        BlockFormat._listed.pop("mine_for_a_test")
    x = torch.randn(4, 100)
    assert ((quantise(x, mine, 1) - x).abs() <= x.abs().amax() / 16).all()
    with pytest.raises(ConfigError, match="did you mean"):
        BlockFormat.named("mx8")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"k1": 0}, "k1"),
        ({"k1": 15}, "k2"),
        ({"d1": 9}, "d1"),
        ({"d1": 0}, "k1"),
        ({"d2": 9}, "d2"),
        ({"d2": 0}, "k2"),
        ({"name": "an mx"}, "name"),
    ],
)
def test_contradictions_in_a_format_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(MX9, **changes)
    assert caught.value.where.endswith(field)


def test_bits_of_the_catalogue() -> None:
    expected = {"mx9": 9, "mx6": 6, "mx4": 4, "mxfp8_e4m3": 8.25, "mxfp6_e2m3": 6.25, "mxfp4": 4.25, "mxint8": 8.25}
    expected |= {"msfp16": 8.5, "msfp12": 4.5, "int8": 8, "fp8_e4m3_row": 8, "bf16": 16, "tf32": 19}
    for name, bits in expected.items():
        assert BlockFormat.named(name).bits_per_element == bits, name


def test_truncation_never_grows_a_number() -> None:
    x = torch.randn(20, 64)
    truncated = dataclasses.replace(MX9, rounding=Rounding.TRUNCATE)
    assert (quantise(x, truncated, 1).abs() <= x.abs()).all()


@pytest.mark.parametrize(("name", "first_refused"), [("fp16", 65520.0), ("fp8_e5m2", 61440.0), ("fp8_e4m3", 464.5)])
def test_a_limit_that_is_named_agrees_with_what_is_refused(name: str, first_refused: float) -> None:
    with pytest.raises(NumericsError) as caught:
        quantise(torch.tensor([first_refused]), BlockFormat.named(name), 0)
    limit = {"fp16": "below 65520", "fp8_e5m2": "below 61440", "fp8_e4m3": "of 464 at most"}[name]
    assert caught.value.expected == f"magnitudes {limit} to round to {name}"


def test_a_number_without_an_axis_gets_one_as_the_message_says() -> None:
    number = torch.tensor(1.5)
    with pytest.raises(ConfigError, match="without") as caught:
        quantise(number, BlockFormat.named("mx9"), -1)
    assert caught.value.ways_out == ("give it an axis: x.view(1)",)
    assert quantise(number.view(1), BlockFormat.named("mx9"), -1).tolist() == [1.5]


def test_fp32_scales_do_not_follow_tiny_numbers_down() -> None:
    rows = BlockFormat.named("fp8_e4m3_row")
    large, tiny = (quantise(torch.tensor([2.0**-n, 2.0**-n / 3]), rows, 0) for n in (100, 137))
    assert large.count_nonzero() == 2
    assert tiny.tolist() == [0.0, 0.0]
    integers = quantise(torch.tensor([2.0**-130, 0.8 * 2.0**-132]), BlockFormat.named("int8"), 0)
    assert integers.tolist() == [2.0**-130, 2.0**-132]  # one step is 2^-6 of the smallest scale

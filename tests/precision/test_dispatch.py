"""Dispatch takes the fastest kernel that is accurate enough, computes with it, and refuses a file of something else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.files import digest_of
from ziggurat.numerics.probe import Direction, ProbeRecord, ProductStatistics
from ziggurat.precision import NATIVE, dispatch
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import (
    Choice,
    DispatchedArithmetic,
    DispatchPlan,
    KernelMeasured,
    Whole,
    choose,
    plan_dispatch,
)
from ziggurat.precision.kernels import ProductKernel
from ziggurat.precision.product_errors import measure_errors
from ziggurat.precision.products import Settings, Shapes

CPU = torch.device("cpu")


def measured(**found: tuple[float, float]) -> dict[str, KernelMeasured]:
    return {name: KernelMeasured(error=error, speedup=speedup) for name, (error, speedup) in found.items()}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (measured(fp32=(0.0, 1.0), bf16=(0.01, 2.0), int8=(0.1, 3.0)), "int8"),
        (measured(fp32=(0.0, 1.0), bf16=(0.01, 2.0), int8=(0.2, 3.0)), "bf16"),
        (measured(fp32=(0.0, 1.0), bf16=(0.01, 1.05), int8=(math.inf, 0.0)), "fp32"),
        (measured(fp32=(0.0, 1.0)), "fp32"),
    ],
)
def test_fastest_safe_kernel_is_chosen(found: dict[str, KernelMeasured], wanted: str) -> None:
    assert choose(found).kernel == wanted


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (measured(fp32=(0.0, 0.5), bf16=(0.01, 1.0), int8=(0.1, 1.2)), "int8"),
        (measured(fp32=(0.0, 0.5), bf16=(0.01, 1.0), int8=(0.1, 1.04)), "bf16"),
        (measured(fp32=(0.0, 0.5), bf16=(0.01, 1.0), int8=(0.2, 1.2)), "bf16"),
        (measured(fp32=(0.0, 0.5), bf16=(0.2, 1.0), int8=(0.3, 1.2)), "fp32"),
        (measured(fp32=(0.0, 1.2), bf16=(0.01, 1.0)), "fp32"),
    ],
)
def test_between_bf16_activations_a_kernel_has_to_beat_bf16(found: dict[str, KernelMeasured], wanted: str) -> None:
    assert choose(found, activations="bf16").kernel == wanted


def test_a_reason_says_why_this_kernel_and_what_the_others_would_do() -> None:
    slower = choose(measured(fp32=(0.0, 0.5), bf16=(0.01, 1.0)), activations="bf16")
    assert slower.reason == (
        "the activations are in bf16, and no kernel with an error below 0.2 is more than 1.05 times as fast as its own "
        "(fp32: error 0, 0.50 times as fast)"
    )
    faster = choose(measured(fp32=(0.0, 1.2), bf16=(0.01, 1.0)), activations="bf16")
    assert faster.reason == (
        "1.20 times as fast as bf16, which the activations are in, with an error of 0; the fastest whose error is "
        "below 0.2 (no other could be measured)"
    )


def test_an_overflow_is_told_in_words() -> None:
    rows, weight = torch.full((64, 16), 1e15), torch.full((16, 8), 3.2e25)
    found = measure_errors(product_of(rows, weight), Direction.FORWARD, [ProductKernel.named("bf16")], device=CPU)
    assert found["bf16"].error == math.inf
    assert "overflows bf16: operands up to 3.2e+25, the format holds 3.4e+38" in found["bf16"].why
    # Squares of these overflow the statistics themselves.
    rows = torch.randn(64, 16) * 1e25
    unknown = measure_errors(product_of(rows, weight), Direction.FORWARD, [ProductKernel.named("bf16")], device=CPU)
    assert unknown["bf16"].error == math.inf
    assert "too large for statistics in FP32" in unknown["bf16"].why
    choice = choose({"bf16": KernelMeasured(error=math.inf, speedup=2.0, why=found["bf16"].why)})
    assert "overflows bf16" in choice.reason
    assert "inf" not in choice.reason


def product_of(rows: Tensor, weight: Tensor, *, name: str = "layer") -> ProductStatistics:
    """Return the statistics of a product with a weight."""
    shapes = (tuple(rows.shape), tuple(weight.shape))
    product = ProductStatistics.of(name, rows, weight, weights=(False, True), shapes=shapes)
    product.update(rows, weight)
    product.update_gradient(torch.randn(len(rows), weight.shape[1]))
    return product


def plan(*, whole: str = "fp32", **kernels: str) -> DispatchPlan:
    choices = {Direction(each): Choice(kernel=kernel, reason="") for each, kernel in kernels.items()}
    return DispatchPlan(
        model="DNN",
        machine=machine_facts(CPU),
        choices={"layer": choices},
        missing={},
        whole=Whole(precision=whole, reason=""),
    )


def test_network_in_bf16_keeps_products_native_that_bf16_computes_and_gives_bf16() -> None:
    alone = {"forward": "bf16", "input_gradient": "bf16", "weight_gradient": "bf16"}
    assert plan(whole="bf16", **alone).arithmetic("layer") is NATIVE
    # Without autocast torch's own product would be FP32.
    scored = plan(whole="bf16", **alone).arithmetic("layer", is_scored=True)
    rows, weight = torch.randn(32, 16), torch.randn(8, 16, requires_grad=True)
    bf16 = ProductKernel.named("bf16")
    assert scored.linear(rows, weight).equal(bf16.multiply(rows, weight.t()))
    mixed = plan(whole="bf16", **alone | {"weight_gradient": "fp32"}).arithmetic("layer")
    bias = torch.randn(8, requires_grad=True)
    given = rows.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = mixed.linear(given, weight, bias)
    assert product.dtype is torch.bfloat16
    assert product.equal(given @ weight.bfloat16().t() + bias.bfloat16())
    gradient = torch.randn(32, 8).bfloat16()
    product.backward(gradient)
    assert weight.grad is not None
    assert given.grad is not None
    assert weight.grad.equal((given.detach().float().t() @ gradient.float()).t())
    assert given.grad.dtype is torch.bfloat16
    assert given.grad.equal(gradient @ weight.detach().bfloat16())


@pytest.mark.parametrize(("fastest", "wanted"), [("bf16", "bf16"), ("fp32", "fp32")])
def test_the_fastest_whole_network_decides_about_activations(fastest: str, wanted: str) -> None:
    record = ProbeRecord(model="DNN", products={"layer": product_of(torch.randn(64, 16), torch.randn(16, 8))})

    def seconds_of(plans: Sequence[DispatchPlan]) -> list[float]:
        return [1.0 if plan.whole.precision == fastest else 2.0 for plan in plans]

    found = plan_dispatch(record, device=CPU, seconds_of=seconds_of)
    assert found.whole.precision == wanted
    assert "activations fp32" in found.whole.reason
    assert "1000.0 ms" in found.whole.reason


def test_no_plan_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # BF16 products slower than FP32 ones of the same operands: both plans with BF16 activations then have FP32 kernels.
    monkeypatch.setattr(
        dispatch, "measure_speedups", lambda shapes, kernels, *, device, dtype: {"fp32": 2.0, "bf16": 1.0}
    )
    record = ProbeRecord(model="DNN", products={"layer": product_of(torch.randn(64, 16), torch.randn(16, 8))})
    timed = list[DispatchPlan]()

    def seconds_of(plans: Sequence[DispatchPlan]) -> list[float]:
        timed.extend(plans)
        return [1.0] * len(plans)

    plan_dispatch(record, device=CPU, seconds_of=seconds_of)
    assert [(each.whole.precision, dict(each.counts())) for each in timed] == [
        ("fp32", {"fp32": 3}),
        ("bf16", {"fp32": 3}),
    ]


def test_activations_stay_fp32_where_an_error_is_not_known() -> None:
    record = ProbeRecord(model="DNN", products={"layer": product_of(torch.randn(64, 16), torch.randn(16, 8))})
    record.left_out["own"] = "Attention multiplies past an arithmetic"
    found = plan_dispatch(record, device=CPU, seconds_of=lambda plans: [0.0] * len(plans))
    assert found.whole == Whole(precision="fp32", reason="errors of 1 products in BF16 are not known (own)")


def test_a_file_of_before_activations_were_chosen_has_them_in_fp32(tmp_path: Path) -> None:
    path = plan(forward="bf16").write(tmp_path / "dispatch.json")
    facts = json.loads(path.read_text())
    del (
        facts["shapes"],
        facts["settings"],
        facts["whole"],
        facts["choices"]["layer"]["forward"]["error"],
        facts["sha256"],
    )
    facts["version"] = 1
    path.write_text(json.dumps(facts | {"sha256": digest_of(facts)}))
    read = DispatchPlan.read(path, model="DNN", shapes={"layer": {}}, device=CPU)
    assert read.whole.precision == "fp32"
    assert read.choices == plan(forward="bf16").choices


def test_each_direction_computes_by_its_own_kernel() -> None:
    arithmetic = plan(forward="bf16", input_gradient="fp32", weight_gradient="mx4").arithmetic("layer")
    left, right = torch.randn(32, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    gradient = torch.randn(32, 8)
    product = arithmetic.matmul(left, right)
    product.backward(gradient)
    kernels = {name: ProductKernel.named(name).multiply for name in ("bf16", "fp32", "mx4")}
    assert product.equal(kernels["bf16"](left.detach(), right.detach()))
    assert left.grad is not None
    assert left.grad.equal(gradient @ right.detach().t())
    assert right.grad is not None
    assert right.grad.equal(kernels["mx4"](left.detach().t(), gradient))
    assert not right.grad.equal(left.detach().t() @ gradient)


def test_operands_of_one_kernel_are_converted_once_and_give_the_same_bits() -> None:
    arithmetic = plan(forward="bf16", input_gradient="bf16", weight_gradient="bf16").arithmetic("layer")
    left = torch.randn(3, 32, 16, requires_grad=True)
    weight = torch.randn(8, 16, requires_grad=True)
    gradient = torch.randn(3, 32, 8)
    product = arithmetic.matmul(left, weight.t())
    saved = product.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert {each.dtype for each in saved} == {torch.bfloat16}
    product.backward(gradient)
    multiply = ProductKernel.named("bf16").multiply
    rows = left.detach()
    right = weight.detach().t()
    assert product.equal(multiply(rows, right))
    assert left.grad is not None
    assert left.grad.dtype is torch.float32
    assert left.grad.equal(multiply(gradient, right.mT))
    assert weight.grad is not None
    assert weight.grad.equal(multiply(rows.mT, gradient).sum_to_size(right.shape).t())


def test_products_in_fp32_alone_stay_native_and_broadcast_gradients_are_summed() -> None:
    assert plan(forward="fp32", input_gradient="fp32", weight_gradient="fp32").arithmetic("layer") is NATIVE
    assert plan(forward="bf16").arithmetic("another") is NATIVE
    left, right = torch.randn(3, 5, 4), torch.randn(4, 2, requires_grad=True)
    DispatchedArithmetic({}).matmul(left, right).sum().backward()
    assert right.grad is not None
    torch.testing.assert_close(right.grad, left.sum(dim=(0, 1))[:, None].expand(4, 2))


def test_a_kernel_that_does_not_take_a_shape_gives_way_to_fp32_and_says_so_once() -> None:
    arithmetic = DispatchedArithmetic({Direction.FORWARD: ProductKernel.named("int8")}, module="top.layers.0")
    left = torch.randn(4, 7)
    right = torch.randn(7, 8)
    for _ in range(2):
        assert arithmetic.matmul(left, right).equal(left @ right)
    assert arithmetic.take_news() == [
        "dispatch: top.layers.0, forward: FP32 in place of int8, width 7 is no multiple of 8"
    ]
    assert not arithmetic.matmul(torch.randn(4, 8), torch.randn(8, 8)).isnan().any()
    assert not arithmetic.take_news()


def test_plan_measures_every_product_and_is_read_as_written(tmp_path: Path) -> None:
    record = ProbeRecord(model="DNN")
    for name in ("layer", "layer#2"):
        record.products[name] = product_of(torch.randn(64, 16), torch.randn(16, 8), name=name)
    found = plan_dispatch(record, device=CPU)
    assert list(found.choices) == ["layer"]
    assert all("error" in choice.reason or "no kernel" in choice.reason for choice in found.choices["layer"].values())
    path = found.write(tmp_path / "dispatch.json")
    assert DispatchPlan.read(path, model="DNN", shapes={"layer": {}, "other": {}}, device=CPU) == found


def of_machine(**facts: str) -> Callable[[DispatchPlan], DispatchPlan]:
    return lambda plan: replace(plan, machine=plan.machine | facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, model="DLRM"), "a dispatch of DNN"),
        (lambda plan: replace(plan, choices={}), "nothing would be computed otherwise"),
        (lambda plan: replace(plan, choices={"tower": plan.choices["layer"]}), "tower"),
        (of_machine(machine="another"), "measured with machine"),
        (of_machine(torch="1.0"), "measured with torch"),
        (of_machine(ziggurat="0"), "measured with ziggurat"),
    ],
)
def test_file_of_something_else_is_refused_by_name(
    tmp_path: Path, change: Callable[[DispatchPlan], DispatchPlan], message: str
) -> None:
    path = change(plan(forward="bf16")).write(tmp_path / "dispatch.json")
    with pytest.raises(ConfigError, match=message):
        DispatchPlan.read(path, model="DNN", shapes={"layer": {}}, device=CPU)
    with pytest.raises(MissingFileError):
        DispatchPlan.read(tmp_path / "none.json", model="DNN", shapes={"layer": {}}, device=CPU)


SHAPES = {"other": {"weight": [4, 8], "bias": [4]}, "layer": {"weight": [8, 16]}}


@pytest.mark.parametrize(
    ("shapes", "expected", "found"),
    [
        (SHAPES | {"layer": {"weight": [8, 32]}}, "layer with weight 8×32", "layer with weight 8×16"),
        (SHAPES | {"other": {"weight": [4, 8]}}, "other with weight 4×8", "other with weight 4×8, bias 4"),
        (SHAPES | {"third": {}}, "third with no weights", "no third"),
        ({"layer": SHAPES["layer"]}, "no other", "other with weight 4×8, bias 4"),
    ],
)
def test_file_of_a_model_of_other_sizes_is_refused_by_the_first_that_differs(
    tmp_path: Path, shapes: Shapes, expected: str, found: str
) -> None:
    path = replace(plan(forward="bf16"), shapes=SHAPES).write(tmp_path / "dispatch.json")
    assert DispatchPlan.read(path, model="DNN", shapes=SHAPES, device=CPU).shapes == SHAPES
    with pytest.raises(ConfigError) as refused:
        DispatchPlan.read(path, model="DNN", shapes=shapes, device=CPU)
    assert refused.value.expected == f"a dispatch of DNN with these sizes: {expected}"
    assert refused.value.found == found
    assert refused.value.where == str(path)


SETTINGS = {f"model.deep.{name}": "1" for name in ("a", "b", "c", "d")}


@pytest.mark.parametrize(
    ("settings", "expected", "found", "way_out"),
    [
        (SETTINGS | {"model.deep.b": "2"}, "model.deep.b 2", "model.deep.b 1", "--model.deep.b 1"),
        ({"model.deep.e": "2", **SETTINGS}, "model.deep.e 2", "no model.deep.e", ""),
        (
            dict.fromkeys(SETTINGS, "2"),
            "model.deep.a 2, model.deep.b 2, model.deep.c 2 and 1 more",
            "model.deep.a 1, model.deep.b 1, model.deep.c 1 and 1 more",
            "",
        ),
    ],
)
def test_file_of_a_model_of_other_settings_is_refused_by_their_names(
    tmp_path: Path, settings: Settings, expected: str, found: str, way_out: str
) -> None:
    path = replace(plan(forward="bf16"), settings=SETTINGS).write(tmp_path / "dispatch.json")
    shapes: Shapes = {"layer": {}}
    for alike in (SETTINGS, None):
        assert DispatchPlan.read(path, model="DNN", shapes=shapes, settings=alike, device=CPU).settings == SETTINGS
    with pytest.raises(ConfigError) as refused:
        DispatchPlan.read(path, model="DNN", shapes=shapes, settings=settings, device=CPU)
    assert refused.value.expected == f"a dispatch of DNN with these settings: {expected}"
    assert refused.value.found == found
    assert refused.value.where == str(path)
    assert ("train the model that the file is of" in str(refused.value)) == bool(way_out)
    assert way_out in str(refused.value)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"choices": []}, "choices"),
        (
            {"choices": {"layer": {"sideways": {"kernel": "bf16", "reason": "", "error": None}}}},
            "choices.layer.sideways",
        ),
        ({"choices": {"layer": {"forward": {"kernel": "fp7", "reason": "", "error": None}}}}, "choices.layer.forward"),
        ({"choices": {"layer": {"forward": {"kernel": "bf16", "error": None}}}}, "choices.layer.forward"),
        ({"choices": {"layer": {"forward": "bf16"}}}, "choices.layer.forward"),
        ({"whole": {"precision": "mx9", "reason": ""}}, "whole.precision"),
        ({"whole": None}, "whole"),
        ({"machine": "this"}, "machine"),
        ({"shapes": {"layer": {"weight": "8×16"}}}, "shapes.layer.weight"),
        ({"settings": {"model.deep.bias": 1}}, "settings.model.deep.bias"),
        ({"version": 1, "choices": "none"}, ""),
    ],
)
def test_wrong_content_under_a_right_seal_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, object], place: str
) -> None:
    path = plan(forward="bf16").write(tmp_path / "dispatch.json")
    facts = json.loads(path.read_text()) | change
    del facts["sha256"]
    path.write_text(json.dumps(facts | {"sha256": digest_of(facts)}))
    readers: list[Callable[[], object]] = [
        lambda: DispatchPlan.read(path, model="DNN", shapes={"layer": {}}, device=CPU),
        lambda: DispatchPlan.activations_of(path),
        lambda: DispatchPlan.exchanges_products(path),
    ]
    for read in readers:
        with pytest.raises(ConfigError) as refused:
            read()
        assert str(path) in refused.value.where
        assert place in refused.value.where

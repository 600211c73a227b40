"""Scoring plans: the fastest accurate format of each product, read as written, and refused where it is of another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.test_converted import RICH
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.files import digest_of
from ziggurat.models import DCNv2Config, Model, build_model, scoring_plan
from ziggurat.models.blocks.mlp import Activation, MLPConfig
from ziggurat.models.network_settings import network_settings
from ziggurat.models.packed import pack_products, packable_modules, take_bits
from ziggurat.models.probed import ModelProbe
from ziggurat.models.scoring_plan import ScoringPlan, plan_scoring
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.probe import Direction, ProbeRecord, ProductStatistics
from ziggurat.precision.dispatch import Choice, DispatchPlan, KernelMeasured
from ziggurat.precision.packed import PackedKernel
from ziggurat.testing.batches import random_batch


def made() -> tuple[Model, ProbeRecord, Batch]:
    model = build_model(DCNv2Config(), RICH, seed=0).eval()
    batch = random_batch(RICH, 64, seed=1)
    probe = ModelProbe(model)
    probe.take(batch)
    return model, probe.record, batch.rows(0, 4)


def with_times(monkeypatch: pytest.MonkeyPatch, *, speedups: Mapping[str, float], whole: Mapping[str, float]) -> None:
    """Let times be those that are given: of formats in each product, and of networks by the formats they have."""

    def measured(*unused: object, name: str, **also: object) -> dict[str, KernelMeasured]:
        # MX9 is the faster one in the cross layers, so that formats differ.
        own = {**speedups, "mx9": 4.0} if name.startswith("cross") else speedups
        return {format: KernelMeasured(error=0.0, speedup=each) for format, each in own.items()}

    def seconds(model: Model, plans: Sequence[Mapping[str, str]], **also: object) -> list[list[float]]:
        return [[whole["+".join(sorted(set(plan.values())))]] * 3 for plan in plans]

    monkeypatch.setattr(scoring_plan, "_measured", measured)
    monkeypatch.setattr(scoring_plan, "_seconds_of_plans", seconds)


SPEEDUPS = {"int8": 2.0, "mx6": 0.5, "mx9": 1.5}
WHOLE = {"fp32": 1.0, "int8": 0.7, "mx6": 2.0, "fp32+mx6": 2.0, "mx9": 0.8, "int8+mx9": 0.5, "fp32+int8": 0.7}


def test_each_product_has_the_format_that_is_fastest_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, record, batch = made()
    with_times(monkeypatch, speedups=SPEEDUPS, whole=WHOLE)
    plan = plan_scoring(model, record, batch=batch, batch_size=64)
    assert plan.choices.keys() == packable_modules(model).keys()
    for name, choice in plan.choices.items():
        assert choice.kernel == ("mx9" if name.startswith("cross") else "int8"), name
        assert "times as fast" in choice.reason
        assert choice.error is not None
        assert 0 < choice.error < 0.2
    assert plan.whole.startswith("2.00 times as fast as FP32, requests of 4 rows (fp32 1000.000 ms")


def test_one_format_is_taken_where_the_whole_network_is_faster_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, record, batch = made()
    with_times(monkeypatch, speedups=SPEEDUPS, whole=WHOLE | {"int8": 0.3})
    plan = plan_scoring(model, record, batch=batch, batch_size=64)
    assert {choice.kernel for choice in plan.choices.values()} == {"int8"}


def test_nothing_is_packed_where_no_network_is_faster_and_such_a_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, record, batch = made()
    with_times(monkeypatch, speedups=SPEEDUPS, whole=dict.fromkeys(WHOLE, 1.0))
    plan = plan_scoring(model, record, batch=batch, batch_size=64)
    assert plan.formats == {}
    assert all("int8: error" in choice.reason for choice in plan.choices.values())
    with pytest.raises(ConfigError, match="leave --dispatch out"):
        ScoringPlan.read(plan.write(tmp_path / "plan.json"), model=model)


def test_a_format_that_is_not_accurate_enough_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, record, batch = made()
    with_times(monkeypatch, speedups={"mx4": 9.0}, whole={"fp32": 1.0, "fp32+mx4": 0.1, "mx4": 0.1})
    monkeypatch.setattr(scoring_plan, "MAX_ERROR", 0.0)
    monkeypatch.setattr("ziggurat.precision.dispatch.MAX_ERROR", 0.0)
    plan = plan_scoring(model, record, batch=batch, batch_size=64, formats=("mx4",))
    assert {choice.kernel for choice in plan.choices.values()} == {"fp32"}


def test_the_times_of_a_small_network_are_measured_and_it_is_left_as_it_was() -> None:
    model, record, batch = made()
    with torch.no_grad():
        before = model(batch)
    plan = plan_scoring(model, record, batch=batch, batch_size=64)
    assert {choice.kernel for choice in plan.choices.values()} <= {"fp32", "int8", "mx6", "mx9"}
    assert "requests of 4 rows (fp32 " in plan.whole
    with torch.no_grad():
        assert torch.equal(model(batch), before)


def test_the_error_of_packed_weights_is_that_of_their_product() -> None:
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    found = PackedKernel(BlockFormat.named("mx9")).multiply(rows, weight)
    assert float((found.double() - rows.double() @ weight.double()).abs().max()) < 0.2
    assert float((PackedKernel(BlockFormat.named("mx4")).multiply(rows, weight) - found).abs().max()) > 0.2


def plan_of(model: Model, **kernels: str) -> ScoringPlan:
    from ziggurat.precision.choice import machine_facts
    from ziggurat.precision.products import shapes_of_products

    return ScoringPlan(
        model=type(model).__name__,
        machine=machine_facts(torch.device("cpu")),
        rows=4,
        choices={name.replace("__", "."): Choice(kernel=kernel, reason="") for name, kernel in kernels.items()},
        whole="given",
        shapes=shapes_of_products(model),
        settings=network_settings(model),
    )


def test_a_plan_is_read_as_written_and_packs_each_module_by_its_format(tmp_path: Path) -> None:
    model, _, batch = made()
    first, second, *others = packable_modules(model)
    plan = plan_of(model, **{first: "mx9", second: "int8"} | dict.fromkeys(others, "fp32"))
    assert ScoringPlan.read(plan.write(tmp_path / "plan.json"), model=model) == plan
    packed = pack_products(model, plan.formats)
    assert packed.formats == {first: BlockFormat.named("mx9"), second: BlockFormat.named("int8")}
    assert packed.by_module == {second: "int8"}
    assert "mx9 in 1, int8 in 1" in packed.line()
    assert packed.left.keys() >= set(others)
    with torch.no_grad():
        wanted: Tensor = model(batch)
    again, _, _ = made()
    take_bits(again, packed.formats, packed.bits)
    with torch.no_grad():
        assert torch.equal(again(batch), wanted)


def test_plans_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    model, _, _ = made()
    first = next(iter(packable_modules(model)))
    plan = plan_of(model, **{first: "int8"})
    wider = build_model(DCNv2Config(embedding_dim=8), RICH, seed=0)
    path = plan.write(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="with these sizes"):
        ScoringPlan.read(path, model=wider)
    swish = build_model(DCNv2Config(deep=MLPConfig(activation=Activation.HARD_SWISH)), RICH, seed=0)
    with pytest.raises(ConfigError, match=r"settings: model\.deep\.activation hard_swish") as refused:
        ScoringPlan.read(path, model=swish)
    # A finished run is given no other settings.
    assert not any("model.deep" in each for each in refused.value.ways_out)
    facts = json.loads(path.read_text())
    del facts["settings"], facts["sha256"]
    facts["version"] = 1
    older = tmp_path / "older.json"
    older.write_text(json.dumps(facts | {"sha256": digest_of(facts)}))
    assert ScoringPlan.read(older, model=swish) == dataclasses.replace(plan, settings=None)
    for change, found in (
        ({"model": "DLRM"}, "of DLRM"),
        ({"machine": plan.machine | {"machine": "another"}}, "another"),
        ({"machine": plan.machine | {"torch": "1.0"}}, "1.0"),
        ({"choices": {"nowhere": Choice(kernel="int8", reason="")}}, "with nowhere"),
    ):
        dataclasses.replace(plan, **change).write(path)
        with pytest.raises(ConfigError, match="a dispatch") as refused:
            ScoringPlan.read(path, model=model)
        assert found in refused.value.found
    dataclasses.replace(plan, choices={first: Choice(kernel="bf16", reason="")}).write(path)
    with pytest.raises(ConfigError, match=f"choices.{first}.kernel"):
        ScoringPlan.read(path, model=model)
    # That of a training is another thing.
    training = DispatchPlan(model="DCNv2", machine=plan.machine, choices={}, missing={}, shapes=None)
    with pytest.raises(ConfigError, match="--for scoring"):
        ScoringPlan.read(training.write(path), model=model)
    with pytest.raises(ConfigError, match="a dispatch of dense products"):
        DispatchPlan.activations_of(plan.write(path))


def test_a_packed_model_and_a_record_without_its_products_are_refused() -> None:
    model, record, batch = made()
    empty = dataclasses.replace(record, products=dict[str, ProductStatistics]())
    with pytest.raises(ConfigError, match="--for scoring --measure"):
        plan_scoring(model, empty, batch=batch, batch_size=64)
    pack_products(model, BlockFormat.named("int8"))
    with pytest.raises(ConfigError, match="packed already"):
        plan_scoring(model, record, batch=batch, batch_size=64)


def test_the_drawn_operands_of_a_forward_product_are_those_of_the_packed_one() -> None:
    model, record, _ = made()
    name = next(iter(packable_modules(model)))
    left, right = record.products[name].operands(Direction.FORWARD, generator=torch.Generator().manual_seed(0))
    weight = model.get_parameter(f"{name}.weight")
    assert right.shape == weight.mT.shape
    assert left.shape[1] == weight.shape[1]

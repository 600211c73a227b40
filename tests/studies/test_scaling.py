"""Growth meets its FLOPs by the published order, counters are torch's, and studies go on where they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ziggurat as zg
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.tasks import Task
from ziggurat.models import (
    BuiltInConfig,
    DCNv2Config,
    DLRMConfig,
    DNNConfig,
    LogisticRegressionConfig,
    MLPConfig,
    WukongConfig,
    build_model,
)
from ziggurat.models.contract.growth import Grows
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.dcn_v2 import MAX_CROSS_LAYERS
from ziggurat.models.wukong import MAX_LAYERS
from ziggurat.recipes.run_config import load_config
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_own import own_data
from ziggurat.studies.scaling import forward_flops, grow, growing_models
from ziggurat.studies.scaling_report import write_scaling
from ziggurat.studies.scaling_runs import (
    RatesFor,
    ScaleConfig,
    ScaleStudy,
    TriedRate,
    best_rate,
    descend,
    scale,
    smallest,
)
from ziggurat.training.report.progress import NoProgress

INPUTS = InputSpec(
    dense=("a", "b"),
    single=tuple(SingleSpec(name=f"f{index}", table=f"f{index}") for index in range(6)),
    tables=tuple(TableSpec(name=f"f{index}", num_rows=20) for index in range(6)),
    labels=(LabelSpec(name="click"),),
)


OF_ROWS = sorted(set(growing_models()) - {"sequence_ranker"})  # that one reads histories: test_scaling_histories.py


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("factor", [1.0, pytest.param(16.0, marks=pytest.mark.slow)])
def test_growth_meets_the_compute(name: str, factor: float) -> None:
    start = smallest(name)
    grown = grow(start, INPUTS, factor=factor)
    met = forward_flops(grown, INPUTS) / forward_flops(start, INPUTS)
    assert met == pytest.approx(factor, rel=0.15)
    assert type(grown) is type(start)
    assert grown.table_columns(INPUTS) == start.table_columns(INPUTS)


@pytest.mark.parametrize("name", OF_ROWS)
def test_flops_are_torchs(name: str) -> None:
    start = dataclasses.replace(smallest(name), embedding_dim=6)  # not whole vectors: torch multiplies, and counts
    grown = grow(start, INPUTS, factor=3.0)
    model = cast(RankingModel, build_model(grown, INPUTS, seed=0))
    fields = torch.randn(6, sum(model.field_dims), requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model.interact(torch.randn(6, 2), fields, {})
    assert counter.get_total_flops() == 6 * forward_flops(grown, INPUTS)


@pytest.mark.slow
def test_wukong_grows_layers_first_then_everything_in_them() -> None:
    start = smallest("wukong")
    assert isinstance(start, WukongConfig)
    layers, widths = [], []
    for factor in (1, 2, 4, 16, 64, 256):
        grown = grow(start, INPUTS, factor=factor)
        assert isinstance(grown, WukongConfig)
        layers.append(grown.num_layers)
        widths.append((grown.num_fm[0], grown.num_linear[0], grown.rank[0], grown.mlp.hidden_dims[0]))
    assert layers == sorted(layers)
    assert layers[-1] == MAX_LAYERS
    assert layers[1] > layers[0]
    before = tuple(start_size[0] for start_size in (start.num_fm, start.num_linear, start.rank))
    assert all(now > old for now, old in zip(widths[-1], before, strict=False))
    ratios = [now / old for now, old in zip(widths[-1], (*before, start.mlp.hidden_dims[0]), strict=True)]
    assert max(ratios) / min(ratios) < 1.1  # together


def test_dcn_v2_and_dlrm_grow_what_they_have() -> None:
    dcn = grow(smallest("dcn_v2"), INPUTS, factor=64)
    assert isinstance(dcn, DCNv2Config)
    assert dcn.cross.num_layers == MAX_CROSS_LAYERS
    dlrm = grow(smallest("dlrm"), INPUTS, factor=64)
    assert isinstance(dlrm, DLRMConfig)
    assert dlrm.top.hidden_dims[0] > 4 * smallest("dlrm").top.hidden_dims[0]  # pyright: ignore


@pytest.mark.parametrize("name", OF_ROWS)
def test_models_grow_step_by_step(name: str) -> None:
    start = smallest(name)
    assert isinstance(start, Grows)
    assert start.wider(1.0) == start
    deep: Grows = start
    layers = 1
    while (deeper := deep.deeper()) is not None:
        assert forward_flops(cast(BuiltInConfig, deeper), INPUTS) > forward_flops(cast(BuiltInConfig, deep), INPUTS)
        deep = deeper
        layers += 1
    assert layers <= 8
    # All studies begin at about the same compute.
    assert 5_000 < forward_flops(start, INPUTS) < 30_000


class NarrowConfig(DNNConfig):
    """A model of one's own, which says another rule than its parent."""

    def wider(self, factor: float) -> NarrowConfig:
        """Widen the first layer alone."""
        first, *rest = self.deep.hidden_dims
        return dataclasses.replace(self, deep=MLPConfig(hidden_dims=(round(first * factor), *rest)))


def test_a_model_of_ones_own_grows_as_it_says() -> None:
    start = NarrowConfig(embedding_dim=8, deep=MLPConfig(hidden_dims=(48, 48)))
    grown = grow(start, INPUTS, factor=8.0)
    assert isinstance(grown, NarrowConfig)
    assert grown.deep.hidden_dims[1] == 48
    assert forward_flops(grown, INPUTS) / forward_flops(start, INPUTS) == pytest.approx(8.0, rel=0.05)


def test_the_help_of_the_verb_names_all_models_that_grow(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", "--help"])
    named = " ".join(capsys.readouterr().out.split()).split("that say how they grow: ")[1].split(";")[0]
    assert sorted(named.split(", ")) == sorted(growing_models())


def test_rules_of_growth_that_cannot_be_are_named() -> None:
    with pytest.raises(ConfigError, match=r"SameDepth\.deeper"):
        grow(SameDepth(), INPUTS, factor=4.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="@classmethod above"):
        smallest("no_class_method", known={"no_class_method": NoClassMethod})
    with pytest.raises(ConfigError, match="--model gives it"):
        ScaleConfig(models=("OwnGrowing",), own=(OwnGrowing,))


@pytest.mark.slow
def test_sizes_that_cost_the_same_are_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    said: list[str] = []
    with pytest.raises(ConfigError, match="sizes of dnn that cost more") as error:
        _study(tmp_path / "runs", said, factors=(1.0, 1.001, 1.002, 1.5))
    assert "1.001x" in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_growth_has_limits() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        grow(smallest("dlrm"), INPUTS, factor=0.5)
    with pytest.raises(ConfigError, match="rule of growth"):
        grow(LogisticRegressionConfig(), INPUTS, factor=2.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnGrowing(NarrowConfig):
    """A model from outside that says where it starts."""

    kind: str = "own_growing"  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def smallest(cls) -> OwnGrowing:
        """Start narrow."""
        return cls(embedding_dim=8, deep=MLPConfig(hidden_dims=(16, 16)))


class SameDepth(OwnGrowing):
    """Its layer more costs nothing, and there is always one."""

    def deeper(self) -> SameDepth:
        return self


class NoClassMethod(OwnGrowing):
    def smallest(self) -> NoClassMethod:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="rates"):
        ScaleConfig(models=("dnn",), rates=(0.0,))
    with pytest.raises(ConfigError, match="two learning rates or more"):
        ScaleConfig(models=("dnn",), rates=(1e-3, 1e-3), rates_for=RatesFor.EVERY_SIZE)
    with pytest.raises(ConfigError, match="--rates and --tuned"):
        ScaleConfig(models=("dnn",), rates=(1e-3,), tuned="tuned")
    with pytest.raises(ConfigError, match="--batch-size and --tuned"):
        ScaleConfig(models=("dnn",), batch_size=8, tuned="tuned")
    with pytest.raises(ConfigError, match="smallest, deeper and wider"):
        ScaleConfig(models=("final_mlp",))
    assert "own_narrow" not in ScaleConfig(models=("dnn",)).known
    with pytest.raises(ConfigError, match="its rows"):
        ScaleConfig(models=("dnn",), data=ComparedData.SYNTHETIC_1M, rows=1000)


@pytest.mark.parametrize("best", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("start", [1.0, 2.0, 4.0, 8.0])
def test_rates_are_tried_from_one_for_as_long_as_the_loss_falls(start: float, best: float) -> None:
    def try_rate(rate: float) -> TriedRate:
        return TriedRate(rate=rate, valid=abs(rate - best), cpu_s=0.0)

    rates = (1.0, 2.0, 4.0, 8.0)
    tried = descend(rates, start=start, try_rate=try_rate)
    found = [each.rate for each in tried]
    assert found == sorted(set(found))
    assert min(tried, key=lambda each: each.valid).rate == best
    # Those between start and best, one beyond the best, and one above the start where the best does not lie below.
    low = min(start, best)
    high = max(start, best)
    needed = [rate for rate in rates if low <= rate <= high]
    assert set(needed) <= set(found)
    assert len(found) <= len(needed) + 2


def test_a_rate_that_diverges_is_left_for_those_that_do_not() -> None:
    losses = {1.0: 0.5, 2.0: 0.4, 4.0: float("nan"), 8.0: float("nan")}
    tried = descend(tuple(losses), start=8.0, try_rate=lambda rate: TriedRate(rate=rate, valid=losses[rate], cpu_s=0.0))
    assert best_rate(tried) == 2.0
    assert tried[-1].to_json()["valid"] is None
    with pytest.raises(ConfigError, match="each of 4, 8 diverged"):
        best_rate([each for each in tried if each.rate > 2.0])


def test_a_loss_that_is_no_number_is_never_the_better_one() -> None:
    losses = {1.0: float("nan"), 2.0: 0.5, 4.0: 0.4, 8.0: float("nan")}
    tried = descend(tuple(losses), start=2.0, try_rate=lambda rate: TriedRate(rate=rate, valid=losses[rate], cpu_s=0.0))
    assert [each.rate for each in tried] == list(losses)
    assert best_rate(tried) == 4.0


def _study(out: Path, said: list[str], **changes: object) -> ScaleStudy:
    class Kept(NoProgress):
        def say(self, text: str) -> None:
            said.append(text)

    given = {"models": ("dnn",), "factors": (1.0, 1.5, 2.0, 3.0, 4.0), "rows": 2000, "rates": (1e-3, 4e-3)}
    return scale(ScaleConfig(**(given | changes)), out=out, progress=Kept())  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_study_goes_on_and_knows_what_is_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    said: list[str] = []
    first = _study(tmp_path, said)
    assert "5 runs of" in said[0] or "5 runs of" in said[1]
    assert any("CPU" in line and "in all" in line for line in said)
    model = first.models[0]
    tried = model.points[0].tried
    assert len(tried) == 2
    assert {point.learning_rate for point in model.points} == {min(tried, key=lambda each: each.valid).rate}
    assert not any(point.tried for point in model.points[1:])
    assert first.best_log_loss is not None
    assert model.laws is not None
    # The labels are drawn from p*, so the log loss is the best one and what lies above it, but for their luck.
    for point in model.points:
        expected = first.best_log_loss + point.above_best
        assert point.mean("log_loss") == pytest.approx(expected, abs=0.08)
    said.clear()
    again = _study(tmp_path, said, seeds=2, models=("dnn", "dcn_v2"))
    assert again.models[0].points[0].runs[0].record == model.points[0].runs[0].record
    assert any("15 runs of" in line for line in said)  # one seed of a model was there
    assert len(again.differences) == 1
    assert len(again.ratios) == 1
    paths = write_scaling(again, tmp_path / "report")
    assert [path.suffix for path in paths] == [".html", ".json", ".md", ".png", ".svg"]
    data = json.loads((tmp_path / "report.json").read_text())
    run = data["models"][0]["points"][0]["runs"][0]
    assert sum(run["block_sums"]) / sum(data["block_rows"]) == pytest.approx(run["above_best"], rel=1e-5)
    assert "best reachable" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_every_size_takes_the_better_of_the_rates_that_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    said: list[str] = []
    study = _study(tmp_path, said, factors=(1.0, 2.0, 4.0), rates=(4e-3, 1e-3, 1.6e-2), rates_for=RatesFor.EVERY_SIZE)
    assert any("at most 9 to choose learning rates" in line for line in said)
    before = None
    for point in study.models[0].points:
        rates = {each.rate: each.valid for each in point.tried}
        assert point.learning_rate == min(rates, key=lambda rate: rates[rate])
        assert before is None or before in rates
        (folder,) = tmp_path.glob(f"*/dnn/{point.factor:g}x_seed0")
        assert load_config(folder / "config.json").training.learning_rate == point.learning_rate
        before = point.learning_rate
    said.clear()
    again = _study(tmp_path, said, factors=(1.0, 2.0, 4.0), rates=(4e-3, 1e-3, 1.6e-2), rates_for=RatesFor.EVERY_SIZE)
    assert [point.tried for point in again.models[0].points] == [point.tried for point in study.models[0].points]
    assert [point.runs[0].record for point in again.models[0].points] == [
        point.runs[0].record for point in study.models[0].points
    ]
    assert not any("validation loss" in line for line in said)


@pytest.mark.slow
def test_a_study_goes_on_past_a_rate_that_diverges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    said: list[str] = []
    given = {"factors": (1.0, 2.0, 4.0), "rates": (4e-3, 1e10), "models": ("dcn_v2",)}
    study = _study(tmp_path, said, **given)
    assert any("learning rate 1e+10: diverged" in line for line in said)
    assert {point.learning_rate for point in study.models[0].points} == {4e-3}
    write_scaling(study, tmp_path / "report")
    assert "1e+10: diverged" in (tmp_path / "report.md").read_text()
    said.clear()
    again = _study(tmp_path, said, **given)
    assert not any("diverged" in line for line in said), "it is not trained again"
    assert again.models[0].points[0].runs[0].record == study.models[0].points[0].runs[0].record
    with pytest.raises(ConfigError, match="diverged") as error:
        _study(tmp_path / "all", said, **(given | {"rates": (1e9, 1e10)}))
    assert "--rates 1e+07,1e+08" in str(error.value)


@pytest.mark.slow
def test_single_runs_without_losses_of_rows_have_no_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bands were ± 0 %, and the exponents of two models differed with p = 0.002."""
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    rng = np.random.default_rng(0)
    user = rng.integers(0, 30, 2000)
    paid = rng.normal(size=30)[user] + rng.normal(size=2000)
    pl.DataFrame({"user": user, "paid": paid}).write_parquet(tmp_path / "shop.parquet")
    schema = zg.Schema(features=(zg.Categorical(name="user"),), labels=(zg.Label(name="paid", task=Task.REGRESSION),))
    run = zg.table_run(zg.DNNConfig(), schema)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, train=(str(tmp_path / "shop.parquet"),)))
    factors = (1.0, 1.5, 2.0, 3.0, 4.0)
    config = ScaleConfig(models=("dnn", "dcn_v2"), data=own_data(run, {}, name="shop"), factors=factors)
    study = scale(config, out=tmp_path)
    assert [model.laws for model in study.models] == [None, None]
    assert "give --seeds 3" in study.models[0].says
    assert study.differences == study.ratios == ()
    assert any("one seed of each size" in note for note in study.notes)
    several = scale(dataclasses.replace(config, seeds=2), out=tmp_path)
    assert all(model.laws is not None for model in several.models)
    assert not any("one seed of each size" in note for note in several.notes)


@pytest.mark.slow
def test_a_model_from_outside_is_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    given = ["scale", "dnn", "--model", f"{__name__}:OwnGrowing", "--rows", "2000", "--batch-size", "256"]
    given += ["--compute", "1x..4x", "--points", "5", "--rates", "2e-3,4e-3", "--out", str(tmp_path)]
    assert main([*given, "--json", str(tmp_path / "own.json")]) == 0
    assert "own_growing" in capsys.readouterr().out
    data = json.loads((tmp_path / "own.json").read_text())
    assert [model["name"] for model in data["models"]] == ["dnn", "own_growing"]
    assert [each["rate"] for each in data["models"][1]["points"][0]["rates_tried"]] == [2e-3, 4e-3]
    assert data["differences"] == data["ratios_at_largest"] == [], "one seed tells no two models apart"


def test_flags_that_say_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "dnn", "--data", "synthetic-1m", "--rows", "5000"]) == 2
    assert "leave --rows out" in capsys.readouterr().err
    assert main(["compare", "synthetic-300k", "--models", "dnn", "--rows", "5000"]) == 2
    assert "leave --rows out" in capsys.readouterr().err
    assert main(["tune", "synthetic-300k", "--models", "dnn", "--rows", "5000", "--show-space"]) == 2
    assert "leave --rows out" in capsys.readouterr().err
    assert main(["scale", "dnn", "--rates", "fast"]) == 2
    assert "--rates 1e-3,2e-3,4e-3" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_scales(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    given = ["scale", "wukong,dlrm", "--compute", "1x..9x", "--points", "3", "--rows", "3000"]
    assert main([*given, "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "wukong" in shown
    assert "3 sizes tell no laws apart" in shown
    assert "x^(" not in shown
    data = json.loads((tmp_path / "found.json").read_text())
    for model in data["models"]:
        flops = [point["flops"] for point in model["points"]]
        assert flops[2] / flops[0] == pytest.approx(9, rel=0.15)
        assert all(run["test"] and run["protocol"] == "scale" for point in model["points"] for run in point["runs"])
    assert (tmp_path / "found.svg").exists()
    assert main(["scale", "wukong", "--compute", "4x"]) == 2
    assert "1x..256x" in capsys.readouterr().err

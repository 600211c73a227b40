"""Growth meets its FLOPs by the published order, counters are torch's, and the law is found again from its points."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
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
from ziggurat.studies.scaling import forward_flops, grow, growing_models
from ziggurat.studies.scaling_law import ScalingLaw, doubt_of, fit_law, fit_with_band
from ziggurat.studies.scaling_runs import smallest

INPUTS = InputSpec(
    dense=("a", "b"),
    single=tuple(SingleSpec(name=f"f{index}", table=f"f{index}") for index in range(6)),
    tables=tuple(TableSpec(name=f"f{index}", num_rows=20) for index in range(6)),
    labels=(LabelSpec(name="click"),),
)


@pytest.mark.parametrize("name", sorted(growing_models()))
@pytest.mark.parametrize("factor", [1.0, pytest.param(16.0, marks=pytest.mark.slow)])
def test_growth_meets_the_compute(name: str, factor: float) -> None:
    start = smallest(name)
    grown = grow(start, INPUTS, factor=factor)
    met = forward_flops(grown, INPUTS) / forward_flops(start, INPUTS)
    assert met == pytest.approx(factor, rel=0.15)
    assert type(grown) is type(start)
    assert grown.table_columns(INPUTS) == start.table_columns(INPUTS)


@pytest.mark.parametrize("name", sorted(growing_models()))
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


@pytest.mark.parametrize("name", sorted(growing_models()))
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


def test_growth_has_limits() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        grow(smallest("dlrm"), INPUTS, factor=0.5)
    with pytest.raises(ConfigError, match="rule of growth"):
        grow(LogisticRegressionConfig(), INPUTS, factor=2.0)


@pytest.mark.parametrize("law", [ScalingLaw(a=0.4, b=0.1, c=0.3), ScalingLaw(a=0.0, b=2.0, c=1.2)])
def test_the_law_is_found_again(law: ScalingLaw) -> None:
    x = [1.0, 2.0, 8.0, 32.0, 128.0]
    found = fit_law(x, law(x).tolist())
    assert (found.a, found.b, found.c) == pytest.approx((law.a, law.b, law.c), abs=2e-3)


def test_a_rising_loss_has_no_gain() -> None:
    assert fit_law([1.0, 2.0, 4.0], [0.5, 0.6, 0.7]).b == 0.0
    with pytest.raises(DataError, match="three or more"):
        fit_law([1.0, 2.0], [0.5, 0.4])


def test_fits_that_mean_nothing_are_named() -> None:
    law = ScalingLaw(a=0.4, b=0.1, c=0.3)
    x = [1.0, 4.0, 16.0, 64.0]
    assert doubt_of(x, law(x).tolist(), law=law) == ""
    assert "exactly" in doubt_of(x[:3], law(x[:3]).tolist(), law=law)
    rising = [0.5, 0.4, 0.41, 0.39]
    assert "does not fall" in doubt_of(x, rising, law=fit_law(x, rising))
    cliff = [0.5, 0.4, 0.4 - 1e-9, 0.4 - 2e-9]  # everything in the first step: no exponent is steep enough
    assert "end of the range" in doubt_of(x, cliff, law=fit_law(x, cliff))


def test_the_band_holds_the_truth() -> None:
    law = ScalingLaw(a=0.4, b=0.1, c=0.5)
    x = [1.0, 4.0, 16.0, 64.0, 256.0]
    rng = np.random.default_rng(0)
    runs = [(value + rng.normal(0, 0.002, 6)).tolist() for value in law(x)]
    fitted = fit_with_band(x, runs, draws=100)
    assert fitted.exponents[0] < 0.5 < fitted.exponents[1]
    truth = law(fitted.grid)
    inside = (truth > np.asarray(fitted.low) - 1e-4) & (truth < np.asarray(fitted.high) + 1e-4)
    assert inside.mean() > 0.8
    single = fit_with_band(x, [[each[0]] for each in runs], draws=50)
    assert single.low[0] <= single.high[0]


@pytest.mark.slow
def test_the_command_scales(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    given = ["scale", "wukong,dlrm", "--compute", "1x..9x", "--points", "3", "--rows", "3000"]
    assert main([*given, "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "wukong" in shown
    assert "3 points determine three numbers exactly" in shown
    assert "x^(" not in shown
    data = json.loads((tmp_path / "found.json").read_text())
    for model in data["models"]:
        flops = [point["flops"] for point in model["points"]]
        assert flops[2] / flops[0] == pytest.approx(9, rel=0.15)
        assert all(run["test"] and run["protocol"] == "scale" for point in model["points"] for run in point["runs"])
    assert (tmp_path / "found.svg").exists()
    assert main(["scale", "wukong", "--compute", "4x"]) == 2
    assert "1x..256x" in capsys.readouterr().err

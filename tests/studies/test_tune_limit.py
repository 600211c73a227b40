"""Limits of what a model that is tried may cost: which draws are tries, and that these are the same however asked."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.models import DNNConfig, MLPConfig, build_model, flops_per_sample, num_parameters
from ziggurat.models.contract.search_space import Choices, Floats, Integers, Value
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.tune import TuneConfig, tune
from ziggurat.studies.tune_limit import MOST_DRAWS, Limit, SizeLimits
from ziggurat.studies.tune_space import TuningSpace
from ziggurat.studies.tune_study import Pruner, Sampler, Tries
from ziggurat.testing.batches import small_inputs
from ziggurat.training.config import TrainingConfig

pytest.importorskip("optuna")

INPUTS = small_inputs()
SPACE = TuningSpace(
    model=DNNConfig(embedding_dim=8, deep=MLPConfig(hidden_dims=(32, 32))),
    training=TrainingConfig(),
    dimensions=(
        Choices("model.embedding_dim", ("4", "8")),
        Integers("model.deep.width", 8, 64, log=True),
        Integers("model.deep.depth", 1, 3),
        Floats("training.learning_rate", 1e-4, 1e-2, log=True),
        Floats("dropout", 0.0, 0.5, only=("model.embedding_dim", ("8",))),
    ),
)


def limits(flops: str = "", parameters: str = "") -> SizeLimits:
    return SizeLimits(
        SPACE,
        inputs=INPUTS,
        count_flops=lambda model: flops_per_sample(model, backward=False).forward,
        flops=Limit.parse(flops, flag="--max-flops-per-sample"),
        parameters=Limit.parse(parameters, flag="--max-parameters"),
    )


def tries(folder: Path, bounds: SizeLimits | None, *, sampler: Sampler = Sampler.TPE, seed: int = 3) -> Tries:
    folder.mkdir(exist_ok=True)
    return Tries(
        folder,
        model="dnn",
        space=SPACE,
        higher=True,
        sampler=sampler,
        pruner=Pruner.NONE,
        seed=seed,
        limits=bounds,
    )


def make(found: Tries, *, number: int) -> list[dict[str, Value]]:
    """Make tries without training: wide networks are good, so that the sampler asks for what is beyond."""
    for _ in range(number):
        work = found.next(may_ask=lambda made: True, may_go_on=lambda made: True)
        assert work is not None
        work.complete(float(work.values["model.deep.width"]) / 64 - float(work.values["training.learning_rate"]))
    return [each.values for each in found.all()]


def cost(values: Mapping[str, Value]) -> tuple[int, int]:
    model, _ = SPACE.apply(values)
    built = build_model(model, INPUTS, seed=0)
    return flops_per_sample(built).forward, num_parameters(built).total


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 1000),
    flops=st.sampled_from(["", "0.5x", "1x", "4000"]),
    parameters=st.sampled_from(["", "1x", "3000"]),
    sampler=st.sampled_from([Sampler.TPE, Sampler.RANDOM, Sampler.QMC]),
)
def test_no_try_is_beyond_a_limit_and_a_study_in_parts_asks_for_the_same(
    tmp_path_factory: pytest.TempPathFactory, seed: int, flops: str, parameters: str, sampler: Sampler
) -> None:
    folder = tmp_path_factory.mktemp("draws")
    bounds = limits(flops, parameters)
    whole = make(tries(folder / "whole", bounds, sampler=sampler, seed=seed), number=14)
    for values in whole:
        for bound, number in zip(("FLOPs a sample", "parameters"), cost(values), strict=True):
            assert number <= bounds.numbers.get(bound, number)
        for dimension in SPACE.dimensions:
            assert dimension.name not in values or dimension.holds(values[dimension.name])
        assert ("dropout" in values) == (values["model.embedding_dim"] == "8")
    make(tries(folder / "parts", bounds, sampler=sampler, seed=seed), number=12)
    # Two workers, the second with limits of its own, take turns.
    first = tries(folder / "parts", bounds, sampler=sampler, seed=seed)
    second = tries(folder / "parts", limits(flops, parameters), sampler=sampler, seed=seed)
    make(first, number=1)
    assert make(second, number=1) == whole


@pytest.mark.parametrize("sampler", list(Sampler))
def test_a_limit_that_nothing_is_beyond_changes_no_draw(tmp_path: Path, sampler: Sampler) -> None:
    with_limit = make(tries(tmp_path / "with", limits("1e9", "1e9"), sampler=sampler), number=13)
    assert with_limit == make(tries(tmp_path / "without", None, sampler=sampler), number=13)


def test_draws_beyond_a_limit_are_counted_and_no_tries(tmp_path: Path) -> None:
    found = tries(tmp_path, limits("0.5x"))
    make(found, number=6)
    made = found.all()
    assert [each.number for each in made] == list(range(6))
    assert made[0].beyond == 0
    assert sum(each.beyond for each in made) > 0
    assert all(each.beyond <= MOST_DRAWS for each in made)


def test_after_many_draws_the_last_one_is_made_smaller() -> None:
    bounds = limits("0.5x")
    beyond = {**SPACE.start(), "model.deep.width": 64, "training.learning_rate": 2e-3}
    drawn = []
    values, count = bounds.draw(lambda: drawn.append(beyond) or beyond)
    assert count == len(drawn) == MOST_DRAWS
    assert values["training.learning_rate"] == 2e-3
    assert cost(values)[0] <= bounds.numbers["FLOPs a sample"] < cost(beyond)[0]


def test_the_first_try_is_made_smaller_where_it_is_beyond(tmp_path: Path) -> None:
    start = SPACE.start()
    assert limits("1x").start == start
    half = limits("0.5x").start
    assert cost(start)[0] * 0.4 < cost(half)[0] <= cost(start)[0] * 0.5  # no smaller than it has to be
    assert half["training.learning_rate"] == start["training.learning_rate"]
    assert half["dropout"] == start["dropout"]


def test_a_limit_that_no_settings_keep_is_refused_and_its_way_out_works() -> None:
    with pytest.raises(ConfigError, match="choices as given") as caught:
        limits("100")
    found = re.fullmatch(r"--max-flops-per-sample (\d+), or more", caught.value.ways_out[0])
    assert found is not None
    limits(found[1])
    with pytest.raises(ConfigError, match="of 100"):
        limits(parameters="100")


@pytest.mark.parametrize("text", ["two", "x", "0x", "-3", "nan", "inf", "1e400", "2xx", "10x5"])
def test_what_is_no_limit_is_refused_and_ways_out_work(text: str) -> None:
    with pytest.raises(ConfigError, match="a multiple of the settings as given") as caught:
        TuneConfig(data=ComparedData.SYNTHETIC, models=("dnn",), max_flops_per_sample=text)
    for way in caught.value.ways_out:
        TuneConfig(data=ComparedData.SYNTHETIC, models=("dnn",), max_flops_per_sample=way.split()[1])


def test_settings_that_a_killed_worker_wrote_down_are_the_next_try(tmp_path: Path) -> None:
    whole = make(tries(tmp_path / "whole", limits("1x")), number=4)
    killed = tries(tmp_path / "killed", limits("1x"))
    make(killed, number=2)
    # Killed before it had asked for a single setting; what it drew is there, and what others find since is no matter.
    killed._study.sampler = killed._sampler_of(2)
    killed._study.ask()
    make(tries(tmp_path / "killed", limits("1x")), number=1)
    assert make(tries(tmp_path / "killed", limits("1x")), number=1) == whole
    # Killed between writing the first settings down and taking them.
    first = tries(tmp_path / "first", limits("1x"))
    first._study.enqueue_trial(whole[0])
    assert make(tries(tmp_path / "first", limits("1x")), number=2) == whole[:2]


# ------------------------------------------------------------------------------------------------------ whole studies


@pytest.fixture
def _cache(tmp_path_factory: pytest.TempPathFactory):
    patch = pytest.MonkeyPatch()
    cache_with_kernels(tmp_path_factory.mktemp("cache"), patch)
    yield
    patch.undo()


@pytest.mark.usefixtures("_cache")
def test_a_study_keeps_its_limit_says_so_and_refuses_another(tmp_path: Path) -> None:
    asked = TuneConfig(
        data=ComparedData.SYNTHETIC,
        models=("dnn",),
        rows=3000,
        budget=3,
        max_epochs=1,
        pruner=Pruner.NONE,
        max_flops_per_sample="0.5x",
        max_parameters="1x",
    )
    found = tune(asked, out=tmp_path)
    assert json.loads((tmp_path / "study.json").read_text())["max_flops_per_sample"] == "0.5x"
    kept = json.loads((tmp_path / "tuning.json").read_text())
    assert kept["limits"] == {"max_flops_per_sample": "0.5x", "max_parameters": "1x"}
    assert set(kept["models"][0]["limits"]) == {"FLOPs a sample", "parameters"}
    assert any("or beyond the limit: " in note for note in found.notes)
    (beyond,) = [note for note in found.notes if "draws that lay beyond the limit" in note]
    assert f"drawn again: {sum(each['beyond'] for each in kept['models'][0]['tries'])}" in beyond
    assert "Limit of FLOPs a sample: 0.5x those of the settings as given" in (tmp_path / "report.html").read_text()
    for changes, match in (
        ({"max_flops_per_sample": "2x"}, "max_flops_per_sample: 0.5x there, 2x now"),
        ({"max_flops_per_sample": ""}, "max_flops_per_sample: 0.5x there, none now"),
    ):
        with pytest.raises(ConfigError, match=match):
            tune(dataclasses.replace(asked, **changes), out=tmp_path)
    tune(dataclasses.replace(asked, max_flops_per_sample="0.50x"), out=tmp_path)  # the same limit in other words


def test_the_command_line_shows_limits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "frappe", "--models", "dcn_v2", "--show-space", "--max-flops-per-sample"]
    assert main([*words, "2x"]) == 0
    assert "Limit of FLOPs a sample: 2x those of the settings as given" in capsys.readouterr().out
    assert main([*words, "800000", "--max-parameters", "1e6"]) == 0
    shown = capsys.readouterr().out
    assert "Limit of FLOPs a sample: 800 k" in shown
    assert "Limit of parameters: 1 M" in shown


@pytest.mark.slow
def test_two_processes_draw_what_one_does(tmp_path: Path) -> None:
    """Without pruning and by random draws, which do not depend on what others have found so far."""
    small = ["--rows", "3000", "--models", "dnn", "--budget", "6", "--max-epochs", "1", "--pruner", "none"]
    words = [*small, "--sampler", "random", "--max-flops-per-sample", "0.5x"]
    line = [sys.executable, "-m", "ziggurat", "tune", "synthetic", *words, "--out"]
    subprocess.run([*line, str(tmp_path / "one")], check=True, capture_output=True)
    both = [subprocess.Popen([*line, str(tmp_path / "two")], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    one, two = (
        json.loads((tmp_path / name / "tuning.json").read_text())["models"][0]["tries"] for name in ("one", "two")
    )
    for name in ("values", "beyond", "value"):
        assert [each[name] for each in two] == [each[name] for each in one]
    assert sum(each["beyond"] for each in one) > 0

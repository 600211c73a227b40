"""Studies on tiny data: the same budget for each model, no test rows, kills, other data, and recipes that are taken."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ziggurat as zg
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.embeddings import room
from ziggurat.errors import ConfigError, DataError, MissingFileError, NumericsError, ZigguratError
from ziggurat.ops.machine.memory import Memory
from ziggurat.recipes.protocols import Protocol
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.studies import tune as tune_module
from ziggurat.studies import tuned as tuned_module
from ziggurat.studies.compare import CompareConfig, base_run, compare
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_own import OwnData, own_data
from ziggurat.studies.compare_report import markdown
from ziggurat.studies.scaling_runs import ScaleConfig, scale
from ziggurat.studies.tune import TuneConfig, Watch, spaces_of, tune, turns
from ziggurat.studies.tune_report import best_so_far
from ziggurat.studies.tune_study import Ended, Pruner, Sampler, Spent, Try
from ziggurat.studies.tuned import TEST_READ, TUNED, read_tuned

optuna = pytest.importorskip("optuna")

ROWS = 3000
TRAINED = 2 * 2526  # two epochs of the training part
SMALL = ("model.deep.width=8..16", "model.deep.depth=1,2", "training.loader.batch_size=1024,2048")

SHORT_STEPS = ("training.loader.batch_size=256,512",)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    patch = pytest.MonkeyPatch()
    cache_with_kernels(tmp_path_factory.mktemp("cache"), patch)
    yield
    patch.undo()


def config(**changes: object) -> TuneConfig:
    given = {
        "data": ComparedData.SYNTHETIC,
        "models": ("dnn",),
        "rows": ROWS,
        "budget": 2,
        "max_epochs": 2,
        "narrowed": SMALL,
        "pruner": Pruner.NONE,
    }
    return TuneConfig(**{**given, **changes})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two models that others only read, or copy."""
    folder = tmp_path_factory.mktemp("study") / "tuned"
    tune(config(models=("dnn", "logistic_regression")), out=folder)
    return folder


def test_a_study_never_opens_test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_run(base_run(config().compared))
    files = [path for path in (prepared.folder / "test").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    monkeypatch.setattr(tune_module, "prepare_run", lambda base, progress: prepared)
    try:
        for path in files:
            path.write_bytes(b"no row of the test part can be read")
        tune(config(budget=1), out=tmp_path / "tuned")
        assert prepared.test is not None
        with pytest.raises((ZigguratError, OSError)):  # so the bytes above would have been noticed
            prepared.test.read_group(0)
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def test_each_model_gets_the_same_tries_and_all_are_accounted_for(study: Path) -> None:
    found = json.loads((study / "tuning.json").read_text())
    assert {model["name"]: len(model["tries"]) for model in found["models"]} == {"dnn": 2, "logistic_regression": 2}
    for model in found["models"]:
        for each in model["tries"]:
            assert each["ended"] == "complete"
            assert each["spent"]["rows"] == TRAINED
            assert each["spent"]["evaluations"] == 2 + 1  # the last one is of the best weights
            assert each["spent"]["cpu_s"] > 0
            assert each["spent"]["flops"] > each["spent"]["rows"]
        assert model["best"] == max(model["tries"], key=lambda each: each["value"])["number"]
    assert not list(study.glob("tries/*/*/checkpoints"))
    page = (study / "report.html").read_text()
    assert "<h2>Tries</h2>" in page
    assert "best settings, of try" in page
    assert "http-equiv=refresh" not in page


def test_a_recipe_is_what_the_best_try_was_trained_by(study: Path) -> None:
    tuned = json.loads((study / TUNED).read_text())
    best = tuned["models"]["dnn"]["try"]
    recipe = load_config(study / "dnn.json")
    tried = load_config(study / "tries" / "dnn" / f"try{best}_seed1000")
    assert recipe.model == tried.model
    changed = override(tried.training, {"seed": "0", "loader.seed": "0", "threads": "0"})
    assert recipe.training == changed


def test_a_study_that_is_done_makes_no_try_twice(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "finish_run", lambda *given, **named: pytest.fail("a try was trained again"))
    again = tune(config(models=("dnn", "logistic_regression")), out=study)
    assert [len(model.tries) for model in again.models] == [2, 2]


def test_a_study_goes_on_after_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tune(config(), out=tmp_path / "whole")
    original = Watch.on_evaluate

    def interrupt(self: Watch, trainer, evaluation, *, is_best: bool) -> None:
        original(self, trainer, evaluation, is_best=is_best)
        if self._work.number == 1 and len(trainer.position.evaluations) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "on_evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tune(config(), out=tmp_path / "parts")
    monkeypatch.setattr(Watch, "on_evaluate", original)
    parts = tune(config(), out=tmp_path / "parts")
    # The same tries with the same values, bit for bit: the second one from its checkpoint on.
    assert [(each.values, each.value, each.reached) for each in parts.models[0].tries] == [
        (each.values, each.value, each.reached) for each in whole.models[0].tries
    ]
    assert (tmp_path / "parts" / "dnn.json").read_bytes() == (tmp_path / "whole" / "dnn.json").read_bytes()


def test_a_pruned_try_costs_less_and_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tune_module.Work.report

    def hopeless(self, value: float, *, step: int) -> bool:
        return original(self, value, step=step) or self.number == 1

    monkeypatch.setattr(tune_module.Work, "report", hopeless)
    (found,) = tune(config(), out=tmp_path).models
    assert [each.ended for each in found.tries] == [Ended.COMPLETE, Ended.PRUNED]
    assert [each.spent.evaluations for each in found.tries] == [2 + 1, 1]
    assert found.best == 0


def test_hours_end_a_try_that_the_next_call_goes_on_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a complete try") as caught:
        tune(config(budget=0, hours=1e-7), out=tmp_path)
    assert "larger --hours" in caught.value.ways_out[0]
    (found,) = tune(config(budget=1), out=tmp_path).models
    assert [each.ended for each in found.tries] == [Ended.COMPLETE]
    assert found.tries[0].spent.rows == TRAINED


def test_two_workers_keep_to_the_hours_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(budget=0, hours=1.0, models=("logistic_regression",), narrowed=SHORT_STEPS, max_epochs=1)
    of_other = Spent(wall_s=0.0)
    seconds = tune_module._seconds
    monkeypatch.setattr(tune_module, "_seconds", lambda tries: seconds(tries) + of_other.wall_s)
    monkeypatch.setattr(tune_module, "_LOOK_EVERY_S", 0.0)
    made = tune_module.Watch.on_step

    def spend_elsewhere(self: Watch, trainer, step) -> None:
        nonlocal of_other
        if trainer.position.step == 2:
            of_other = Spent(wall_s=3600.0)  # what another worker notes while this one trains
        made(self, trainer, step)

    monkeypatch.setattr(Watch, "on_step", spend_elsewhere)
    with pytest.raises(ConfigError, match="a complete try"):
        tune(asked, out=tmp_path)
    assert [path.name for path in (tmp_path / "tries" / "logistic_regression").iterdir()] == ["try0_seed1000"]
    record = json.loads((tmp_path / "tuning.json").read_text())["models"][0]["tries"]
    assert [each["ended"] for each in record] == ["running"]
    of_other = Spent()
    monkeypatch.setattr(Watch, "on_step", made)
    (found,) = tune(dataclasses.replace(asked, budget=1), out=tmp_path).models
    assert [each.ended for each in found.tries] == [Ended.COMPLETE]
    assert found.tries[0].spent.rows == TRAINED // 2


def test_all_that_a_try_costs_is_in_what_it_has_spent(tmp_path: Path) -> None:
    found = tune(config(budget=2, max_epochs=1), out=tmp_path)
    spent = sum(each.spent.cpu_s for each in found.models[0].tries)
    # Between them lie a record and the storage's answers.
    assert 0.9 * found.inside_s < spent <= found.inside_s


def test_a_try_that_diverges_has_its_steps_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tune_module.Watch.on_step

    def diverge(self: Watch, trainer, step) -> None:
        made(self, trainer, step)
        if trainer.position.step == 2:
            raise NumericsError(expected="numbers", found="NaN", where="a step", ways_out="none")

    monkeypatch.setattr(Watch, "on_step", diverge)
    with pytest.raises(ConfigError, match="a complete try"):
        tune(config(budget=1, models=("logistic_regression",), narrowed=SHORT_STEPS), out=tmp_path)
    (each,) = json.loads((tmp_path / "tuning.json").read_text())["models"][0]["tries"]
    assert each["why"] == "diverged: NaN"
    assert each["spent"]["rows"] > 0
    assert each["spent"]["cpu_s"] > 0


def test_flops_end_a_study(tmp_path: Path) -> None:
    (found,) = tune(config(budget=0, flops=1.0), out=tmp_path).models
    assert len(found.tries) == 1  # which used them up


def test_several_seeds_of_a_try_are_averaged(tmp_path: Path) -> None:
    (found,) = tune(
        config(budget=1, try_seeds=2, pruner=Pruner.NONE, max_epochs=1, models=("logistic_regression",), narrowed=()),
        out=tmp_path,
    ).models
    values = [
        json.loads((tmp_path / "tries" / "logistic_regression" / f"try0_seed{seed}" / "run.json").read_text())
        for seed in (1000, 1001)
    ]
    assert found.tries[0].value == pytest.approx(sum(each["valid"]["auc"] for each in values) / 2)
    assert found.tries[0].spent.rows == TRAINED
    assert read_tuned(tmp_path).seeds == (1000, 1001)


def test_settings_that_cannot_be_built_are_tries_without_a_value(tmp_path: Path) -> None:
    asked = config(
        models=("finalmlp",),
        budget=4,
        narrowed=("model.first.width=81,83", "model.num_heads=7,11", "model.second.width=8", "model.gate.width=8"),
    )
    with pytest.raises(ConfigError, match="settings go together") as caught:
        tune(asked, out=tmp_path)
    assert "heads" in caught.value.found


def test_reports_of_a_study_that_goes_on_take_a_small_share_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "_REPORT_EVERY_S", -1.0)
    written: list[bool] = []

    def count(tuning: object, folder: Path, *, is_live: bool) -> None:
        written.append(is_live)

    monkeypatch.setattr("ziggurat.studies.tune_report.write_tuning", count)
    asked = config(models=("logistic_regression",), narrowed=(), budget=2, max_epochs=1)
    for share, live in ((0.0, 1), (1e9, 2)):
        monkeypatch.setattr(tune_module, "_REPORT_SHARE", share)
        written.clear()
        tune(asked, out=tmp_path / str(share))
        assert written == [True] * live + [False]


# ------------------------------------------------------------------------------------------- a table of one's own


def shop(folder: Path, changes: dict[str, str]) -> OwnData:
    """A small table, of which a fifth are positives."""
    rows = ["price,shop,bought"]
    rows += [f"{number % 17},{'abcde'[number % 5]},{int(number % 17 + number % 5 > 16)}" for number in range(1200)]
    (folder / "shop.csv").write_text("\n".join(rows) + "\n")
    features = (zg.Dense(name="price"), zg.Categorical(name="shop"))
    schema = zg.Schema(features=features, labels=(zg.Label(name="bought"),))
    run = zg.table_run(zg.DNNConfig(deep=zg.MLPConfig(hidden_dims=(8,))), schema)
    given = {"data.train": str(folder / "shop.csv"), "training.epochs": "2", "training.loader.batch_size": "128"}
    return own_data(run, given | changes, name="shop")


def two_ids(folder: Path, changes: dict[str, str]) -> OwnData:
    """A small table of two ids."""
    rows = [f"{number % 7},{number % 5},{int(number % 7 > number % 5)}" for number in range(600)]
    (folder / "ids.csv").write_text("\n".join(["shop,kind,bought", *rows]) + "\n")
    features = (zg.Categorical(name="shop"), zg.Categorical(name="kind"))
    run = zg.table_run(zg.DNNConfig(), zg.Schema(features=features, labels=(zg.Label(name="bought"),)))
    given = {"data.train": str(folder / "ids.csv"), "training.epochs": "1", "training.loader.batch_size": "128"}
    return own_data(run, given | changes, name="ids")


def of_shop(data: OwnData, **changes: object) -> TuneConfig:
    given = {"data": data, "protocol": Protocol.RECIPE, "max_epochs": 0, "budget": 1, "narrowed": ()}
    return config(**{**given, **changes})


@pytest.fixture(scope="module")
def int8_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of one try whose tables are kept in INT8."""
    folder = tmp_path_factory.mktemp("int8")
    tune(of_shop(shop(folder, {"tables.weights": "int8"})), out=folder / "tuned")
    return folder


def test_a_try_is_the_run_that_train_makes_of_its_settings(int8_study: Path, tmp_path: Path) -> None:
    tried = int8_study / "tuned" / "tries" / "dnn" / "try0_seed1000"
    trained = train_run(load_config(tried), folder=tmp_path / "run")
    record = json.loads((tried / "run.json").read_text())
    # Both start at the share of positives, from the same rows of tables; to the bit.
    assert trained.evaluations["valid"].metrics == record["valid"]
    assert "bought" in json.loads((tried / "startup.json").read_text())["Training"]["scores start at"]


def test_formats_of_tables_are_settings_of_a_study(int8_study: Path, tmp_path: Path) -> None:
    plain = shop(int8_study, {})
    with pytest.raises(ConfigError, match=r"tables, .* of dnn \(other\)"):
        tune(of_shop(plain), out=int8_study / "tuned")
    # A comparison keeps rows as the tries did, also where nobody says it again.
    asked = CompareConfig(
        data=plain, models=("dnn",), seeds=1, protocol=Protocol.RECIPE, tuned=str(int8_study / "tuned")
    )
    found = compare(asked, out=tmp_path)
    assert load_config(found.models[0].folders[0]).tables.weights.value == "int8"


def test_settings_beside_recipes_are_refused_where_recipes_say_otherwise(int8_study: Path) -> None:
    tuned = read_tuned(int8_study / "tuned")
    tuned.refuse_settings({"training.epochs": "2", "data.train": "elsewhere.csv", "model.cross.rank": "3"})
    for changes in ({"training.epochs": "5"}, {"model.embedding-dim": "64"}, {"tables.weights": "fp32"}):
        with pytest.raises(ConfigError, match="recipes say otherwise") as caught:
            tuned.refuse_settings(changes)
        assert caught.value.ways_out[1].split("ziggurat compare ")[1].startswith(str(int8_study / "tuned" / "dnn.json"))
    tuned.refuse_fewer_epochs(0)
    tuned.refuse_fewer_epochs(2)
    with pytest.raises(ConfigError, match="max_epochs = 1, of dnn 2"):
        tuned.refuse_fewer_epochs(1)


def test_a_model_of_ones_own_is_compared_by_its_recipe_alone(tmp_path: Path) -> None:
    own = importlib.import_module("examples.extensions.matrix_factorisation").MatrixFactorisationConfig
    names = {"model.user": "shop", "model.item": "kind"}
    asked = of_shop(two_ids(tmp_path, names), models=("matrix_factorisation",), own=(own,), narrowed=())
    tune(asked, out=tmp_path / "tuned")
    # Nobody repeats which features these are: the recipe says it, and no model has other settings that would fit.
    found = compare(
        CompareConfig(
            data=two_ids(tmp_path, {}),
            models=("matrix_factorisation",),
            own=(own,),
            seeds=1,
            protocol=Protocol.RECIPE,
            tuned=str(tmp_path / "tuned"),
        ),
        out=tmp_path / "compared",
    )
    trained = load_config(found.models[0].folders[0], models=(own,))
    assert trained.model == load_config(tmp_path / "tuned" / "matrix_factorisation.json", models=(own,)).model


def test_settings_that_compared_runs_do_not_follow_are_refused(tmp_path: Path) -> None:
    for changes in (
        {"warm_start.run": "runs/first"},
        {"delayed.loss": "fnw"},
        {"device": "cuda"},
        {"warm_start.run": "runs/first", "device": "cuda"},
    ):
        with pytest.raises(ConfigError, match="settings of ") as caught:
            shop(tmp_path, changes)
        words = shlex.split(caught.value.ways_out[0].partition(": ")[2])
        ways = {name.removeprefix("--"): text for name, text in zip(words[::2], words[1::2], strict=True)}
        shop(tmp_path, changes | {name.replace("-", "_"): text for name, text in ways.items()})


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_study_of_other_data_or_another_space_is_refused(study: Path) -> None:
    models = ("dnn", "logistic_regression")
    for changes, match in (
        ({"rows": ROWS + 500}, "other training rows"),
        ({"narrowed": (*SMALL, "dropout=0..0.1")}, r"space of dnn \(other\)"),
        ({"max_epochs": 1}, r"settings as given \(of training, .*\) of dnn \(other\)"),
        ({"seed": 7}, "seed: 1000 there, 7 now"),
        ({"sampler": Sampler.RANDOM}, "sampler: tpe there, random now"),
        ({"metric": "log_loss"}, "metric: auc there, log_loss now"),
    ):
        with pytest.raises(ConfigError, match=match) as caught:
            tune(config(models=models, **changes), out=study)
        assert "--out" in caught.value.ways_out[0]


def test_a_folder_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="that of a study") as caught:
        tune(config(), out=tmp_path)
    assert caught.value.ways_out[0] == f"--out {tmp_path / 'tuned'}"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_an_empty_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="a budget") as caught:
        config(budget=0)
    assert "--budget 40" in caught.value.ways_out


def test_a_budget_of_flops_alone_is_refused_where_a_model_has_none(tmp_path: Path) -> None:
    asked = of_shop(two_ids(tmp_path, {}), budget=0, flops=1e9, models=("fm",))
    with pytest.raises(ConfigError, match="count no FLOPs"):
        tune(asked, out=tmp_path / "tuned")
    (found,) = tune(dataclasses.replace(asked, budget=1), out=tmp_path / "tuned").models
    assert len(found.tries) == 1


@pytest.mark.parametrize("seeds", range(2, 8))
def test_wilcoxon_wants_as_many_seeds_as_can_end_a_try(seeds: int) -> None:
    pruner = optuna.pruners.WilcoxonPruner()
    study = optuna.create_study(direction="maximize", pruner=pruner)
    good = study.ask()
    for seed in range(seeds):
        good.report(0.9 + 0.001 * seed, 1000 + seed)
    study.tell(good, 0.9)
    bad = study.ask()
    ends_early = False
    for seed in range(seeds - 1):
        bad.report(0.1 + 0.002 * seed, 1000 + seed)
        ends_early = ends_early or bad.should_prune()
    if ends_early:
        config(pruner=Pruner.WILCOXON, try_seeds=seeds)
    else:
        with pytest.raises(ConfigError, match="ends no try before its last seed"):
            config(pruner=Pruner.WILCOXON, try_seeds=seeds)


def test_a_metric_that_does_not_exist_is_refused_and_ways_out_work() -> None:
    with pytest.raises(ConfigError, match="a metric of the evaluation") as caught:
        spaces_of(config(metric="aucc"))
    assert caught.value.where == "ziggurat tune, --metric"
    names = [way.removeprefix("--metric ") for way in caught.value.ways_out if way.startswith("--metric ")]
    assert "auc" in names
    for name in names:
        spaces_of(config(metric=name))


def test_a_space_that_does_not_fit_the_memory_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Memory(free_bytes=25_000, total_bytes=25_000, owner="a small machine")
    monkeypatch.setattr(room, "memory_of", lambda device: small)
    asked = config(narrowed=("model.embedding_dim=2..32", *SMALL))
    with pytest.raises(ConfigError, match="largest model fits the memory") as caught:
        tune(asked, out=tmp_path)
    way = caught.value.ways_out[0]
    assert way.startswith("--space model.embedding_dim=2..")
    assert not (tmp_path / "journal.log").exists()
    tune(dataclasses.replace(asked, budget=1, narrowed=(way.removeprefix("--space "), *SMALL)), out=tmp_path)


# ---------------------------------------------------------------------------------------- what is done with recipes


def compared(study: Path, **changes: object) -> CompareConfig:
    given = {
        "data": ComparedData.SYNTHETIC,
        "models": ("dnn", "logistic_regression"),
        "rows": ROWS,
        "seeds": 1,
        "judged_by": "auc",
        "tuned": str(study),
    }
    return CompareConfig(**{**given, **changes})


def copy_of(study: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in (TUNED, "dnn.json", "logistic_regression.json", "study.json"):
        (folder / name).write_bytes((study / name).read_bytes())
    return folder


def test_a_comparison_takes_recipes_and_reads_test_once(study: Path, tmp_path: Path) -> None:
    mine = copy_of(study, tmp_path / "tuned")
    found = compare(compared(mine), out=tmp_path / "first")
    recipe = load_config(mine / "dnn.json")
    trained = load_config(found.models[0].folders[0])
    assert trained.model == recipe.model
    assert trained.training.learning_rate == recipe.training.learning_rate
    assert "dnn (tuned, 2 tries)" in markdown(found)
    compare(compared(mine), out=tmp_path / "first")  # the same one may look again
    with pytest.raises(ConfigError, match="read before by the comparison") as caught:
        compare(compared(mine), out=tmp_path / "second")
    assert caught.value.ways_out[0].endswith(str(tmp_path / "first"))
    # The other way out: it is said.
    again = compare(compared(mine, read_test_again=True), out=tmp_path / "second")
    assert any("not fresh" in note for note in again.notes)


def test_settings_found_since_test_was_read_are_refused(study: Path, tmp_path: Path) -> None:
    mine = copy_of(study, tmp_path / "tuned")
    tuned = read_tuned(mine)
    out = tmp_path / "out"
    assert tuned.note_that_test_is_read(["dnn"], out=out, read_again=False) == ""
    better = override(tuned.recipes["dnn"], {"training.learning_rate": "0.005"})
    later = dataclasses.replace(tuned, recipes={"dnn": better})
    with pytest.raises(ConfigError, match="further tries have found other settings"):
        later.note_that_test_is_read(["dnn"], out=out, read_again=False)
    assert (mine / TEST_READ).exists()


def test_of_two_comparisons_at_a_time_one_reads_test(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = copy_of(study, tmp_path / "tuned")
    tuned = read_tuned(mine)
    entered = threading.Barrier(2, timeout=0.5)
    digest = tuned_module.digest_of

    def beside_the_other(*arguments: Any) -> str:
        # Both have looked who has read it by now, unless one waits for the other.
        with contextlib.suppress(threading.BrokenBarrierError):
            entered.wait()
        return digest(*arguments)

    monkeypatch.setattr(tuned_module, "digest_of", beside_the_other)
    with ThreadPoolExecutor(2) as pool:
        pending = [
            pool.submit(tuned.note_that_test_is_read, ["dnn"], out=tmp_path / name, read_again=False)
            for name in ("first", "second")
        ]
        refused = [each.exception() for each in pending]
    assert sorted(type(each).__name__ for each in refused) == ["ConfigError", "NoneType"]


def test_a_folder_in_which_another_worker_begins_is_one_of_a_study(tmp_path: Path) -> None:
    """It holds its lock, and a part of what it searches; a killed one leaves both."""
    (tmp_path / "asking.lock").touch()
    (tmp_path / f".study.json.{os.getpid()}.0123abcd.tmp").write_text("{")
    tune_module._refuse_what_is_no_study(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="txt, and no study"):
        tune_module._refuse_what_is_no_study(tmp_path)


def test_a_folder_that_lacks_a_model_is_cut_or_edited_is_refused(study: Path, tmp_path: Path) -> None:
    mine = copy_of(study, tmp_path / "tuned")
    with pytest.raises(ConfigError, match="models that were tuned") as caught:
        read_tuned(mine, models=("dnn", "wukong"))
    assert caught.value.ways_out[0] == "--models dnn"
    text = (mine / "dnn.json").read_text()
    # As the file itself proposes to whoever changes it on purpose: without its checksum.
    lines = [line for line in text.splitlines() if '"sha256"' not in line]
    lines[-2] = lines[-2].rstrip(",")
    edited = "\n".join(lines).replace('"epochs": 2', '"epochs": 3')
    (mine / "dnn.json").write_text(edited)
    with pytest.raises(ConfigError, match="changed since"):
        read_tuned(mine)
    (mine / "dnn.json").write_text(text.replace('"epochs": 2', '"epochs": 3'))
    with pytest.raises(DataError, match="sha256"):
        read_tuned(mine)
    (mine / "dnn.json").write_text(text[:200])
    with pytest.raises(DataError):
        read_tuned(mine)
    (mine / "dnn.json").unlink()
    with pytest.raises(MissingFileError, match="the recipe of dnn"):
        read_tuned(mine)
    (mine / TUNED).unlink()
    with pytest.raises(MissingFileError, match="without a finished try"):
        read_tuned(mine)
    with pytest.raises(MissingFileError, match=TUNED):
        read_tuned(tmp_path / "nothing")


def test_a_lost_recipe_is_written_anew_by_the_same_command(study: Path) -> None:
    before = (study / "dnn.json").read_bytes()
    (study / "dnn.json").unlink()
    tune(config(models=("dnn", "logistic_regression")), out=study)
    assert (study / "dnn.json").read_bytes() == before


def test_seeds_and_data_of_a_comparison_are_looked_at(study: Path, tmp_path: Path) -> None:
    tuned = read_tuned(study)
    with pytest.raises(ConfigError, match="tries of other seeds") as caught:
        dataclasses.replace(tuned, seeds=(3,)).refuse_seeds(5)
    assert caught.value.ways_out[0] == "--seeds 3"
    tuned.refuse_seeds(5)
    with pytest.raises(ConfigError, match="other rows in train and valid"):
        compare(compared(study, rows=ROWS + 500), out=tmp_path)
    with pytest.raises(ConfigError, match="the protocol and metric of tuning"):
        compare(compared(study, protocol=Protocol.SCALE), out=tmp_path)
    with pytest.raises(ConfigError, match="leave --trials out"):
        compared(study, trials=2)
    assert not (study / TEST_READ).exists()


def test_scaling_grows_a_tuned_recipe(study: Path, tmp_path: Path) -> None:
    asked = {"data": ComparedData.SYNTHETIC, "rows": ROWS}
    with pytest.raises(ConfigError, match="protocol scale"):
        scale(ScaleConfig(models=("dnn",), tuned=str(study), **asked), out=tmp_path / "scaled")
    tuned = tmp_path / "tuned"
    tune(config(protocol=Protocol.SCALE, budget=1, max_epochs=0), out=tuned)
    found = scale(
        ScaleConfig(models=("dnn",), factors=(1.0, 1.5, 2.0), tuned=str(tuned), **asked), out=tmp_path / "scaled"
    )
    recipe = load_config(tuned / "dnn.json")
    assert found.models[0].points[0].model == recipe.model
    trained = load_config(next((tmp_path / "scaled").glob("*-tuned/dnn/1.5x_seed0")))
    assert trained.training.learning_rate == recipe.training.learning_rate


# ---------------------------------------------------------------------------------------------------- command line


def test_the_command_line_shows_a_space_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", "frappe", "--model", "dcn_v2", "--show-space", "--fix", "dropout=0.2"]
    assert main([*words, "--space", "training.learning-rate=1e-3..1e-2"]) == 0
    shown = capsys.readouterr().out
    assert "model.cross.rank" in shown
    assert "0.001 … 0.01" in shown
    assert "dropout" not in shown
    assert not list(tmp_path.iterdir())
    assert main(["tune", "frappe", "--models", "dcn_v2", "--show-space", "--space", "model.cross.num_layer=1,2"]) == 2
    assert "model.cross.num_layers" in capsys.readouterr().err


def test_a_table_of_ones_own_is_tuned_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["price,shop,bought"]
    rows += [f"{number % 17},{'abcde'[number % 5]},{int(number % 17 + number % 5 > 9)}" for number in range(1500)]
    (tmp_path / "shop.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "my.toml").write_text(
        '[[feature]]\nname = "price"\nkind = "dense"\n\n[[feature]]\nname = "shop"\nkind = "categorical"\n\n'
        '[[label]]\nname = "bought"\n'
    )
    words = ["table", "--data.train", "shop.csv", "--schema", "my.toml", "--epochs", "1", "--batch-size", "256"]
    small = ["--fix", "model.deep.width=8", "--fix", "model.deep.depth=1", "--metric", "log_loss"]
    assert main(["tune", *words, "--model", "dnn", "--budget", "1", *small, "--out", "tuned"]) == 0
    shown = capsys.readouterr().out
    assert "tuned/dnn.json" in shown
    again = ["compare", *words[:5], "--tuned", "tuned", "--seeds", "1", "--out", "compared"]
    assert main([*again, "--epochs", "3"]) == 2
    assert "--training.epochs 3, which recipes say otherwise" in capsys.readouterr().err
    assert main([*again, "--epochs", "1"]) == 0
    assert "dnn (tuned, 1 tries)" in capsys.readouterr().out
    assert main(["train", "--config", "tuned/dnn.json", "--out", "trained"]) == 0


def test_the_report_counts_what_was_better_than_all_before() -> None:
    def one(number: int, value: float | None) -> Try:
        return Try(number=number, values={}, value=value, ended=Ended.COMPLETE if value else Ended.PRUNED)

    tries = [one(0, 0.5), one(1, None), one(2, 0.4), one(3, 0.7)]
    assert best_so_far(tries, higher=True) == [(0, 0.5), (3, 0.7)]
    assert best_so_far(tries, higher=False) == [(0, 0.5), (2, 0.4)]
    assert Spent(rows=1) + Spent(rows=2, cpu_s=1.0) == Spent(rows=3, cpu_s=1.0)


def test_workers_spread_over_models() -> None:
    def one(ended: Ended, *, wall_s: float) -> Try:
        return Try(number=0, values={}, value=None, ended=ended, spent=Spent(wall_s=wall_s))

    done = one(Ended.COMPLETE, wall_s=50.0)
    known = {"dnn": [done, done], "dcn_v2": [one(Ended.RUNNING, wall_s=0.0)], "wukong": [done], "fm": [done]}
    assert turns(known) == ["wukong", "fm", "dcn_v2", "dnn"]
    assert turns(known | {"fm": []})[0] == "fm"


# --------------------------------------------------------------------------------------------------- real processes


def worker(folder: Path, *, budget: int) -> subprocess.Popen[bytes]:
    words = ["tune", "synthetic", "--rows", str(ROWS), "--models", "dnn", "--budget", str(budget), "--max-epochs", "2"]
    spaces = [word for text in SMALL for word in ("--space", text)]
    line = [sys.executable, "-m", "ziggurat", *words, *spaces, "--pruner", "none", "--out", str(folder)]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def begun(folder: Path) -> int:
    return len(list(folder.glob("tries/dnn/try*/config.json")))


@pytest.mark.slow
def test_two_processes_share_tries_and_one_is_killed(tmp_path: Path) -> None:
    first = worker(tmp_path, budget=6)
    second = worker(tmp_path, budget=6)
    while begun(tmp_path) < 3 and first.poll() is None:
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _, said = second.communicate()
    assert second.returncode == 0, said.decode()
    # Whoever was left alone may have looked before the kill; the same command makes the rest.
    last = worker(tmp_path, budget=6)
    _, said = last.communicate()
    assert last.returncode == 0, said.decode()
    found = json.loads((tmp_path / "tuning.json").read_text())["models"][0]["tries"]
    assert [each["number"] for each in found] == list(range(6))
    assert all(each["ended"] == "complete" for each in found)
    assert all(each["spent"]["rows"] == TRAINED for each in found)


def test_files_of_a_study_that_were_cut_off_are_no_dead_ends(tmp_path: Path) -> None:
    asked = config(budget=1, max_epochs=1, models=("logistic_regression",), narrowed=())
    tune(asked, out=tmp_path)
    whole = read_tuned(tmp_path)
    text = (tmp_path / "tuned.json").read_bytes()
    (tmp_path / "tuned.json").write_bytes(text[: len(text) // 2])
    with pytest.raises(DataError, match="the same `ziggurat tune` command again"):
        read_tuned(tmp_path)
    tune(asked, out=tmp_path)
    assert read_tuned(tmp_path).recipes == whole.recipes
    models = tuple(whole.recipes)
    assert not whole.note_that_test_is_read(models, out=tmp_path / "first", read_again=False)
    text = (tmp_path / "test_read.json").read_bytes()
    (tmp_path / "test_read.json").write_bytes(text[: len(text) // 2])
    with pytest.raises(DataError, match="--read-test-again"):
        whole.note_that_test_is_read(models, out=tmp_path / "first", read_again=False)
    said = whole.note_that_test_is_read(models, out=tmp_path / "first", read_again=True)
    assert "could not be read" in said

"""Comparisons end to end on tiny data: resume, settings that changed, protocols kept apart, the protocol itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.sequence.rankers.histories import MODELS as OF_HISTORIES
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.encoded.loader import Loader
from ziggurat.errors import ConfigError
from ziggurat.models import (
    MODEL_CONFIGS,
    DINConfig,
    ESMMConfig,
    LightGCNConfig,
    MMoEConfig,
    NextItemConfig,
    PEPNetConfig,
    PLEConfig,
    RankMixerConfig,
    SequenceRankerConfig,
    TwoTowerConfig,
    build_model,
)
from ziggurat.models.build import kind_of
from ziggurat.recipes.model_settings import FRAPPE, OTHERS
from ziggurat.recipes.protocols import Protocol, averaged, bars_model, bars_training, protocol_of, require_one_protocol
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.studies import compare_runs
from ziggurat.studies.compare import CompareConfig, compare
from ziggurat.studies.compare_data import ComparedData, data_run
from ziggurat.studies.compare_report import markdown, write_comparison
from ziggurat.studies.compare_settings import VARIANTS, settings_of, variant
from ziggurat.training.evaluation.evaluate import evaluate_batches, ordered_batches
from ziggurat.training.records.run_folder import STARTUP, RunFolder

ROWS = 6000


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    patch = pytest.MonkeyPatch()
    cache_with_kernels(tmp_path_factory.mktemp("cache"), patch)
    yield
    patch.undo()


def config(**changes: object) -> CompareConfig:
    given = {"data": ComparedData.SYNTHETIC, "models": ("logistic_regression", "dnn"), "seeds": 2, "rows": ROWS}
    return CompareConfig(**{**given, "max_epochs": 2, **changes})


def test_compares_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compare(config(seeds=1), out=tmp_path)
    trained: list[str] = []
    original = compare_runs._trainer

    def counted(request: compare_runs.RunRequest, **given: object):
        trained.append(f"{request.model}{request.config.training.seed}")
        return original(request, **given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(compare_runs, "_trainer", counted)
    elsewhere = RunFolder(first.models[0].folders[0]).startup  # as if the first part had been made elsewhere
    report = STARTUP.read(elsewhere)
    STARTUP.write(elsewhere, report | {"Machine": report["Machine"] | {"torch": "1.0"}})
    second = compare(config(), out=tmp_path)
    assert not any("torch differs" in note for note in first.notes)
    assert any(f"torch differs (1.0; {torch.__version__})" in note for note in second.notes)
    assert trained == ["logistic_regression1", "dnn1"]  # seed 0 was there
    assert second.models[0].runs[0] == first.models[0].runs[0]
    found = second.differences["logistic_regression", "dnn"]
    values = [model.values("auc") for model in second.models]
    assert found.mean == pytest.approx(np.mean(values[0]) - np.mean(values[1]))
    assert 0.0 < found.rows_error < 0.2
    paths = write_comparison(second, tmp_path / "table")
    assert all(path.stat().st_size > 500 for path in paths)
    data = json.loads(paths[0].read_text())
    assert data["models"][1]["runs"][1]["test"]["auc"] == values[1][1]
    assert f"{second.models[0].mean_sd('auc')[0]:.5f}" in markdown(second)


def test_each_model_is_trained_in_each_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ("dnn", "dlrm")
    plain = compare(config(models=models, seeds=1, max_epochs=1), out=tmp_path)
    trained: list[str] = []
    original = compare_runs._trainer

    def counted(request: compare_runs.RunRequest, **given: object):
        trained.append(f"{request.model} {request.config.training.precision}")
        return original(request, **given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(compare_runs, "_trainer", counted)
    found = compare(config(models=models, seeds=1, max_epochs=1, precisions=("fp32", "mx4")), out=tmp_path)
    assert trained == ["dnn mx4", "dlrm mx4"]  # FP32 is the protocol's precision, and its runs were there
    assert [each.name for each in found.models] == ["dnn fp32", "dnn mx4", "dlrm fp32", "dlrm mx4"]
    assert [each.precision.name for each in found.models] == ["fp32", "mx4", "fp32", "mx4"]
    assert found.models[0].runs == plain.models[0].runs
    assert found.models[1].folders == (tmp_path / "synthetic-bars" / "dnn-mx4" / "variant0_seed0",)
    auc = {each.name: each.values("auc")[0] for each in found.models}
    assert auc["dnn mx4"] != auc["dnn fp32"]
    means = {pair: each.mean for pair, each in found.differences.items()}
    pairs = [("dnn mx4", "dnn fp32"), ("dlrm mx4", "dlrm fp32"), ("dnn fp32", "dlrm fp32"), ("dnn mx4", "dlrm mx4")]
    assert means == pytest.approx({(first, second): auc[first] - auc[second] for first, second in pairs})
    assert any("metrics of mx4 are of a network whose products are rounded" in note for note in found.notes)
    assert not any("precision differs" in note for note in found.notes)
    data = json.loads(write_comparison(found, tmp_path / "table")[0].read_text())
    assert data["config"]["precisions"] == ["fp32", "mx4"]
    assert [(each["model"], each["precision"]) for each in data["models"]][1] == ("dnn", "mx4")
    assert "trained in fp32, mx4, and is set beside itself in fp32" in markdown(found)
    assert "| test NE |" in markdown(found)
    assert "| test NE |" not in markdown(plain)


def test_one_precision_is_said_and_names_no_model(tmp_path: Path) -> None:
    found = compare(config(models=("dnn",), seeds=1, max_epochs=1, precisions=("mx9",)), out=tmp_path)
    assert [each.name for each in found.models] == ["dnn"]
    assert "Trained in mx9." in markdown(found)


def test_precisions_that_cannot_be_are_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="each named once"):
        config(precisions=("mx9", "mx9"))
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "synthetic", "--precisions", "fp32,fp8-row"]) == 2
    error = capsys.readouterr().err
    assert 'did you mean "fp8_rowwise"' in error
    assert "--precisions" in error
    assert main(["compare", "synthetic", "--precisions", "fp32,tf32"]) == 2
    assert "leave tf32 out of --precisions" in capsys.readouterr().err
    assert main(["compare", "movielens_dlrm", "--precision", "mx9", "--precisions", "fp32,mx9"]) == 2
    assert "leave --precision out" in capsys.readouterr().err
    assert main(["compare", "a_run", "another", "--precisions", "fp32,mx9"]) == 2
    assert "leave --precisions out" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(config(models=("dnn",), seeds=1), out=tmp_path / "whole")
    from ziggurat.training.hooks.fitting import SaveWhenDue
    from ziggurat.training.trainer import Trainer

    original = SaveWhenDue.after

    def killed(self: SaveWhenDue, trainer: Trainer, *, is_last: bool) -> None:
        original(self, trainer, is_last=is_last)
        if trainer.position.epoch == 1:
            trainer.store.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(SaveWhenDue, "after", killed)
    with pytest.raises(KeyboardInterrupt):
        compare(config(models=("dnn",), seeds=1), out=tmp_path / "killed")
    monkeypatch.undo()
    assert not list((tmp_path / "killed").glob("*/*/*/run.json"))
    again = compare(config(models=("dnn",), seeds=1), out=tmp_path / "killed")
    assert again.models[0].values("auc") == whole.models[0].values("auc")


def test_trials_choose_by_validation_and_leave_test_alone(tmp_path: Path) -> None:
    found = compare(config(models=("dnn",), seeds=1, trials=3), out=tmp_path).models[0]
    assert found.variant == max(found.trials, key=lambda index: found.trials[index])
    for index in range(3):
        record = compare_runs.RunRecord.load(tmp_path / "synthetic-bars" / "dnn" / f"variant{index}_seed0")
        assert record is not None
        assert bool(record.test) is (index == found.variant)
        assert record.valid["auc"] == found.trials[index]


def test_other_settings_are_not_reused(tmp_path: Path) -> None:
    compare(config(models=("logistic_regression",), seeds=1), out=tmp_path)
    with pytest.raises(ConfigError, match="other settings"):
        compare(config(models=("logistic_regression",), seeds=1, max_epochs=1), out=tmp_path)


def test_a_run_of_a_comparison_is_an_ordinary_run(tmp_path: Path) -> None:
    found = compare(config(models=("dnn",), seeds=1), out=tmp_path).models[0]
    again = train_run(load_config(found.folders[0]), folder=tmp_path / "again")
    assert again.evaluations["test"].metrics["auc"] == found.values("auc")[0]


def test_protocols_are_not_mixed(tmp_path: Path) -> None:
    bars = compare(config(seeds=1, models=("dnn",)), out=tmp_path)
    scale = compare(config(seeds=1, models=("dnn",), protocol=Protocol.SCALE, max_epochs=0), out=tmp_path)
    assert [each.models[0].runs[0].protocol for each in (bars, scale)] == ["bars", "scale"]
    configs = [load_config(each.models[0].folders[0]) for each in (bars, scale)]
    assert [protocol_of(each) for each in configs] == [Protocol.BARS, Protocol.SCALE]
    with_average = dataclasses.replace(configs[0], training=averaged(configs[0].training))
    assert protocol_of(with_average) is Protocol.BARS_AVERAGED
    with pytest.raises(ConfigError, match="bars-averaged"):
        require_one_protocol([("a", configs[0]), ("b", with_average)])
    with pytest.raises(ConfigError, match="runs of one protocol"):
        require_one_protocol(zip(("a", "b"), configs, strict=True))
    folder = scale.models[0].folders[0]
    strange = tmp_path / "synthetic-bars" / "dnn" / "variant0_seed9"
    strange.mkdir()
    (strange / "run.json").write_text((folder / "run.json").read_text())
    with pytest.raises(ConfigError, match="protocol bars alone"):
        compare(config(seeds=1, models=("dnn",)), out=tmp_path)


def test_errors_name_the_way_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compare", "frapp", "--out", str(tmp_path)]) == 2
    assert "did you mean 'frappe'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="models out of"):
        compare(config(models=("dnm",)), out=tmp_path)
    with pytest.raises(ConfigError, match="each named once"):
        config(models=("dnn", "dnn"))


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["compare", "synthetic", "--rows", str(ROWS), "--models", "logistic_regression", "--seeds", "1"]
    assert main([*given, "--max-epochs", "1", "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    assert "logistic" in capsys.readouterr().out
    assert (tmp_path / "found.png").exists()


WITHOUT_SETTINGS = (
    DINConfig,
    *(type(model) for model in OF_HISTORIES if type(model) is not RankMixerConfig),  # which wants no history
    TwoTowerConfig,
    LightGCNConfig,
    NextItemConfig,
    SequenceRankerConfig,
    # Of several labels, which no compared data set has.
    MMoEConfig,
    PLEConfig,
    PEPNetConfig,
    ESMMConfig,
)


@pytest.mark.parametrize("name", sorted(kind_of(cls) for cls in MODEL_CONFIGS if cls not in WITHOUT_SETTINGS))
def test_every_built_in_model_has_settings_and_variants(name: str) -> None:
    assert [each.model.kind for each in FRAPPE] == [each.model.kind for each in OTHERS]
    for data in (ComparedData.FRAPPE, ComparedData.MOVIELENS):
        settings = settings_of(name, data)
        made = [variant(settings, index) for index in range(len(VARIANTS))]
        assert made[0] == settings
        assert [each.embedding_l2 / settings.embedding_l2 for each in made] == pytest.approx([f for f, _ in VARIANTS])
        if name == "dnn":
            dropouts = [each.model.deep.dropout - settings.model.deep.dropout for each in made]  # pyright: ignore
            assert dropouts == pytest.approx([shift for _, shift in VARIANTS])


def test_bars_is_the_loop_of_its_definition(tmp_path: Path) -> None:
    """The trainer with `bars_training`, against twenty lines of plain torch."""
    run = data_run(ComparedData.SYNTHETIC, rows=ROWS)
    model = bars_model(dataclasses.replace(settings_of("dnn", ComparedData.SYNTHETIC).model, embedding_dim=4))
    model = dataclasses.replace(model, deep=dataclasses.replace(model.deep, dropout=0.0, hidden_dims=(16,)))  # pyright: ignore
    training = bars_training(embedding_l2=0.05, learning_rate=0.01, patience=4, batch_size=500)
    training = dataclasses.replace(training, epochs=30, threads=1)
    run = dataclasses.replace(run, model=model, training=training)
    data = prepare_run(run)
    twin = build_model(run.model, data.inputs, seed=0)
    factors, best_auc, best_weights = _bars_by_hand(twin, data, training)
    result = train_run(run, folder=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["auc"] for line in lines if line["kind"] == "valid"]
    assert len(evaluations) == len(factors)
    assert min(factors) < 0.1  # the learning rate fell at least twice, or this test shows little
    assert result.fit.best_value == pytest.approx(best_auc, abs=1e-3)
    twin.load_state_dict(best_weights)
    batches = ordered_batches(data.test, batch_size=2000).batches(epoch=0)
    auc = evaluate_batches(twin, batches, inputs=data.inputs).metrics["auc"]
    assert result.evaluations["test"].metrics["auc"] == pytest.approx(auc, abs=1e-3)


def _bars_by_hand(model, data, training):
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    tables = set(map(id, model.embeddings.parameters()))
    first = [torch.zeros_like(p) for p in parameters]
    second = [torch.zeros_like(p) for p in parameters]
    loader = Loader(data.train, config=training.loader)
    rate, step, wait, best, kept, factors = training.learning_rate, 0, 0, -1.0, {}, []
    for epoch in range(training.epochs):
        model.train()
        for batch in loader.batches(epoch=epoch):
            logits = model(batch)[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels[:, 0])
            grads = list(torch.autograd.grad(loss, parameters))
            grads = [g + 0.05 * p.detach() if id(p) in tables else g for g, p in zip(grads, parameters, strict=True)]
            norm = float(sum((g.double() ** 2).sum() for g in grads)) ** 0.5
            step += 1
            for p, g, m, v in zip(parameters, grads, first, second, strict=True):
                g = g * min(1.0, 10.0 / (norm + 1e-6))
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                update = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
                p.data.sub_(rate * update)
        factors.append(rate / training.learning_rate)
        valid = ordered_batches(data.valid, batch_size=2000).batches(epoch=0)
        auc = evaluate_batches(model, valid, inputs=data.inputs).metrics["auc"]
        if auc >= best + 1e-6:
            best, wait = auc, 0
            kept = {name: value.clone() for name, value in model.state_dict().items()}
        else:
            wait, rate = wait + 1, max(rate * 0.1, 1e-6)
            if wait == 4:
                break
    return factors, best, kept

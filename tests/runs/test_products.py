"""Errors of formats in the products of a run, from what it kept and from its own rows."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.errors import ConfigError
from ziggurat.files import digest_of
from ziggurat.models.scoring_plan import SCORING_PLAN
from ziggurat.numerics.probe import Direction
from ziggurat.precision import DenseProducts
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import DISPATCH, Choice, DispatchPlan, Whole
from ziggurat.precision.precision import Precision
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.load import load_run
from ziggurat.runs.products import PRODUCT_ERRORS, dispatch_of_run
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import TrainingConfig
from ziggurat.training.hooks.probe_products import ProbeProducts
from ziggurat.training.report.progress import LineProgress


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 400 rows that kept a probe."""
    path = tmp_path_factory.mktemp("probed") / "run"
    frame = {"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}
    config = zg.table_run(
        zg.DNNConfig(embedding_dim=4, deep=zg.MLPConfig(hidden_dims=(16,))), zg.inspect_file(frame).schema
    )
    zg.train_run(config, folder=path, data=frame, hooks=[ProbeProducts(every=1)])
    return path


@pytest.mark.parametrize("words", [[], ["--measure"]])
def test_probe_prints_errors_and_writes_them(
    folder: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "errors.json"
    assert main(["numerics", "probe", str(folder), *words, "--kernels", "fp32,bf16,mx9,mx4", "--json", str(file)]) == 0
    assert "mx9" in capsys.readouterr().out
    found = PRODUCT_ERRORS.read(file)
    assert found["products"]
    for directions in found["products"].values():
        assert list(directions) == ["forward", "input_gradient", "weight_gradient"]
        for errors in directions.values():
            error = {name: float(each["error"]) for name, each in errors.items()}
            assert error["fp32"] <= error["mx9"] <= error["mx4"]


def test_dispatch_writes_choices_with_reasons(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dispatch.json"
    assert main(["numerics", "dispatch", str(folder), "--out", str(file)]) == 0
    found = DISPATCH.read(file)
    assert f"whole: {found['whole']['precision']} (the fastest whole network" in capsys.readouterr().out
    assert found["model"] == "DNN"
    for directions in found["choices"].values():
        assert list(directions) == ["forward", "input_gradient", "weight_gradient"]
        assert all(choice["reason"] for choice in directions.values())


@pytest.mark.parametrize("words", [[], ["--measure", "--rows", "8"]])
def test_dispatch_for_scoring_writes_a_format_for_each_product(
    folder: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scoring.json"
    assert main(["numerics", "dispatch", str(folder), "--for", "scoring", *words, "--out", str(file)]) == 0
    found = SCORING_PLAN.read(file)
    assert found["rows"] == (8 if words else 16)
    assert f"whole: {found['whole']}" in capsys.readouterr().out
    assert all(choice["reason"] for choice in found["choices"].values())


def test_rows_of_requests_are_of_scoring_alone_and_no_more_than_a_batch_has(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["numerics", "dispatch", str(folder), "--out", str(tmp_path / "it.json"), "--rows"]
    assert main([*words, "8"]) == 2
    assert "choose for scoring: --for scoring" in capsys.readouterr().err
    assert main([*words, "0", "--for", "scoring"]) == 2
    assert "rows of a request" in capsys.readouterr().err


def test_run_without_a_probe_names_the_ways_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["numerics", "probe", str(folder / "none")]) != 0
    assert "--measure" in capsys.readouterr().err


def write_plan(folder: Path, file: Path, *, kernel: str, whole: str = "fp32") -> Path:
    """Write a dispatch of all products of a run by one kernel."""
    choices = {
        name: {each: Choice(kernel=kernel, reason="") for each in Direction}
        for name, module in load_run(folder).model.named_modules()
        if isinstance(module, DenseProducts)
    }
    plan = DispatchPlan(
        model="DNN",
        machine=machine_facts(torch.device("cpu")),
        choices=choices,
        missing={},
        whole=Whole(precision=whole, reason=""),
    )
    return plan.write(file)


def changed(folder: Path, **changes: Any) -> RunConfig:
    config = load_run(folder).config
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **changes))


def test_dispatch_holds_for_the_sizes_of_its_model_and_an_older_file_says_that_it_does_not_know_them(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "dispatch.json"
    dispatch_of_run(folder, measure=True).write(file)
    wider = changed(folder, precision=Precision.DISPATCH, dispatch=str(file))
    wider = dataclasses.replace(wider, model=dataclasses.replace(wider.model, embedding_dim=8))
    with pytest.raises(ConfigError, match="these sizes") as refused:
        zg.train_run(wider, folder=tmp_path / "wider")
    assert refused.value.where == str(file)  # not its copy in the folder of the run
    assert "weight 16×8" in refused.value.expected
    assert "weight 16×4" in refused.value.found
    # The same file as version 2 wrote it.
    facts = json.loads(file.read_text())
    del facts["shapes"], facts["settings"], facts["sha256"]
    facts["version"] = 2
    file.write_text(json.dumps(facts | {"sha256": digest_of(facts)}))
    zg.train_run(wider, folder=tmp_path / "wider")
    assert (
        "for which sizes and settings of the network it holds, the file does not say"
        in (tmp_path / "wider" / "startup.json").read_text()
    )


def test_dispatch_holds_for_the_settings_of_its_model_and_an_older_file_says_that_it_does_not_know_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dispatch.json"
    dispatch_of_run(folder, measure=True).write(file)
    config = changed(folder, precision=Precision.DISPATCH, dispatch=str(file))
    # Tables are no part of the network.
    zg.train_run(override(config, {"model.embedding.init-std": "0.5"}), folder=tmp_path / "tables")
    other = override(config, {"model.deep.activation": "hard_swish", "model.deep.normalization": "block"})
    with pytest.raises(ConfigError, match="these settings") as refused:
        zg.train_run(other, folder=tmp_path / "other")
    assert refused.value.where == str(file)
    assert refused.value.expected.endswith(
        "with these settings: model.deep.activation hard_swish, model.deep.normalization block"
    )
    assert refused.value.found == "model.deep.activation relu, model.deep.normalization none"
    assert not (tmp_path / "other" / "checkpoints").exists()
    # The ways out: settings of the file, and a file of the other model, made by the command that is named.
    of_settings, by_file, *_ = list(refused.value.ways_out)
    flags = by_file.partition(": ")[2].replace("--", "").split()
    back = override(other, dict(zip(flags[::2], flags[1::2], strict=True)))
    assert back.model == config.model
    zg.train_run(override(other, {"training.precision": "fp32", "training.dispatch": ""}), folder=tmp_path / "fp32")
    words = of_settings.partition("ziggurat ")[2].replace("RUN", str(tmp_path / "fp32"))
    assert main(words.replace("dispatch.json", str(tmp_path / "own.json")).split()) == 0
    own = dataclasses.replace(other.training, dispatch=str(tmp_path / "own.json"))
    zg.train_run(dataclasses.replace(other, training=own), folder=tmp_path / "own")
    # The same file as version 3 wrote it.
    facts = json.loads(file.read_text())
    del facts["settings"], facts["sha256"]
    facts["version"] = 3
    file.write_text(json.dumps(facts | {"sha256": digest_of(facts)}))
    zg.train_run(other, folder=tmp_path / "other")
    said = (tmp_path / "other" / "startup.json").read_text()
    assert "for which settings of the network it holds, the file does not say" in said


def test_run_trains_by_the_kernels_of_a_file(folder: Path, tmp_path: Path) -> None:
    file = write_plan(folder, tmp_path / "dispatch.json", kernel="mx9")

    def losses(name: str, **changes: Any) -> dict[str, float]:
        return zg.train_run(changed(folder, **changes), folder=tmp_path / name).evaluations["valid"].metrics

    fp32 = losses("fp32", precision=Precision.FP32, dispatch="")
    mx9 = losses("mx9", precision=Precision("mx9"), dispatch="")
    dispatched = losses("dispatched", precision=Precision.DISPATCH, dispatch=str(file))
    assert dispatched == mx9
    assert dispatched != fp32
    # A finished run is scored by the kernels that it kept, also where the file is gone.
    file.unlink()
    by_kernels = load_run(tmp_path / "dispatched", precision=Precision.DISPATCH).model
    by_format = load_run(tmp_path / "mx9", precision=Precision("mx9")).model
    batch = random_batch(by_kernels.inputs, 8)
    with torch.no_grad():
        assert torch.equal(by_kernels(batch), by_format(batch))
        assert not torch.equal(by_kernels(batch), load_run(tmp_path / "dispatched").model(batch))
    with pytest.raises(ConfigError, match="keeps its kernels"):
        load_run(tmp_path / "mx9", precision=Precision.DISPATCH)


def test_whole_network_in_bf16_trains_to_the_bits_of_precision_bf16(folder: Path, tmp_path: Path) -> None:
    file = write_plan(folder, tmp_path / "dispatch.json", kernel="bf16", whole="bf16")
    zg.train_run(changed(folder, precision=Precision.BF16, dispatch=""), folder=tmp_path / "bf16")
    zg.train_run(changed(folder, precision=Precision.DISPATCH, dispatch=str(file)), folder=tmp_path / "dispatched")
    assert "activations in bf16" in (tmp_path / "dispatched" / "startup.json").read_text()
    wanted = load_run(tmp_path / "bf16").model.state_dict()
    found = load_run(tmp_path / "dispatched").model.state_dict()
    zg.train_run(changed(folder, precision=Precision.FP32, dispatch=""), folder=tmp_path / "fp32")
    fp32 = load_run(tmp_path / "fp32").model.state_dict()
    assert all(found[name].equal(each) for name, each in wanted.items())
    assert not all(fp32[name].equal(each) for name, each in wanted.items())


def test_run_whose_products_went_back_to_fp32_is_scored_in_fp32(folder: Path, tmp_path: Path) -> None:
    file = write_plan(folder, tmp_path / "dispatch.json", kernel="mx4")
    calls = iter(range(1_000_000))

    def endless_once(outputs: zg.Outputs, batch: zg.Batch) -> zg.LossSums:
        total = torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, batch.labels, reduction="none")
        scale = float("inf") if next(calls) == 1 else 1.0
        return zg.LossSums(total=scale * total.sum(dim=0), weight=torch.tensor([float(len(total))]))

    run = tmp_path / "run"
    config = changed(folder, precision=Precision.DISPATCH, dispatch=str(file), epochs=2)
    config = dataclasses.replace(
        config, training=dataclasses.replace(config.training, loader=LoaderConfig(batch_size=100))
    )
    zg.train_run(config, folder=run, loss=endless_once)
    assert "FP32 from here on in" in (run / "run.log").read_text()
    assert "FP32 from here on in" in (run / "report.html").read_text()
    by_kernels = load_run(run, precision=Precision.DISPATCH).model
    batch = random_batch(by_kernels.inputs, 8)
    with torch.no_grad():
        found = by_kernels(batch)
        fp32 = load_run(run).model(batch)
        mx4 = load_run(run, precision=Precision("mx4")).model(batch)
    torch.testing.assert_close(found, fp32, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(mx4, fp32, rtol=1e-5, atol=1e-6)


def test_resumed_run_goes_on_by_the_dispatch_that_it_kept(folder: Path, tmp_path: Path) -> None:
    file = write_plan(folder, tmp_path / "dispatch.json", kernel="mx6")
    run = tmp_path / "run"
    asked = {"precision": Precision.DISPATCH, "dispatch": str(file)}
    whole = zg.train_run(changed(folder, epochs=2, **asked), folder=tmp_path / "whole")
    zg.train_run(changed(folder, epochs=1, **asked), folder=run)
    # The file is written anew: the run does not read it, and refuses it where it is given.
    write_plan(folder, file, kernel="fp32")
    with pytest.raises(ConfigError, match="the dispatch that the run began with"):
        zg.train_run(changed(folder, epochs=2, **asked), folder=run, resume=True)
    stored = load_run(run).config
    assert stored.training.dispatch == str(run / "dispatch.json")
    resumed = zg.train_run(
        dataclasses.replace(stored, training=dataclasses.replace(stored.training, epochs=2)), folder=run, resume=True
    )
    assert resumed.evaluations["valid"].metrics == whole.evaluations["valid"].metrics


def test_a_run_says_which_products_fell_back_to_fp32(folder: Path, tmp_path: Path) -> None:
    file = write_plan(folder, tmp_path / "dispatch.json", kernel="int8")
    zg.train_run(
        changed(folder, precision=Precision.DISPATCH, dispatch=str(file), epochs=1),
        folder=tmp_path / "run",
        progress=LineProgress(io.StringIO()),
    )
    said = (tmp_path / "run" / "run.log").read_text()
    assert "FP32 in place of int8, width 1 is no multiple of 8" in said


def on_ranks(rank: int, folder: str, dispatch: str, other: str, out: str) -> str:
    """Train on two ranks, the second of which may be given another file."""
    path = other if rank and other else dispatch
    config = changed(Path(folder), precision=Precision.DISPATCH, dispatch=path)
    try:
        return str(zg.train_run(config, folder=out).evaluations["valid"].metrics["log_loss"])
    except ConfigError as error:
        return str(error)


def test_ranks_compute_by_one_dispatch(folder: Path, tmp_path: Path) -> None:
    mx6 = str(write_plan(folder, tmp_path / "dispatch.json", kernel="mx6"))
    (tmp_path / "other").mkdir()
    fp32 = str(write_plan(folder, tmp_path / "other" / "dispatch.json", kernel="fp32"))
    first, second = run_ranks(on_ranks, 2, str(folder), mx6, "", str(tmp_path / "mx6"))
    assert first == second
    assert "dispatch in" in (tmp_path / "mx6" / "startup.json").read_text()
    for found in run_ranks(on_ranks, 2, str(folder), mx6, fp32, str(tmp_path / "both")):
        assert "dispatch, content" in found


def test_precision_dispatch_and_its_file_go_together() -> None:
    with pytest.raises(ConfigError, match="together with the file"):
        TrainingConfig(precision=Precision.DISPATCH)
    with pytest.raises(ConfigError, match="together with the file"):
        TrainingConfig(precision=Precision.FP32, dispatch="dispatch.json")

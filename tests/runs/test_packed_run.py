"""Runs whose products are packed: written whole, loaded to the same scores, and refused for all but scoring."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from tests.serving.shop import Shop, events
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.errors import ConfigError, DataError
from ziggurat.numerics import BlockFormat
from ziggurat.parallel.device import Device
from ziggurat.precision import Precision
from ziggurat.runs.load import load_run
from ziggurat.runs.packed_run import refuse_output, save_packed
from ziggurat.runs.products_cost import ProductsConfig, fine_tune, quantise_products
from ziggurat.runs.quality.importance import ImportanceConfig
from ziggurat.runs.verify import verify_run
from ziggurat.training.records.run_folder import CONFIG
from ziggurat.training.report.progress import NoProgress

MX6 = BlockFormat.named("mx6")


@pytest.fixture(scope="module")
def trained(shop: Shop) -> Path:
    """A small run."""
    return shop.ranker


@pytest.fixture(scope="module")
def packed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, packed."""
    out = tmp_path_factory.mktemp("packed") / "run"
    save_packed(load_run(trained, products=MX6), out, report={})
    return out


def scores(folder: Path, *, products: BlockFormat | None = None) -> np.ndarray:
    return load_run(folder, products=products).scores(events(300, seed=9))


def test_a_packed_run_scores_as_it_did_before_it_was_written(trained: Path, packed: Path) -> None:
    before = scores(trained)
    cast = scores(trained, products=MX6)
    found = scores(packed)
    assert np.array_equal(found, cast)
    assert 0 < np.abs(found - before).max() < 0.2
    run = load_run(packed)
    assert run.packed is not None
    assert "mx6" in run.packed.line()
    assert verify_run(packed).good


def test_a_packed_run_is_not_said_to_be_in_fp32(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A run that was trained in a precision of few bits, whose packed copy is in no precision of training.
    few_bits = tmp_path / "few_bits"
    shutil.copytree(trained, few_bits)
    config = CONFIG.read(few_bits / "config.json")
    config["training"]["precision"] = "mx9"
    CONFIG.write(few_bits / "config.json", config)
    save_packed(load_run(few_bits, products=MX6), tmp_path / "packed", report={})
    load_run(tmp_path / "packed")
    assert "computed in FP32" not in caplog.text
    load_run(few_bits)
    assert "computed in FP32; the run was trained with products in mx9" in caplog.text


def test_packed_weights_take_the_bits_of_their_format_in_the_file(trained: Path, packed: Path) -> None:
    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        (file,) = (folder / "checkpoints").glob("step-*/*.safetensors")
        return load_file(file)

    weights = {name: each for name, each in tensors(trained).items() if name.startswith("model.")}
    found = tensors(packed)
    bits = {name.removeprefix("products."): each for name, each in found.items() if name.startswith("products.")}
    assert bits
    for name, each in bits.items():
        outputs, inputs = weights[f"model.{name}.weight"].shape
        blocks = -(-inputs // 16)
        # 5 bits a number with its sign, 1 a pair and 8 a block.
        assert each.shape == (outputs, -(-(5 * inputs + -(-inputs // 2) + 8 * blocks) // 8))
        assert f"model.{name}.weight" not in found
    assert all(torch.equal(found[name], each) for name, each in weights.items() if name in found)


def test_evaluate_says_what_the_products_are_in(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = packed.parent / "evaluated.json"
    assert main(["evaluate", str(packed), "--split", "valid", "--json", str(out)]) == 0
    assert "dense products in mx6, packed in " in capsys.readouterr().out
    assert json.loads(out.read_text())["precision"] == "packed mx6"


def test_a_packed_run_is_not_packed_rounded_trained_or_moved_to_a_gpu(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="mx6 already"):
        load_run(packed, products=BlockFormat.named("mx9"))
    for precision in ("fp32", "mx6"):
        with pytest.raises(ConfigError, match="leave --precision out"):
            load_run(packed, precision=Precision(precision))
    with pytest.raises(ConfigError, match="device cpu"):
        load_run(packed, device=Device.CUDA)
    files = sorted((path, path.stat().st_mtime_ns) for path in packed.rglob("*") if path.name != ".lock")
    assert main(["train", str(packed), "--resume"]) == 2
    assert "packed in mx6, for scoring" in capsys.readouterr().err
    assert sorted((path, path.stat().st_mtime_ns) for path in packed.rglob("*") if path.name != ".lock") == files
    with pytest.raises(ConfigError, match="does not exist yet"):
        save_packed(load_run(packed), packed, report={})


def test_an_earlier_version_refuses_a_packed_run_by_its_version(trained: Path, packed: Path) -> None:
    earlier = dataclasses.replace(CONFIG, newest=0)
    assert "table_schema" in earlier.read(trained / "config.json")
    with pytest.raises(DataError, match="of version 1 or older") as refused:
        earlier.read(packed / "config.json")
    assert "version 2: a newer Ziggurat wrote it" in refused.value.found
    assert refused.value.ways_out[0] == "update Ziggurat"


def test_a_damaged_record_of_products_is_refused(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "damaged"
    save_packed(load_run(trained, products=MX6), out, report={})
    text = (out / "products.json").read_text()
    (out / "products.json").write_text(text.replace('"mx6"', '"mx9"'))
    with pytest.raises(DataError, match="sha256"):
        load_run(out)
    assert not verify_run(out).good


def test_a_record_of_products_that_is_gone_or_of_another_run_is_named(
    trained: Path, packed: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(packed, gone)
    (gone / "products.json").unlink()
    other = tmp_path / "other"
    save_packed(load_run(trained, products=BlockFormat.named("mx9")), other, report={})
    (other / "products.json").write_bytes((packed / "products.json").read_bytes())
    plain = tmp_path / "plain"
    shutil.copytree(trained, plain)
    (plain / "products.json").write_bytes((packed / "products.json").read_bytes())
    for folder in (gone, other, plain):
        with pytest.raises(DataError, match=r"pack .* again") as refused:
            load_run(folder)
        assert refused.value.where == str(folder / "products.json"), folder


def test_a_folder_without_a_name_of_its_own_is_named_in_the_way_out(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "here"
    place.mkdir()
    (place / "notes.txt").touch()
    monkeypatch.chdir(place)
    for out in (".", "./"):
        assert main(["quantise", str(trained), "--products", "mx6", "--out", out]) == 2
        assert f"--out {tmp_path / 'here_packed'}" in capsys.readouterr().err


def test_what_a_killed_process_left_of_a_packed_run_is_removed(trained: Path, tmp_path: Path) -> None:
    left = tmp_path / ".run.999999999.0123abcd.tmp"
    left.mkdir()
    os.utime(left, (0, 0))
    save_packed(load_run(trained, products=MX6), tmp_path / "run", report={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_training_on_that_diverges_names_what_this_verb_can_change(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--products", "mx6", "--epochs", "1", "--learning-rate", "1e30", "--out", str(tmp_path / "out")]
    assert main(["quantise", str(trained), *arguments]) == 2
    said = capsys.readouterr().err
    assert "--learning-rate 1e+29" in said
    assert "clip-norm" not in said
    assert not (tmp_path / "out").exists()


def test_quantise_says_what_packing_costs_and_writes_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mx9"
    before = sorted((path, path.stat().st_mtime_ns) for path in trained.rglob("*") if path.name != ".lock")
    arguments = ["--products", "mx9", "--out", str(out), "--json", str(tmp_path / "cost.json")]
    assert main(["quantise", str(trained), *arguments]) == 0
    shown = capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in trained.rglob("*") if path.name != ".lock") == before
    assert "dense products in mx9, packed in" in shown
    assert "times as fast" in shown
    found = json.loads((tmp_path / "cost.json").read_text())
    whole, packed = load_run(trained), load_run(out)
    for run, key in ((whole, "before"), (packed, "after")):
        metrics = run.evaluate_split("valid").metrics
        assert found["metrics"]["auc"][key] == pytest.approx(metrics["auc"], abs=1e-9)
        assert found["metrics"]["log_loss"][key] == pytest.approx(metrics["log_loss"], abs=1e-9)
    assert found["metrics"]["log_loss"]["half_width"] > 0
    assert set(found["times"]) == {"1", "16", "64"}
    assert all(each["packed_ms"] > 0 for each in found["times"].values())
    assert packed.packed is not None
    assert found["packed_bytes"] == packed.packed.num_bytes
    assert json.loads((out / "products.json").read_text())["report"]["metrics"] == found["metrics"]
    assert "auc" in repr(packed)
    assert main(["compare", str(trained), str(out)]) == 0
    assert str(out) in capsys.readouterr().out


def test_a_packed_run_without_metrics_says_how_to_get_them(
    trained: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(trained), str(packed)]) == 2
    assert "pack it again, judged on its own rows" in capsys.readouterr().err


def test_a_packed_run_has_a_report_of_what_it_is(
    trained: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(packed)]) == 0
    assert str(packed / "report.html") in capsys.readouterr().out
    page = (packed / "report.html").read_text()
    step = load_run(packed).step
    assert (
        f"dense products packed in mx6, of run {trained.name} at step {step:,}; packed for scoring, so no log" in page
    )
    assert "<h2>Training</h2>" not in page
    assert verify_run(packed).good
    assert main(["report", str(packed), "--baseline"]) == 2
    assert "leave --baseline out" in capsys.readouterr().err
    (packed / "report.html").unlink()


def test_a_run_that_finds_items_is_packed_and_ranked(shop: Shop, tmp_path: Path) -> None:
    cost = quantise_products(shop.two_tower, config=ProductsConfig(format="int8"), out=tmp_path / "int8")
    packed = load_run(tmp_path / "int8")
    assert packed.packed is not None
    ndcg = packed.evaluate_split("valid").metrics["full_ndcg@10"]
    assert cost.metrics["full_ndcg@10"].after == pytest.approx(ndcg, abs=1e-12)


def test_what_quantise_cannot_do_is_refused(
    trained: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, text in (
        ([str(trained), "--products", "mxfp8_e4m3"], "mx6"),
        ([str(trained), "--products", "nonsense"], "--products mx6"),
        ([str(trained), "--products", ""], "--products mx6"),
        ([str(packed), "--products", "mx9"], "mx6 already"),
        ([str(trained), "--products", "mx6", "--by-table"], "leave --by-table out"),
        ([str(trained), "--out", str(tmp_path / "out")], "--products mx6"),
        ([str(trained), "--products", "mx6", "--out", str(trained)], "does not exist yet"),
    ):
        assert main(["quantise", *arguments]) == 2, arguments
        assert text in capsys.readouterr().err, arguments
    assert not (tmp_path / "out").exists()


def test_fine_tuning_trains_the_network_in_the_format_and_leaves_tables(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    arguments = ["--products", "mx4", "--epochs", "2", "--learning-rate", "0.01", "--out", str(out)]
    assert main(["quantise", str(trained), *arguments]) == 0
    assert "trained on in mx4 for 14 steps, learning rate 0.01, tables as they were" in capsys.readouterr().out
    before = load_run(trained).model
    found = load_run(out).model
    for name in before.embeddings.tables.places:
        assert torch.equal(before.embeddings.table(name), found.embeddings.table(name)), name
    cast = load_run(trained, products=BlockFormat.named("mx4"))
    assert cast.packed is not None
    moved = [
        name
        for name in cast.packed.bits
        if not torch.equal(cast.model.get_parameter(f"{name}.weight"), found.get_parameter(f"{name}.weight"))
    ]
    assert moved == list(cast.packed.bits)
    report = json.loads((out / "products.json").read_text())["report"]
    assert report["tuned"].startswith("trained on in mx4")
    # Formats that no precision of training is listed for are trained in all the same.
    cost = quantise_products(trained, config=ProductsConfig(format="int8", epochs=1))
    assert "trained on in int8 for 7 steps, learning rate 0.001" in cost.tuned


def test_importance_and_prediction_are_those_of_packed_scores(trained: Path, packed: Path, tmp_path: Path) -> None:
    rows = events(200, seed=3)
    run = load_run(packed)
    frame = run.predict(rows)
    assert isinstance(frame, pl.DataFrame)
    assert np.allclose(frame["like"].to_numpy(), run.scores(rows)[:, 0], atol=1e-7)
    cast = load_run(trained, products=MX6)
    config = ImportanceConfig(rounds=1, samples=100)
    ours = run.importance(config=config)
    theirs = cast.importance(config=config)
    assert ours.table() == theirs.table()


def test_tables_on_a_disk_are_neither_copied_nor_held_while_the_network_is_trained(
    trained: Path, tmp_path: Path
) -> None:
    run = load_run(trained)
    on_disk = dataclasses.replace(run, config=override(run.config, {"tables.disk": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"ziggurat export .* --products mx6"):
        refuse_output(on_disk, tmp_path / "out")
    config = ProductsConfig(format="mx6", epochs=1)
    with pytest.raises(ConfigError, match="--precision mx6"):
        fine_tune(on_disk, MX6, config=config, progress=NoProgress())
    with pytest.raises(ConfigError, match="leave --epochs out") as refused:
        fine_tune(on_disk, BlockFormat.named("int8"), config=config, progress=NoProgress())
    assert len(refused.value.ways_out) == 1, "no precision of training is called int8"

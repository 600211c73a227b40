"""Exports with packed products: the scores of the packed run to the bit, smaller files, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ziggurat as zg
from tests.serving.shop import Shop, events
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError, ExportError
from ziggurat.models.network_settings import network_settings
from ziggurat.models.packed import packable_modules
from ziggurat.models.scoring_plan import ScoringPlan
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.linear import linear_chain_reference, linear_reference
from ziggurat.precision import packed
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import Choice
from ziggurat.precision.products import shapes_of_products
from ziggurat.runs.packed_run import save_packed
from ziggurat.serving.answering.chain import Question
from ziggurat.serving.answers import Effort
from ziggurat.serving.export.export_folder import open_export, seal_export
from ziggurat.serving.export.packed_model import MODEL
from ziggurat.training.records.run_folder import CONFIG

MX6 = BlockFormat.named("mx6")
QUICK = zg.ExportConfig(golden=2, parity_rows=300, products="mx6", allow=True)


@pytest.fixture(scope="module")
def export(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker whose products were packed when it was exported."""
    out = tmp_path_factory.mktemp("packed") / "ranker"
    zg.export_run(shop.ranker, out=out, config=QUICK)
    return out


def test_an_export_scores_as_the_packed_run_on_every_path(
    shop: Shop, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = events(300, seed=9)
    expected = zg.load_run(shop.ranker, products=MX6).scores(rows)
    rec = zg.Recommender.load(export)
    assert np.array_equal(rec.scores(rows), expected)
    assert rec.info().products == {"ranker": "mx6"}
    facts = open_export(export).manifest.facts
    assert facts["products"]["ranker"]["format_of_weights"] == "mx6"
    assert facts["program"] == "not written: its dense products are packed in mx6"
    assert 1e-5 < facts["parity"]["largest_difference"] < 0.1, "it is compared with the run in FP32"
    # A machine without the compiled kernel.
    monkeypatch.setattr(packed, "linear", linear_reference)
    monkeypatch.setattr(packed, "linear_chain", linear_chain_reference)
    assert np.array_equal(zg.Recommender.load(export).scores(rows), expected)


def test_the_weights_of_an_export_take_fewer_bytes(shop: Shop, export: Path, tmp_path: Path) -> None:
    zg.export_run(shop.ranker, out=tmp_path / "fp32", config=dataclasses.replace(QUICK, products=""))
    whole = load_file(tmp_path / "fp32" / "ranker" / "weights.safetensors")
    found = load_file(export / "ranker" / "weights.safetensors")
    bits = {name.removeprefix("products."): each for name, each in found.items() if name.startswith("products.")}
    assert bits
    assert sum(each.numel() for each in bits.values()) < 0.4 * sum(4 * whole[f"{name}.weight"].numel() for name in bits)
    assert not {f"{name}.weight" for name in bits} & set(found)


def test_an_export_of_a_packed_run_is_exact(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_packed(zg.load_run(shop.ranker, products=MX6), tmp_path / "run", report={})
    out = tmp_path / "export"
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--parity-rows", "300"]) == 0
    said = capsys.readouterr()
    assert "dense products in mx6, packed in" in said.out + said.err
    assert open_export(out).manifest.facts["parity"]["largest_difference"] == 0.0
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--products", "mx9"]) == 2
    assert "leave --products out: the export keeps mx6" in capsys.readouterr().err


def test_a_run_that_finds_items_and_its_ranker_are_packed_together(shop: Shop, tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, value="like", num_candidates=12, products="int8")
    zg.export_run(shop.two_tower, ranker=shop.ranker, out=tmp_path / "both", config=config)
    rec = zg.Recommender.load(tmp_path / "both")
    assert rec.info().products == {"encoder": "int8", "ranker": "int8"}
    found = rec.chain.recommend([Question(row={"user_id": 3}, k=5)], effort=Effort.FULL, explain=False)
    assert len(found[0].items) == 5


def test_an_export_by_a_dispatch_has_a_format_for_each_product(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = zg.load_run(shop.ranker)
    first, second, *others = packable_modules(run.model)
    kernels = {first: "mx9", second: "int8"} | dict.fromkeys(others, "fp32")
    plan = ScoringPlan(
        model=type(run.model).__name__,
        machine=machine_facts(torch.device("cpu")),
        rows=4,
        choices={name: Choice(kernel=kernel, reason="given") for name, kernel in kernels.items()},
        whole="given",
        shapes=shapes_of_products(run.model),
        settings=network_settings(run.model),
    )
    # As a file of version 1 is read.
    file = dataclasses.replace(plan, settings=None).write(tmp_path / "plan.json")
    out = tmp_path / "export"
    words = ["--dispatch", str(file), "--parity-rows", "300", "--allow"]
    assert main(["export", str(shop.ranker), "--out", str(out), *words]) == 0
    said = capsys.readouterr()
    assert "dense products in mx9+int8, packed in 2 modules (mx9 in 1, int8 in 1)" in said.out + said.err
    assert "does not say for which settings of the network" in said.out + said.err
    rows = events(300, seed=9)
    rec = zg.Recommender.load(out)
    assert np.array_equal(rec.scores(rows), zg.load_run(shop.ranker, products=plan.formats).scores(rows))
    assert rec.info().products == {"ranker": "mx9+int8"}
    content = json.loads((out / "ranker" / "model.json").read_text())
    assert content["version"] == 5
    assert content["products"]["by_module"] == {second: "int8"}
    with pytest.raises(ExportError, match="of version 4 or older"):
        dataclasses.replace(MODEL, newest=4).read(out / "ranker" / "model.json")
    # Beside a retrieving run, the part that the plan is of is packed, and the other is said to be FP32.
    both = ["export", str(shop.two_tower), "--ranker", str(shop.ranker), "--out", str(tmp_path / "both"), *words]
    assert main([*both, "--value", "like", "--candidates", "12"]) == 0
    said = capsys.readouterr()
    assert "encoder: dense products in FP32" in said.out + said.err
    assert zg.Recommender.load(tmp_path / "both").info().products == {"encoder": "fp32", "ranker": "mx9+int8"}
    with pytest.raises(ConfigError, match="leave --dispatch out"):
        zg.ExportConfig(products="mx6", dispatch=str(file))
    assert main(["export", str(shop.two_tower), "--out", str(tmp_path / "other"), *words]) == 2
    assert "a dispatch of" in capsys.readouterr().err


def test_what_an_export_multiplies_is_said_of_a_run_trained_in_few_bits(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few_bits = tmp_path / "few_bits"
    shutil.copytree(shop.ranker, few_bits)
    config = CONFIG.read(few_bits / "config.json")
    config["training"]["precision"] = "mx6"
    CONFIG.write(few_bits / "config.json", config)

    def said(products: str) -> list[str]:
        caplog.clear()
        zg.export_run(few_bits, out=tmp_path / "export", config=dataclasses.replace(QUICK, products=products))
        return [each for each in caplog.messages if "few_bits: " in each]

    packed_in = "few_bits: the export multiplies by weights packed in mx9; the run was trained with products in mx6"
    assert said("mx9") == [packed_in]
    assert said("mx9") == [], "once is enough"
    assert said("mx6") == [], "nothing differs"
    (plain,) = said("")
    assert plain.startswith("few_bits: the export multiplies FP32 numbers; the run was trained with products in mx6")
    assert "--products mx6 packs its weights" in plain


def test_unknown_formats_and_damaged_bits_are_refused(shop: Shop, export: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mx6"):
        zg.ExportConfig(products="mxfp4")
    earlier = dataclasses.replace(MODEL, newest=0)
    with pytest.raises(ExportError, match="of version 2 or older"):
        earlier.read(export / "ranker" / "model.json")
    out = tmp_path / "cut"
    shutil.copytree(export, out)
    tensors = load_file(out / "ranker" / "weights.safetensors")
    name = next(name for name in tensors if name.startswith("products."))
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, out / "ranker" / "weights.safetensors")
    seal_export(out, sources=(), facts={}, made_with={})
    with pytest.raises(ExportError, match="products"):
        zg.Recommender.load(out)


def test_exports_in_fp32_stay_readable_by_earlier_versions(shop: Shop) -> None:
    earlier = dataclasses.replace(MODEL, newest=0)
    assert earlier.read(shop.export / "ranker" / "model.json")["tables"] == "fp32"
    assert json.loads((shop.export / "ranker" / "model.json").read_text())["version"] == 2

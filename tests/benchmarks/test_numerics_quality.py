"""The quality benchmark of numerics: each variant changes the model that it says, and variants are paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import numerics, numerics_quality
from benchmarks.numerics_quality import BASE, FRAPPE, HSTU, SYNTHETIC, TOGETHER, Trained, base_config, mods_of
from benchmarks.report import Report
from ziggurat.config import override
from ziggurat.models.blocks.mlp import Normalization
from ziggurat.precision import Precision
from ziggurat.precision.dispatch import DISPATCH
from ziggurat.recipes.run_config import RunConfig


@pytest.mark.parametrize("recipe", FRAPPE)
def test_each_option_changes_its_settings_and_together_all_of_them(recipe: str) -> None:
    base = base_config(recipe, seed=3, source="")
    assert (base.training.epochs, base.training.seed, base.training.precision) == (1, 3, Precision.FP32)
    found = {name: override(base, changes).model for name, changes in mods_of(recipe).items()}
    assert len({*map(str, found.values()), str(base.model)}) == 5
    part = "top" if recipe == "frappe_dlrm" else "deep"
    mlp = getattr(found[TOGETHER], part)
    assert (mlp.bias, mlp.normalization, mlp.activation.value) == (False, Normalization.BLOCK, "hard_swish")


def test_recipes_of_the_last_part_are_there() -> None:
    for model in numerics.MODELS:
        config = base_config(f"{SYNTHETIC}{model}", seed=0, source="", rows=1_000)
        assert (config.model.kind, config.dataset.rows) == (model, 1_000)
    assert base_config(HSTU, seed=0, source="").training.epochs > 1


def test_int8_is_dispatched_in_every_product_and_direction(tmp_path: Path) -> None:
    config = base_config(f"{SYNTHETIC}dlrm", seed=0, source="", rows=2_000)
    found = numerics_quality.by_int8(config, tmp_path / "plans")
    assert found.training.precision is Precision.DISPATCH
    choices = DISPATCH.read(found.training.dispatch)["choices"]
    assert choices
    assert all(choice["kernel"] == "int8" for each in choices.values() for choice in each.values())


@pytest.mark.parametrize(
    ("limit", "verdict"), [(lambda values: 0.0003, "met"), (lambda values: 0.0001, "missed"), (None, None)]
)
def test_variants_take_turns_and_are_paired_by_seed(
    limit: Callable[[Sequence[float]], float] | None, verdict: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[tuple[int, str]]()

    def train(config: RunConfig, folder: Path) -> Trained:
        variant = folder.name.removeprefix("frappe_dlrm_").rpartition("_")[0]
        order.append((config.training.seed, variant))
        auc = 0.9 + 0.01 * config.training.seed + 0.0002 * (variant == "other")
        return Trained(metrics={"auc": auc, "log_loss": 0.2, "ne": 0.9}, cpu_s=2.0 if variant == "other" else 1.0)

    monkeypatch.setattr(numerics_quality, "trained", train)
    options = numerics.parse_options(["--parts", "mods", "--seeds", "3"])
    report = Report(benchmark="numerics", claim="", command="")
    variants = {BASE: lambda config, folder: config, "other": lambda config, folder: config}
    numerics_quality.compared(report, options, "frappe_dlrm", variants, part="mods", metric="auc", limit=limit)
    assert order == [(seed, name) for seed in range(3) for name in ("as_it_is", "other")]
    (figure,) = report.figures
    assert figure["name"] == "frappe_dlrm_other_auc_difference"
    assert figure["ours"] == pytest.approx(0.0002)
    assert figure["sd"] == pytest.approx(0.0, abs=1e-9)
    assert figure.get("verdict") == verdict
    assert "| other | 0.91020 ± 0.01000 | +0.00020 ± 0.00000 |" in report.tables[0]
    assert report.tables[0].endswith("| 0.20000 | 0.90000 | 2.00 |")
    assert figure["low_90"] == pytest.approx(0.0002)
    assert figure.get("is_shown") == (None if verdict is None else verdict == "met")


def test_half_of_an_interval_is_that_of_students_t() -> None:
    # t of 4 degrees of freedom at 95 % is 2.1318.
    assert numerics_quality.half_of_interval(0.001, num_pairs=5) == pytest.approx(2.1318 * 0.001 / 5**0.5, rel=1e-4)


def test_long_parts_run_only_where_they_are_named() -> None:
    assert "mods" not in numerics.parse_options([]).parts
    assert {"mods", "int8", "few_bits", "frappe"} <= numerics.PARTS.keys()

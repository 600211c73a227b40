"""The benchmark `tables`: what an earlier report has stands beside new figures; named cases of AUC; no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.tables
from benchmarks.harness import ROOT
from benchmarks.table_tiers.memory import CASES as MEMORY
from benchmarks.table_tiers.quality import collect
from benchmarks.table_tiers.reported import read_report
from benchmarks.table_tiers.subjects import CASES, PROMISED, SUBJECTS, VARIANTS, config_of, settings_of
from benchmarks.tables import parse_options, run
from ziggurat.config import override
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.ops.row_cache import CachePolicy
from ziggurat.recipes.run_config import run_config_to_json
from ziggurat.training.records.run_folder import CONFIG, EVALUATION, RunFolder
from ziggurat.training.report.progress import NoProgress

CASE, VARIANT = "frappe_d64_int8_cache5_auc", VARIANTS["d64_int8_cache5"]
COMMITTED = ROOT / "benchmarks" / "reports" / "amd-epyc-25-17-2-cores-2026-11-23" / "tables.json"


def auc_case(**changes: object) -> dict[str, Any]:
    made: dict[str, Any] = {"name": CASE, "recipe": "frappe", "auc": [0.90, 0.92], "auc_fp32": [0.91, 0.91]}
    return made | {"settings": settings_of("frappe", VARIANT)} | changes


def report_file(folder: Path, *cases: dict[str, Any], **extra: object) -> Path:
    path = folder / "earlier.json"
    whole = {"benchmark": "tables", "commit": "abc", "date": "2026-11-23", "cases": cases} | extra
    path.write_text(json.dumps(whole))
    return path


def finished(folder: Path, config: Any, *, auc: float) -> None:
    """The folder of a run as it is when its training is over."""
    run_folder = RunFolder(folder)
    CONFIG.write(run_folder.config, run_config_to_json(config))
    EVALUATION.write(run_folder.evaluation("test"), {"metrics": {"auc": auc}})


def test_cases_name_their_data_and_tables() -> None:
    assert set(PROMISED) == {
        f"{name}_{kind}_auc" for name in SUBJECTS for kind in ("d64_int8_cache5", "d128_int4_cache1", "d128_int4_lfu1")
    }
    assert VARIANTS["d128_int4_lfu1"].tables.cache_policy is CachePolicy.LFU
    lfu, lru = (MEMORY[f"dlrm_d128_int4_{each}_memory"].measure()["ratio"] for each in ("lfu1", "cache1"))
    assert (lfu, lru) == (pytest.approx(6.35, abs=0.01), pytest.approx(6.68, abs=0.01))
    assert len(set(CASES)) == len(CASES)
    for subject in SUBJECTS:
        config = config_of(subject, VARIANTS["d128_int4_cache1"], 7)
        config.check()
        assert config.training.seed == 7
        assert config.tables == VARIANTS["d128_int4_cache1"].tables
        assert getattr(config.model, "embedding_dim", 0) == 128
    stream = config_of("stream", VARIANT, 1)
    assert stream.dataset.rows == 10_000_000
    assert stream.teacher is not None
    assert stream.teacher.zipf_exponent == 1.05


def test_seeds_of_an_earlier_report_count_and_are_not_trained(tmp_path: Path) -> None:
    runs, plain = tmp_path / "runs", TablesConfig()
    finished(runs / "frappe_d64_int8_cache5_seed3", config_of("frappe", VARIANT, 3), auc=0.94)
    fp32 = type(VARIANT)(dim=64, tables=plain)
    finished(runs / "frappe_d64_fp32_seed3", config_of("frappe", fp32, 3), auc=0.95)
    options: dict[str, Any] = {"out": runs, "until": 0.0, "epochs": 0, "progress": NoProgress()}
    reported = read_report(report_file(tmp_path, auc_case()))
    found, left = collect([CASE], seeds=4, reported=reported, **options)
    summary = found[CASE].summary()
    assert left == ["frappe_d64_fp32_seed4", "frappe_d64_int8_cache5_seed4"]
    assert summary["auc"] == [0.90, 0.92, 0.94]
    assert summary["auc_differences"] == pytest.approx([-0.01, 0.01, -0.01])
    assert summary["seeds_of_earlier_report"] == [1, 2]
    assert summary["verdict"] == "met", "the mean is within the deviation of FP32's seeds"
    again = read_report(report_file(tmp_path, {"name": CASE, **summary}))
    assert collect([CASE], seeds=3, reported=again, **options)[0][CASE].summary()["auc"] == summary["auc"]
    alone, _ = collect([], seeds=5, reported=reported, **options)
    assert list(alone) == [CASE], "what is not asked for stands as it is"
    assert alone[CASE].differences == pytest.approx([-0.01, 0.01])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"name": "frappe_d64_int2_auc"}, "frappe_d64_int2_auc"),
        ({"recipe": "stream"}, "of stream"),
        ({"settings": settings_of("frappe", VARIANT, epochs=1)}, "other settings"),
        ({"seed_numbers": [1, 1]}, "1 different seeds, 2 values"),
        ({"auc": [0.9, 1.9]}, r"1\.9"),
    ],
)
def test_figures_that_cannot_stand_beside_new_ones_are_refused(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        read_report(report_file(tmp_path, auc_case(**changes)))


def test_cases_that_are_not_named_stay_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.tables, "_has_frappe", lambda: True)
    words = ["--cases", "dlrm_d64_int8_cache5_memory", "--with-report", str(COMMITTED), "--runs", str(tmp_path)]
    report = run(options=parse_options(words))
    before = json.loads(COMMITTED.read_text())
    by_name = {case["name"]: case for case in before["cases"]}
    assert {case.name for case in report.cases} | {str(each["name"]) for each in report.figures} == set(by_name)
    for case in report.cases:
        assert (case.ours, case.ratio, case.goal) == tuple(by_name[case.name][key] for key in ("ours", "ratio", "goal"))
        assert report.extra[f"table_share {case.name}"] == before[f"table_share {case.name}"]
    new = {"settings", "seeds_of_earlier_report"}  # what a report says of itself
    for figure in report.figures:
        old = by_name[str(figure["name"])]
        assert {name: figure[name] for name in old.keys() - new} == {name: old[name] for name in old.keys() - new}
    kept = next(note for note in report.notes if "not measured again" in note)
    assert "disk_8x_zipf" in kept
    assert "dlrm_d64_int8_cache5_memory" not in kept
    with pytest.raises(ConfigError, match="both"):
        run(quick=True, options=parse_options(words))


def test_a_finished_run_is_read_though_it_has_chosen_what_stops_it_early(tmp_path: Path) -> None:
    plain = type(VARIANT)(dim=64, tables=TablesConfig())
    for variant, name, auc in ((plain, "d64_fp32", 0.8), (VARIANT, "d64_int8_cache5", 0.7)):
        config = config_of("synthetic", variant, 1)
        assert config.training.early_stop.metric == "auto"
        finished(tmp_path / f"synthetic_{name}_seed1", override(config, {"training.early-stop.metric": "auc"}), auc=auc)
    options: dict[str, Any] = {"out": tmp_path, "until": 0.0, "epochs": 0, "progress": NoProgress()}
    name = "synthetic_d64_int8_cache5_auc"
    assert collect([name], seeds=1, **options)[0][name].differences == pytest.approx([-0.1])
    other = override(config_of("synthetic", VARIANT, 1), {"training.early-stop.patience": "7"})
    finished(tmp_path / "synthetic_d64_int8_cache5_seed1", other, auc=0.7)
    with pytest.raises(ConfigError, match="other settings"):
        collect([name], seeds=1, **options)

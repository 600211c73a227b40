"""Quality of next-item models over seeds: seeds of an earlier report count, ablations are paired; no training."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.next_item.quality import Found, collect, difference_table, differences, pooled, table
from benchmarks.next_item.reported import read_report
from benchmarks.next_item.subjects import SUBJECTS, config_of, folder_of, settings_of
from benchmarks.report import Report
from benchmarks.sequences import add_quality, parse_options, run
from ziggurat.errors import ConfigError
from ziggurat.models.sequence.layers.hstu import PositionTimeBias
from ziggurat.models.sequence.layers.places import AskedAt
from ziggurat.models.sequence.next_item import NextItemConfig
from ziggurat.recipes.run_config import run_config_to_json
from ziggurat.training.records.run_folder import CONFIG, EVALUATION
from ziggurat.training.report.progress import NoProgress

LATE = 0.0  # no training starts


def case(name: str = "ml1m_hstu", *, hits: tuple[float, ...] = (0.30, 0.32), **changes: object) -> dict[str, Any]:
    made = {"name": name, "recipe": SUBJECTS[name].recipe, "hr10": list(hits), "valid_hr10": list(hits)}
    return made | {"ndcg10_mean": 0.2, "ndcg10_std": 0.01, "seeds": len(hits)} | changes


def report_file(folder: Path, *cases: dict[str, Any], benchmark: str = "sequences") -> Path:
    path = folder / "sequences.json"
    path.write_text(json.dumps({"benchmark": benchmark, "commit": "abc", "date": "2026-11-23", "cases": cases}))
    return path


def finished(name: str, seed: int, *, out: Path, hit: float, gain: float = 0.2) -> None:
    """The folder of a run as it is when its training is over."""
    folder = folder_of(name, seed, out=out)
    CONFIG.write(folder.config, run_config_to_json(config_of(SUBJECTS[name], seed)))
    for split in ("valid", "test"):
        metrics = {"full_recall@10": hit, "full_ndcg@10": gain}
        EVALUATION.write(folder.evaluation(split), {"metrics": metrics})


def collected(names: list[str], *, out: Path, report: Path | None = None, seeds: int = 3):
    reported = read_report(report) if report else None
    options: dict[str, Any] = {"seeds": seeds, "until": LATE, "epochs": 0, "progress": NoProgress()}
    return collect(names, out=out, reported=reported, **options)


def test_mean_and_deviation_of_all_seeds_follow_from_those_of_some():
    values = [0.31, 0.33, 0.30, 0.35, 0.36]
    known, others = values[:3], values[3:]
    mean, std = pooled(others, count=3, mean=statistics.fmean(known), std=statistics.stdev(known))
    assert mean == pytest.approx(statistics.fmean(values))
    assert std == pytest.approx(statistics.stdev(values))
    assert pooled([0.4], count=1, mean=0.2, std=0.0) == pytest.approx((0.3, statistics.stdev([0.2, 0.4])))


def test_seeds_of_a_report_count_and_only_the_others_are_wanted(tmp_path):
    report = report_file(tmp_path, case(hits=(0.30, 0.32)))
    finished("ml1m_hstu", 3, out=tmp_path, hit=0.34, gain=0.23)
    finished("ml1m_hstu", 1, out=tmp_path, hit=0.99)  # the report has this seed
    found, left = collected(["ml1m_hstu"], out=tmp_path, report=report, seeds=4)
    figures = found["ml1m_hstu"].summary()
    assert left == ["ml1m_hstu, seed 4"]
    assert figures["hr10"] == [0.30, 0.32, 0.34]
    assert figures["seed_numbers"] == [1, 2, 3]
    assert figures["seeds_of_earlier_report"] == [1, 2]
    assert figures["ndcg10_mean"] == pytest.approx((0.2 + 0.2 + 0.23) / 3)


def test_a_report_can_be_taken_up_again_and_keeps_cases_that_were_not_asked_for(tmp_path):
    first = report_file(tmp_path, case(), case("ml1m_sasrec", hits=(0.29,), ndcg10_std=None))
    finished("ml1m_hstu", 3, out=tmp_path, hit=0.34)
    found, _ = collected(["ml1m_hstu"], out=tmp_path, report=first)
    report = Report(benchmark="sequences", claim="", command="")
    add_quality(report, found, reported=read_report(first))
    again = read_report(report_file(tmp_path, *json.loads(json.dumps(report.figures))))
    assert again.cases["ml1m_hstu"].hr10 == (0.30, 0.32, 0.34)
    assert again.cases["ml1m_sasrec"].seeds == (1,)
    assert not again.unchecked
    assert "ml1m_hstu 1, 2; ml1m_sasrec 1" in report.notes[0]
    assert "settings of ml1m_hstu, ml1m_sasrec" in report.notes[1]


def test_the_committed_report_needs_two_more_seeds_of_sasrec(tmp_path):
    reports = Path(__file__).resolve().parents[2] / "benchmarks" / "reports"
    path = reports / "amd-epyc-25-17-2-cores-2026-11-23" / "sequences.json"
    reported = read_report(path)
    assert len(reported.cases["ml1m_hstu"].hr10) >= 5
    _, left = collected(["ml1m_sasrec"], out=tmp_path, report=path, seeds=100)
    assert len(left) == 100 - len(reported.cases["ml1m_sasrec"].hr10)
    assert {each.name for each in reported.speed} >= {"ml1m_hstu_speed_rectools"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"recipe": "movielens_sasrec"}, "the recipe movielens_hstu"),
        ({"name": "ml1m_other"}, "a case out of"),
        ({"valid_hr10": [0.3]}, "2 different seeds, 2 and 1 values"),
        ({"seed_numbers": [4, 4]}, "1 different seeds"),
        ({"hr10": [0.3, 32.0]}, "between 0 and 1"),
        ({"hr10": [0.3, "much"]}, "hr10"),
        ({"settings": settings_of(SUBJECTS["ml1m_hstu"], epochs=1)}, "as it is trained today"),
        ({"settings": settings_of(SUBJECTS["ml1m_hstu_time"])}, "as it is trained today"),
    ],
)
def test_other_recipes_settings_and_values_are_refused(tmp_path, changes, match):
    with pytest.raises(ConfigError, match=match):
        read_report(report_file(tmp_path, case() | changes))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        read_report(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="bench sequences"):
        read_report(report_file(tmp_path, case(), benchmark="quality"))
    options = parse_options(["--with-report", "report.json"])
    with pytest.raises(ConfigError, match="--quick or --with-report"):
        run(quick=True, options=options)


def test_settings_of_a_report_without_a_newer_setting_are_the_same(tmp_path):
    settings = settings_of(SUBJECTS["ml1m_hstu"])
    del settings["model"]["stochastic_length"]
    assert read_report(report_file(tmp_path, case(settings=settings))).unchecked == ()


def test_ablations_change_the_biases_and_nothing_else():
    whole = config_of(SUBJECTS["ml1m_hstu"], 1)
    wanted = {
        "ml1m_hstu_no_bias": {"bias": PositionTimeBias.NONE},
        "ml1m_hstu_position": {"bias": PositionTimeBias.POSITION},
        "ml1m_hstu_time": {"bias": PositionTimeBias.TIME},
        "ml1m_hstu_own_time": {"asked": AskedAt.OWN},
    }
    assert {name for name, each in SUBJECTS.items() if each.against} == set(wanted)
    assert isinstance(whole.model, NextItemConfig)
    for name, changes in wanted.items():
        assert config_of(SUBJECTS[name], 1) == replace(whole, model=replace(whole.model, **changes))


def test_ablations_are_compared_seed_by_seed_in_a_table_of_their_own(tmp_path):
    for seed, hit in ((1, 0.28), (2, 0.31), (3, 0.2)):
        finished("ml1m_hstu_time", seed, out=tmp_path, hit=hit)
    report = report_file(tmp_path, case(hits=(0.30, 0.32)))
    found, left = collected(["ml1m_hstu_time", "ml1m_hstu_position"], out=tmp_path, report=report)
    assert left == [f"ml1m_hstu_position, seed {seed}" for seed in (1, 2, 3)]
    assert differences(found)["ml1m_hstu_time"] == pytest.approx({1: -0.02, 2: -0.01})
    text = difference_table(found)
    assert "ml1m_hstu: -0.0150 ± 0.0071, p 0.2" in text
    assert "1: -0.0200, 2: -0.0100" in text
    assert "| ml1m_hstu_position | bias by position | 0 | – | – | ml1m_hstu: – | no common seed |" in text
    assert "ml1m_hstu_time" not in table(found)


def test_without_ablations_there_is_no_second_table():
    assert difference_table({"ml1m_hstu": Found(subject=SUBJECTS["ml1m_hstu"])}) == ""


def test_runs_of_ablations_do_not_take_the_folder_of_the_recipe(tmp_path):
    names = {folder_of(name, 1, out=tmp_path).path.name for name in SUBJECTS}
    assert len(names) == len(SUBJECTS)
    assert "movielens_hstu_seed1" in names

"""Statistics, targets and the order of work of the tower quality benchmark, on made-up figures; nothing is trained."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tower_quality import Job, Results, cells, config_of, folder_of, left_over, parse_options, work
from benchmarks.tower_quality_subjects import SUBJECTS
from benchmarks.tower_quality_table import (
    Cell,
    Difference,
    as_good_as_flat,
    cell_of,
    cells_table,
    clearly_better,
    no_worse_than_naive,
    plot_auc,
    plot_differences,
    targets,
    targets_table,
)
from ziggurat.config import to_json
from ziggurat.models.build import check_towers
from ziggurat.plan import Towers


def cell(strategy: str, compression: int, *auc: float, subject: str = "made up") -> Cell:
    return Cell(subject=subject, strategy=strategy, compression=compression, auc=dict(enumerate(auc)))


FLAT = cell("flat", 1, 0.80, 0.81, 0.82)  # mean 0.81, sd 0.01


def test_differences_pair_the_seeds_that_both_have():
    one = Cell(subject="s", strategy="coherent", compression=8, auc={0: 0.9, 2: 0.7, 4: 0.5})
    other = Cell(subject="s", strategy="naive", compression=8, auc={4: 0.2, 0: 0.8, 1: 0.1})
    difference = Difference.of(one, other)
    assert difference.values == pytest.approx((0.1, 0.3))
    assert difference.mean == pytest.approx(0.2)
    assert difference.sd == pytest.approx(0.2 / math.sqrt(2))
    assert difference.standard_error == pytest.approx(0.1)


def test_nothing_in_common_has_no_difference():
    difference = Difference.of(cell("coherent", 2, 0.5), Cell(subject="s", strategy="naive", compression=2))
    assert math.isnan(difference.mean)
    assert math.isnan(difference.standard_error)
    assert difference.text() == ""


@pytest.mark.parametrize(("auc", "verdict"), [(0.8001, "met"), (0.7999, "missed"), (0.9, "met")])
def test_towers_are_as_good_as_flat_down_to_one_sd(auc, verdict):
    assert as_good_as_flat(cell("coherent", 4, auc, auc), FLAT).verdict == verdict


def test_one_seed_of_flat_judges_nothing():
    assert as_good_as_flat(cell("coherent", 4, 0.1), cell("flat", 1, 0.8)).verdict == "not measured"


@pytest.mark.parametrize(
    ("learned", "verdict"),
    [((0.7, 0.7), "met"), ((0.71, 0.7), "met"), ((0.70, 0.69), "within noise"), ((0.6, 0.61), "missed")],
)
def test_learned_is_no_worse_than_naive(learned, verdict):
    assert no_worse_than_naive(cell("coherent", 2, *learned), cell("naive", 2, 0.7, 0.7)).verdict == verdict


def test_clearly_better_takes_the_largest_deviation():
    naive = cell("naive", 8, 0.70, 0.72, 0.74)  # sd 0.02, the differences' sd is 0
    assert clearly_better(cell("coherent", 8, 0.73, 0.75, 0.77), naive).verdict == "missed"
    assert clearly_better(cell("coherent", 8, 0.75, 0.77, 0.79), naive).verdict == "met"
    assert clearly_better(cell("coherent", 8, 0.99), naive).verdict == "not measured"


def test_targets_cover_every_promise_and_only_planted_subjects_need_to_be_clear():
    table = [FLAT, cell("coherent", 4, 0.81, 0.81), cell("coherent", 8, 0.7, 0.7), cell("naive", 8, 0.6, 0.6)]
    verdicts = {target.name: target.verdict for target in targets(table, planted=["made up"])}
    assert verdicts == {
        "made up: towers within 1 sd of flat at compression 4": "met",
        "made up: learned ≥ naive at compression 4": "not measured",
        "made up: learned ≥ naive at compression 8": "met",
        "made up: learned better than naive by more than 2 sd at compression 8": "met",
    }
    assert not [target for target in targets(table, planted=[]) if "2 sd" in target.name]


def test_tables_show_every_cell_and_target():
    table = [FLAT, cell("coherent", 8, 0.70, 0.72), cell("naive", 8, 0.6, 0.6)]
    text = cells_table(table)
    assert len(text.splitlines()) == 2 + len(table)
    assert "| made up | coherent | 8 | 2 | 0.71000 ± 0.01414 | -0.09500 ± 0.00707 | +0.11000 ± 0.01414 |" in text
    assert "| made up | flat |  | 3 | 0.81000 ± 0.01000 |  |  |" in text
    assert "missed" in targets_table([as_good_as_flat(cell("coherent", 4, 0.1), FLAT)])


def test_plots_are_drawn(tmp_path: Path):
    table = [FLAT, cell("coherent", 8, 0.70, 0.72), cell("naive", 8, 0.6), cell("flat", 1, 0.5, subject="other")]
    plot_auc(table, tmp_path / "auc.png", best={"made up": 0.9})
    plot_differences(table, tmp_path / "differences.png")
    plot_differences([FLAT], tmp_path / "none.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("auc.png", "differences.png", "none.png"))


def test_work_takes_the_flat_model_of_a_subject_first_and_nothing_twice():
    jobs = list(work(SUBJECTS, seeds=5))
    assert max(Counter(jobs).values()) == 1
    assert len(jobs) == 5 * sum(len(cells) for subject in SUBJECTS for cells in subject.rounds)
    first = {job.subject: job for job in reversed(jobs)}
    assert {(job.strategy, job.seed) for job in first.values()} == {("flat", 0)}
    length = sum(len(subject.rounds[0]) for subject in SUBJECTS)
    assert {(job.subject, job.strategy, job.compression) for job in jobs[: 5 * length]} == {
        (subject.key, *cell) for subject in SUBJECTS for cell in subject.rounds[0]
    }


def test_finished_jobs_become_cells_in_reading_order():
    subject = SUBJECTS[0]
    metrics = {
        Job(subject=subject.key, strategy=strategy, compression=compression, seed=seed): {"auc": seed + compression}
        for strategy, compression in (("naive", 8), ("coherent", 8), ("coherent", 2), ("flat", 1))
        for seed in (1, 0)
    }
    found = cells(Results(metrics=metrics), SUBJECTS)
    shown = [(each.strategy, each.compression) for each in found]
    assert shown == [("flat", 1), ("coherent", 2), ("coherent", 8), ("naive", 8)]
    assert cell_of(found, subject.name, "coherent", 8).auc == {0: 8, 1: 9}


def test_runs_are_told_apart_by_all_their_settings(tmp_path: Path):
    subject = SUBJECTS[0]
    job = Job(subject=subject.key, strategy="coherent", compression=4, seed=0)
    names = tuple(feature.name for feature in subject.config.table_schema.features if feature.name.startswith("C"))
    one = config_of(subject, job, towers=Towers(towers=(names[:8], names[8:])))
    other = config_of(subject, job, towers=Towers(towers=(names[:7], names[7:])))
    faster = replace(one, training=replace(one.training, learning_rate=0.1))
    assert len({folder_of(job, config, out=tmp_path) for config in (one, other, faster)}) == 3
    assert one.training.threads == 1
    assert one.training.seed == 0


def test_a_run_is_found_again_when_settings_have_been_added_and_choices_resolved(tmp_path: Path):
    subject = SUBJECTS[0]
    job = Job(subject=subject.key, strategy="flat", compression=1, seed=0)
    config = config_of(subject, job, towers=None)
    written = to_json(config)
    written["training"]["precision"] = "fp32"
    written["model"]["embedding"]["kernel"] = "torch"
    del written["parallel"], written["training"]["log_every"]
    folder = tmp_path / subject.key / "flat_c1_seed0_written_earlier"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))
    assert folder_of(job, config, out=tmp_path) == folder
    changed = replace(config, training=replace(config.training, log_every=51))
    assert folder_of(job, changed, out=tmp_path) != folder


def test_every_cell_of_every_subject_can_be_built():
    for subject in SUBJECTS:
        for strategy, compression in itertools.chain(*subject.rounds):
            if strategy != "flat":
                module = replace(subject.module, compression=compression)
                assert module.output_dim(subject.config.model.embedding_dim) >= 1
                check_towers(replace(subject.config.model, tower_module=module), Towers(towers=(("a",),)))


def test_what_is_left_takes_a_line_a_cell():
    jobs = [Job(subject="s", strategy=name, compression=2, seed=seed) for seed in (1, 2) for name in ("flat", "naive")]
    assert left_over(jobs) == [
        "s, flat, compression 2: no time for seeds 1, 2",
        "s, naive, compression 2: no time for seeds 1, 2",
    ]


def test_minutes_are_read():
    assert parse_options([]).minutes == 0
    assert parse_options(["--minutes", "2.5"]).minutes == 2.5

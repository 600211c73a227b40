"""A damaged training log is read up to the damage, and says how many lines are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ziggurat.training.records.log import LogRecord, MetricsFile, num_lost_lines, read_records
from ziggurat.training.records.windows import WindowRecord, WindowsFile, read_windows
from ziggurat.training.report.plots import training_figures

FIRST = {"kind": "train", "step": 10, "epoch": 0, "rows": 640, "loss": 0.6, "lr": 0.1, "timing": {"samples_per_s": 5.0}}
LAST = {"kind": "valid", "step": 20, "epoch": 1, "log_loss": 0.5}


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "step": 15, "loss": "0.3"}',
        '{"kind": "train", "step": 15, "loss": null}',
        '{"kind": "valid", "step": 15, "log_loss": "a"}',
        '{"kind": "valid", "step": true, "log_loss": 0.5}',
        '{"kind": "valid", "step": 15, "log_loss": [0.5]}',
        '{"kind": "train", "step": 15, "loss": 0.5, "timing": 3}',
        '{"kind": "products", "step": 15, "gone": 3}',
        '{"kind": 5, "step": 15}',
        '{"step": 15}',
        "[1, 2]",
        "hello",
        "",
    ],
)
def test_a_line_that_reports_could_not_read_ends_what_is_read_and_is_counted(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "metrics.jsonl", json.dumps(FIRST), line, json.dumps(LAST))
    assert read_records(path) == [FIRST]
    assert num_lost_lines(path) == 2


def test_a_metric_that_an_earlier_version_wrote_as_null_is_read_and_not_drawn(tmp_path: Path) -> None:
    undefined: LogRecord = {"kind": "valid", "step": 10, "auc": None, "log_loss": 0.6}
    path = written(tmp_path / "metrics.jsonl", json.dumps(FIRST), json.dumps(undefined), json.dumps(LAST))
    assert read_records(path) == [FIRST, undefined, LAST]
    assert num_lost_lines(path) == 0
    assert training_figures(read_records(path), best_step=20)


@pytest.mark.parametrize("end", ["\u2028", "\x85", "\u2029"])
def test_text_with_ends_of_lines_of_its_own_stays_one_line_also_when_the_run_goes_on(tmp_path: Path, end: str) -> None:
    mine: LogRecord = {"kind": "mine", "step": 15, "note": f"first{end}second"}
    log = MetricsFile(tmp_path / "metrics.jsonl")
    for record in (FIRST, mine, LAST):
        log.append(record)
    log.close()
    assert read_records(tmp_path / "metrics.jsonl") == [FIRST, mine, LAST]
    assert num_lost_lines(tmp_path / "metrics.jsonl") == 0
    MetricsFile(tmp_path / "metrics.jsonl", resume_step=15).close()
    assert read_records(tmp_path / "metrics.jsonl") == [FIRST, mine]


def test_a_window_may_have_an_end_of_a_line_in_its_name(tmp_path: Path) -> None:
    windows = [
        WindowRecord(window=1, name="a\u2028b", step=0, rows=3),
        WindowRecord(window=2, name="c", step=5, rows=3),
    ]
    file = WindowsFile(tmp_path / "windows.jsonl", last_step=0)
    for each in windows:
        file.append(each)
    assert read_windows(tmp_path / "windows.jsonl") == windows

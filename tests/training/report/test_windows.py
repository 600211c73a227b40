"""The windows of a stream in its report: units, lines to judge by, and what teachers had said."""

from __future__ import annotations

import math

from ziggurat.data.streams.stability import ALARM
from ziggurat.training.records.windows import HistoryRows, TaughtRows, WindowRecord
from ziggurat.training.report.windows import history_notes, taught_notes, window_figures, windows_section

DAY = 86_400.0


def record(window: int, **more: object) -> WindowRecord:
    values: dict[str, object] = {"metrics": {"ne": 0.9 + 0.01 * window, "calibration": 1.0 + 0.1 * (-1) ** window}}
    if window == 1:
        values = {}
    return WindowRecord(window=window, name=f"2026-01-{window:02}", step=window, rows=100, **(values | more))  # type: ignore[arg-type]


def test_every_plot_names_its_unit_and_what_runs_along_it() -> None:
    shift = {f"C{number}": number / 20 for number in range(9)}
    unknown = {f"C{number}": number / 20 for number in range(9)}
    taught = {"big": TaughtRows(share=0.5, age=DAY)}
    records = [
        record(number, shift=shift, shift_before=shift, unknown=unknown, teachers=taught) for number in range(1, 5)
    ]
    figures = window_figures(records)
    axes = [figure.axes[0] for figure in figures]
    assert [each.get_ylabel() for each in axes] == [
        "NE, lower is better",
        "mean score / mean label",
        "% of samples",
        "population stability index",
        "population stability index",
        "% of rows",
        "days",
    ]
    assert {each.get_xlabel() for each in axes} == {"window"}
    for each in axes:
        colours = [line.get_color() for line in each.lines]
        assert len(set(colours)) == len(colours), "no two curves look alike"
        assert any(len(line.get_xdata()) > 0 for line in each.lines), "no plot is empty"
    # The six features with most, with a legend beside the curves, and the line above which an index is notable.
    shares = axes[2]
    assert shares.get_title(loc="left").endswith(", 6 largest")
    legend = shares.get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text() == "C8"
    assert any(list(line.get_ydata()) == [ALARM, ALARM] for line in axes[3].lines)


def test_a_teacher_that_has_said_nothing_has_no_plot_of_its_age() -> None:
    records = [record(number, teachers={"big": TaughtRows(share=0.0)}) for number in range(1, 4)]
    assert [figure.axes[0].get_ylabel() for figure in window_figures(records)][-1] == "% of rows"
    (note,) = taught_notes(records)
    assert note.startswith("Teacher big had scored 0.0% of 300 rows, and none in 3 of 3 windows.")


def test_the_report_says_what_teachers_had_scored_and_how_old_it_was() -> None:
    taught = [
        TaughtRows(share=0.0),
        TaughtRows(share=0.5, age=DAY, versions=("a",)),
        TaughtRows(share=1.0, age=3 * DAY, versions=("a", "b")),
    ]
    records = [record(number, teachers={"big": each}) for number, each in enumerate(taught, start=1)]
    page = windows_section(records, control=[], figures=[])
    assert "Teacher big had scored 50.0% of 300 rows, by 2 versions, and none in 1 of 3 windows." in page
    assert "1 days old in the window where it was newest, and 3 days old where it was oldest" in page
    assert not math.isnan(records[1].metrics["ne"] or math.nan)


def test_the_report_names_bad_rows_and_labels_of_the_future() -> None:
    page = windows_section([record(1), record(2, bad=3, labels_ahead=2)], control=[], figures=[])
    assert "3 rows were put aside as bad rows" in page
    assert "2 labels have a time of more than a day after their window was read (2026-01-02)" in page
    frozen = windows_section([record(1), record(2, is_trained=False)], control=[], figures=[])
    assert "the first window alone was trained" in frozen


def test_the_report_says_what_rows_read_of_a_teachers_vectors() -> None:
    read = [
        HistoryRows(share=0.0),
        HistoryRows(share=0.5, length=2.0, age=DAY, versions=("a",)),
        HistoryRows(share=1.0, length=5.0, age=3 * DAY, versions=("a", "b")),
    ]
    records = [record(number, histories={"big": each}) for number, each in enumerate(read, start=1)]
    (note,) = history_notes(records)
    assert note.startswith(
        "50.0% of 300 rows had a history of vectors of teacher big, of 4.0 vectors as a mean, and none in 1 of 3 "
        "windows. Its latest example was 3 days old"
    )
    assert [figure.axes[0].get_ylabel() for figure in window_figures(records)][-2:] == ["% of rows", "vectors"]
    page = windows_section(records, control=(), figures=())
    assert "history of big 50.0%, 2.0 vectors, 1 days old" in page
    assert history_notes([record(1)]) == []


def test_rows_that_were_left_out_as_late_are_counted_by_window_and_in_all() -> None:
    records = [record(1), record(2, dropped=3), record(3, dropped=4)]
    page = windows_section(records, control=[], figures=[])
    assert "7 rows came late and were left out" in page
    assert "<th class=n>late, left out" in page
    assert "<td>2026-01-02<td class=n>100<td class=n>0<td class=n>3" in page
    assert "left out" not in windows_section([record(1), record(2)], control=[], figures=[])

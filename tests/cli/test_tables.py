"""Tables lose no number at any width, on a terminal or in a pipe, for every kind of table that a verb prints."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ziggurat.cli import tables
from ziggurat.cli.main import main
from ziggurat.cli.tables import print_table, table_text

COLUMNS = ("model", "test AUC", "test log loss", "FLOPs a sample", "difference", "why", "")
ROWS = [
    ("wukong", "0.98513 ± 0.00011", "0.1234", "12,345,678", "+0.00211 ± 0.00034", "more products of fields " * 4, ""),
    ("logistic_regression", "0.93250 ± 0.00002", "0.2345", "1,024", "−0.05132 ± 0.00002", "the floor", ""),
    ("dnn", "0.98404", "7.41", "–", "", "column 12 of 300 was left out", "note 17"),
]


def numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*\d|\d", text))


@pytest.mark.parametrize("width", [20, 40, 80, 200, None])
def test_every_number_is_there(width: int | None) -> None:
    shown = table_text(COLUMNS, ROWS, width=width)
    assert numbers(shown) == numbers(" ".join(cell for row in ROWS for cell in row))
    assert "…" not in shown
    if width and width >= 40:
        assert max(map(len, shown.splitlines())) <= width
    for word in COLUMNS[:-1]:
        assert word in shown


def test_the_form_follows_the_width() -> None:
    wide, narrow = table_text(COLUMNS, ROWS, width=None), table_text(COLUMNS, ROWS, width=40)
    assert len(wide.splitlines()) == len(ROWS) + 2
    assert "model: wukong" in narrow
    assert re.search(r"test AUC: +0.98513 ± 0.00011$", narrow, re.MULTILINE)
    folded = table_text(COLUMNS, ROWS, width=160)
    assert "0.98513 ± 0.00011" in folded
    assert "model: wukong" not in folded
    assert table_text(COLUMNS, [], width=80) == ""


@pytest.mark.parametrize(("is_terminal", "width"), [(True, 40), (True, 80), (True, 200), (False, 80)])
def test_a_terminal_and_a_pipe(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda: console)
    print_table(COLUMNS, ROWS)
    assert numbers(out.getvalue()) == numbers(" ".join(cell for row in ROWS for cell in row))
    if not is_terminal:
        assert len(out.getvalue().splitlines()) == len(ROWS) + 3  # as wide as it needs


@pytest.mark.parametrize("width", [40, 80, 200])
def test_verbs_print_whole_tables(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a simulation shows on a terminal is what it shows in a pipe."""
    seen: list[tuple] = []
    original = tables.table_text

    def kept(columns, rows, *, width):
        seen.append((columns, rows))
        return original(columns, rows, width=width)

    monkeypatch.setattr(tables, "table_text", kept)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: a terminal
    monkeypatch.setenv("TERM", "dumb")
    assert main(["simulate", "mlperf_dlrm", "--cluster", "h100x8", "h100x16", "--budget-s", "0.05"]) == 0
    _, rows = seen[0]
    assert len(rows) == 3
    cells = " ".join(cell for row in rows for cell in row)
    shown = capsys.readouterr().out
    for number in set(numbers(cells)):
        assert shown.count(number) >= cells.count(number), number
    assert "…" not in shown

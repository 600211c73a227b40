"""Text on a terminal breaks between words: numbers stay whole, and commands stay one line to paste."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from ziggurat.files.streams import columns_of, folded

RESULT = "test     auc 0.54317 ± 0.05179  log_loss 1.37996  calibration 0.98760  gauc 0.47785  full_mrr 0.12345"
DATA = (
    "data     train 1,234,567, valid 12,345, test 12,345 from 1 raw file; by time column 'time': valid from 1700288000"
)
NEXT = "next     better than logistic regression? ziggurat report 'my runs/first one' --baseline"


def words_with_digits(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"\d", word)]


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 200])
@pytest.mark.parametrize(
    "line", [RESULT, DATA, "step 1,173  valid  auc 0.74869  (best)", "    indented 12,345,678 " * 9]
)
def test_no_number_is_broken_and_none_is_lost(width: int, line: str) -> None:
    shown = folded(line, width=width)
    assert words_with_digits(shown) == words_with_digits(line)
    assert shown.split() == line.split()
    assert max(map(columns_of, shown.splitlines())) <= width
    if columns_of(line) <= width:
        assert shown == line


def test_a_metric_keeps_its_value_and_stands_below_the_first() -> None:
    assert folded(RESULT, width=40).splitlines() == [
        "test     auc 0.54317 ± 0.05179",
        "         log_loss 1.37996",
        "         calibration 0.98760",
        "         gauc 0.47785  full_mrr 0.12345",
    ]


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_command_is_one_line_however_long(width: int) -> None:
    lines = folded(NEXT, width=width).splitlines()
    assert lines[-1].strip() == "ziggurat report 'my runs/first one' --baseline"
    alone = "  ziggurat train auto --data.train shop.csv --schema shop.toml"
    assert folded(alone, width=width) == alone


def test_lines_of_a_text_fold_each_by_itself_and_wide_marks_count_twice() -> None:
    assert folded("one\n\ntwo three", width=5) == "one\n\ntwo\n  three"
    assert columns_of("映画 1") == 6


@pytest.mark.parametrize("width", [40, 80])
def test_an_error_on_a_narrow_terminal_breaks_between_words(width: int) -> None:
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    command = [sys.executable, "-m", "ziggurat", "train"]
    subprocess.run(command, stderr=writing, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False)
    os.close(writing)
    said = os.read(reading, 65_536).decode()
    os.close(reading)
    lines = [line for line in said.splitlines() if "ziggurat " not in line]
    assert max(map(columns_of, lines)) <= width
    assert "ziggurat train auto --data.train FILE --schema SCHEMA" in said
    assert "expected: a recipe, --config FILE, or" in said

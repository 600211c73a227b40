"""What is shown of a run: little by default, everything when asked for, and nothing but whole numbers."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ziggurat.training.report import startup
from ziggurat.training.report.progress import LineProgress
from ziggurat.training.report.progress_bar import BarProgress


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(*, verbose: bool, seconds: int) -> list[str]:
    """The lines of a phase of so many seconds, one unit a second."""
    stream = io.StringIO()
    clock = Clock()
    progress = LineProgress(stream, verbose=verbose, clock=clock)
    progress.begin("epoch 1/1", total=seconds)
    for second in range(seconds + 1):
        clock.now = float(second)
        progress.update(second)
    progress.detail("step 7  valid  auc 0.5")
    progress.end()
    progress.say("warning: look here")
    return stream.getvalue().splitlines()


def test_a_short_phase_leaves_no_line_and_a_warning_always_does() -> None:
    assert watched(verbose=False, seconds=9) == ["warning: look here"]
    assert watched(verbose=True, seconds=9) == [
        "step 7  valid  auc 0.5",
        "epoch 1/1: 9/9 (100 %)",
        "warning: look here",
    ]


def test_lines_of_a_long_phase_come_ever_later_but_every_minute() -> None:
    done = [int(re.findall(r": (\d+)/", line)[0]) for line in watched(verbose=False, seconds=300)[:-1]]
    assert done == [10, 30, 70, 130, 190, 250]
    assert len(watched(verbose=True, seconds=300)) == 30 + 3


def test_phases_that_follow_one_another_share_the_time_to_the_first_line() -> None:
    stream = io.StringIO()
    clock = Clock()
    progress = LineProgress(stream, clock=clock)
    for number in range(4):
        progress.begin(f"epoch {number}", total=3)
        for _ in range(3):
            clock.now += 1.0
            progress.update(3)
        progress.end()
    assert stream.getvalue() == "epoch 3: 3/3 (100 %)\n"


def test_a_total_that_was_an_estimate_is_corrected() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, verbose=True)
    progress.begin("fit", total=5001)
    progress.update(5000)
    progress.update(5000, total=5000)
    progress.end()
    assert stream.getvalue() == "fit: 5,000/5,000 (100 %)\n"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("verbose", [False, True])
def test_a_bar_shows_whole_numbers_on_a_terminal_of_any_width(width: int, verbose: bool) -> None:
    out = io.StringIO()
    bar = BarProgress(Console(file=out, width=width, force_terminal=True, color_system=None), verbose=verbose)
    bar.begin("epoch 12/27", total=123_456)
    bar.update(65_536, note="loss 0.5487 · valid auc 0.54317 (best) · 21,914 samples/s")
    bar.say("warning: the first 1,234,567 of 9,876,543 rows have 1700288000 as their time")
    bar.detail("step 123,456  valid  auc 0.54317  log_loss 0.12345")
    bar.end()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "…" not in shown
    known = {"12/27", "123,456", "65536/123456", "65,536/123,456", "0.5487", "0.54317", "21,914", "0.12345"}
    known |= {"1,234,567", "9,876,543", "1700288000", "53%", "0%"}
    for word in shown.split():
        if re.search(r"\d", word) and not re.fullmatch(r"\d+:\d\d:\d\d|0/123456", word):
            assert word in known, f"{word!r} in {width} columns"
    assert ("step 123,456" in shown) == verbose
    assert "1700288000" in shown
    if width >= 80:
        assert "loss 0.5487" in shown


def test_what_is_slower_than_it_could_be_is_said_in_short_too() -> None:
    sections = {
        "Machine": {"c++ compiler": "none: slower"},
        "Ranks": {"ranks of one host": "through torch.distributed, slower: no /dev/shm", "ranks": "2 ranks on 1 host"},
        "Embedding kernels": {"why": "fastest, measured just now"},
    }
    said = startup._slower_than_asked(sections)
    assert said == ["         ranks of one host: through torch.distributed, slower: no /dev/shm"]

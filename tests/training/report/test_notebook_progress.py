"""A bar in a notebook: one output that changes; elsewhere a terminal or lines have it."""

from __future__ import annotations

import sys
import types

import pytest

from ziggurat.training.report.notebook_progress import NotebookProgress, bar_in_notebook
from ziggurat.training.report.progress import show_progress


class Display:
    """Stands in for `IPython.display`: keeps what an output shows."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def HTML(self, text: str) -> str:  # noqa: N802  its name in IPython
        return text

    def display(self, html: str, *, display_id: bool) -> types.SimpleNamespace:
        assert display_id
        shown = [html]
        self.outputs.append(shown)
        return types.SimpleNamespace(update=shown.append)


def test_a_phase_is_one_output_that_ends_with_its_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    bar = NotebookProgress(display)
    bar.begin("epoch <1>", total=1000)
    for done in range(0, 1001, 10):
        bar.update(done, note="loss 0.5")
    bar.end()
    (shown,) = display.outputs
    shown = list(shown)
    assert len(shown) < 20, "it is not drawn for every batch"
    assert "epoch &lt;1&gt;" in shown[0]
    assert 'value="1000" max="1000"' in shown[-1]
    assert "1,000/1,000 loss 0.5" in shown[-1]
    bar.begin("rows", total=None)
    bar.update(7)
    bar.detail("a detail")
    bar.say("a warning")
    bar.end()
    (shown,) = display.outputs
    assert "<progress></progress> <code>7</code>" in shown[-1], "the next phase takes its place"
    assert capsys.readouterr().out == "a warning\n"
    bar.update(7, total=9)
    bar.end()
    assert 'value="7" max="9"' in display.outputs[0][-1]


def test_it_is_chosen_in_the_kernel_of_a_notebook_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bar_in_notebook() is None
    shell = types.SimpleNamespace(kernel=None)
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # pyright: ignore[reportAttributeAccessIssue]
    ipython.display = types.ModuleType("IPython.display")  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    assert bar_in_notebook() is None, "IPython on a terminal has no kernel"
    shell.kernel = object()
    assert isinstance(show_progress(), NotebookProgress)

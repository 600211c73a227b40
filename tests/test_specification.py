"""Half-written members of kinds: refused in four parts where they are added, on one process, before training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.features.kinds import Feature
from ziggurat.features.schema import Categorical
from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.table_optimizers import TableOptimizerKind
from ziggurat.placements import Part, Placement
from ziggurat.specification import Specification
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.metrics import Judged, Metric


@pytest.fixture(autouse=True)
def unlisted() -> Iterator[None]:
    """Kinds as they were, whatever a test adds."""
    kinds: tuple[type[Specification], ...] = (Placement, RowFormat, TableOptimizerKind, Metric)
    known = [dict(kind._members) for kind in kinds]
    yield
    for kind, members in zip(kinds, known, strict=True):
        kind._members.clear()
        kind._members.update(members)


class Rows(Placement):
    """Cuts a table into equal blocks of rows; each test breaks one of its answers."""

    name = "rows_for_a_test"
    cuts_rows = True

    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        ends = [num_rows * (index + 1) // num_parts for index in range(num_parts)]
        begins = [0, *ends[:-1]]
        return tuple(
            Part(first_row=begin, num_rows=end - begin, first_column=0, num_columns=num_columns)
            for begin, end in zip(begins, ends, strict=True)
        )


class NoParts(Placement):
    name = "no_parts"


class OverlappingRows(Rows):
    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        return super().parts(num_rows=num_rows, num_columns=num_columns, num_parts=1) * num_parts


class WrongOwners(Rows):
    def owners(self, rows_N: torch.Tensor, parts: Any) -> torch.Tensor:
        return torch.zeros_like(rows_N)


class RowsOnTopOfEachOther(Rows):
    def local_rows(self, rows_N: torch.Tensor, owners_N: torch.Tensor, parts: Any) -> torch.Tensor:
        return torch.zeros_like(rows_N)


class Ends(Rows):
    def parts(self, **sizes: int) -> tuple[Part, ...]:
        return (1 // 0,)


class Spaced(Rows):
    name = "two words"


class NoRule(TableOptimizerKind):
    name = "no_rule"

    def change(self, rows: Any) -> Any:
        return 3


class SaysText(Metric):
    name = "says_text"

    def compute(self, judged: Judged) -> Any:
        return "0.5"


@pytest.mark.parametrize(
    ("kind", "make", "expected", "where"),
    [
        (Placement, NoParts, "a placement that has parts", "NoParts"),
        (Placement, OverlappingRows, "blocks of rows in order", "OverlappingRows.parts"),
        (Placement, WrongOwners, "the part that holds each row", "WrongOwners.owners"),
        (Placement, RowsOnTopOfEachOther, "a place of its own for each row", "RowsOnTopOfEachOther.local_rows"),
        (Placement, Ends, "answers when it is tried out", f"{Path(__file__).name}:"),
        (Placement, Spaced, "whose name is a word", "Spaced"),
        (TableOptimizerKind, NoRule, "answers when it is tried out", "table_optimizer.py:"),
        (Metric, SaysText, "a float", "SaysText.compute"),
    ],
)
def test_a_half_written_member_is_refused_where_it_is_added(kind: Any, make: Any, expected: str, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kind.add(make())
    assert expected in refused.value.expected
    assert where in refused.value.where
    assert refused.value.ways_out
    assert make.name not in kind._members


def test_a_class_in_place_of_an_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="the class SaysText") as refused:
        Metric.add(SaysText)  # type: ignore[type-var]
    assert refused.value.ways_out == ("make one: Metric.add(SaysText())",)


@pytest.mark.parametrize("kind", [Placement, Metric, Hook])
def test_what_derives_from_another_kind_or_none_is_refused(kind: Any) -> None:
    for stranger in (object(), NoRule(), lambda trainer: None):
        with pytest.raises(ConfigError, match=f"which derives from {kind.__module__}.{kind.__name__}") as refused:
            kind.add(stranger)
        assert refused.value.where == f"{kind.__name__}.add"
        assert stranger not in list(kind)


def test_what_is_no_class_of_a_kind_of_feature_is_refused() -> None:
    with pytest.raises(ConfigError, match="an object of Categorical"):
        Feature.add(Categorical(name="x"))  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"derives from ziggurat.features.kinds.feature.Feature"):
        Feature.add(SaysText)  # type: ignore[type-var]


class NeedsTwo(Metric):
    name = "needs_two"

    def compute(self, judged: Judged) -> float:
        return float(judged.samples.scores[0])


def test_a_metric_that_fails_of_no_samples_is_told_that_there_were_none() -> None:
    with pytest.raises(ConfigError, match=r"of 0 samples") as refused:
        Metric.add(NeedsTwo())
    assert "IndexError" in refused.value.found


def test_a_whole_one_is_listed() -> None:
    assert Placement.add(Rows()) is Placement("rows_for_a_test")


def test_a_module_that_fails_while_it_is_imported_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_extension.py").write_text("first = 1\nsecond = first.size\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["--extension", "broken_extension", "recipes"]) != 0
    shown = capsys.readouterr().err
    assert "'int' object has no attribute 'size'" in shown
    assert "broken_extension.py:2" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "about"),
    [(["--extension", "{}", "recipes"], "--extension {}"), (["verify", "--model", "{}:A", "x"], "--model {}:A")],
)
@pytest.mark.parametrize(
    ("name", "content", "found", "place"),
    [
        ("slip_in_syntax", b"first = 1\nsecond = (\n", "SyntaxError", "slip_in_syntax.py:2"),
        ("other_bytes", b"first = '\xff\xfe'\n", "SyntaxError", "other_bytes.py"),
        ("null_bytes", b"first = 1\n\0\n", "null bytes", "null_bytes.py"),
        ("text_of_code", b"first = 1\n\ncompile('1 +', '<text>', 'eval')\n", "SyntaxError", "text_of_code.py:3"),
        ("ends_at_once", b"import sys\nsys.exit(0)\n", "SystemExit: 0", "ends_at_once.py:2"),
    ],
)
def test_a_module_that_cannot_be_imported_names_its_file(
    words: list[str],
    about: str,
    name: str,
    content: bytes,
    found: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / f"{name}.py").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([word.format(name) for word in words]) == 2
    shown = capsys.readouterr().err
    assert found in shown
    assert f"command line, {about.format(name)}, at {tmp_path / place}" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("name", ["../mine", "./mine.py", "", "folder/mine.py"])
def test_a_path_is_no_name_of_a_module(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--extension", name, "recipes"]) == 2
    shown = capsys.readouterr().err
    assert "no path, and no .py" in shown
    assert "start where the module is" in shown

"""Pictures are written whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from ziggurat.errors import FileError
from ziggurat.files import write_figure
from ziggurat.retrieval.recall import RecallPoint, plot_recall


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matplotlib write half of a picture and find no room for the rest."""

    def savefig(self: Figure, path: str | Path, **options: Any) -> None:
        Path(path).write_bytes(b"half of a picture")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_has_the_format_of_its_name(tmp_path: Path, ending: str) -> None:
    write_figure(Figure(), tmp_path / f"x.{ending}")
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert (tmp_path / f"x.{ending}").read_bytes().startswith(begins[ending])


@pytest.mark.usefixtures("full_disk")
def test_an_older_picture_stays_where_there_is_no_room_for_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    path.write_bytes(b"older")
    points = [RecallPoint(filter="", probes=1, recall=0.5, us_per_query=3.0, plan="scan")]
    with pytest.raises(FileError, match="No space left on device"):
        write_figure(Figure(), path)
    with pytest.raises(FileError, match="No space left on device"):
        plot_recall(points, path, k=5)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]

"""A drifting data set in a folder: it can be streamed, goes on, and replaces nothing of others."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from ziggurat.cli.main import main
from ziggurat.data.synthetic.drift import DriftConfig, DriftingTeacher
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema_io import read_schema
from ziggurat.runs.drifting import write_drifting

CONFIG = DriftConfig(window_rows=3000, preference_rate=0.1, lifetime=5.0)


def test_a_folder_goes_on_to_the_same_files_as_one_that_was_written_at_once(tmp_path: Path) -> None:
    at_once = write_drifting(CONFIG, folder=tmp_path / "a", windows=3)
    write_drifting(CONFIG, folder=tmp_path / "b", windows=2)
    second = tmp_path / "b" / "windows" / "2026-01-02.parquet"
    second.unlink()
    later = write_drifting(CONFIG, folder=tmp_path / "b", windows=3)
    assert (at_once.drawn, later.drawn) == (3, 2)
    for name in ("truth.csv", "schema.toml", "drift.json", *(f"windows/2026-01-0{day}.parquet" for day in (1, 2, 3))):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    teacher = DriftingTeacher(CONFIG)
    assert_frame_equal(pl.read_parquet(second), teacher.frame(1), check_exact=True)
    assert at_once.truth["label best ne"][1] == teacher.truth(1).best["label"].normalised_entropy
    assert at_once.truth["new C1"].to_list() == [teacher.new_ids(window)["C1"] for window in range(3)]
    assert read_schema(tmp_path / "a" / "schema.toml") == teacher.schema()
    assert (tmp_path / "a" / "truth.svg").read_text().count("best NE of label") == 1


def test_a_folder_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="new or empty folder"):
        write_drifting(CONFIG, folder=tmp_path, windows=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    write_drifting(CONFIG, folder=tmp_path / "a", windows=1)
    with pytest.raises(ConfigError, match="the settings"):
        write_drifting(DriftConfig(window_rows=4000), folder=tmp_path / "a", windows=1)
    with pytest.raises(ConfigError, match="at least one window"):
        write_drifting(CONFIG, folder=tmp_path / "b", windows=0)


@pytest.mark.parametrize("damage", ["", "window,name\n1,a\n", "window,name\nx,a\n"])
def test_a_damaged_list_of_windows_is_refused_and_its_way_out_works(damage: str, tmp_path: Path) -> None:
    write_drifting(CONFIG, folder=tmp_path / "a", windows=2)
    truth = tmp_path / "a" / "truth.csv"
    whole = truth.read_text()
    truth.write_text(damage)
    with pytest.raises(DataError, match="a line for each window"):
        write_drifting(CONFIG, folder=tmp_path / "a", windows=2)
    truth.unlink()
    assert write_drifting(CONFIG, folder=tmp_path / "a", windows=2).drawn == 2
    assert truth.read_text() == whole


def test_the_verb_takes_settings_and_names_the_nearest_to_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["drift", "--windows", "2", "--window-rows", "1500", "--preference-rate", "0.1"]) == 0
    said = capsys.readouterr().out.strip().splitlines()
    assert said[-1].endswith("--data.train drifting/windows/ --schema drifting/schema.toml --by day")
    assert pl.read_parquet("drifting/windows/2026-01-02.parquet").height == 1500
    assert main(["drift", "--windows", "4", "--preference-rat", "0.2"]) != 0
    assert "--preference-rate" in capsys.readouterr().err
    assert main(["drift", "--settings"]) == 0
    assert "--preference-rate" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_that_the_verb_prints_streams_the_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["drift", "--windows", "3", "--window-rows", "1500", "--preference-rate", "0.1"]) == 0
    command = capsys.readouterr().out.strip().splitlines()[-1].split()[1:]
    assert main([*command, "--threads", "1", "--model.embedding.kernel", "torch", "--out", "runs/live"]) == 0
    lines = (tmp_path / "runs" / "live" / "windows.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["2026-01-01", "2026-01-02", "2026-01-03"]

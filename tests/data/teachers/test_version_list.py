"""A version that is gone as a whole is missed, and whoever wants to do without it says so."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ziggurat.data.teachers import side_table
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, versions_in
from ziggurat.data.teachers.version_list import LIST_FILE
from ziggurat.errors import DataError

FACTS = TeacherVersion(
    teacher="big",
    version="one",
    labels=("click",),
    are_probabilities=(True,),
    example_columns=("user",),
    watermark=0.0,
    is_calendar=True,
)


def log(folder: Path, version: str, *, teacher: str = "big") -> VersionFolder:
    made = VersionFolder.begin(folder, replace(FACTS, teacher=teacher, version=version))
    made.write_part(np.array([[1, 2]], dtype=np.uint64), np.zeros((1, 1), dtype=np.float32), None)
    return made


def names(folder: Path) -> list[str]:
    return [f"{each.facts.teacher}/{each.facts.version}" for each in versions_in(folder)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "side table"
    for version in ("one", "two"):
        log(folder, version)
    log(folder, "one", teacher="small")
    return folder


@pytest.mark.parametrize(("gone", "found"), [("big/two", "big/two"), ("small", "small/one"), ("big", "and 1 more")])
def test_what_is_gone_is_missed_and_a_copy_restores_it(table: Path, tmp_path: Path, gone: str, found: str) -> None:
    shutil.move(table / gone, tmp_path / "kept")
    with pytest.raises(DataError, match=found):
        versions_in(table)
    with pytest.raises(DataError, match=found):
        log(table, "three")
    shutil.move(tmp_path / "kept", table / gone)
    assert names(table) == ["big/one", "big/two", "small/one"]


def test_the_ways_out_lead_on(table: Path) -> None:
    shutil.rmtree(table / "big/two")
    with pytest.raises(DataError) as refused:
        versions_in(table)
    log(table, "two")  # again
    assert names(table) == ["big/one", "big/two", "small/one"]
    shutil.rmtree(table / "big/two")
    subprocess.run(["sh", "-c", refused.value.ways_out[-1].partition(": ")[2]], check=True)
    assert names(table) == ["big/one", "small/one"]
    log(table, "one")  # lists what is there
    shutil.rmtree(table / "small")
    with pytest.raises(DataError, match="small/one"):
        versions_in(table)


def test_tables_of_before_there_was_a_list_open_and_are_listed_when_somebody_logs(table: Path) -> None:
    (table / LIST_FILE).unlink()
    assert names(table) == ["big/one", "big/two", "small/one"]
    assert not (table / LIST_FILE).exists(), "readers write nothing"
    log(table, "one")
    shutil.rmtree(table / "big/two")
    with pytest.raises(DataError, match="big/two"):
        versions_in(table)


@pytest.mark.parametrize("look", [names, lambda table: log(table, "three")], ids=["reads", "logs"])
def test_a_version_that_begins_while_another_looks_is_not_gone(
    table: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
) -> None:
    found = side_table._names_of_versions

    def another_begins_behind(folder: Path) -> list[str]:
        monkeypatch.setattr(side_table, "_names_of_versions", found)
        before = found(folder)
        log(table, "meanwhile")
        return before

    monkeypatch.setattr(side_table, "_names_of_versions", another_begins_behind)
    look(table)
    assert "big/meanwhile" in names(table)


def test_parts_that_come_with_their_description_meanwhile_are_not_alone(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (table / "big/meanwhile").mkdir()
    parts = side_table._names_of_parts

    def behind_another(folder: Path) -> list[str]:
        if folder.name == "meanwhile":
            monkeypatch.setattr(side_table, "_names_of_parts", parts)
            log(table, "meanwhile")
        return parts(folder)

    monkeypatch.setattr(side_table, "_names_of_parts", behind_another)
    assert "big/meanwhile" in names(table)


def test_a_version_that_another_process_begins_meanwhile_keeps_its_parts(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = side_table.found_versions

    def behind_another(folder: Path, look: Callable[[], list[str]], **settings: str) -> list[str]:
        monkeypatch.setattr(side_table, "found_versions", found)
        log(table, "three")
        return found(folder, look, **settings)

    monkeypatch.setattr(side_table, "found_versions", behind_another)
    version = VersionFolder.begin(table, replace(FACTS, version="three"))
    assert len(version.index()) == 1


def test_versions_that_begin_at_the_same_time_are_all_listed(tmp_path: Path) -> None:
    threads = [threading.Thread(target=log, args=(tmp_path, f"v{number}")) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    shutil.rmtree(tmp_path / "big")
    with pytest.raises(DataError, match="and 7 more"):
        versions_in(tmp_path)

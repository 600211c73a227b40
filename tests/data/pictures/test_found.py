"""Names of pictures: below the folder that was named, in one order, each once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ziggurat.data.pictures.found import find_pictures
from ziggurat.data.pictures.picture_file import PictureFile, RefusedPictureError
from ziggurat.errors import DataError, MissingFileError


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for name in ("shop/b.jpg", "shop/a/2.png", "shop/a/1", "shop/.hidden", "other/b.jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path


def test_every_file_of_a_folder_has_its_path_below_it(shop: Path) -> None:
    assert [each.name for each in find_pictures([shop / "shop"])] == [".hidden", "a/1", "a/2.png", "b.jpg"]
    assert [each.name for each in find_pictures([shop])][-1] == "shop/b.jpg"


def test_files_and_globs_have_their_own_names(shop: Path) -> None:
    found = find_pictures([shop / "shop/b.jpg", f"{shop}/shop/a/*"])
    assert [(each.name, each.path) for each in found] == [
        ("1", shop / "shop/a/1"),
        ("2.png", shop / "shop/a/2.png"),
        ("b.jpg", shop / "shop/b.jpg"),
    ]


def test_a_file_that_is_named_twice_counts_once(shop: Path) -> None:
    assert len(find_pictures([shop / "shop", shop / "shop/b.jpg", shop / "shop"])) == 4


def test_two_files_of_one_name_are_refused(shop: Path) -> None:
    with pytest.raises(DataError, match=r"'b\.jpg' twice"):
        find_pictures([shop / "shop", shop / "other"])


def test_nothing_there_is_an_error(shop: Path) -> None:
    (shop / "empty").mkdir()
    for place in ("absent", "empty", "shop/*.gif"):
        with pytest.raises(MissingFileError, match=place.replace("*", r"\*")):
            find_pictures([shop / place])


def test_a_link_to_a_folder_is_not_followed_and_not_left_out_without_a_word(shop: Path) -> None:
    (shop / "shop/up").symlink_to(shop)
    (shop / "shop/a/other").symlink_to("../../other")
    found = {each.name: each.path for each in find_pictures([shop / "shop"])}
    assert sorted(found) == [".hidden", "a/1", "a/2.png", "a/other", "b.jpg", "up"]
    with pytest.raises(RefusedPictureError, match="a folder behind a link"):
        PictureFile(found["up"]).pixels(32)


def test_a_folder_that_cannot_be_listed_stands_among_the_pictures(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refusing(path: str) -> object:
        if os.fspath(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert [each.name for each in find_pictures([shop / "shop"])] == [".hidden", "a", "b.jpg"]


def test_a_name_that_is_no_text_is_written_out_and_refused(shop: Path) -> None:
    with open(os.fsencode(shop / "shop") + b"/b\xff.jpg", "wb") as file:
        file.write(b"x")
    found = {each.name: each.path for each in find_pictures([shop / "shop"])}
    assert r"b\xff.jpg" in found
    with pytest.raises(RefusedPictureError, match="UTF-8"):
        PictureFile(found[r"b\xff.jpg"]).pixels(32)


def test_what_the_command_writes_and_what_killed_ones_left_is_no_picture(shop: Path) -> None:
    folder = shop / "shop"
    for name in ("vectors.parquet", "vectors.parquet.parts/part-000000.parquet", ".b.jpg.123.0123abcd.tmp"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    own = (folder / "vectors.parquet", folder / "vectors.parquet.parts")
    assert [each.name for each in find_pictures([folder], without=own)] == [".hidden", "a/1", "a/2.png", "b.jpg"]
    assert len(find_pictures([folder])) == 6
    # A place that is named is looked at, whatever is written there.
    assert [each.name for each in find_pictures([folder / "a"], without=[folder / "a"])] == ["1", "2.png"]


def test_a_name_with_the_marks_of_a_glob_is_itself(shop: Path) -> None:
    (shop / "a[1].jpg").write_bytes(b"x")
    assert [each.name for each in find_pictures([shop / "a[1].jpg"])] == ["a[1].jpg"]

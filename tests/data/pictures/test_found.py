"""Names of pictures: below the folder that was named, in one order, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.data.pictures.found import find_pictures
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


def test_a_link_to_a_folder_above_is_not_followed(shop: Path) -> None:
    (shop / "shop/up").symlink_to(shop)
    assert len(find_pictures([shop / "shop"])) == 4


def test_a_name_with_the_marks_of_a_glob_is_itself(shop: Path) -> None:
    (shop / "a[1].jpg").write_bytes(b"x")
    assert [each.name for each in find_pictures([shop / "a[1].jpg"])] == ["a[1].jpg"]

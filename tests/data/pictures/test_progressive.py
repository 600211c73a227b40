"""Copies in scans: the same picture, fewer bytes to a small one, nothing lost without a word."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from tests.data.pictures.made import animated, encoded, photo
from ziggurat.data.pictures.found import find_pictures
from ziggurat.data.pictures.jpeg_scans import USUAL_SCANS, JpegScans
from ziggurat.data.pictures.picture_file import PictureFile
from ziggurat.data.pictures.progressive import ProgressiveFolder, as_progressive
from ziggurat.errors import ConfigError, FileError


def scans_of(content: bytes) -> JpegScans:
    scans = JpegScans()
    scans.add(content)
    return scans


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_baseline_jpeg_comes_in_the_usual_scans_with_its_own_pixels(subsampling: int, tmp_path: Path) -> None:
    content = encoded(photo(200, 240), "JPEG", quality=85, subsampling=subsampling)
    copy = as_progressive(content)
    scans = scans_of(copy)
    assert scans.is_whole
    assert tuple(scans.scans) == USUAL_SCANS
    assert scans.ends == sorted(scans.ends)
    (tmp_path / "before").write_bytes(content)
    (tmp_path / "after").write_bytes(copy)
    before, after = (PictureFile(tmp_path / name).pixels(200).astype(int) for name in ("before", "after"))
    assert np.abs(before - after).mean() < 0.5
    assert as_progressive(copy) == copy


def test_the_place_where_it_was_taken_is_left_out_and_its_turn_is_not(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    exif[271] = "a maker of cameras"
    content = encoded(photo(64, 64), "JPEG", exif=exif, icc_profile=b"a profile")
    copy = as_progressive(content)
    assert b"a maker" in content
    assert b"a maker" not in copy
    assert b"a profile" in copy
    (tmp_path / "before").write_bytes(content)
    (tmp_path / "after").write_bytes(copy)
    before, after = (PictureFile(tmp_path / name).pixels(64).astype(int) for name in ("before", "after"))
    assert np.abs(before - after).mean() < 3  # a turned picture would differ by tens


def test_a_folder_is_copied_with_a_reason_for_what_is_not(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    (shop / "hats").mkdir(parents=True)
    (shop / "hats/1.jpg").write_bytes(encoded(photo(), "JPEG"))
    (shop / "2.png").write_bytes(encoded(photo(), "PNG"))
    (shop / "3.gif").write_bytes(animated("GIF"))
    for _ in range(2):
        folder = ProgressiveFolder(tmp_path / "copies")
        pictures = find_pictures([shop])
        folder.check(pictures)
        for picture in pictures:
            folder.write(picture)
        folder.write_refused()
    assert (folder.done.num_rewritten, folder.done.num_copied, folder.done.num_there) == (0, 0, 2)
    assert [each.name for each in find_pictures([tmp_path / "copies"])] == ["2.png", "hats/1.jpg"]
    assert (tmp_path / "copies/2.png").read_bytes() == (shop / "2.png").read_bytes()
    assert pl.read_csv(folder.refused_path)["reason"].to_list() == ["animated"]
    assert folder.done.bytes_before == sum((shop / name).stat().st_size for name in ("hats/1.jpg", "2.png"))


def test_pictures_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(encoded(photo(), "JPEG"))
    with pytest.raises(ConfigError, match="_progressive"):
        ProgressiveFolder(tmp_path).check(find_pictures([tmp_path]))


def copied(shop: Path, out: Path) -> ProgressiveFolder:
    folder = ProgressiveFolder(out)
    pictures = find_pictures([shop], without=(out, folder.refused_path))
    folder.check(pictures)
    for picture in pictures:
        folder.write(picture)
    return folder


def test_a_copy_of_a_picture_that_has_changed_is_not_kept_without_a_word(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    for number in range(2):
        (shop / f"{number}.jpg").write_bytes(encoded(photo(seed=number), "JPEG"))
        os.utime(shop / f"{number}.jpg", (1_600_000_000, 1_600_000_000))
    out = tmp_path / "copies"
    copied(shop, out)
    (shop / "1.jpg").write_bytes(encoded(photo(seed=7), "JPEG"))
    with pytest.raises(FileError, match=r"1 files of another time, the first .*1\.jpg") as error:
        copied(shop, out)
    # The first way out.
    command = str(error.value).split("again: ")[1].splitlines()[0]
    assert command == f"rm {out / '1.jpg'}"
    (out / "1.jpg").unlink()
    done = copied(shop, out).done
    assert (done.num_there, done.num_rewritten) == (1, 1)
    assert copied(shop, out).done.num_there == 2


def test_nothing_that_is_no_copy_is_written_over(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    other = tmp_path / "holidays"
    for folder, seed in ((shop, 0), (other, 1)):
        folder.mkdir()
        (folder / "1.jpg").write_bytes(encoded(photo(seed=seed), "JPEG"))
    os.utime(other / "1.jpg", (1_600_000_000, 1_600_000_000))
    before = (other / "1.jpg").read_bytes()
    with pytest.raises(FileError, match=r"--out .*holidays_new"):
        copied(shop, other)
    assert (other / "1.jpg").read_bytes() == before


def test_copies_of_pictures_that_are_gone_are_named(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    for number in range(2):
        (shop / f"{number}.jpg").write_bytes(encoded(photo(seed=number), "JPEG"))
    copied(shop, tmp_path / "copies")
    (shop / "0.jpg").unlink()
    assert copied(shop, tmp_path / "copies").done.others == ["0.jpg"]


def test_copies_below_the_pictures_are_not_copied_again(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(encoded(photo(), "JPEG"))
    for _ in range(2):
        done = copied(tmp_path, tmp_path / "copies").done
    assert (done.num_there, done.num_rewritten, done.refused.total()) == (1, 0, 0)

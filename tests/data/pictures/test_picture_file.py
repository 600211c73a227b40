"""One picture: read as far as needed, the same pixels whatever its form, refused with the reason that fits."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.pictures.made import animated, encoded, jpeg_with, photo, png_header, png_of_16_bits
from ziggurat.data.pictures.jpeg_scans import USUAL_SCANS
from ziggurat.data.pictures.picture_file import PictureFile, PictureLimits, Reason, RefusedPictureError


def written(folder: Path, content: bytes, name: str = "picture") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _cmyk_frame(content: bytearray, at: int) -> None:
    content[at + 9] = 4


def _twelve_bits(content: bytearray, at: int) -> None:
    content[at + 4] = 12


def _huge(content: bytearray, at: int) -> None:
    content[at + 5 : at + 9] = b"\xff\xff\xff\xff"


def tarred(content: bytes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        entry = tarfile.TarInfo("1.jpg")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def _with_a_second_frame() -> bytes:
    """A JPEG that says its size twice, the second time beyond the bytes that are read first, and much larger."""
    content = encoded(photo(), "JPEG")
    at = content.index(b"\xff\xc0")
    frame = bytearray(content[at : at + 19])
    comment = b"\xff\xfe" + (2000).to_bytes(2) + bytes(1998)
    larger = frame.copy()
    _huge(larger, 0)
    return content[:at] + bytes(frame) + comment + bytes(larger) + content[at + 19 :]


REFUSED: dict[str, tuple[Callable[[], bytes], Reason]] = {
    "empty": (lambda: b"", Reason.NO_PICTURE),
    "jpeg 2000": (lambda: b"\0\0\0\x0cjP  \r\n\x87\n", Reason.OTHER_FORMAT),
    "avif": (lambda: b"\0\0\0 ftypavif\0\0\0\0", Reason.OTHER_FORMAT),
    "tar": (lambda: tarred(encoded(photo(), "JPEG")), Reason.OTHER_FORMAT),
    "two frames": (_with_a_second_frame, Reason.TOO_MANY_PIXELS),
    "text": (lambda: b"a list of shoes\n", Reason.NO_PICTURE),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", Reason.NO_PICTURE),
    "cut jpeg": (lambda: encoded(photo(), "JPEG")[:-400], Reason.BROKEN),
    "cut progressive jpeg": (lambda: encoded(photo(), "JPEG", progressive=True)[:-400], Reason.BROKEN),
    "start of a jpeg": (lambda: b"\xff\xd8", Reason.BROKEN),
    "jpeg of zeros": (lambda: b"\xff\xd8" + bytes(100), Reason.BROKEN),
    "cut png": (lambda: encoded(photo(), "PNG")[:-400], Reason.BROKEN),
    "start of a png": (lambda: b"\x89PNG\r\n\x1a\n", Reason.BROKEN),
    "cut webp": (lambda: encoded(photo(), "WEBP")[:40], Reason.BROKEN),
    "bomb png": (lambda: png_header(100_000, 100_000), Reason.TOO_MANY_PIXELS),
    "large png": (lambda: png_header(10_000, 10_000), Reason.TOO_MANY_PIXELS),
    "bomb jpeg": (lambda: jpeg_with(_huge), Reason.TOO_MANY_PIXELS),
    "no pixels": (
        lambda: jpeg_with(lambda content, at: content.__setitem__(slice(at + 5, at + 7), b"\0\0")),
        Reason.BROKEN,
    ),
    "cmyk jpeg": (lambda: encoded(photo().convert("CMYK"), "JPEG"), Reason.CMYK),
    "cmyk jpeg by its frame": (lambda: jpeg_with(_cmyk_frame), Reason.BROKEN),
    "cmyk tiff": (lambda: encoded(photo().convert("CMYK"), "TIFF"), Reason.CMYK),
    "12 bits jpeg": (lambda: jpeg_with(_twelve_bits), Reason.SIXTEEN_BITS),
    "16 bits png in colours": (png_of_16_bits, Reason.SIXTEEN_BITS),
    "16 bits png in grey": (lambda: encoded(Image.fromarray(np.zeros((9, 9), np.uint16)), "PNG"), Reason.SIXTEEN_BITS),
    "16 bits tiff": (lambda: encoded(Image.fromarray(np.zeros((9, 9), np.uint16)), "TIFF"), Reason.SIXTEEN_BITS),
    "float tiff": (lambda: encoded(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"), Reason.SIXTEEN_BITS),
    "lab tiff": (lambda: encoded(Image.new("LAB", (9, 9)), "TIFF"), Reason.COLOURS),
    "animated gif": (lambda: animated("GIF"), Reason.ANIMATED),
    "animated webp": (lambda: animated("WEBP"), Reason.ANIMATED),
    "animated png": (lambda: animated("PNG"), Reason.ANIMATED),
    "tiff of two pages": (lambda: animated("TIFF"), Reason.ANIMATED),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("num_scans", [0, 10])
def test_refused_with_its_reason(name: str, num_scans: int, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    path = written(tmp_path, make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RefusedPictureError) as error:
            PictureFile(path).pixels(32, num_scans=num_scans)
    assert error.value.reason is reason
    assert error.value.found


def test_what_is_no_readable_file_is_unreadable(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "link", "absent", "."):
        with pytest.raises(RefusedPictureError) as error:
            PictureFile(tmp_path / name).pixels(32)
        assert error.value.reason is Reason.UNREADABLE


def test_limits_are_those_that_were_given(tmp_path: Path) -> None:
    path = written(tmp_path, encoded(photo(20, 30), "PNG"))
    assert PictureFile(path, limits=PictureLimits(max_pixels=600)).pixels(32).shape == (32, 32, 3)
    with pytest.raises(RefusedPictureError, match="20 × 30 pixels"):
        PictureFile(path, limits=PictureLimits(max_pixels=599)).pixels(32)
    with pytest.raises(RefusedPictureError, match="too many bytes"):
        PictureFile(path, limits=PictureLimits(max_bytes=100)).pixels(32)


def test_the_limit_of_pixels_is_ours_and_not_that_of_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, encoded(photo(20, 30), "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert PictureFile(path, limits=PictureLimits(max_pixels=600)).pixels(32).shape == (32, 32, 3)
    with pytest.raises(RefusedPictureError, match=r"too many pixels: 600 pixels$"):
        PictureFile(path, limits=PictureLimits(max_pixels=200)).pixels(32)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_transparency_takes_twice_the_memory_of_its_pixels_and_no_more(tmp_path: Path) -> None:
    side = 3000
    path = written(tmp_path, encoded(Image.new("RGBA", (side, side), (10, 20, 30, 40)), "PNG", compress_level=1))
    program = (
        "import resource, sys; from pathlib import Path; from ziggurat.data.pictures.picture_file import PictureFile\n"
        "small = PictureFile(Path(sys.argv[2])).pixels(64)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "PictureFile(Path(sys.argv[1])).pixels(64)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    other = written(tmp_path, encoded(photo().convert("RGBA"), "PNG"), "other")
    done = subprocess.run(
        [sys.executable, "-c", program, path, other], capture_output=True, text=True, check=True, timeout=120
    )
    assert 1024 * int(done.stdout) < 2.3 * 4 * side**2


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG"])
def test_every_format_gives_the_square_in_the_middle(kind: str, tmp_path: Path) -> None:
    picture = photo(90, 120)
    given = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    pixels = PictureFile(written(tmp_path, encoded(picture, kind, **given))).pixels(64)
    middle = picture.crop((0, 15, 90, 105)).resize((64, 64), Image.Resampling.BICUBIC)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - np.asarray(middle)).mean() < (8 if kind == "GIF" else 2)


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    for name, picture in {
        "rgba": Image.new("RGBA", (20, 20), (10, 20, 30, 0)),
        "la": Image.new("LA", (20, 20), (10, 0)),
    }.items():
        assert (PictureFile(written(tmp_path, encoded(picture, "PNG"), name)).pixels(32) == 255).all()


def test_half_of_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    picture = photo(90, 120).convert("RGBA")
    picture.putalpha(Image.fromarray(draw.integers(0, 256, (8, 6), dtype=np.uint8)).resize((90, 120)))
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    plain = Image.alpha_composite(white, picture).convert("RGB")
    pixels = PictureFile(written(tmp_path, encoded(picture, "PNG"))).pixels(64)
    wanted = plain.crop((0, 15, 90, 105)).resize((64, 64), Image.Resampling.BICUBIC)
    assert np.abs(pixels.astype(int) - np.asarray(wanted)).mean() < 1


def test_a_camera_turned_picture_stands_upright(tmp_path: Path) -> None:
    picture = photo(64, 64)
    exif = Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    for kind in ("JPEG", "PNG"):
        turned = PictureFile(written(tmp_path, encoded(picture, kind, exif=exif), f"turned {kind}")).pixels(64)
        upright = PictureFile(written(tmp_path, encoded(picture, kind), f"upright {kind}")).pixels(64)
        assert np.array_equal(turned, np.rot90(upright, k=-1))


def test_a_progressive_jpeg_is_read_up_to_its_scan(tmp_path: Path) -> None:
    content = encoded(photo(400, 533), "JPEG", progressive=True, quality=90)
    path = written(tmp_path, content)
    whole = PictureFile(path)
    pixels = whole.pixels(48)
    assert whole.bytes_read == len(content)
    errors = []
    read = []
    for num_scans in range(1, len(USUAL_SCANS)):
        file = PictureFile(path)
        errors.append(np.abs(file.pixels(48, num_scans=num_scans).astype(int) - pixels).mean())
        read.append(file.bytes_read)
        assert file.is_in_parts
    assert read == sorted(read)
    assert read[0] < 0.3 * len(content)
    assert 0 < errors[0] < 12
    assert errors[-2] < 1


def test_reading_on_reads_no_byte_twice(tmp_path: Path) -> None:
    content = encoded(photo(400, 533), "JPEG", progressive=True, quality=90)
    path = written(tmp_path, content)
    file = PictureFile(path)
    file.pixels(48, num_scans=1)
    few = file.bytes_read
    file.release()
    again = file.pixels(200, num_scans=5)
    assert few < file.bytes_read < len(content)
    assert np.array_equal(again, PictureFile(path).pixels(200, num_scans=5))
    assert np.array_equal(file.pixels(200), PictureFile(path).pixels(200))
    assert file.bytes_read == len(content)


def test_scans_in_another_order_are_read_whole(tmp_path: Path) -> None:
    content = encoded(photo(400, 533).convert("L"), "JPEG", progressive=True, quality=90)
    file = PictureFile(written(tmp_path, content))
    pixels = file.pixels(48, num_scans=1)
    assert file.bytes_read == len(content)
    assert not file.is_in_parts
    assert np.array_equal(pixels, PictureFile(file.path).pixels(48))


def test_the_second_picture_of_a_phone_is_not_read_as_an_animation(tmp_path: Path) -> None:
    content = encoded(photo(), "MPO", save_all=True, append_images=[photo(seed=1)])
    assert PictureFile(written(tmp_path, content)).pixels(32).shape == (32, 32, 3)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_read_or_refused_and_never_ends_in_another_error(data: st.DataObject, tmp_path: Path) -> None:
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "progressive"]))
    content = bytearray(
        encoded(photo(40, 50), "JPEG", progressive=True) if kind == "progressive" else encoded(photo(40, 50), kind)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(1, len(content))) :]
    file = PictureFile(written(tmp_path, bytes(content)), limits=PictureLimits(max_pixels=100_000))
    num_scans = data.draw(st.integers(0, 11))
    with contextlib.suppress(RefusedPictureError):
        assert file.pixels(32, num_scans=num_scans).shape == (32, 32, 3)

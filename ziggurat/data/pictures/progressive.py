"""Write pictures as progressive JPEG, so that whoever needs few pixels later reads few bytes.

    JPEG, baseline            decoded and coded again with its own tables, in the usual ten scans
    JPEG, progressive         copied, where its scans are the usual ones; else coded again as above
    PNG, WebP, GIF, …         copied: another loss of quality is not for us to decide
    what would be refused     not written, with its reason in a table

Pillow keeps tables and sampling (`quality="keep"`); what is lost is rounding, and some sharpness of colours where these
have fewer samples (on five photographs of clothes 0.004 to 0.14 of 255 levels, a mean). Kept are the profile of colours
and the orientation; the rest of what cameras and programs write beside a picture (thumbnails, places, times) is left
out, since it stands before the first scan and would be read each time.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from ziggurat.data.pictures.found import FoundPicture
from ziggurat.data.pictures.jpeg_scans import START, USUAL_SCANS, JpegScans
from ziggurat.data.pictures.picture_file import ORIENTATION, PictureFile, PictureLimits, RefusedPictureError
from ziggurat.errors import ConfigError
from ziggurat.files import read_bytes, replacing, write_bytes

_LOOK = 8  # side of the square by which a picture is tried


@dataclass(kw_only=True)
class Rewritten:
    """The result of writing pictures as progressive JPEG.

    Args:
        num_rewritten: coded again.
        num_copied: as they were.
        num_there: of an earlier command.
        bytes_before: of all that have a copy.
        bytes_after: of their copies.
        refused: how many were refused, by reason.
    """

    num_rewritten: int = 0
    num_copied: int = 0
    num_there: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def as_progressive(content: bytes) -> bytes:
    """Return a JPEG in the usual scans; any other content as it is.

    Args:
        content: of a picture that can be decoded.
    """
    if not content.startswith(START):
        return content
    scans = JpegScans()
    scans.add(content)
    if tuple(scans.scans) == USUAL_SCANS:
        return content
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    image = JpegImageFile(io.BytesIO(content))
    orientation = image.getexif().get(ORIENTATION, 1)
    exif = Image.Exif()
    if orientation != 1:
        exif[ORIENTATION] = orientation
    written = io.BytesIO()
    image.save(
        written,
        "JPEG",
        quality="keep",
        progressive=True,
        optimize=True,
        icc_profile=image.info.get("icc_profile"),
        exif=exif,
    )
    return written.getvalue()


class ProgressiveFolder:
    """Writes pictures into a folder under their names, one after the other; given again, it goes on.

    Args:
        out: the folder.
        limits: above which a picture is refused.
    """

    def __init__(self, out: str | Path, *, limits: PictureLimits | None = None) -> None:
        self.out = Path(out)
        self.done = Rewritten()
        self._limits = limits or PictureLimits()
        self._refused: list[tuple[str, str, str]] = []

    @property
    def refused_path(self) -> Path:
        """The table of refused pictures, beside the folder."""
        return self.out.with_name(f"{self.out.name}_refused.csv")

    def check(self, pictures: Sequence[FoundPicture]) -> None:
        """Refuse to write over a picture that is read.

        Raises:
            ConfigError: the folder holds one of them under its own name.
        """
        for picture in pictures:
            if (self.out / picture.name).resolve() == picture.path.resolve():
                raise ConfigError(
                    expected="a folder of its own for the copies",
                    found=f"{self.out}, which holds the picture {picture.name}",
                    where="--out",
                    ways_out=f"--out {self.out.with_name(self.out.name + '_progressive')}",
                )

    def write(self, picture: FoundPicture) -> None:
        """Write the copy of a picture, or note why it is refused."""
        target = self.out / picture.name
        if target.is_file():
            self.done.num_there += 1
            self._count(picture, target)
            return
        try:
            PictureFile(picture.path, limits=self._limits).pixels(_LOOK)
        except RefusedPictureError as error:
            self.done.refused[error.reason.value] += 1
            self._refused.append((picture.name, error.reason.value, error.found))
            return
        content = read_bytes(picture.path, max_bytes=self._limits.max_bytes)
        copy = as_progressive(content)
        if copy == content:
            self.done.num_copied += 1
        else:
            self.done.num_rewritten += 1
        write_bytes(target, copy)
        self._count(picture, target)

    def write_refused(self) -> None:
        """Write the table of refused pictures, empty where there are none."""
        names = ("picture", "reason", "found")
        with replacing(self.refused_path) as temporary:
            pl.DataFrame(self._refused, schema=dict.fromkeys(names, pl.String), orient="row").write_csv(temporary)

    def _count(self, picture: FoundPicture, target: Path) -> None:
        self.done.bytes_before += picture.path.stat().st_size
        self.done.bytes_after += target.stat().st_size

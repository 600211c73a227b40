"""Write pictures as progressive JPEG, so that whoever needs few pixels later reads few bytes.

    JPEG, baseline            decoded and coded again with its own tables, in the usual ten scans
    JPEG, progressive         copied, where its scans are the usual ones; else coded again as above
    PNG, WebP, GIF, …         copied: another loss of quality is not for us to decide
    what would be refused     not written, with its reason in a table

Pillow keeps tables and sampling (`quality="keep"`); what is lost is rounding, and some sharpness of colours where these
have fewer samples (on five photographs of clothes 0.004 to 0.14 of 255 levels, a mean). Kept are the profile of colours
and the orientation; the rest of what cameras and programs write beside a picture (thumbnails, places, times) is left
out, since it stands before the first scan and would be read each time.

A copy has the time of its picture. Given again, the command keeps copies whose time is still that, and refuses to go on
where one's is another: the picture was changed since, or the file is no copy of ours, which nothing may write over.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from ziggurat.commands import pasted
from ziggurat.data.pictures.found import FoundPicture
from ziggurat.data.pictures.jpeg_scans import START, USUAL_SCANS, JpegScans
from ziggurat.data.pictures.picture_file import ORIENTATION, PictureFile, PictureLimits, RefusedPictureError
from ziggurat.errors import ConfigError, FileError
from ziggurat.files import is_temporary, read_bytes, replacing

_LOOK = 8  # side of the square by which a picture is tried
_FEW = 5  # paths that an error lists
_SAME_TIME_NS = 2_000_000_000  # some file systems keep times in steps of two seconds


@dataclass(kw_only=True)
class Rewritten:
    """The result of writing pictures as progressive JPEG.

    Args:
        num_rewritten: coded again.
        num_copied: as they were.
        num_there: of an earlier command.
        others: names of files in the folder that are copies of none of the pictures.
        bytes_before: of all that have a copy.
        bytes_after: of their copies.
        refused: how many were refused, by reason.
    """

    num_rewritten: int = 0
    num_copied: int = 0
    num_there: int = 0
    others: list[str] = field(default_factory=list)
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
        """Refuse to write over a picture that is read, and to keep a copy of a picture that has changed.

        Raises:
            ConfigError: the folder holds one of them under its own name.
            FileError: the folder holds a file that is no copy of the picture of its name as that is now.
        """
        outdated: list[Path] = []
        for picture in pictures:
            copy = self.out / picture.name
            if not copy.is_file():
                continue
            if copy.resolve() == picture.path.resolve():
                raise ConfigError(
                    expected="a folder of its own for the copies",
                    found=f"{self.out}, which holds the picture {picture.name}",
                    where="--out",
                    ways_out=f"--out {self.out.with_name(self.out.name + '_progressive')}",
                )
            if not _is_of_time(copy, _time_of(picture.path)):
                outdated.append(copy)
        if outdated:
            whole = pasted(self.out)
            few = " ".join(pasted(copy) for copy in outdated[:_FEW])
            raise FileError(
                expected="copies of the pictures as they are now: of the same time",
                found=f"{len(outdated):,} files of another time, the first {outdated[0]}",
                where=str(self.out),
                ways_out=(
                    f"where they are old copies, delete them, and give the command again: rm {few}"
                    if len(outdated) <= _FEW
                    else f"where nothing but old copies is in it, delete it, and give the command again: rm -r {whole}",
                    f"--out {self.out.with_name(self.out.name + '_new')}",
                ),
            )
        wanted = {picture.name for picture in pictures}
        for root, _, names in os.walk(self.out):
            for name in sorted(names):
                copied = Path(root, name).relative_to(self.out).as_posix()
                if copied not in wanted and not is_temporary(name):
                    self.done.others.append(copied)

    def write(self, picture: FoundPicture) -> None:
        """Write the copy of a picture, or note why it is refused."""
        target = self.out / picture.name
        if target.is_file():
            self.done.num_there += 1
            self._count(picture, target)
            return
        # Before it is read: changed meanwhile, its copy is outdated.
        time = _time_of(picture.path)
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
        # What killed writers left is not looked for at each of thousands of files; no picture is found by its name.
        with replacing(target, removes_left=False) as temporary:
            temporary.write_bytes(copy)
            os.utime(temporary, ns=(time, time))
        self._count(picture, target)

    def write_refused(self) -> None:
        """Write the table of refused pictures, empty where there are none."""
        names = ("picture", "reason", "found")
        with replacing(self.refused_path) as temporary:
            pl.DataFrame(self._refused, schema=dict.fromkeys(names, pl.String), orient="row").write_csv(temporary)

    def _count(self, picture: FoundPicture, target: Path) -> None:
        self.done.bytes_before += picture.path.stat().st_size
        self.done.bytes_after += target.stat().st_size


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # reading it will say why
        return 0


def _is_of_time(copy: Path, time: int) -> bool:
    return abs(_time_of(copy) - time) < _SAME_TIME_NS

"""Embed pictures: files to vectors, in bounded memory; killed at any instant, the same command goes on.

    names ─► parts of 512 ─► read, decode ─► backbone ─► vectors.parquet.parts/part-000003.parquet
                                                                   │ when all are there
    vectors.parquet       picture │ vector (D floats) │ resolution │ bytes_read   ◄──┤
    vectors_refused.csv   picture │ reason │ found                                ◄──┘

Which resolution a picture is taken at is for a `ScaleChoice` to say: one for all, or by the file, or with a scale model
by a look at its thumbnail first. Pictures wait in a batch of their resolution until it is full, or the part ends:

    thumbnails of 32 ─► backbone ─► scale model ─┬─ r₁: done, the vector is there
                                                 ├─ r₂: read on, decode, wait with others of r₂ ─► backbone
                                                 └─ r₃: …

Batches never cross parts, so a vector does not depend on where a run was killed.

Memory: names of all pictures; the bytes and pixels of one; for each resolution a batch of squares of 3 R² bytes; of a
batch of thumbnails their files where these are short (1 MiB); a part of vectors.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from ziggurat.config import to_json
from ziggurat.data.pictures.found import FoundPicture
from ziggurat.data.pictures.picture_file import PictureFile, PictureLimits, RefusedPictureError
from ziggurat.errors import ConfigError, DataError
from ziggurat.files import Format, digest_of, replacing
from ziggurat.files.parquet import ParquetFile
from ziggurat.files.parts import PartsFolder, parts_of
from ziggurat.models.images.backbone import Backbone
from ziggurat.models.images.compiled import CompiledBackbone
from ziggurat.models.images.scale_choice import OneResolution, ScaleChoice
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import Count, checked

ASKED = Format(
    name="ziggurat.images", what="what vectors were asked for", ways_out=("delete the folder of parts, and begin anew",)
)
PART = Format(
    name="ziggurat.images_part", what="the note of a part of vectors", ways_out=("delete the folder of parts",)
)


@dataclass(frozen=True, kw_only=True)
@checked
class EmbedConfig:
    """Settings of embedding pictures.

    Args:
        resolution: of all pictures, where no choice is given.
        num_scans: of a progressive JPEG that are read, likewise; 0: all.
        batch_size: pictures that the backbone computes together.
        compiled: by kernels that are compiled for each resolution: half a minute each, and the last bits differ.
        part_pictures: pictures of a part, the unit of going on after a kill.
        limits: above which a picture is refused.
    """

    resolution: Count = 224
    num_scans: int = 0
    batch_size: Count = 32
    compiled: bool = False
    part_pictures: Count = 512
    limits: PictureLimits = field(default_factory=PictureLimits)


@dataclass(kw_only=True)
class EmbeddedPictures:
    """The result of embedding pictures.

    Args:
        num_pictures: that have a vector.
        refused: how many were refused, by reason.
        resolutions: how many were embedded at each resolution.
        bytes_read: of all files, those of refused pictures too.
        bytes_there: the sizes of all files that have a vector.
        flops: of the backbone over all pictures, thumbnails included.
        num_resumed: pictures whose part was there already.
    """

    num_pictures: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    resolutions: Counter[int] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_there: int = 0
    flops: int = 0
    num_resumed: int = 0


def refused_beside(out: str | Path) -> Path:
    """Return the table of refused pictures that stands beside a table of vectors."""
    target = Path(out)
    return target.with_name(f"{target.stem}_refused.csv")


def written_with(out: str | Path) -> tuple[Path, ...]:
    """Return all that embedding into a table writes, which is no picture where it lies among pictures."""
    target = Path(out)
    return target, refused_beside(target), parts_of(target)


def embed_pictures(
    pictures: Sequence[FoundPicture],
    *,
    backbone: Backbone,
    out: str | Path,
    scale: ScaleChoice | None = None,
    config: EmbedConfig | None = None,
    progress: Progress | None = None,
) -> EmbeddedPictures:
    """Write the vectors of pictures, and which were refused.

    Args:
        pictures: in the order of the rows.
        backbone: computes the vectors.
        out: Parquet file to write; the table of refused pictures stands beside it.
        scale: chooses the resolution of each picture; None: all are taken at the config's.
        config: resolution, sizes of batches and parts, limits.
        progress: shows pictures.

    Raises:
        ConfigError: `out` is no Parquet file, the scale model belongs to another backbone, or a choice has resolutions
            that are none.
        FileError: nothing can be written there, or another process makes the same file.
        DataError: every picture was refused; the table of them is written.
    """
    config = config or EmbedConfig()
    progress = progress or NoProgress()
    target = Path(out)
    if target.suffix != ".parquet":
        raise ConfigError(
            expected="a file that ends in .parquet: text would take several times the bytes for vectors",
            found=str(out),
            where="--out",
            ways_out=f"--out {target.with_suffix('.parquet')}",
        )
    scale = scale or OneResolution(config.resolution, num_scans=config.num_scans)
    scale.check()
    scale.check_backbone(backbone.config.fingerprint(), where="the scale model")
    for resolution in scale.resolutions:
        backbone.check_resolution(resolution)
    worker = _Embedder(backbone, scale=scale, config=config)
    done = EmbeddedPictures()
    folder = PartsFolder(
        parts_of(target),
        question=_question(pictures, backbone, scale, config),
        what="vectors",
        asked=ASKED,
        note=PART,
        say=progress.say,
    )
    folder.check_place()
    with folder as parts:
        progress.begin("embed", total=len(pictures))
        for number, start in enumerate(range(0, len(pictures), config.part_pictures)):
            group = pictures[start : start + config.part_pictures]
            content = parts.read(number)
            if content is None:
                table = worker.part(group, progress=progress, done=start)
                parts.write(number, _as_parquet(table))
            else:
                table = _from_parquet(content)
                done.num_resumed += len(group)
            _count(done, table, backbone, scale)
            progress.update(start + len(group), note=_note(done))
        progress.end()
        if not done.num_pictures:
            _write_refused(parts, target)
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in done.refused.most_common())
            raise DataError(
                expected="at least one picture that can be read",
                found=f"{len(pictures):,} files, all refused: {reasons}",
                where=str(refused_beside(target)),
                ways_out=("look at the reason of each there", "name a folder with pictures"),
            )
        _join(parts, target, dim=backbone.dim)
        _write_refused(parts, target)
        # Last: until both files stand, the parts are all that was done.
        parts.remove()
    return done


class _Waiting:
    """Squares of one resolution that wait for a full batch.

    Args:
        resolution: of all of them.
    """

    def __init__(self, resolution: int) -> None:
        self.resolution = resolution
        self.rows: list[int] = []
        self.pixels: list[np.ndarray] = []


class _Embedder:
    """Computes parts.

    Args:
        backbone: computes the vectors.
        scale: chooses resolutions.
        config: sizes and limits.
    """

    def __init__(self, backbone: Backbone, *, scale: ScaleChoice, config: EmbedConfig) -> None:
        self._dim = backbone.dim
        self._vectors = CompiledBackbone(backbone, batch_size=config.batch_size) if config.compiled else backbone
        self._scale = scale
        self._config = config

    def part(self, pictures: Sequence[FoundPicture], *, progress: Progress, done: int) -> pa.Table:
        """Return the rows of pictures, those of refused ones with a reason and no vector."""
        rows = _Rows(pictures, dim=self._dim)
        waiting = [_Waiting(resolution) for resolution in self._scale.resolutions]
        size = self._config.batch_size
        for start in range(0, len(pictures), size):
            files: dict[int, PictureFile] = {}
            looked_at: dict[int, PictureFile] = {}
            for row, picture in enumerate(pictures[start : start + size], start=start):
                files[row] = PictureFile(picture.path, limits=self._config.limits)
                place = self._scale.place_of(num_bytes=rows.sizes[row])
                if place == 0 and self._scale.looks:
                    looked_at[row] = files[row]
                else:
                    self._take(row, files[row], rows, waiting, place=place)
            self._look(looked_at, rows, waiting)
            for row, file in files.items():
                rows.bytes_read[row] = file.bytes_read
            progress.update(done + min(start + size, len(pictures)))
        for each in waiting:
            self._compute(each, rows)
        return rows.table()

    def _look(self, files: dict[int, PictureFile], rows: _Rows, waiting: Sequence[_Waiting]) -> None:
        """Look at thumbnails; keep the vectors of those that need no more, and send the others on."""
        thumbnails = _Waiting(self._scale.resolutions[0])
        for row, file in files.items():
            self._decode(row, file, rows, thumbnails, num_scans=self._scale.num_scans[0])
        if not thumbnails.rows:
            return
        vectors = self._vectors(torch.from_numpy(np.stack(thumbnails.pixels)))
        choices = self._scale.choose(vectors).tolist()
        for row, choice, vector in zip(thumbnails.rows, choices, vectors.numpy(), strict=True):
            if choice == 0:
                rows.keep(row, vector, resolution=thumbnails.resolution)
            else:
                self._take(row, files[row], rows, waiting, place=choice)

    def _take(self, row: int, file: PictureFile, rows: _Rows, waiting: Sequence[_Waiting], *, place: int) -> None:
        """Let a picture wait for a batch of its resolution, and compute that where it is full."""
        others = waiting[place]
        self._decode(row, file, rows, others, num_scans=self._scale.num_scans[place])
        if len(others.rows) >= self._config.batch_size:
            self._compute(others, rows)

    def _decode(self, row: int, file: PictureFile, rows: _Rows, waiting: _Waiting, *, num_scans: int) -> None:
        try:
            waiting.pixels.append(file.pixels(waiting.resolution, num_scans=num_scans))
            waiting.rows.append(row)
        except RefusedPictureError as error:
            rows.refuse(row, error)
        file.release()

    def _compute(self, waiting: _Waiting, rows: _Rows) -> None:
        if waiting.rows:
            vectors = self._vectors(torch.from_numpy(np.stack(waiting.pixels))).numpy()
            for row, vector in zip(waiting.rows, vectors, strict=True):
                rows.keep(row, vector, resolution=waiting.resolution)
        waiting.rows.clear()
        waiting.pixels.clear()


class _Rows:
    """The rows of a part while they are filled, in whatever order.

    Args:
        pictures: one a row.
        dim: numbers of a vector.
    """

    def __init__(self, pictures: Sequence[FoundPicture], *, dim: int) -> None:
        self._names = [picture.name for picture in pictures]
        self.sizes = [_facts(picture.path)[0] for picture in pictures]
        self._vectors = np.zeros((len(pictures), dim), dtype=np.float32)
        self._resolutions = [0] * len(pictures)
        self._reasons: list[str | None] = [None] * len(pictures)
        self._found: list[str | None] = [None] * len(pictures)
        self.bytes_read = [0] * len(pictures)

    def keep(self, row: int, vector: np.ndarray, *, resolution: int) -> None:
        """Take the vector of a picture."""
        self._vectors[row] = vector
        self._resolutions[row] = resolution

    def refuse(self, row: int, error: RefusedPictureError) -> None:
        """Take the reason why a picture has no vector."""
        self._reasons[row] = error.reason.value
        self._found[row] = error.found

    def table(self) -> pa.Table:
        """Return all rows."""
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(self._vectors.reshape(-1)), self._vectors.shape[1])
        return pa.table(
            {
                "picture": pa.array(self._names, pa.string()),
                "vector": vectors,
                "resolution": pa.array(self._resolutions, pa.int32()),
                "bytes_read": pa.array(self.bytes_read, pa.int64()),
                "bytes_there": pa.array(self.sizes, pa.int64()),
                "reason": pa.array(self._reasons, pa.string()),
                "found": pa.array(self._found, pa.string()),
            }
        )


def _question(
    pictures: Sequence[FoundPicture], backbone: Backbone, scale: ScaleChoice, config: EmbedConfig
) -> dict[str, object]:
    """Return all that the vectors depend on: parts of an earlier command are taken where it is equal."""
    files = hashlib.sha256()
    for picture in pictures:
        files.update(repr((picture.name, *_facts(picture.path))).encode("utf-8", "surrogateescape"))
    return {
        "pictures": files.hexdigest(),
        "backbone": backbone.config.fingerprint(),
        "scale": digest_of(scale.to_json()),
        "config": to_json(config),
    }


def _facts(path: Path) -> tuple[int, int]:
    """Return the bytes of a file, and when it was changed; zeros of one that is not there: reading it says why."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _count(done: EmbeddedPictures, table: pa.Table, backbone: Backbone, scale: ScaleChoice) -> None:
    frame = pl.DataFrame(pl.from_arrow(table.drop(["vector", "picture"])))
    kept = frame.filter(pl.col("reason").is_null())
    done.num_pictures += kept.height
    done.refused.update(frame["reason"].drop_nulls().to_list())
    counts = Counter(kept["resolution"].to_list())
    done.resolutions.update(counts)
    done.bytes_read += int(frame["bytes_read"].sum())
    done.bytes_there += int(kept["bytes_there"].sum())
    for resolution, count in counts.items():
        done.flops += count * backbone.flops(resolution)
    if scale.looks:
        further = kept.filter(pl.col("resolution") != scale.resolutions[0])
        num_looked_at = sum(scale.place_of(num_bytes=size) == 0 for size in further["bytes_there"].to_list())
        done.flops += num_looked_at * backbone.flops(scale.resolutions[0])


def _note(done: EmbeddedPictures) -> str:
    num_refused = sum(done.refused.values())
    return f"{num_refused:,} refused" if num_refused else ""


def _as_parquet(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    return content.getvalue()


def _from_parquet(content: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(content))


def _join(parts: PartsFolder, target: Path, *, dim: int) -> None:
    columns = pa.schema(
        {
            "picture": pa.string(),
            "vector": pa.list_(pa.float32(), dim),
            "resolution": pa.int32(),
            "bytes_read": pa.int64(),
        }
    )
    with (
        replacing(target) as temporary,
        ParquetFile(temporary, columns, compression="zstd", write_page_checksum=True) as writer,
    ):
        for number in range(parts.num_parts):
            table = _from_parquet(parts.checked(number))
            writer.write_table(table.filter(pc.field("reason").is_null()).select(columns.names).cast(columns))


def _write_refused(parts: PartsFolder, target: Path) -> None:
    frames = []
    for number in range(parts.num_parts):
        table = _from_parquet(parts.checked(number)).select(["picture", "reason", "found"])
        frames.append(pl.DataFrame(pl.from_arrow(table)).filter(pl.col("reason").is_not_null()))
    with replacing(refused_beside(target)) as temporary:
        # Written where it is empty, too: a table of an earlier command must not be taken for this one's.
        pl.concat(frames).write_csv(temporary)

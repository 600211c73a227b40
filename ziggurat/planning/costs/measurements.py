"""Measurements: what `ziggurat cluster probe` found out about a machine, as one JSON file. Versioned plain data.

    machine, versions, date      what the figures belong to
    draw                         how tables were drawn; with it any group can be drawn again, table for table
    lookups                      groups of tables → milliseconds of lookup, and of lookup and update
    exchanges                    columns of each rank → milliseconds of the embedding exchange on each, both ways
    links                        bytes between two ranks → milliseconds, inside a host and between hosts
    memory                       bytes a second: long reads and writes, and reads of scattered rows
    disk                         rows a second of a folder's disk: read and replaced in random order

The file is written anew, whole, every few seconds of a probe, and renamed into place: an interrupted probe goes on from
its last group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.files import Format
from ziggurat.planning.costs.probe_tables import DrawConfig


@dataclass(frozen=True, kw_only=True)
class LookupMeasurement:
    """The measured times of one group of tables; see `LookupTimes`.

    Args:
        tables: positions in its pool.
        dims: columns of each.
        forward_ms: lookup and pooling.
        total_ms: with the update.
    """

    tables: tuple[int, ...]
    dims: tuple[int, ...]
    forward_ms: float
    total_ms: float


@dataclass(frozen=True, kw_only=True)
class ExchangeMeasurement:
    """One exchange of embeddings among all ranks; see `ziggurat.parallel.exchange.link_meter`.

    Args:
        columns: that each rank sends.
        starts_ms: how much later than the first each rank began.
        forward_ms: of each rank, from its own beginning.
        backward_ms: the same for gradients, all ranks beginning together.
    """

    columns: tuple[int, ...]
    starts_ms: tuple[float, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """A message between two ranks, there and back, halved.

    Args:
        link: "host" or "cross_host".
        num_bytes: of the message.
        ms: the fastest of several.
    """

    link: str
    num_bytes: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class MemoryMeasurement:
    """Rates of one thread, bytes a second.

    Args:
        copy_bytes_per_s: read and written together.
        gather_bytes_per_s: rows of 256 bytes in random order, read.
    """

    copy_bytes_per_s: float
    gather_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class DiskMeasurement:
    """The disk of a folder; see `ops/row_file/rate.py`.

    Args:
        folder: on it.
        disk_bytes: of its file system.
        row_bytes: numbers of a row.
        moved_bytes: read or written for a row: whole pages.
        is_direct: whether the page cache is left out.
        read_rows_per_s: in random order.
        written_rows_per_s: replaced in random order, each with what lies in its page.
    """

    folder: str
    disk_bytes: int
    row_bytes: int
    moved_bytes: int
    is_direct: bool
    read_rows_per_s: float
    written_rows_per_s: float


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything of one probe. See the module's docstring.

    Args:
        machine: in words.
        versions: "name version" of what matters.
        date: of the start, ISO.
        clock: what exchanges were timed by: "wall", or "processor" where ranks share cores.
        ranks: of the job.
        ranks_per_host: of the job.
        batch_size: samples of a rank in exchanges.
        draw: of tables and groups.
        lookups: in the order of their numbers.
        exchanges: in the order of their numbers.
        links: between ranks.
        cut_factor: what a step of tables that are cut by columns takes, over the same step of whole ones of that width
            (median of some groups); 0 as long as it is not measured.
        memory: None as long as it is not measured.
        disk: None as long as it is not measured.
    """

    # Files that were written before have the name on the left.
    FORMERLY: ClassVar[Mapping[str, str]] = {"ranks_a_host": "ranks_per_host"}

    machine: str = ""
    versions: tuple[str, ...] = ()
    date: str = ""
    clock: str = "wall"
    ranks: int = 1
    ranks_per_host: int = 1
    batch_size: int = 0
    draw: DrawConfig = field(default_factory=DrawConfig)
    lookups: tuple[LookupMeasurement, ...] = ()
    exchanges: tuple[ExchangeMeasurement, ...] = ()
    links: tuple[LinkMeasurement, ...] = ()
    cut_factor: float = 0.0
    memory: MemoryMeasurement | None = None
    disk: DiskMeasurement | None = None

    def save(self, path: str | Path) -> None:
        """Write, so that a reader finds the old file or the new one."""
        MEASUREMENTS.write(path, to_json(self))

    @staticmethod
    def load(path: str | Path) -> Measurements:
        """Read what `save` wrote.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: it is of another format, or damaged.
        """
        return from_json(Measurements, MEASUREMENTS.read(path), where=str(path))


def without_number(content: dict[str, object]) -> object:
    """Version 0 of what the probe writes: `format` was the number 1."""
    if (number := content.pop("format")) != 1:
        raise ValueError(f"format {number!r}, and not 1")
    return content


MEASUREMENTS = Format(
    name="ziggurat.measurements",
    what="measurements",
    migrations={0: without_number},
    error=ConfigError,
    ways_out=("measure again: ziggurat cluster probe --out FILE", "name another file"),
    max_bytes=1 << 30,
)

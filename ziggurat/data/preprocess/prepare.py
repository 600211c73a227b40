"""prepare: raw files in; fitted preprocessing and encoded training, validation and test data out.

    raw files ─► where to cut? ─► parse, check ─► draft on disk ─► encode ─► FOLDER/FINGERPRINT/{train,valid,test,…}
                 (split by time)       └► fit on training rows ─────┘

Nothing but training rows is seen by the fit: a vocabulary that knows the ids of the test rows flatters the test.

The result is cached under a fingerprint of settings, schema, and path, size and time of change of every raw file; it is
checked again before it is reused, and made anew if it is damaged. It is built in a temporary folder, under a lock, and
renamed when it is whole: a killed process leaves nothing that looks finished, and of several processes that want the
same data (the ranks of one run) one prepares and the others wait.

Every raw row is parsed once (in a split by time, its time once more): what is parsed is kept in a draft (`draft.py`)
until all training rows have been seen. Reading, fitting and writing overlap, each in its own thread, and then so do
encoding and writing; at most a few chunks are in memory. Cost, on two cores: 0.9 µs a row of Criteo to parse, fit and
keep it, 0.8 µs to encode and write it; disk, while it runs: about as much as the uncompressed text.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ziggurat.arguments import check_arguments
from ziggurat.data.preprocess.build import Build, ProgressCallback, Sources, fingerprint_of
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.leaks import refuse_label_as_feature
from ziggurat.data.preprocess.negatives import with_negative_rate
from ziggurat.data.preprocess.prepared import PreparedData, open_prepared
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.errors import CheckpointError, ZigguratError
from ziggurat.features.schema import Schema

_POLL_S = 0.2


@check_arguments
def prepare(
    config: DataConfig, *, schema: Schema, folder: str | Path, progress: ProgressCallback | None = None
) -> PreparedData:
    """Prepare raw data, or open what was prepared from the same before.

    Args:
        config: the raw files and how to split them.
        schema: what their columns mean.
        folder: the cache; the data comes into a folder of its own in it, bad rows into another one.
        progress: called with (phase, rows done, rows in all or None) every chunk.

    Raises:
        MissingFileError: a raw file is absent.
        SchemaError: the raw files do not have the columns and types of the schema, or a feature reads a label's column.
        DataError, BoundsError: a bad row (policy ERROR), too many of them, a damaged file, or no training row.
        ConfigError: settings that contradict each other or the data.
        CheckpointError: the folder cannot be written.
    """
    progress = progress or (lambda phase, done, total: None)
    refuse_label_as_feature(schema)
    schema = with_negative_rate(schema, config.negative_rate)
    is_auto, config = config.split.by is SplitBy.AUTO, config.resolved(schema)
    sources = Sources(config)
    fingerprint = fingerprint_of(config, schema, sources)
    target = Path(folder) / fingerprint
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            note = ""
            if target.exists():
                try:
                    return open_prepared(target, fingerprint=fingerprint, reused=True, auto_split=is_auto)
                except ZigguratError as error:
                    note = f"what was prepared before is damaged and was made anew ({error.where}: {error.found})"
                    shutil.rmtree(target)
            for leftover in target.parent.glob(f".{target.name}.*.tmp"):
                shutil.rmtree(leftover)
            Build(config, schema, sources=sources, target=target, progress=progress).run(fingerprint)
            return open_prepared(target, fingerprint=fingerprint, reused=False, note=note, auto_split=is_auto)
    except OSError as error:
        if isinstance(error, ZigguratError):
            raise
        raise CheckpointError(
            expected="to write the prepared data",
            found=str(error),
            where=str(target),
            ways_out=("free some space", "check the permissions of the folder", "choose another cache: ZIGGURAT_CACHE"),
        ) from error


def find_prepared(config: DataConfig, *, schema: Schema, folder: str | Path) -> PreparedData | None:
    """What `prepare` made of the same before; None if it is not there, or damaged. Reads no raw file."""
    try:
        schema, config = with_negative_rate(schema, config.negative_rate), config.resolved(schema)
        fingerprint = fingerprint_of(config, schema, Sources(config))
        target = Path(folder) / fingerprint
        return open_prepared(target, fingerprint=fingerprint, reused=True) if target.exists() else None
    except ZigguratError:
        return None


@contextmanager
def _locked(target: Path, progress: ProgressCallback) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however it ends."""
    with (target.parent / f".{target.name}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process that prepares the same data", 0, None)
                time.sleep(_POLL_S)
        yield

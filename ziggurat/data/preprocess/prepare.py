"""prepare: raw files in; fitted preprocessing and encoded training, validation and test data out.

    raw files ─► where to cut? ─► parse, check ─► draft on disk ─► encode ─► FOLDER/FINGERPRINT/{train,valid,test,…}
                 (split by time)       └► fit on training rows ─────┘

Nothing but training rows is seen by the fit: a vocabulary that knows the ids of the test rows flatters the test.

The result is cached under a fingerprint of settings, schema, and path, size and time of change of every raw file; it is
checked again before it is reused, and made anew if it is damaged. It is built in a folder of its own, unit by unit
(`work.py`), and renamed when it is whole: a killed process leaves nothing that looks finished, the next one goes on
with what it had finished, and several processes that want the same data (the ranks of one job) share the units. The
result is the same, byte for byte, however many there were and however often they were killed.

Where the rows are events ([events] in the schema), samples are made of them first (`data/events/sequences.py`).

Every raw row is parsed once (in a split by time, its time once more): what is parsed is kept in a draft (`draft.py`)
until all training rows have been seen. Reading, fitting and writing overlap, each in its own thread, and then two
threads encode and write, a file each; at most a few chunks are in memory. Disk, while it runs: about as much as the
uncompressed text.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ziggurat.arguments import check_arguments
from ziggurat.data.events.sequences import find_sequences, sequences_of
from ziggurat.data.preprocess.build import Build, ProgressCallback, Sources, fingerprint_of
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.fit.leaks import refuse_label_as_feature
from ziggurat.data.preprocess.fit.shards import SHARD_BYTES, ShardSizes
from ziggurat.data.preprocess.fit.work import Work, damaged_line
from ziggurat.data.preprocess.negatives import with_negative_rate
from ziggurat.data.preprocess.prepared import PreparedData, open_prepared
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.data.preprocess.values.numeric import NumericState
from ziggurat.errors import CheckpointError, ZigguratError
from ziggurat.features.labels import refuse_threshold_of_number
from ziggurat.features.schema import Schema

_WAITING = "waiting for another process that prepares the same data"
_WENT_ON = "went on with what a preparation that ended early had finished"


@check_arguments
def prepare(
    config: DataConfig,
    *,
    schema: Schema,
    folder: str | Path,
    progress: ProgressCallback | None = None,
    shard_bytes: int = SHARD_BYTES,
    num_processes: int = 1,
    numbers: Mapping[str, NumericState] | None = None,
) -> PreparedData:
    """Prepare raw data, or open what was prepared from the same before.

    Several processes that call this with the same arguments and folder (the ranks of a job, on several machines if
    they see the folder) share the work, and all open the result. What a call that ended early has finished is not done
    again.

    Args:
        config: the raw files and how to split them.
        schema: what their columns mean.
        folder: the cache; the data comes into a folder of its own in it, bad rows into another one.
        progress: called with (phase, rows done, rows in all or None) every chunk.
        shard_bytes: raw files are read in parts of about so many bytes, a file or more each. The result does not
            depend on it.
        num_processes: that make this call. With several, plain text files of more than `shard_bytes` are cut at line
            ends, a part for each, unless a quote occurs in them. The result does not depend on it.
        numbers: statistics of all dense features to encode with, of a run that goes on; None fits them.

    Raises:
        MissingFileError: a raw file is absent.
        SchemaError: the raw files do not have the columns and types of the schema, or a feature reads a label's column.
        DataError, BoundsError: a bad row (policy ERROR), too many of them, a damaged file, or no training row.
        ConfigError: settings that contradict each other or the data.
        CheckpointError: the folder cannot be written.

    Example:
        >>> import polars
        >>> polars.DataFrame({"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}).write_parquet("shop.parquet")
        >>> schema = zg.inspect_file("shop.parquet").schema
        >>> data = zg.prepare(zg.DataConfig(train=("shop.parquet",)), schema=schema, folder="prepared")
        >>> data.inputs.single[0].name, data.train.num_rows > 300
        ('user', True)
    """
    told: ProgressCallback = progress or (lambda phase, done, total: None)
    if numbers is None:
        refuse_threshold_of_number(schema.labels, where="schema")
    if schema.events is not None and config.train:
        Sources(config).refuse_missing_roles(schema)
    wait = partial(told, _WAITING, 0, None)
    sequences = None if schema.events is None else sequences_of(config, schema, folder=Path(folder), waiting=wait)
    config, schema = (config, schema) if sequences is None else (sequences.config, sequences.schema)
    refuse_label_as_feature(schema)
    schema = with_negative_rate(schema, config.negative_rate)
    is_auto = config.split.by is SplitBy.AUTO
    config = config.resolved(schema)
    sources = Sources(config)
    fingerprint = fingerprint_of(config, schema, sources, numbers=numbers)
    target = Path(folder) / fingerprint
    if not target.exists():
        sources.refuse_missing_roles(schema)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with Work(target, waiting=wait) as work:
            note = ""
            if target.exists():
                try:
                    return open_prepared(target, fingerprint=fingerprint, reused=True, auto_split=is_auto)
                except ZigguratError as error:
                    note = _discard_damaged(work, error, fingerprint=fingerprint)
            sizes = ShardSizes(least_bytes=shard_bytes, processes=num_processes)
            build = Build(config, schema, sources=sources, work=work, progress=told, sizes=sizes, numbers=numbers)
            build.run(fingerprint, made_of=sequences)
            note = note or (_WENT_ON if work.resumed else "")
            if work.damaged:
                note = "; ".join([*([note] if note else []), damaged_line(work.damaged)])
            return open_prepared(target, fingerprint=fingerprint, reused=False, note=note, auto_split=is_auto)
    except OSError as error:
        # Some errors of ours are an OSError too, and say more already.
        if isinstance(error, ZigguratError):
            raise
        raise CheckpointError(
            expected="to write the prepared data",
            found=str(error),
            where=str(target),
            ways_out=("free some space", "check the permissions of the folder", "choose another cache: ZIGGURAT_CACHE"),
        ) from error


def _discard_damaged(work: Work, error: ZigguratError, *, fingerprint: str) -> str:
    """Throw away what cannot be opened, unless another process has made it anew meanwhile; says so."""
    with work.alone():
        try:
            open_prepared(work.target, fingerprint=fingerprint, reused=True)
            return ""
        except ZigguratError:
            shutil.rmtree(work.target, ignore_errors=True)
            work.throw_away()
    return f"what was prepared before is damaged and was made anew ({error.where}: {error.found})"


def find_prepared(config: DataConfig, *, schema: Schema, folder: str | Path) -> PreparedData | None:
    """Return what `prepare` made of the same data before; None if it is not there, or damaged. Read no raw file."""
    try:
        if schema.events is not None:
            sequences = find_sequences(config, schema, folder=Path(folder))
            if sequences is None:
                return None
            config = sequences.config
            schema = sequences.schema
        schema, config = with_negative_rate(schema, config.negative_rate), config.resolved(schema)
        fingerprint = fingerprint_of(config, schema, Sources(config))
        target = Path(folder) / fingerprint
        return open_prepared(target, fingerprint=fingerprint, reused=True) if target.exists() else None
    except ZigguratError:
        return None

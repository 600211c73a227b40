"""Streams that read a teacher's vectors of earlier rows (LoopFM) beside its scores, on two made sets.

    drift   the data of `make demo-stream`: ids live 8 windows, preferences drift by 6 % a window. The teacher is twice
            as wide and streams over six times as many rows; after every second window it logs scores and vectors of the
            next two windows of the student's rows. Histories are by C8, the column with most ids. 2,000 rows a window
    moods   that of `ziggurat bench distil_history`: a click depends on a mood of the user, which changes in 1 row of 20
            and which the teacher sees, the student never. One teacher of before the stream has logged all rows;
            histories are of the user, mean of 4, as validation chose there. Windows of 3,000 rows

    alone      labels                                histories   labels, and vectors of earlier rows
    scores     labels, and logged scores (aux head)  both        all of it

Measured is the AUC of each window before it is trained, of the windows behind the first after the history. Nothing was
chosen by these windows.

`ziggurat bench stream_history`
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import polars as pl

import ziggurat as zg
from benchmarks.distil_history import Size, Students, schema_of
from benchmarks.distil_history import config_of as config_of_moods
from benchmarks.harness import say
from benchmarks.report import Report, by_round
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.features.inputs import HistoryPooling
from ziggurat.features.schema_io import read_schema
from ziggurat.runs.drifting import SCHEMA, WINDOWS, write_drifting
from ziggurat.runs.load import load_run
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.teachers.log import log_teacher
from ziggurat.runs.teachers.student import TeacherHistoryConfig, with_teacher
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.distillation import DistilConfig, DistilHead
from ziggurat.training.records.windows import WindowRecord, read_windows

HISTORY = 2  # windows before the stream begins
ROWS = 2_000  # of the student, a window
SHARE = 6  # the teacher sees so many times as many
REFRESHED = 2  # windows between two versions of the teacher
USER = "C8"  # by which histories are: the column with most ids
ARMS = {
    "alone": (DistilHead.NONE, False),
    "scores": (DistilHead.AUX_HEAD, False),
    "histories": (DistilHead.NONE, True),
    "both": (DistilHead.AUX_HEAD, True),
}


def config_of(files: list[str], schema: Path, *, width: int, seed: int) -> zg.RunConfig:
    """Return the config of a student, whose width is 1, or of a teacher."""
    model = zg.DLRMConfig(
        embedding_dim=8 * width,
        bottom=zg.MLPConfig(hidden_dims=(32 * width,)),
        top=zg.MLPConfig(hidden_dims=(64 * width, 32 * width)),
    )
    run = zg.table_run(model, read_schema(schema))
    loader = replace(run.training.loader, batch_size=128, seed=seed)
    training = replace(run.training, seed=seed, epochs=1, threads=1, loader=loader, table_learning_rate=0.2)
    return replace(run, data=replace(run.data, train=tuple(files)), training=training)


def streamed_drift(folder: Path, *, seed: int, windows: int) -> dict[str, list[WindowRecord]]:
    """Stream the teacher and all students of one seed; return their windows.

    Args:
        folder: for all of it.
        seed: of the data, of weights and of the order of rows.
        windows: that are drawn.
    """
    drift = zg.DriftConfig(window_rows=ROWS * SHARE, preference_rate=0.06, lifetime=8.0, popularity_decay=2.0)
    drift = replace(drift, teacher=replace(drift.teacher, seed=seed))
    write_drifting(drift, folder=folder / "drifting", windows=windows)
    schema = folder / "drifting" / SCHEMA
    everything = sorted((folder / "drifting" / WINDOWS).iterdir())
    (folder / "rows").mkdir()
    files: list[Path] = []
    for path in everything:
        files.append(folder / "rows" / path.name)
        pl.read_parquet(path).gather_every(SHARE).write_parquet(files[-1])
    stream = StreamConfig(by="day", begin=files[HISTORY].stem, growing=1000)
    names = list(map(str, files))
    for end in [*range(HISTORY, windows, REFRESHED), windows]:
        known = list(map(str, everything[:end]))
        stream_run(config_of(known, schema, width=2, seed=seed), folder=folder / "big", stream=stream)
        if new := names[end : end + REFRESHED]:
            watermark = f"{files[end - 1].stem}T23:59:59"
            log_teacher(load_run(folder / "big"), new, out=folder / "teacher", watermark=watermark, history=USER)
    config = config_of(names, schema, width=1, seed=seed)
    found = students(config, folder, history=TeacherHistoryConfig(key=USER), stream=stream, seed=seed)
    return {"teacher": read_windows(folder / "big/windows.jsonl"), **found}


def students(
    config: zg.RunConfig, folder: Path, *, history: TeacherHistoryConfig, stream: StreamConfig, seed: int
) -> dict[str, list[WindowRecord]]:
    """Stream the students of one seed; return their windows.

    Args:
        config: of a student that learns from labels alone.
        folder: with the side table; takes the runs.
        history: that two of them read.
        stream: how rows are cut.
        seed: for what is said.
    """
    found: dict[str, list[WindowRecord]] = {}
    for name, (head, reads) in ARMS.items():
        own = config
        if name != "alone":
            own = replace(config, distil=DistilConfig(head=head))
            own = with_teacher(own, folder / "teacher", history=history if reads else None, is_stream=True)
        stream_run(own, folder=folder / f"{name}-{seed}", stream=stream)
        found[name] = read_windows(folder / f"{name}-{seed}" / "windows.jsonl")
        say(f"seed {seed}, {name}: " + " ".join(f"{each.metrics.get('auc') or math.nan:.4f}" for each in found[name]))
    return found


def streamed_moods(made: Students, *, seed: int) -> dict[str, list[WindowRecord]]:
    """Stream the students of one seed of the moods; return their windows.

    Args:
        made: has the teacher and the rows.
        seed: of weights and of the order of rows.
    """
    schema = schema_of("moods", of_teacher=False)
    config = config_of_moods(schema, made.folder / "new.parquet", dim=4, deep=(32, 16), split=zg.SplitConfig())
    loader = replace(config.training.loader, batch_size=128, seed=seed)
    config = replace(config, training=replace(config.training, epochs=1, seed=seed, loader=loader))
    history = TeacherHistoryConfig(key="owner", length=4, pooling=HistoryPooling.MEAN)
    stream = StreamConfig(by="rows:3000")
    return students(config, made.folder, history=history, stream=stream, seed=seed)


def _auc(records: list[WindowRecord]) -> float:
    """Return the mean AUC of the windows behind the first that has a teacher."""
    return statistics.fmean(each.metrics["auc"] or math.nan for each in records[2:])


def _say(report: Report, kind: str, found: list[dict[str, list[WindowRecord]]]) -> None:
    """Add cases and lines of a made set to a report, window by window.

    Args:
        report: that takes them.
        kind: of the set.
        found: windows by arm, for each seed.
    """
    auc = {name: [_auc(each[name]) for each in found] for name in found[0]}
    for name, values in auc.items():
        report.notes.append(f"{kind}, {name}: AUC {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}")
    for name in list(ARMS)[1:]:
        ours = (name, auc[name])
        report.cases.append(by_round(f"{kind}_{name}_auc", ours=ours, peer=("alone", auc["alone"]), unit="AUC"))
        difference = paired_difference(auc[name], auc["alone"])
        report.notes.append(
            f"{kind}, {name} − alone: {difference.mean:+.4f} ± {difference.sd:.4f}, p = {difference.t_p:.2g}"
        )
    for number in range(2, len(found[0]["alone"])):
        means = {
            name: statistics.fmean(each[name][number].metrics["auc"] or math.nan for each in found) for name in auc
        }
        [read] = found[0]["both"][number].histories.values()
        report.notes.append(
            f"{kind}, {found[0]['alone'][number].name}: "
            + ", ".join(f"{name} {value:.4f}" for name, value in means.items())
            + f"; rows with a history {read.share:.1%}, of {read.length:.1f} vectors"
        )


def run(*, quick: bool = False) -> Report:
    """Stream teachers and students of several seeds."""
    seeds = range(1, 3 if quick else 4)
    report = Report(
        benchmark="stream_history",
        claim=f"Streams that read a teacher's vectors, beside its scores, on two made sets; {len(seeds)} seeds.",
        command="ziggurat bench stream_history",
    )
    drifted: list[dict[str, list[WindowRecord]]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            drifted.append(streamed_drift(Path(folder), seed=seed, windows=6 if quick else 8))
    _say(report, "drift", drifted)
    with tempfile.TemporaryDirectory() as folder:
        size = (
            Size(old_rows=8_000, new_rows=12_000, seeds=2) if quick else Size(old_rows=40_000, new_rows=24_000, seeds=3)
        )
        made = Students("moods", size, folder=Path(folder))
        report.notes.append(f"moods, teacher: AUC {made.teacher['auc']:.4f} of the last 35 % of the rows")
        _say(report, "moods", [streamed_moods(made, seed=seed) for seed in seeds])
    for note in report.notes:
        say(note)
    return report

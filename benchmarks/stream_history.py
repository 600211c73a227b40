"""Streams that read a teacher's vectors of earlier rows (LoopFM) beside its scores, on made data that drifts.

The data is that of `make demo-stream`: ids live 8 windows, preferences drift by 6 % a window. The teacher is twice as
wide and streams over six times as many rows; after every second window it logs scores and vectors of the next two
windows of the student's rows, as a teacher does that is refreshed less often than its student.

    alone      labels                                histories   labels, and vectors of earlier rows with the same C8
    scores     labels, and logged scores             both        all of it

Measured is the AUC of each window before it is trained, of the windows behind the first that has a teacher. Nothing was
chosen by these windows: settings are those of the demo, and of `--teacher-history` as it is.

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
from benchmarks.harness import say
from benchmarks.report import Report, by_round
from ziggurat.data.streams.windows import StreamConfig
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


def streamed(folder: Path, *, seed: int, windows: int) -> dict[str, list[WindowRecord]]:
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
    found = {"teacher": read_windows(folder / "big/windows.jsonl")}
    for name, (head, reads) in ARMS.items():
        config = config_of(names, schema, width=1, seed=seed)
        if name != "alone":
            config = replace(config, distil=DistilConfig(head=head))
            history = TeacherHistoryConfig(key=USER) if reads else None
            config = with_teacher(config, folder / "teacher", history=history, is_stream=True)
        stream_run(config, folder=folder / name, stream=stream)
        found[name] = read_windows(folder / name / "windows.jsonl")
        say(f"seed {seed}, {name}: " + " ".join(f"{each.metrics.get('auc') or math.nan:.4f}" for each in found[name]))
    return found


def _auc(records: list[WindowRecord]) -> float:
    """Return the mean AUC of the windows behind the first that has a teacher."""
    return statistics.fmean(each.metrics["auc"] or math.nan for each in records[2:])


def run(*, quick: bool = False) -> Report:
    """Stream teachers and students of several seeds."""
    seeds = range(1, 3 if quick else 4)
    windows = 6 if quick else 10
    report = Report(
        benchmark="stream_history",
        claim=f"Streams with a teacher's scores and vectors: {windows - HISTORY} windows of {ROWS:,} rows, "
        f"{len(seeds)} seeds.",
        command="ziggurat bench stream_history",
    )
    found: list[dict[str, list[WindowRecord]]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(streamed(Path(folder), seed=seed, windows=windows))
    auc = {name: [_auc(each[name]) for each in found] for name in ("teacher", *ARMS)}
    for name, values in auc.items():
        report.notes.append(f"{name}: AUC {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}")
    for name in list(ARMS)[1:]:
        report.cases.append(by_round(f"{name}_auc", ours=(name, auc[name]), peer=("alone", auc["alone"]), unit="AUC"))
        difference = paired_difference(auc[name], auc["alone"])
        report.notes.append(f"{name} − alone: {difference.mean:+.4f} ± {difference.sd:.4f}, p = {difference.t_p:.2g}")
    for number in range(2, windows - HISTORY + 1):
        means = {
            name: statistics.fmean(each[name][number].metrics["auc"] or math.nan for each in found) for name in auc
        }
        read = [each["both"][number].histories["big"] for each in found]
        report.notes.append(
            f"{found[0]['alone'][number].name}: "
            + ", ".join(f"{name} {value:.4f}" for name, value in means.items())
            + f"; rows with a history {statistics.fmean(each.share for each in read):.1%}, "
            f"of {statistics.fmean(each.length for each in read):.1f} vectors"
        )
    for note in report.notes:
        say(note)
    return report

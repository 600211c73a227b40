"""Sessions: bytes on disk, time to read, time of a step; with what repeats kept once, against the plain way.

    recd_storage   rows clustered by session, against the same rows shuffled; same codec, each column as it is smallest
    recd_read      the loader, from Parquet to batches: sessions side by side and slices, against shuffled rows
    recd_step      a training step (forward, backward, update) on a batch with slices, against the plain batch

Synthetic sessions have S rows; 8 histories (of 40 ids on disk, of 200 in steps) keep the value before them with
probability d, all together. Both contestants take turns in one process, on one thread; a ratio is the median of ratios
turn by turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.harness import say
from benchmarks.report import Case, Report
from ziggurat.data.clustering import CODEC, cluster_by_session, column_bytes
from ziggurat.data.column_encodings import smallest_encodings
from ziggurat.data.encoded.dataset import EncodedDataset, EncodedWriter
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
from ziggurat.data.encoded.records import ROW_COLUMN, SESSION_COLUMN, encoded_schema, label_column, table_to_batch
from ziggurat.data.inspect.session_repeats import repeats_of
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import MIN_FACTOR, deduplicate, find_groups
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DINConfig, DLRMConfig, build_model
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

_IDS = 200_000
_NUM_LISTS = 8
_LENGTH = 40
_LONG = 200  # ids of a history where histories dominate a step


@dataclass(frozen=True)
class Point:
    """One kind of sessions in the sweep."""

    rows_per_session: int
    unchanged: float
    factor: float
    bytes_ratio: float
    step_ratio: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of these cases."""
    parser.add_argument("--sessions", default="", help="a Parquet log of real sessions, for recd_storage")
    parser.add_argument("--session-column", default="session_id", help="its column of the session")


def session_inputs(*, num_lists: int = _NUM_LISTS, is_history: bool = False) -> InputSpec:
    """Numbers, two ids and histories; the first history shares its table with the first id."""
    tables = [TableSpec(name=f"history{at}", num_rows=_IDS + 3) for at in range(num_lists)]
    tables.append(TableSpec(name="user", num_rows=_IDS + 3))
    return InputSpec(
        dense=tuple(f"number{at}" for at in range(4)),
        single=(SingleSpec(name="item", table="history0"), SingleSpec(name="user", table="user")),
        jagged=tuple(
            JaggedSpec(name=f"history{at}", table=f"history{at}", ordered=is_history) for at in range(num_lists)
        ),
        tables=tuple(tables),
        labels=(LabelSpec(name="click"),),
        has_sessions=True,
    )


def session_rows(
    num_rows: int, inputs: InputSpec, *, rows_per_session: int, unchanged: float, length: int = _LENGTH, seed: int = 0
) -> pa.Table:
    """Encoded rows, session after session."""
    rng = np.random.default_rng(seed)
    session = np.arange(num_rows) // rows_per_session + 1
    is_new = (rng.random(num_rows) >= unchanged) | (np.arange(num_rows) % rows_per_session == 0)
    version = np.cumsum(is_new) - 1
    columns: dict[str, object] = {name: rng.normal(size=num_rows).astype(np.float32) for name in inputs.dense}
    columns |= {"item": rng.integers(3, _IDS + 3, num_rows), "user": session % _IDS + 3}
    columns |= {label_column("click"): rng.integers(0, 2, num_rows).astype(np.float32)}
    columns |= {SESSION_COLUMN: session, ROW_COLUMN: np.arange(num_rows)}
    schema = encoded_schema(inputs)
    arrays = []
    for field in schema:
        if pa.types.is_list(field.type):
            popular = (_IDS * rng.random((int(version[-1]) + 1, length)) ** 2).astype(np.int32) + 3
            values = pa.array(popular[version].ravel())
            offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * length)
            arrays.append(pa.ListArray.from_arrays(offsets, values, type=field.type))
        else:
            arrays.append(pa.array(columns[field.name]).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def cases(*, quick: bool, options: argparse.Namespace, report: Report) -> None:
    """Append storage, reading and steps to a report."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = 20_000 if quick else 120_000
        inputs = session_inputs()
        table = session_rows(rows, inputs, rows_per_session=16, unchanged=0.9)
        frame = pl.from_arrow(table.drop_columns([ROW_COLUMN]))
        assert isinstance(frame, pl.DataFrame)
        report.cases.append(_storage("recd_storage", frame, session=SESSION_COLUMN, folder=Path(folder)))
        if options.sessions:
            real = pl.read_parquet(options.sessions)
            name = "recd_storage real sessions"
            report.cases.append(_storage(name, real, session=options.session_column, folder=Path(folder)))
        else:
            report.skipped.append("recd_storage of real sessions: --sessions FILE")
        report.cases.append(_read(table, inputs, folder=Path(folder), turns=3 if quick else 5))
        del table, frame
    turns = 5 if quick else 11
    sweep = []
    for rows_per_session, unchanged in ((16, 0.9), (16, 0.5), (4, 0.9), (2, 0.5), (1, 0.0)):
        case, factor = _step("dlrm", rows_per_session=rows_per_session, unchanged=unchanged, turns=turns)
        report.cases.append(case)
        smaller = _smaller(rows_per_session, unchanged)
        sweep.append(Point(rows_per_session, unchanged, factor=factor, bytes_ratio=smaller, step_ratio=case.ratio))
    report.cases.append(_step("dlrm", rows_per_session=16, unchanged=0.9, turns=turns, length=_LENGTH)[0])
    report.cases.append(_step("din", rows_per_session=16, unchanged=0.9, turns=turns)[0])
    report.extra["sessions_sweep"] = [dataclasses.asdict(point) for point in sweep]
    report.plots.append(("sessions.png", lambda path: draw(sweep, path)))
    report.notes.append(f"below a factor of {MIN_FACTOR} a run takes the plain path (`deduplicate = auto`)")


def _smaller(rows_per_session: int, unchanged: float) -> float:
    """How many times smaller clustered histories are, on few rows."""
    inputs = session_inputs(num_lists=2)
    table = session_rows(32_768, inputs, rows_per_session=rows_per_session, unchanged=unchanged)
    frame = pl.from_arrow(table.select([SESSION_COLUMN, *(spec.name for spec in inputs.jagged)]))
    assert isinstance(frame, pl.DataFrame)
    with tempfile.TemporaryDirectory() as folder:
        columns = [spec.name for spec in inputs.jagged]
        return _storage("sweep", frame, session=SESSION_COLUMN, folder=Path(folder), columns=columns).ratio


def draw(sweep: Sequence[Point], path: Path) -> None:
    """Bytes and time of a step against the factor of the data, with the line that work alone would follow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ordered = sorted(sweep, key=lambda point: point.factor)
    factors = [point.factor for point in ordered]
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    axes.plot(factors, factors, ":", color="grey", label="the factor itself")
    axes.plot(factors, [point.bytes_ratio for point in ordered], "o-", label="bytes of the histories, times smaller")
    axes.plot(factors, [point.step_ratio for point in ordered], "s-", label="a training step, times faster")
    axes.axvline(MIN_FACTOR, linestyle="--", color="grey", label=f"taken from {MIN_FACTOR} on")
    for point in ordered:
        axes.annotate(f"S={point.rows_per_session}, d={point.unchanged}", (point.factor, point.factor), fontsize=8)
    axes.set_xlabel("factor: samples for each distinct value in a batch")
    axes.set_ylabel("against the plain way")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _storage(name: str, frame: pl.DataFrame, *, session: str, folder: Path, columns: Sequence[str] = ()) -> Case:
    """Bytes of the columns that repeat, shuffled and clustered."""
    shuffled = frame.sample(fraction=1.0, shuffle=True, seed=0)
    arrow = shuffled.to_arrow(compat_level=pl.CompatLevel.oldest())
    before, after = folder / f"{len(name)}_shuffled.parquet", folder / f"{len(name)}_clustered.parquet"
    encodings = smallest_encodings(arrow.slice(0, 65_536), codec=CODEC)
    pq.write_table(arrow, before, use_dictionary=encodings, row_group_size=65_536, **CODEC)
    cluster_by_session([before], session=session, out=after)
    measured = repeats_of(frame, session=session).columns
    repeated = list(columns) or [
        each.column for each in measured if each.factor >= MIN_FACTOR and not each.column.startswith("label:")
    ]
    sizes = [sum(column_bytes([path])[column] for column in repeated) for path in (after, before)]
    say(f"  {name}: {sizes[1]:,} → {sizes[0]:,} bytes of {', '.join(repeated)}")
    return _case(name, ours=sizes[0], peer=sizes[1], ratios=[sizes[1] / sizes[0]], goal=3.7, unit="bytes")


def _read(table: pa.Table, inputs: InputSpec, *, folder: Path, turns: int) -> Case:
    """Seconds to make all batches of an epoch."""
    order = np.random.default_rng(0).permutation(table.num_rows)
    datasets = {}
    for name, rows in (("sessions", table), ("shuffled", table.take(order))):
        with EncodedWriter(folder / name, inputs) as writer:
            writer.append(rows)
        datasets[name] = EncodedDataset(folder / name)
    groups = tuple(each.features for each in find_groups(table_to_batch(table.slice(0, 2048), inputs), inputs))

    def reader(name: str, shuffle: Shuffle) -> Callable[[], None]:
        loader = Loader(datasets[name], config=LoaderConfig(batch_size=2048, shuffle=shuffle, prefetch=0))
        loader.groups = groups if shuffle is Shuffle.SESSIONS else ()

        def once() -> None:
            for _ in loader.batches(epoch=0):
                pass

        return once

    ours, peer, ratios = _turns(reader("sessions", Shuffle.SESSIONS), reader("shuffled", Shuffle.BUFFER), turns=turns)
    rate = table.num_rows
    say(f"  recd_read: {rate / ours:,.0f} rows/s against {rate / peer:,.0f}")
    return _case("recd_read", ours=rate / ours, peer=rate / peer, ratios=ratios, goal=1.8, unit="rows/s")


def _step(
    model: str, *, rows_per_session: int, unchanged: float, turns: int, length: int = _LONG
) -> tuple[Case, float]:
    """Seconds of a training step, and the factor of the batch."""
    is_din = model == "din"
    size, num_lists = (512, 1) if is_din else (1024, _NUM_LISTS)
    inputs = session_inputs(num_lists=num_lists, is_history=is_din)
    small = MLPConfig(hidden_dims=(64, 32))
    embedding = EmbeddingConfig(dim=64, kernel=KernelChoice.AUTO)
    config = (
        DINConfig(embedding_dim=64, embedding=embedding, deep=small)
        if is_din
        else DLRMConfig(embedding_dim=64, embedding=embedding, bottom=small, top=small)
    )
    settings = {"rows_per_session": rows_per_session, "unchanged": unchanged, "length": length}
    plain = table_to_batch(session_rows(size, inputs, **settings), inputs)
    groups = find_groups(plain, inputs, min_factor=0.0)
    short = deduplicate(plain, [group.features for group in groups])
    training = TrainingConfig(precision=Precision.FP32)
    step = TrainStep(build_model(config, inputs, seed=0), training)
    step.model.embeddings(plain)  # both with the kernel that is fastest for the plain batch

    def stepper(batch: Batch) -> Callable[[], None]:
        def once() -> None:
            step(batch)

        return once

    ours, peer, ratios = _turns(stepper(short), stepper(plain), turns=turns)
    name = "recd_step" + (" din" if is_din else "")
    name += "" if (rows_per_session, unchanged) == (16, 0.9) else f" S={rows_per_session} d={unchanged}"
    name += "" if length == _LONG else f" of {length} ids"
    say(f"  {name}: {1e3 * ours:.1f} ms against {1e3 * peer:.1f} ms, factor {groups[0].factor:.2f}")
    goal = 2.5 if name == "recd_step" else 0.0
    return _case(name, ours=size / ours, peer=size / peer, ratios=ratios, goal=goal), groups[0].factor


def _turns(ours: Callable[[], None], peer: Callable[[], None], *, turns: int) -> tuple[float, float, list[float]]:
    """Median seconds of both, and how many times faster ours was in each turn."""
    seconds: list[tuple[float, float]] = []
    for number in range(turns + 2):
        pair = []
        for contestant in (ours, peer) if number % 2 else (peer, ours):
            begin = time.perf_counter()
            contestant()
            pair.append(time.perf_counter() - begin)
        if number >= 2:  # the first two warm up
            seconds.append((pair[0], pair[1]) if number % 2 else (pair[1], pair[0]))
    medians = [statistics.median(each) for each in zip(*seconds, strict=True)]
    return medians[0], medians[1], [theirs / mine for mine, theirs in seconds]


def _case(name: str, *, ours: float, peer: float, ratios: list[float], goal: float, unit: str = "samples/s") -> Case:
    return Case(
        name=name,
        ours=ours,
        peer=peer,
        ratio=statistics.median(ratios),
        ratio_p10=float(np.quantile(ratios, 0.1)),
        ratio_p90=float(np.quantile(ratios, 0.9)),
        ours_name="sessions once",
        peer_name="plain",
        goal=goal,
        unit=unit,
    )

"""The worlds of `ziggurat bench distil`: rows in windows of time, and who learns from them.

    drift      the drift generator: preferences that move, and a rate of clicks that goes up and down
    biased     the same rows for the student; the others of its teacher come from another domain: ids of two features
               mean something else there, and three of four negatives are left out
    movielens  MovieLens-1M in order of time, its first 750,000 ratings; a random sample of each window is the student's
    sessions   made sessions in the shape of KuaiRand (`made_sessions.py`); the student serves one tab of four, and has
               a sample of its sessions

A world is one object of `WORLDS`. The rows of a window stand in such an order that the first ones are the student's.
Of MovieLens a seed draws the sample, weights and order, and the ratings are always the same; of the others a seed draws
all. Vocabularies of MovieLens are those of all ratings: an id has a row of a table before it is met, which has learned
nothing by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa

import ziggurat as zg
from benchmarks.made_sessions import MadeSessions, SessionsConfig
from ziggurat.data.datasets import fetch, movielens
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.schema import Encoding
from ziggurat.models.dcn_v2 import CrossConfig

CARDINALITIES = (20, 40, 60, 100, 200, 400)
CLICK_RATE = 0.1
OTHERS_MEAN = ("C4", "C6")  # features whose ids mean something else in the other domain
KEPT_NEGATIVES = 0.25  # of the other domain
TEACHER_COLUMN = "teacher"  # of what the teacher says
TEACHER = zg.DCNv2Config(embedding_dim=16, deep=zg.MLPConfig(hidden_dims=(64, 32)))
STUDENT = zg.DCNv2Config(
    embedding_dim=4, cross=CrossConfig(num_layers=1), deep=zg.MLPConfig(hidden_dims=(16,)), numeric=TEACHER.numeric
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the study of a world.

    Args:
        seeds: of it.
        windows: of a seed.
        first: window that the student begins with.
        warm: its windows that nothing is measured on.
        valid: windows after these, by which settings are chosen; those behind them are for the test.
        traffic: rows of a window that the teacher is trained on.
        own: rows of them that are the student's.
        staleness: windows that the teacher is behind.
        batch_size: of the student.
    """

    seeds: int = 5
    windows: int = 22
    first: int = 8
    warm: int = 2
    valid: int = 4
    traffic: int = 16_384
    own: int = 1_536
    staleness: tuple[int, ...] = (0, 7)
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates of the dense network and of the tables."""

    dense: float
    tables: float


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The data of a seed.

    Args:
        seed: of everything.
        preprocessing: of its rows.
        click_rate: share of positives that models start at.
        frames: rows of each window, those of the student first.
        others: what the teacher is trained on in place of the rows that are not the student's; None: those.
    """

    seed: int
    preprocessing: Preprocessing
    click_rate: float
    frames: list[pl.DataFrame]
    others: Callable[[pl.DataFrame, int], pl.DataFrame] | None = None

    @property
    def label(self) -> str:
        """Return the name of the only label."""
        return self.preprocessing.inputs.labels[0].name

    def traffic(self, own: int) -> Iterator[pa.Table]:
        """Yield the encoded rows of each window that the teacher is trained on.

        Args:
            own: rows that are the student's.
        """
        for window, frame in enumerate(self.frames):
            if self.others is not None:
                frame = pl.concat([frame[:own], self.others(frame[own:], window)])
            yield encoded(self.preprocessing, frame)


@dataclass(frozen=True, kw_only=True)
class World:
    """Rows in windows, a teacher and a student.

    Args:
        name: for options, figures and files.
        about: one line for the report.
        draw: makes the rows of a seed.
        size: of the study.
        quick: size of a trial.
        others: whether students of other sizes are studied, too.
        user: raw column of the user, whose vectors a student may read; "": it reads none.
        teacher: the large model.
        student: the small one.
        teacher_rates: of the teacher.
        student_rates: of the student.
    """

    name: str
    about: str
    draw: Callable[[int, Size], Rows]
    size: Size
    quick: Size
    others: bool = True
    user: str = ""
    teacher: zg.DCNv2Config = TEACHER
    student: zg.DCNv2Config = STUDENT
    teacher_rates: Rates = Rates(dense=0.002, tables=0.2)
    student_rates: Rates = Rates(dense=0.005, tables=0.05)


def encoded(preprocessing: Preprocessing, frame: pl.DataFrame) -> pa.Table:
    """Encode rows."""
    return preprocessing.encode(RawChunk.of(frame)).combine_chunks()


def with_teacher_column(schema: zg.Schema) -> zg.Schema:
    """Return a schema that has a place for what a teacher says."""
    return replace(schema, extras=(zg.Extra(name=TEACHER_COLUMN),))


def not_scored(frame: pl.DataFrame) -> pl.DataFrame:
    """Return rows of which no teacher has said anything."""
    return frame.with_columns(pl.lit(None, dtype=pl.Float32).alias(TEACHER_COLUMN))


# ------------------------------------------------------------------------------------------------- the drift generator


def drifting(seed: int, size: Size) -> Rows:
    """Draw the windows of a seed: preferences that move, and a rate of clicks that goes up and down."""
    made = zg.SyntheticConfig(
        num_dense=4,
        cardinalities=CARDINALITIES,
        click_rate=CLICK_RATE,
        dense_share=0.1,
        first_order_share=0.4,
        second_order_share=0.5,
        third_order_share=0.0,
        seed=seed,
    )
    drift = zg.DriftConfig(
        teacher=made, window_rows=size.traffic, preference_rate=0.02, season_windows=12.0, season_logit=0.3
    )
    generator = zg.DriftingTeacher(drift)
    frames = [not_scored(generator.frame(window)) for window in range(size.windows)]
    schema = with_teacher_column(generator.schema(encoding=Encoding.IDENTITY))
    preprocessing = Preprocessing.fit(schema, [RawChunk.of(frames[0])])
    return Rows(seed=seed, preprocessing=preprocessing, click_rate=CLICK_RATE, frames=frames)


def biased(seed: int, size: Size) -> Rows:
    """Draw the same windows, with a teacher that learns from another domain, too."""

    def others(frame: pl.DataFrame, window: int) -> pl.DataFrame:
        return of_another_domain(frame, seed=seed, window=window)

    return replace(drifting(seed, size), others=others)


def of_another_domain(frame: pl.DataFrame, *, seed: int, window: int) -> pl.DataFrame:
    """Return rows as another domain has them: ids that mean something else, and fewer negatives."""
    columns: list[pl.Series] = []
    for name in OTHERS_MEAN:
        index = int(name[1:]) - 1
        meaning = np.random.default_rng((seed, index)).permutation(CARDINALITIES[index])
        columns.append(pl.Series(name, meaning[frame[name].to_numpy()].astype(np.int32)))
    drawn = np.random.default_rng((seed, window, 1)).random(frame.height)
    is_kept = (frame["label"].to_numpy() == 1) | (drawn < KEPT_NEGATIVES)
    return frame.with_columns(columns).filter(pl.Series(is_kept))


# -------------------------------------------------------------------------------------------------------- MovieLens-1M


def rated(seed: int, size: Size) -> Rows:
    """Cut MovieLens-1M into windows of time, and draw the student's ratings of each."""
    ratings = pl.read_parquet(fetch(movielens.NAME)).sort("timestamp", maintain_order=True)
    return cut_by_time(ratings, seed=seed, size=size)


def cut_by_time(ratings: pl.DataFrame, *, seed: int, size: Size) -> Rows:
    """Cut ratings that are in order of time into windows of as many rows.

    Args:
        ratings: all of them; those behind the last window are left out.
        seed: of the order within a window, by which the first rows are a random sample.
        size: of the study.
    """
    ratings = not_scored(ratings.with_columns(at=pl.int_range(pl.len())))
    schema = with_teacher_column(movielens.movielens_schema())
    preprocessing = Preprocessing.fit(schema, [RawChunk.of(ratings)])
    frames = [
        ratings[window * size.traffic : (window + 1) * size.traffic].sample(fraction=1.0, shuffle=True, seed=seed)
        for window in range(size.windows)
    ]
    return Rows(
        seed=seed,
        preprocessing=preprocessing,
        click_rate=float((frames[0]["rating"] >= 4).mean()),  # pyright: ignore[reportArgumentType]
        frames=frames,
    )


# ------------------------------------------------------------------------------------------------------- made sessions


def sessions_config(seed: int, size: Size) -> SessionsConfig:
    """Return the settings of the made sessions."""
    return SessionsConfig(windows=size.windows, window_rows=size.traffic, seed=seed)


def sessions_schema(config: SessionsConfig) -> zg.Schema:
    """Return what models read of made sessions; tags of earlier clicks share the table of tags."""
    rows = {
        "user": config.users,
        "video": config.videos,
        "author": config.authors,
        "tag": config.tags,
        "tab": config.tabs,
        "position": 20,
    }
    return zg.Schema(
        features=(
            zg.Dense(name="duration"),
            *(zg.Categorical(name=name) for name in rows),
            zg.MultiHot(name="recent", table="tag"),
        ),
        tables=tuple(
            zg.Table(name=name, encoding=Encoding.IDENTITY, num_rows=num_rows) for name, num_rows in rows.items()
        ),
        labels=(zg.Label(name="click"),),
    )


def in_sessions(seed: int, size: Size) -> Rows:
    """Draw sessions; those of the first tab, in random order, are the first rows of each window."""
    config = sessions_config(seed, size)
    rng = np.random.default_rng((seed, 36))
    frames: list[pl.DataFrame] = []
    for frame in MadeSessions(config).frames():
        begins = (frame["position"] == 0).cum_sum()
        drawn = pl.Series(rng.permutation(int(begins[-1]) + 1))
        frame = frame.with_columns(drawn=drawn.gather(begins))
        own_first = frame.sort(pl.col("tab") != 0, "drawn", "position").drop("drawn")
        frames.append(not_scored(own_first))
    preprocessing = Preprocessing.fit(with_teacher_column(sessions_schema(config)), [RawChunk.of(frames[0])])
    rate = float(frames[0]["click"].mean())  # pyright: ignore[reportArgumentType]
    return Rows(seed=seed, preprocessing=preprocessing, click_rate=rate, frames=frames)


_QUICK = Size(seeds=2, windows=11, first=3, warm=1, valid=2, traffic=4_096, own=512, staleness=(0, 2))
WORLDS = {
    each.name: each
    for each in (
        World(
            name="drift",
            about="drift generator: a tenth of the rows are clicks, preferences lose 2 % of their variance a window",
            draw=drifting,
            size=Size(staleness=(0, 1, 3, 7)),
            quick=_QUICK,
        ),
        World(
            name="biased",
            about="the same, whose teacher learns from another domain, too",
            draw=biased,
            size=Size(),
            quick=replace(_QUICK, staleness=(0,)),
            others=False,
        ),
        World(
            name="movielens",
            about="MovieLens-1M by time, like = rating of 4 or more",
            draw=rated,
            size=Size(windows=30, first=10, warm=2, valid=6, traffic=25_000, own=1_280),
            quick=replace(_QUICK, traffic=8_000),
            user="user_id",
            student_rates=Rates(dense=0.01, tables=0.2),
        ),
        World(
            name="sessions",
            about="made sessions in the shape of KuaiRand, of which the student serves one tab",
            draw=in_sessions,
            size=Size(),
            quick=_QUICK,
            user="user",
            student_rates=Rates(dense=0.005, tables=0.2),
        ),
    )
}

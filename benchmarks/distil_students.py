"""Teachers and students of `ziggurat bench distil`: one pass over windows, each scored before it is trained.

    version before window t − k ─┬─► scores of the student's rows of window t                 a teacher stale by k
                                 └─► vectors of all rows of window t ─► the last ones of each user by window t + 1

Windows are in memory, each with the scores and vectors that a stream would have joined (`ziggurat stream --teacher`):
what is joined, and when, is tested elsewhere and not measured here. A history has vectors of earlier windows alone,
each by the version that was there when its row came.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray

import ziggurat as zg
from benchmarks.distil_worlds import TEACHER_COLUMN, Rates, Rows, Size, World, encoded
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.encoded.records import encoded_schema, extra_column, label_column, table_to_batch
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.features.inputs import HistoryPooling
from ziggurat.features.kinds import TeacherHistory
from ziggurat.models import Model
from ziggurat.ops.vector_histories import pack_histories, row_words_of
from ziggurat.precision import Precision
from ziggurat.runs.teachers.student import mean_targets
from ziggurat.training.config import TrainingConfig
from ziggurat.training.distillation import DistilConfig, DistilHead, teach
from ziggurat.training.metrics.functions import auc, calibration, normalised_entropy
from ziggurat.training.trainer import Trainer

NONE = DistilConfig()
HISTORY_COLUMN = "teacher_vectors"
HISTORY_LENGTH = 4
MANY = 4  # times as many rows, of the student with most
LOGGED_BEFORE = 6  # windows before the student's first, of which vectors are logged, too

Metrics = dict[str, float]
Scores = NDArray[np.float32]
Words = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Told:
    """Holds what a teacher said of the student's rows, by window.

    Args:
        scores: probabilities; empty before the student's first window.
        vectors: the feature by which a student reads vectors; None where the world has no column of the user.
        histories: packed vectors of each row's user; none where there is no such feature.
        known: share of rows whose user the teacher has met; nan where the world has no column of the user.
    """

    scores: list[Scores]
    vectors: TeacherHistory | None
    histories: list[Words]
    known: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Mean metrics over the windows for validation and for the test."""

    valid: Metrics
    test: Metrics


@dataclass(frozen=True, kw_only=True)
class Student:
    """A student: what tells it from others.

    Args:
        distil: how it learns from scores.
        starts_at_half: whether auxiliary heads start at 1/2, and not at the mean of their targets.
        reads_vectors: whether it reads a history of its users' vectors.
        is_large: whether it is as large as its teacher.
        times_own: so many times the rows.
    """

    distil: DistilConfig = NONE
    starts_at_half: bool = False
    reads_vectors: bool = False
    is_large: bool = False
    times_own: int = 1

    @property
    def name(self) -> str:
        """Return a name for files."""
        distil = self.distil
        scaled = f"_{distil.label_scaling:g}_{distil.gradient_scaling:g}_{distil.loss_weight:g}"
        parts = (
            distil.head.value,
            scaled if distil.head.value != "none" else "",
            "_adapter" * distil.adapter,
            "_from_half" * self.starts_at_half,
            "_vectors" * self.reads_vectors,
            "_large" * self.is_large,
            f"_times_{self.times_own}" if self.times_own > 1 else "",
        )
        return "".join(parts)


def training(seed: int, *, rates: Rates, batch_size: int) -> TrainingConfig:
    """Return the settings of one pass, without anything that is measured or chosen at the start."""
    return TrainingConfig(
        epochs=1,
        seed=seed,
        threads=1,
        learning_rate=rates.dense,
        table_learning_rate=rates.tables,
        precision=Precision.FP32,
        log_every=100_000,
        loader=LoaderConfig(batch_size=batch_size, seed=seed, shuffle_buffer_rows=100_000),
    )


def built(config: zg.DCNv2Config, inputs: zg.InputSpec, rows: Rows) -> Model:
    """Build a model whose scores start at the rate of clicks."""
    model = zg.build_model(config, inputs, seed=rows.seed)
    with torch.no_grad():
        model.output_biases()[0].add_(math.log(rows.click_rate / (1.0 - rows.click_rate)))
    return model


def stream(
    model: Model,
    windows: Sequence[pa.Table],
    *,
    config: TrainingConfig,
    before: Callable[[int], None],
    loss: Callable[..., object] | None = None,
) -> None:
    """Train windows one after the other, once; `before` is called with the number of each before it is trained."""
    inputs = model.inputs
    empty = MemoryDataset(encoded_schema(inputs).empty_table(), inputs)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, config=config, train=empty, folder=folder, loss=loss)  # pyright: ignore[reportArgumentType]
        with trainer.over_windows():
            for number, table in enumerate(windows):
                before(number)
                for _ in trainer.steps(MemoryDataset(table, inputs)):
                    pass


@torch.no_grad()
def scores_of(model: Model, table: pa.Table) -> Scores:
    """Return the probabilities of rows."""
    return scores_and_vectors(model, table)[0]


@torch.no_grad()
def scores_and_vectors(model: Model, table: pa.Table) -> tuple[Scores, torch.Tensor]:
    """Return the probabilities of rows, and their final representations."""
    was_training = model.training
    model.eval()
    seen: list[torch.Tensor] = []
    [closing] = model.closing_maps()
    hook = closing.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits = model(table_to_batch(table, model.inputs)).float()
    finally:
        hook.remove()
        model.train(was_training)
    return torch.sigmoid(logits)[:, 0].numpy(), seen[0].float()


# ---------------------------------------------------------------------------------------------------------- the teacher


class Histories:
    """Keeps the last vectors of each user.

    Args:
        users: largest number of a user, and one more.
        feature: as a student reads them.
    """

    def __init__(self, users: int, feature: TeacherHistory) -> None:
        self.feature = feature
        self._vectors = torch.zeros(users, feature.length, feature.dim)
        self._counts = torch.zeros(users, dtype=torch.int64)

    def of(self, users: NDArray[np.int64]) -> Words:
        """Return the packed vectors of users, the latest first."""
        at = torch.from_numpy(users)
        return pack_histories(self._vectors[at], self._counts[at], history=self.feature.history).numpy()

    def add(self, users: NDArray[np.int64], at: NDArray[np.int64], vectors: torch.Tensor) -> None:
        """Put the vectors of rows before those of earlier ones.

        Args:
            users: of the rows.
            at: their order in time.
            vectors: (rows, dim).
        """
        order = np.lexsort((at, users))
        place = np.arange(len(order))
        is_last = np.append(users[order][1:] != users[order][:-1], True)
        ends = place[is_last]
        sizes = np.diff(ends, prepend=-1)
        for back in range(self.feature.length - 1, -1, -1):
            has = sizes > back
            rows = order[ends[has] - back]
            owner = torch.from_numpy(users[rows])
            self._vectors[owner, 1:] = self._vectors[owner, :-1].clone()
            self._vectors[owner, 0] = vectors[torch.from_numpy(rows)]
            self._counts[owner] = (self._counts[owner] + 1).clamp(max=self.feature.length)


def history_feature(world: World, teacher: Model) -> TeacherHistory:
    """Return the feature by which a student reads its teacher's vectors."""
    [closing] = teacher.closing_maps()
    dim = closing.in_features
    return TeacherHistory(
        name=HISTORY_COLUMN,
        key=world.user,
        length=HISTORY_LENGTH,
        dim=dim,
        format="bf16",
        row_words=row_words_of("bf16", dim),
        pooling=HistoryPooling.MEAN,
    )


def taught_by(world: World, rows: Rows, size: Size, own: Sequence[pa.Table]) -> dict[int, Told]:
    """Train a teacher over all windows, and return what it says of the student's rows, by staleness.

    Args:
        world: has the teacher.
        rows: of a seed.
        size: of the study.
        own: encoded rows of each window that are scored, its first ones.
    """
    model = built(world.teacher, rows.preprocessing.inputs, rows)
    none = np.empty(0, dtype=np.float32)
    scores = {stale: [none] * size.windows for stale in size.staleness}
    words: list[Words] = []
    histories = None
    if world.user:
        users = 1 + max(int(_users(world, frame).max()) for frame in rows.frames)
        histories = Histories(users, history_feature(world, model))
        words = [np.empty((0, histories.feature.history.words), dtype=np.int32)] * size.windows

    def before(window: int) -> None:
        for stale in size.staleness:
            if size.first <= window + stale < size.windows:
                scores[stale][window + stale] = scores_of(model, own[window + stale])
        if histories is not None and window >= size.first - LOGGED_BEFORE:
            frame = rows.frames[window]
            users = _users(world, frame)
            words[window] = histories.of(users[: len(own[window])])
            vectors = scores_and_vectors(model, encoded(rows.preprocessing, frame))[1]
            histories.add(users, frame["at"].to_numpy().astype(np.int64), vectors)

    config = training(rows.seed, rates=world.teacher_rates, batch_size=512)
    stream(model, list(rows.traffic(size.own)), config=config, before=before)
    return {
        stale: Told(
            scores=found,
            vectors=None if histories is None else histories.feature,
            histories=words,
            known=_share_of_known(world, rows, size, stale=stale),
        )
        for stale, found in scores.items()
    }


def _users(world: World, frame: pl.DataFrame) -> NDArray[np.int64]:
    return frame[world.user].to_numpy().astype(np.int64)


def _share_of_known(world: World, rows: Rows, size: Size, *, stale: int) -> float:
    """Return for how many of the student's rows of the test the teacher has met the user before."""
    if not world.user:
        return math.nan
    met: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    found: list[float] = []
    for window in range(size.windows):
        if window >= size.first + size.warm + size.valid:
            found.append(float(np.isin(_users(world, rows.frames[window][: size.own]), met).mean()))
        if window >= stale:
            met = np.union1d(met, _users(world, rows.frames[window - stale]))
    return statistics.mean(found)


# ---------------------------------------------------------------------------------------------------------- the student


def measured(scores: Scores, labels: NDArray[np.float32]) -> Metrics:
    """Return the metrics of a window."""
    return {
        "auc": auc(scores, labels),
        "ne": normalised_entropy(scores, labels),
        "calibration": calibration(scores, labels),
    }


def mean_of(found: Sequence[Metrics]) -> Metrics:
    """Return the means over windows, or over seeds."""
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def outcome_of(size: Size, scores: Callable[[int], Scores], labels: Callable[[int], NDArray[np.float32]]) -> Outcome:
    """Return the metrics of scores over the windows that are measured."""
    begin = size.first + size.warm
    found = [measured(scores(window), labels(window)) for window in range(begin, size.windows)]
    return Outcome(valid=mean_of(found[: size.valid]), test=mean_of(found[size.valid :]))


class Seed:
    """Has the rows of one seed, what its teacher says of them, and its students.

    Args:
        world: that the rows are drawn from.
        size: of the study.
        seed: of everything.
    """

    def __init__(self, world: World, size: Size, seed: int) -> None:
        self.world = world
        self.size = size
        self.seed = seed
        self._own: dict[int, list[pa.Table]] = {}

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows; once the teacher is trained, those of the students alone."""
        return self.world.draw(self.seed, self.size)

    @functools.cached_property
    def told(self) -> dict[int, Told]:
        """What the teacher said, by staleness."""
        most = MANY if self.world.others else 1
        found = taught_by(self.world, self.rows, self.size, self.own(most))
        self.rows = replace(self.rows, frames=[frame[: most * self.size.own] for frame in self.rows.frames])
        return found

    def own(self, times: int) -> list[pa.Table]:
        """Return the encoded rows of a student, window by window.

        Args:
            times: so many times the usual number.
        """
        if times not in self._own:
            frames = [frame[: times * self.size.own] for frame in self.rows.frames]
            self._own[times] = [encoded(self.rows.preprocessing, frame) for frame in frames]
        return self._own[times]

    def labels(self, window: int, *, times: int = 1) -> NDArray[np.float32]:
        """Return the labels of a student's rows."""
        return self.own(times)[window].column(label_column(self.rows.label)).to_numpy()

    def of_teacher(self, stale: int, *, times: int = 1) -> Outcome:
        """Return the metrics of the teacher on a student's rows; of the test, whose users it has met, too."""
        told = self.told[stale]
        count = times * self.size.own
        found = outcome_of(self.size, lambda at: told.scores[at][:count], lambda at: self.labels(at, times=times))
        if not self.world.user:
            return found
        return replace(found, test=found.test | {"known_users": told.known})

    def of_student(self, which: Student, stale: int) -> Outcome:
        """Stream a student over its windows, each scored before it is trained.

        Args:
            which: what tells it from others.
            stale: windows that its teacher is behind; of no meaning where it has none.
        """
        inputs = self._inputs(which)
        tables = [self._table(which, inputs, window, stale) for window in range(self.size.first, self.size.windows)]
        model = built(self.world.teacher if which.is_large else self.world.student, inputs, self.rows)
        means = mean_targets(which.distil, MemoryDataset(tables[0], inputs))
        taught = teach(model, which.distil, seed=self.seed, mean_targets=means)
        if which.starts_at_half and taught is not None:
            for head in taught.heads.modules():
                if isinstance(head, torch.nn.Linear):
                    torch.nn.init.zeros_(head.bias)
        scores: dict[int, Scores] = {}

        def before(number: int) -> None:
            scores[self.size.first + number] = scores_of(model, tables[number])

        config = training(self.seed, rates=self.world.student_rates, batch_size=self.size.batch_size)
        stream(model, tables, config=config, before=before, loss=None if taught is None else taught.loss)
        return outcome_of(self.size, scores.__getitem__, lambda at: self.labels(at, times=which.times_own))

    def _inputs(self, which: Student) -> zg.InputSpec:
        fitted = self.rows.preprocessing
        if not which.reads_vectors:
            return fitted.inputs
        feature = self.told[0].vectors
        assert feature is not None, f"{self.world.name} has no column of the user"
        schema = replace(fitted.schema, features=(*fitted.schema.features, feature))
        return Preprocessing(schema, vocabularies=fitted.vocabularies, numbers=fitted.numbers).inputs

    def _table(self, which: Student, inputs: zg.InputSpec, window: int, stale: int) -> pa.Table:
        """Return the rows of a window with what a student learns from, beside its labels."""
        table = self.own(which.times_own)[window]
        if which.distil.head is not DistilHead.NONE:
            scores = self.told[stale].scores[window][: len(table)]
            name = extra_column(TEACHER_COLUMN)
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(at), pa.array(scores.astype(np.float32)))
        if which.reads_vectors:
            words = self.told[stale].histories[window][: len(table)]
            lists = pa.FixedSizeListArray.from_arrays(pa.array(words.ravel()), words.shape[1])
            table = table.append_column(HISTORY_COLUMN, lists).select(encoded_schema(inputs).names)
        return table

"""LoopFM: students that read a teacher's vectors of their users' earlier rows, beside distillation and neither.

Two made sets of 400 users and 300 items, a row a second, whose truth is known; the teacher (DCNv2 of 16 dims and
(128, 64)) is trained on the first rows, and logs scores and vectors of all. Students (4 dims, (32, 16)) learn from half
of the rows after these, choices are made on the next 15 %, and measured is the rest.

    hashed   tastes stand still; the student's user ids are hashed into 32 rows, the teacher's are not
    moods    click depends on a mood of the user, which changes in 1 row of 20; the teacher sees it, the student never

    alone    labels                            loopfm    labels, and a history of vectors
    aux      labels, and logged scores         both      labels, logged scores, and a history
    stranger the history of another user: a control, which should gain nothing
    all_ids  `hashed` alone: the student has a row for each user, what the folded ids cost it

Length and pooling of the history, and the weight of the auxiliary head, are those of the best validation AUC of the
first seed; all seeds are then measured on the test rows by these choices. Every run has the weights of its best pass
by validation among 8 (the teacher 3): a history is learned slower than what ids say.

`ziggurat bench distil_history`
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

import ziggurat as zg
from benchmarks.harness import say
from benchmarks.report import Case, Report, by_round
from ziggurat.features.inputs import HistoryPooling
from ziggurat.features.schema import Encoding, Feature
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.ops.lookup import KernelChoice
from ziggurat.precision import Precision
from ziggurat.runs.teachers.log import log_teacher
from ziggurat.runs.teachers.student import TeacherHistoryConfig, with_teacher
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.distillation import DistilConfig, DistilHead

NUM_USERS = 400
NUM_ITEMS = 300
NUM_MOODS = 8
FIRST = 1_767_225_600
HISTORIES = {
    f"{pooling.value}_{length}": TeacherHistoryConfig(key="owner", length=length, pooling=pooling)
    for pooling in HistoryPooling
    for length in (4, 16)
}
WEIGHTS = (1.0, 3.0)
METRICS = ("auc", "ne", "calibration")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the experiment.

    Args:
        old_rows: that the teacher is trained on.
        new_rows: of students: training, validation and test.
        seeds: of students.
    """

    old_rows: int
    new_rows: int
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Settings that tell students apart.

    Args:
        history: of vectors that they read, or None.
        weight: of the auxiliary head; 0: without.
        file: of their rows.
        all_ids: whether each user has a row.
    """

    history: TeacherHistoryConfig | None = None
    weight: float = 0.0
    file: str = "new"
    all_ids: bool = False


def made_rows(kind: str, size: Size) -> pl.DataFrame:
    """Return all rows of a made set in order of time; `truth` is the probability of a click."""
    rng = np.random.default_rng(11)
    num_rows = size.old_rows + size.new_rows
    tastes, items = rng.normal(size=(NUM_USERS, 4)), rng.normal(size=(NUM_ITEMS, 4))
    of_moods = rng.normal(size=(NUM_MOODS, 4))
    user = rng.integers(0, NUM_USERS, num_rows)
    item = rng.integers(0, NUM_ITEMS, num_rows)
    now = rng.integers(0, NUM_MOODS, NUM_USERS)
    mood = np.empty(num_rows, dtype=np.int64)
    changes = rng.random(num_rows) < 0.05
    drawn = rng.integers(0, NUM_MOODS, num_rows)
    for row in range(num_rows):
        if changes[row]:
            now[user[row]] = drawn[row]
        mood[row] = now[user[row]]
    wishes = tastes[user] if kind == "hashed" else of_moods[mood]
    logit = -1.5 + 0.7 * (wishes * items[item]).sum(axis=1) + 0.3 * items[item, 0]
    truth = 1.0 / (1.0 + np.exp(-logit))
    return pl.DataFrame(
        {
            "user": user,
            "owner": [f"u{each}" for each in user],
            "stranger": [f"u{each}" for each in rng.permutation(NUM_USERS)[user]],
            "item": item,
            "mood": mood,
            "click": (rng.random(num_rows) < truth).astype(np.int64),
            "at": FIRST + np.arange(num_rows),
            "truth": truth,
        }
    )


def schema_of(kind: str, *, of_teacher: bool, all_ids: bool = False) -> zg.Schema:
    """Return what a teacher or a student of a made set reads."""
    features: list[Feature] = [zg.Categorical(name="user"), zg.Categorical(name="item")]
    if of_teacher and kind == "moods":
        features.append(zg.Categorical(name="mood"))
    folded = zg.Table(name="user", encoding=Encoding.HASHING, num_rows=32)
    tables = () if of_teacher or all_ids or kind != "hashed" else (folded,)
    return zg.Schema(features=tuple(features), tables=tables, labels=(zg.Label(name="click"),), time="at")


def config_of(schema: zg.Schema, file: Path, *, dim: int, deep: tuple[int, ...], split: zg.SplitConfig) -> zg.RunConfig:
    """Return the config of a teacher or a student, which is the smaller one."""
    model = zg.DCNv2Config(
        embedding_dim=dim,
        deep=MLPConfig(hidden_dims=deep),
        embedding=zg.EmbeddingConfig(kernel=KernelChoice.TORCH),
    )
    config = zg.table_run(model, schema)
    loader = replace(config.training.loader, batch_size=256)
    training = replace(
        config.training,
        epochs=8 if dim == 4 else 3,
        learning_rate=0.003,
        threads=1,
        precision=Precision.FP32,
        loader=loader,
    )
    return replace(config, data=replace(config.data, train=(str(file),), split=split), training=training)


class Students:
    """Trains students of one made set.

    Args:
        kind: of the set.
        size: of the experiment.
        folder: for files, runs and the side table.
    """

    def __init__(self, kind: str, size: Size, *, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        rows = made_rows(kind, size)
        old = rows[: size.old_rows]
        new = rows[size.old_rows :]
        old.write_parquet(folder / "old.parquet")
        new.write_parquet(folder / "new.parquet")
        new.with_columns(owner=pl.col("stranger")).write_parquet(folder / "strangers.parquet")
        self.split = zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.15, test_fraction=0.35)
        last = zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.1, test_fraction=0.0)
        teacher = config_of(
            schema_of(kind, of_teacher=True), folder / "old.parquet", dim=16, deep=(128, 64), split=last
        )
        zg.train_run(teacher, folder=folder / "big")
        run = zg.load_run(folder / "big")
        files = [str(folder / "old.parquet"), str(folder / "new.parquet")]
        log_teacher(run, files, out=folder / "teacher", example=("user", "item", "at"), history="owner")
        num_test = int(0.35 * size.new_rows)
        test = new[-num_test:]
        self.teacher = run.evaluate(test).metrics
        truth = test["truth"].to_numpy()
        entropy = -np.mean(truth * np.log(truth) + (1 - truth) * np.log1p(-truth))
        rate = truth.mean()
        self.best_ne = float(entropy / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))

    def trained(self, seed: int, arm: Arm) -> dict[str, dict[str, float]]:
        """Return metrics by split of a student."""
        schema = schema_of(self.kind, of_teacher=False, all_ids=arm.all_ids)
        config = config_of(schema, self.folder / f"{arm.file}.parquet", dim=4, deep=(32, 16), split=self.split)
        training = replace(config.training, seed=seed, loader=replace(config.training.loader, seed=seed))
        head = DistilHead.AUX_HEAD if arm.weight else DistilHead.NONE
        config = replace(config, training=training, distil=DistilConfig(head=head, loss_weight=arm.weight or 1.0))
        if arm.history is not None or arm.weight:
            config = with_teacher(config, self.folder / "teacher", history=arm.history)
        with tempfile.TemporaryDirectory() as folder:
            result = zg.train_run(config, folder=Path(folder) / "run")
        return {split: each.metrics for split, each in result.evaluations.items()}


def history_cases(kind: str, size: Size, *, folder: Path) -> tuple[list[Case], list[str]]:
    """Return cases of a made set against the student alone, and lines about them.

    Args:
        kind: "hashed" or "moods".
        size: of the experiment.
        folder: is made.
    """
    folder.mkdir()
    students = Students(kind, size, folder=folder)
    notes = [
        f"{kind}: teacher AUC {students.teacher['auc']:.4f}, NE {students.teacher['ne']:.4f}, calibration "
        f"{students.teacher['calibration']:.3f}; best reachable NE {students.best_ne:.4f}"
    ]
    say(notes[-1])
    seeds = range(1, size.seeds + 1)

    def chosen(options: dict[str, Arm]) -> str:
        found = {name: students.trained(seeds[0], each)["valid"]["auc"] for name, each in options.items()}
        notes.append(f"{kind}, validation AUC: " + ", ".join(f"{name} {auc:.4f}" for name, auc in found.items()))
        say(notes[-1])
        return max(found, key=lambda name: found[name])

    history = HISTORIES[chosen({name: Arm(history=each) for name, each in HISTORIES.items()})]
    weight = float(chosen({f"weight {each:g}": Arm(weight=each) for each in WEIGHTS}).split()[1])
    arms = {
        "alone": Arm(),
        "aux": Arm(weight=weight),
        "loopfm": Arm(history=history),
        "both": Arm(history=history, weight=weight),
        "stranger": Arm(history=history, file="strangers"),
    }
    if kind == "hashed":
        arms["all_ids"] = Arm(all_ids=True)
    found: dict[str, list[dict[str, float]]] = {}
    for name, arm in arms.items():
        found[name] = [students.trained(seed, arm)["test"] for seed in seeds]
        said = [f"{metric} {_spread([each[metric] for each in found[name]])}" for metric in METRICS]
        notes.append(f"{kind}, {name}: " + ", ".join(said))
        say(notes[-1])
    cases: list[Case] = []
    room = students.teacher["auc"] - statistics.mean(each["auc"] for each in found["alone"])
    for name in list(arms)[1:]:
        ours = [each["auc"] for each in found[name]]
        peer = [each["auc"] for each in found["alone"]]
        cases.append(by_round(f"{kind}_{name}_auc", ours=(name, ours), peer=("alone", peer), unit="AUC"))
        difference = paired_difference(ours, peer)
        notes.append(
            f"{kind}, {name} − alone: {difference.mean:+.4f} ± {difference.sd:.4f}, p = {difference.t_p:.2g}, "
            f"transfer {difference.mean / room:.2f}"
        )
        say(notes[-1])
    for one, other in (("both", "loopfm"), ("both", "aux"), ("loopfm", "aux")):
        difference = paired_difference([each["auc"] for each in found[one]], [each["auc"] for each in found[other]])
        notes.append(f"{kind}, {one} − {other}: {difference.mean:+.4f} ± {difference.sd:.4f}, p = {difference.t_p:.2g}")
        say(notes[-1])
    return cases, notes


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {deviation:.4f}"


def run(*, quick: bool = False) -> Report:
    """Train students of both made sets."""
    size = Size(old_rows=80_000, new_rows=24_000, seeds=5)
    if quick:
        size = Size(old_rows=8_000, new_rows=4_000, seeds=2)
    report = Report(
        benchmark="distil_history",
        claim=f"A history of a teacher's vectors beside distillation: {size.new_rows:,} rows, {size.seeds} seeds.",
        command="ziggurat bench distil_history",
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("hashed", "moods"):
            cases, notes = history_cases(kind, size, folder=Path(folder) / kind)
            report.cases += cases
            report.notes += notes
    return report

"""Does an export score as the run it was made from? Asked before it is published, on up to 100,000 raw rows.

    raw rows ──► the run: its preprocessing, its model ───────────► scores ─┐
             └─► the export, read back from its files ────────────► scores ─┴─► the largest difference, AUC of both
    the same rows with ids that nobody has seen, with missing cells and empty lists, as a request would send them

With FP32 tables no score may differ by more than 1e-5. Tables or products in few bits change scores by design; the AUC
of each binary label may then not fall by more than 1e-4 (of a label that is a number: the root mean squared error may
not rise by more than 1e-4 of it). A metric that gets better by chance is no reason to refuse, and its change is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.preprocess.values.parsing import vectors_of_words
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import ExportError
from ziggurat.features.kinds import TeacherHistory
from ziggurat.features.schema import Feature, Schema, column_of
from ziggurat.ops.written_decimals import frame_with_decimals
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.export_config import ExportConfig
from ziggurat.runs.load import Run
from ziggurat.serving.answering.ranker import Ranker
from ziggurat.serving.plain_values import plain
from ziggurat.training.evaluation.evaluate import scores_of
from ziggurat.training.metrics.metric import Judged, held_in_few_bits, metric_of
from ziggurat.training.metrics.ranking import DEFAULT_RANKING_K
from ziggurat.training.metrics.scored_samples import ScoreScale, scored_samples

TOLERANCE = 1e-5
METRIC_TOLERANCE = 1e-4
_BATCH = 16_384
_NEVER_SEEN = "an id that nobody has seen"


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The comparison of an export's scores with those of its run.

    Args:
        num_rows: raw rows that both scored.
        largest_difference: of any score of the raw rows.
        largest_of_requests: the same where rows came as requests, with unseen ids and missing cells.
        metrics: by name and label, those of the run and of the export that few bits may not make worse; only where
            both are defined.
    """

    num_rows: int
    largest_difference: float
    largest_of_requests: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The comparison as plain data."""
        return {
            "num_rows": self.num_rows,
            "largest_difference": self.largest_difference,
            "largest_of_requests": self.largest_of_requests,
            "metrics": {name: list(pair) for name, pair in self.metrics.items()},
        }

    def line(self) -> str:
        """The comparison for people, in one line."""
        metrics = "".join(
            f"; {name} {there:.6f} instead of {run:.6f} ({there - run:+.1e})"
            for name, (run, there) in self.metrics.items()
        )
        text = f"{self.num_rows:,} raw rows: scores differ by at most {self.largest_difference:.1e}{metrics}"
        # Whoever reads an AUC takes it for a quality, and most of these rows were trained on.
        return text + (" on these rows, which hold those of training" if metrics else "")


def compare(run: Run, ranker: Ranker, *, data: RunData, num_rows: int) -> Parity:
    """Score raw rows of a run's data by the run and by its export.

    Args:
        run: on one device.
        ranker: of the export, read back.
        data: of the run.
        num_rows: about how many.
    """
    batch_inputs = run.preprocessing.inputs
    of_run = []
    of_export = []
    labels = []
    sample: RawChunk | None = None
    for chunk in data.samples(num_rows=num_rows):
        sample = sample or chunk
        mine = table_to_batch(run.preprocessing.encode(chunk, bad_rows=data.bad_rows, needs_extras=False), batch_inputs)
        theirs = table_to_batch(
            ranker.packed.preprocessing.encode(chunk, bad_rows=data.bad_rows, needs_extras=False), ranker.inputs
        )
        of_run += [scores for _, scores in scores_of(run.model, [mine])]
        of_export.append(ranker.score_batch(theirs).numpy())
        labels.append(mine.labels.numpy())
    assert sample is not None, "a run has rows"
    first = np.concatenate(of_run)
    second = np.concatenate(of_export)
    known = np.concatenate(labels)
    return Parity(
        num_rows=len(first),
        largest_difference=largest_difference(first, second),
        largest_of_requests=_requests(run, ranker, sample),
        metrics=_metrics(run, first, second, known),
    )


def refuse_difference(parity: Parity, *, config: ExportConfig, where: str) -> None:
    """Refuse an export that scores differently.

    Args:
        parity: of the export and its run.
        config: of the export.
        where: the run.

    Raises:
        ExportError: it does; says by how much.
    """
    if config.allow:
        return
    worst = max(parity.largest_difference, parity.largest_of_requests)
    if config.is_exact and not worst <= TOLERANCE:
        raise ExportError(
            expected=f"the scores of the run, to {TOLERANCE:.0e}",
            found=f"{parity.line()}; rows as requests by at most {parity.largest_of_requests:.1e}",
            where=where,
            ways_out=("`ziggurat doctor` says which kernels this machine uses", "take it all the same: --allow"),
        )
    for name, (run, there) in parity.metrics.items():
        if not config.is_exact and not is_kept(name, run=run, change=there - run):
            raise ExportError(
                expected=f"{name} of the run, no worse by more than {METRIC_TOLERANCE:.0e}",
                found=parity.line(),
                where=where,
                ways_out=(
                    *config.ways_to_more_bits,
                    *config.ways_to_see_costs(where),
                    "take it all the same: --allow",
                ),
            )


def is_kept(name: str, *, run: float, change: float) -> bool:
    """Return whether a metric of tables in few bits is no worse than an export takes; one that got better passes.

    Args:
        name: of the metric: an AUC, which may fall by 1e-4, or an RMSE, which may rise by 1e-4 of itself.
        run: the metric of the run.
        change: the metric of the export less that of the run. NaN is not kept.
    """
    metric = metric_of(name)
    if metric is None:
        return True
    return metric.loss_of(change) <= metric.most_lost(run, tolerance=METRIC_TOLERANCE)


def largest_difference(first: np.ndarray, second: np.ndarray) -> float:
    """The largest difference of numbers: relative for those above 1; NaN where one is."""
    if not first.size:
        return 0.0
    scale = np.maximum(1.0, np.abs(first))  # probabilities: the difference; large numbers: relative
    return float(np.max(np.abs(first - second) / scale))


def _metrics(run: Run, first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> dict[str, tuple[float, float]]:
    found = {}
    for index, label in enumerate(run.preprocessing.inputs.labels):
        known = ~np.isnan(labels[:, index])
        truth = labels[known, index]
        pair = (first[known, index], second[known, index])
        for metric in held_in_few_bits(label.task):
            samples = [scored_samples(scores, truth, task=label.task, scale=ScoreScale.ANY) for scores in pair]
            of_run, of_export = (metric.checked(Judged(each, None, DEFAULT_RANKING_K)) for each in samples)
            if not math.isnan(of_run) and not math.isnan(of_export):
                found[f"{metric}/{label.name}"] = (of_run, of_export)
    return found


def _requests(run: Run, ranker: Ranker, chunk: RawChunk) -> float:
    """The largest difference where rows come as requests, and some cells are unseen, missing or empty."""
    schema = run.preprocessing.schema
    changed = unseen(plain_rows(chunk, schema).head(256), schema, joined=run.model.joined_lists)
    rows = request_rows(changed)
    # The unknown ids of these rows are made ones, so that nothing is said of them, as `Run.scores` would.
    batch = run.preprocessing.batch(changed)
    (of_run,) = [scores for _, scores in scores_of(run.model, [batch])]
    return largest_difference(of_run, ranker.score_rows(rows).numpy())


def unseen(frame: pl.DataFrame, schema: Schema, *, joined: tuple[tuple[str, ...], ...] = ()) -> pl.DataFrame:
    """Raw rows some of whose cells are ids that nobody has seen, missing, or empty lists.

    Args:
        frame: raw rows.
        schema: of them.
        joined: groups of features that describe the same events, and so are missing together; see `Model`.
    """
    draw = np.random.default_rng(0)
    together = {name: group[0] for group in joined for name in group}
    of_group = {first: pl.Series(draw.integers(0, 8, frame.height)) for first in dict.fromkeys(together.values())}
    readers = Counter(column_of(feature) for feature in schema.features)
    changes: dict[str, pl.Expr] = {}
    for feature in schema.features:
        name = column_of(feature)
        is_alone = readers[name] == 1  # what one feature takes for an unknown id may be no number for another
        kind = frame.schema[name]
        cells = pl.Series(draw.integers(0, 8, frame.height))
        # Lists of the same events are missing in the same rows, or their lengths would differ.
        if feature.name in together:
            cells = of_group[together[feature.name]].replace(1, 0)
        # Without a history a request says so by an empty list: what is left out is looked up by the export.
        nothing = pl.Series([[]], dtype=kind).first() if isinstance(feature, TeacherHistory) else None
        cell = pl.when(pl.lit(cells) == 0).then(pl.lit(nothing, dtype=kind))
        if is_alone and feature.is_id and kind == pl.String and _is_free(schema, feature):
            cell = cell.when(pl.lit(cells) == 1).then(pl.lit(_NEVER_SEEN))
        if is_alone and feature.id_lists is not None and isinstance(kind, pl.List):
            cell = cell.when(pl.lit(cells) == 1).then(pl.lit(pl.Series([[]], dtype=kind).first(), dtype=kind))
        changes[name] = cell.otherwise(pl.col(name)).alias(name)
    return frame.with_columns(list(changes.values()))


def plain_rows(chunk: RawChunk, schema: Schema) -> pl.DataFrame:
    """The columns of a schema's features, with numbers in text as programs write them."""
    return plain_columns(chunk, schema.features)


def plain_columns(chunk: RawChunk, features: Iterable[Feature]) -> pl.DataFrame:
    """The columns of some features, with numbers in text as programs write them.

    Columns whose numbers are written in a way of their own become numbers: the schema would read their texts in that
    way a second time.
    """
    features = tuple(features)
    frame = chunk.frame.select(list(dict.fromkeys(map(column_of, features))))
    frame = frame.with_columns(
        vectors_of_words(frame[column_of(each)], each.history) for each in features if isinstance(each, TeacherHistory)
    )
    if chunk.written.is_plain:
        return frame
    names = {column_of(each) for each in features if each.reads_numbers}
    texts = [name for name in names if frame.schema[name] == pl.String]
    own = chunk.written.own
    return frame.with_columns(
        own[name].cast(frame[name]) if name in own else chunk.numbers.as_points(frame[name]) for name in texts
    )


def _is_free(schema: Schema, feature: Feature) -> bool:
    return schema.table(feature.table_name).encoding.value != "identity"


def request_rows(frame: pl.DataFrame) -> list[dict[str, object]]:
    """Rows of a frame as a request in JSON would have them."""
    rows = frame_with_decimals(frame).iter_rows(named=True)
    return [{name: plain(value) for name, value in row.items()} for row in rows]

"""Let a run learn from a side table: schema, data and settings of distillation, from the name of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.loader import Dataset
from ziggurat.data.encoded.records import extra_column, numbers_of
from ziggurat.data.teachers.history import check_versions, index_of
from ziggurat.data.teachers.join import (
    AGE,
    VECTORS,
    is_joined,
    joined_column,
    joined_histories,
    require_time,
    teacher_of,
    teachers_of,
)
from ziggurat.data.teachers.side_table import unchecked_note, versions_in
from ziggurat.errors import ConfigError, MissingFileError, SchemaError
from ziggurat.features.extras import Extra
from ziggurat.features.inputs import HistoryPooling
from ziggurat.features.kinds import TeacherHistory
from ziggurat.ops.vector_histories import row_words_of
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.distillation import DistilConfig, DistilHead
from ziggurat.typed import Length, checked

_ROWS_OF_MEANS = 100_000  # the mean of so many scores is known to a few thousandths of itself


@dataclass(frozen=True, kw_only=True)
@checked
class TeacherHistoryConfig:
    """Settings of the vectors that a student reads of its users.

    Args:
        key: raw column of the user, by which the teacher was logged (`ziggurat teacher log --history`).
        length: most vectors of a row.
        pooling: what a model makes of them.
    """

    key: str
    length: Length = 16
    pooling: HistoryPooling = HistoryPooling.ATTENTION


def with_teacher(
    config: RunConfig,
    folder: str | Path,
    *,
    history: TeacherHistoryConfig | None = None,
    is_stream: bool = False,
) -> RunConfig:
    """Return the config of a run that learns from the teachers of a side table, or reads their vectors.

    For distillation its schema has an extra column for each teacher and label that both have, and one for the age of
    each teacher; for a history it has a feature for each teacher. They are joined when data is prepared
    (`data/teachers/join.py`).

    Args:
        config: of the run; what learns is `distil.head`.
        folder: the side table.
        history: of vectors that the run reads as a feature; None: it reads none.
        is_stream: the table may grow, so that vectors are looked up part by part when a window is opened.

    Raises:
        ConfigError: nothing is to learn, and nothing to be read.
        SchemaError: no teacher knows a label of the schema that is a probability, or the schema has no time.
        MissingFileError, DataError: there is no side table, it is damaged, or has no vectors by this column.
    """
    if config.distil.head is DistilHead.NONE and history is None:
        raise ConfigError(
            expected="what learns from the teacher, or reads its vectors",
            found="a teacher, and neither --distil nor --teacher-history",
            where="--teacher",
            ways_out=(
                "--distil aux-head",
                "--distil single-head",
                "--teacher-history COLUMN, of the user",
                "leave --teacher out",
            ),
        )
    require_time(config.table_schema)
    config = replace(config, data=replace(config.data, teacher=str(Path(folder).absolute())))
    if history is not None:
        config = _with_history(config, folder, history, is_stream=is_stream)
    return config if config.distil.head is DistilHead.NONE else _with_scores(config, folder)


def _with_history(config: RunConfig, folder: str | Path, wanted: TeacherHistoryConfig, *, is_stream: bool) -> RunConfig:
    schema = config.table_schema
    known = {feature.name for feature in schema.features}
    features: list[TeacherHistory] = []
    versions = versions_in(folder)
    for teacher in dict.fromkeys(each.facts.teacher for each in versions):
        own = [each for each in versions if each.facts.teacher == teacher]
        newest = max(own, key=lambda each: each.facts.watermark).facts
        feature = TeacherHistory(
            name=re.sub(r"\W", "_", f"teacher_{teacher}_{VECTORS}"),
            column=joined_column(teacher, VECTORS),
            key=wanted.key,
            length=wanted.length,
            dim=newest.vector_dim or 1,
            format=newest.vectors or "bf16",
            row_words=row_words_of(newest.vectors or "bf16", newest.vector_dim or 1),
            pooling=wanted.pooling,
        )
        check_versions(feature, own)
        if not is_stream:
            for each in own:
                index_of(each)  # made once for all who will read it
        features.append(feature)
    schema = replace(schema, features=(*schema.features, *(each for each in features if each.name not in known)))
    return replace(config, table_schema=schema)


def _with_scores(config: RunConfig, folder: str | Path) -> RunConfig:
    schema = config.table_schema
    labels = [label.name for label in schema.labels if label.task.has_positives]
    known = {extra.name for extra in schema.extras}
    extras: list[Extra] = []
    teachers: list[str] = []
    versions = versions_in(folder)
    for teacher in dict.fromkeys(each.facts.teacher for each in versions):
        facts = [each.facts for each in versions if each.facts.teacher == teacher]
        logged = {
            label
            for each in facts
            for label, is_probability in zip(each.labels, each.are_probabilities, strict=True)
            if is_probability
        }
        for label in labels:
            if label not in logged:
                continue
            name = re.sub(r"\W", "_", f"teacher_{teacher}_{label}")
            extras.append(Extra(name=name, column=joined_column(teacher, label)))
            teachers.append(name if len(schema.labels) == 1 else f"{name}={label}")
        if logged.intersection(labels):
            extras.append(
                Extra(name=re.sub(r"\W", "_", f"teacher_{teacher}_{AGE}"), column=joined_column(teacher, AGE))
            )
    if not teachers:
        logged_labels = sorted({label for each in versions for label in each.facts.labels})
        raise SchemaError(
            expected=f"a teacher of a label of the schema that is a probability: {', '.join(labels) or 'it has none'}",
            found=f"teachers of {', '.join(logged_labels)}",
            where=str(folder),
            ways_out=("log a teacher that was trained on this label", "leave --teacher out"),
        )
    schema = replace(schema, extras=(*schema.extras, *(extra for extra in extras if extra.name not in known)))
    return replace(
        config,
        table_schema=schema,
        distil=replace(config.distil, teachers=tuple(dict.fromkeys([*config.distil.teachers, *teachers]))),
    )


def coverage_lines(config: RunConfig, dataset: Dataset) -> dict[str, str]:
    """Return lines for the start-up report: how many training rows each teacher has scored, and how old it was then.

    Args:
        config: of the run.
        dataset: its encoded training rows.
    """
    lines: dict[str, str] = {}
    for extra in config.table_schema.extras:
        if not is_joined(extra.column) or not extra.column.endswith(f":{AGE}"):
            continue
        ages = np.concatenate([np.empty(0), *_column(dataset, extra.name)])
        taught = ages[~np.isnan(ages)]
        share = f"{len(taught) / max(len(ages), 1):.1%} of {len(ages):,} training rows"
        old = ""
        if len(taught):
            days = np.quantile(taught, [0.5, 1.0]) / 86_400
            old = f"; its watermark is {days[0]:.3g} days before the median of them, {days[1]:.3g} at most"
        lines[f"teacher {extra.column.split(':')[1]}"] = share + old
    for feature in joined_histories(config.table_schema):
        words = feature.history.words
        counts = np.concatenate([np.empty(0, np.int32), *_counts(dataset, feature)])
        lines[f"history of {feature.key}"] = (
            f"{(counts > 0).mean() if len(counts) else 0.0:.1%} of {len(counts):,} training rows have one, of "
            f"{counts[counts > 0].mean() if (counts > 0).any() else 0.0:.1f} vectors of {feature.dim} numbers; "
            f"{4 * words:,} bytes a row"
        )
    return lines


def doubts_about_coverage(lines: Mapping[str, str]) -> list[str]:
    """Return a line for each teacher that has scored no training row, as far as a tenth of a percent shows.

    Args:
        lines: of `coverage_lines`.
    """
    return [
        f"{name} has scored {text.partition(';')[0]}: the head learns nothing from it; were the same examples logged, "
        "by a teacher whose watermark is before them? (ziggurat teacher log)"
        for name, text in lines.items()
        if name.startswith("teacher ") and text.startswith("0.0% of")
    ]


def doubts_about_teachers(config: RunConfig) -> list[str]:
    """Return a line that names versions whose parts nobody can check, among those that rows of a run are joined with.

    Args:
        config: of the run.
    """
    schema = config.table_schema
    wanted = {*teachers_of(schema), *(teacher_of(feature) for feature in joined_histories(schema))}
    if not wanted or not config.data.teacher:
        return []
    try:
        versions = versions_in(config.data.teacher)
    except MissingFileError:  # rows that were joined before are read from their copy
        return []
    note = unchecked_note([each for each in versions if each.facts.teacher in wanted])
    return [note] if note else []


def mean_targets(config: DistilConfig, dataset: Dataset) -> dict[str, tuple[float, ...]]:
    """Return the mean of what heads learn from teachers, min(α·p, 1), over the first rows: heads start there.

    Args:
        config: what learns from which extra columns.
        dataset: encoded rows; one without a score is left out.

    Returns:
        By extra column, a mean for each label that it has scores of; without columns that have none.
    """
    found: dict[str, tuple[float, ...]] = {}
    if config.head is not DistilHead.AUX_HEAD:
        return found
    for name in [text.partition("=")[0] for text in config.teachers] or [spec.name for spec in dataset.inputs.extras]:
        scores: list[np.ndarray] = []
        for index in range(len(dataset.group_sizes)):
            column = dataset.read_group(index).column(extra_column(name)).combine_chunks()
            is_list = not pa.types.is_floating(column.type)
            flat = (column.flatten() if is_list else column).to_numpy(zero_copy_only=False)
            scores.append(flat.reshape(len(column), -1))
            if sum(map(len, scores)) >= _ROWS_OF_MEANS:
                break
        targets = np.minimum(config.label_scaling * np.concatenate(scores), 1.0) if scores else np.empty((0, 1))
        known = ~np.isnan(targets)
        if len(targets) and known.any(axis=0).all():
            means = np.where(known, targets, 0.0).sum(axis=0, dtype=np.float64) / known.sum(axis=0)
            found[name] = tuple(float(mean) for mean in means)
    return found


def _counts(dataset: Dataset, feature: TeacherHistory) -> Iterator[np.ndarray]:
    for index in range(len(dataset.group_sizes)):
        yield numbers_of(dataset.read_group(index).column(feature.name).combine_chunks())[:: feature.history.words]


def _column(dataset: Dataset, name: str) -> Iterator[np.ndarray]:
    for index in range(len(dataset.group_sizes)):
        yield dataset.read_group(index).column(extra_column(name)).to_numpy()

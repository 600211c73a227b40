"""Let a run learn from a side table: schema, data and settings of distillation, from the name of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ziggurat.data.encoded.loader import Dataset
from ziggurat.data.encoded.records import extra_column
from ziggurat.data.teachers.join import AGE, is_joined, joined_column, require_time
from ziggurat.data.teachers.side_table import versions_in
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.extras import Extra
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.distillation import DistilHead


def with_teacher(config: RunConfig, folder: str | Path) -> RunConfig:
    """Return the config of a run that learns from the teachers of a side table.

    Its schema has an extra column for each teacher and label that both have, and one for the age of each teacher, which
    are joined when data is prepared (`data/teachers/join.py`).

    Args:
        config: of the run; what learns is `distil.head`.
        folder: the side table.

    Raises:
        ConfigError: nothing is to learn.
        SchemaError: no teacher knows a label of the schema that is a probability, or the schema has no time.
        MissingFileError, DataError: there is no side table, or it is damaged.
    """
    if config.distil.head is DistilHead.NONE:
        raise ConfigError(
            expected="what learns from the teacher",
            found="a teacher, and no --distil",
            where="--teacher",
            ways_out=("--distil aux-head", "--distil single-head", "leave --teacher out"),
        )
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
    require_time(schema)
    schema = replace(schema, extras=(*schema.extras, *(extra for extra in extras if extra.name not in known)))
    return replace(
        config,
        table_schema=schema,
        data=replace(config.data, teacher=str(Path(folder).absolute())),
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
    return lines


def _column(dataset: Dataset, name: str) -> Iterator[np.ndarray]:
    for index in range(len(dataset.group_sizes)):
        yield dataset.read_group(index).column(extra_column(name)).to_numpy()

"""Find dense weights that read other fields than those of the parent, whatever their shapes.

A weight of the same name and shape may mean something else: one feature gone and another one added, or the same
features in another order, leave every shape as it was. So a weight is taken by name and shape alone where it does not
depend on the fields, or where both models have the same ones in the same order. Which weights depend on them is tried
out: the model is built on shapes alone with one number, one id, one label and one row of each table more, and what then
has another shape depends on it. A part that is there once a label (`heads.networks.1.output.weight`) keeps its shape,
and there is one more of it: it is taken where the parent has the same label in the same place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import StrEnum

import torch

from ziggurat.errors import ZigguratError
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import MODEL_CONFIGS, build_model
from ziggurat.recipes.run_config import RunConfig

_PROBE = "warm_start:probe"  # no feature's name may have a colon
_STUDENT = "student."  # beside the network: learned weights of labels, heads that learn from a teacher


class Reads(StrEnum):
    """Parts of the inputs that the shape of a weight may depend on."""

    NUMBERS = "numbers"
    FIELDS = "fields"
    LABELS = "labels"
    ROWS = "rows"


_WHY = {
    Reads.NUMBERS: "it reads the numbers, which are others or in another order",
    Reads.FIELDS: "it reads the fields, which are others or in another order",
    Reads.LABELS: "it has a part for each label, and the labels are others",
    Reads.ROWS: "it has a number for each row, and begins anew",
}
_OTHER_LABEL = "it is of one label, and in the parent its place is that of another one"


def reasons_not_to_take(
    config: RunConfig, mine: InputSpec, *, names: Collection[str], parent: RunConfig, theirs: InputSpec
) -> dict[str, str]:
    """Return the weights that may not be taken by name and shape, each with the reason.

    Args:
        config: of the run.
        mine: inputs of its model.
        names: of its weights, with those that stand beside the network in training.
        parent: config of the parent.
        theirs: inputs of the parent's model.
    """
    differ = [
        part
        for part in (Reads.NUMBERS, Reads.FIELDS, Reads.LABELS)
        if _layout(part, config, mine) != _layout(part, parent, theirs)
    ]
    found: dict[str, str] = {}
    shapes = _shapes(config, mine)
    for part in (*differ, Reads.ROWS):
        other = _shapes(config, _with_one_more(part, mine))
        if part is Reads.ROWS and not (shapes and other):
            continue
        if not shapes or not other:  # a model of the user's own, or one that refuses such a feature
            return dict.fromkeys([""], f"the {part} are others, and which weights read them could not be tried out")
        for name, shape in shapes.items():
            if other.get(name, ()) != shape:
                found.setdefault(name, _WHY[part])
        if part is Reads.LABELS:
            found |= {name: _WHY[part] for name in names if name.startswith(_STUDENT)}
            labels = [(label.name, label.task) for label in theirs.labels]
            for name, index in _parts_of_labels(shapes, other, num_labels=len(mine.labels)).items():
                own = mine.labels[index]
                if labels[index : index + 1] != [(own.name, own.task)]:
                    found.setdefault(name, _OTHER_LABEL)
    return found


def have_columns_of_other_labels(config: RunConfig, mine: InputSpec, *, theirs: InputSpec) -> frozenset[str]:
    """Return the tables whose rows have a column for each label, where the labels are others than the parent's."""
    if _layout(Reads.LABELS, config, mine) == _layout(Reads.LABELS, config, theirs):
        return frozenset()
    columns = config.model.table_columns(mine)
    other = config.model.table_columns(_with_one_more(Reads.LABELS, mine))
    return frozenset(table for table, width in columns.items() if other[table] != width)


def _parts_of_labels(shapes: Mapping[str, object], other: Mapping[str, object], *, num_labels: int) -> dict[str, int]:
    """Return the weights of which there is one for each label, each with the number of its label.

    Args:
        shapes: of a model's weights by name.
        other: the same of one with a label more: a name that is new there, with the number of that label in it, is one
            of such weights.
        num_labels: of the first.
    """
    found: dict[str, int] = {}
    for name in other:
        if name in shapes:
            continue
        words = name.split(".")
        for place, word in enumerate(words):
            if word != str(num_labels):
                continue
            numbered = [".".join([*words[:place], str(index), *words[place + 1 :]]) for index in range(num_labels)]
            if all(each in shapes for each in numbered):
                found |= {each: index for index, each in enumerate(numbered)}
    return found


def _layout(part: Reads, config: RunConfig, inputs: InputSpec) -> object:
    """Return names in order of what a weight may read."""
    if part is Reads.NUMBERS:
        return inputs.dense
    if part is Reads.LABELS:
        return [(label.name, label.task) for label in inputs.labels]
    columns = config.model.table_columns(inputs)
    fields = [(spec.name, spec.table, columns.get(spec.table)) for spec in (*inputs.single, *inputs.jagged)]
    return fields, inputs.vectors, inputs.moments


def _with_one_more(part: Reads, inputs: InputSpec) -> InputSpec:
    if part is Reads.NUMBERS:
        return replace(inputs, dense=(*inputs.dense, _PROBE))
    if part is Reads.LABELS:
        return replace(inputs, labels=(*inputs.labels, LabelSpec(name=_PROBE)))
    if part is Reads.ROWS:
        return replace(inputs, tables=tuple(replace(table, num_rows=table.num_rows + 1) for table in inputs.tables))
    single = SingleSpec(name=_PROBE, table=_PROBE)
    tables = (*inputs.tables, TableSpec(name=_PROBE, num_rows=4))
    return replace(inputs, single=(*inputs.single, single), tables=tables)


def _shapes(config: RunConfig, inputs: InputSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by name, tables left out; none where it cannot be built so."""
    if type(config.model) not in MODEL_CONFIGS or config.towers is not None:
        return {}
    try:
        with torch.device("meta"):
            model = build_model(config.model, inputs, seed=0, draw_tables=False)
    except ZigguratError:
        return {}
    tables = {f"embeddings.tables.{table.name}.weight" for table in inputs.tables}
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    return {name: shape for name, shape in shapes.items() if name not in tables}

"""Two questions of one event log, for a comparison of next-item models with rankers.

    question     samples                                         models                    judged by
    what next    a user's history, and the item behind it        sasrec, gsasrec, stu, …   its place among all items
    how          candidates with labels behind their history     bst, din, dien, transact  AUC of the label, log loss

Both are made of the same log with the same split: the same users, and with leave one out the same last events. Their
answers are figures of two kinds, so they stand in two tables, and nothing is tested across them.

Labels are no part of the first question: its schema is that of the log without labels and without what belongs to
candidates alone. The second one is trained as `movielens_hstu_ranker`, or on a log of one's own as
`table_sequence_ranker`; `sequence_ranker` (HSTU) is there as the rankers' peer even where nobody named it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ziggurat.config import override, settings
from ziggurat.data.datasets import movielens_events
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Schema, table_of
from ziggurat.models import MODEL_CONFIGS, NextItemConfig
from ziggurat.models.build import ModelConfig, kind_of
from ziggurat.recipes.catalogue import table_run
from ziggurat.recipes.rankers import HSTU_RANKER, movielens_hstu_ranker
from ziggurat.recipes.run_config import RunConfig
from ziggurat.studies.compare_own import OwnData, own_models

PEER = "sequence_ranker"
APART = (
    "the two tables answer different questions, which item comes next and how a user answers to a given one: "
    "a figure of one says nothing about a figure of the other"
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that some models of a comparison are asked.

    Args:
        data: what they are trained on.
        models: their names.
        text: the question, for people; "" where there is one kind alone.
        notes: what a reader should know besides.
    """

    data: Any
    models: tuple[str, ...]
    text: str = ""
    notes: tuple[str, ...] = ()


def questions_of(models: Sequence[str], data: object, *, own: Sequence[type[ModelConfig]] = ()) -> tuple[Question, ...]:
    """One question for all models, or two where next-item models and rankers are named together.

    Args:
        models: names.
        data: a built-in data set, or data of one's own.
        own: config classes of your own; they are asked what the recipe asks.

    Raises:
        ConfigError: rankers on a log without labels.
    """
    if not isinstance(data, OwnData) or not isinstance(data.run.model, NextItemConfig):
        return (Question(data=data, models=tuple(models)),)
    kinds = {kind_of(each) for each in MODEL_CONFIGS} - {data.run.model.kind, *(kind_of(each) for each in own)}
    ranked = tuple(name for name in models if name in kinds)
    following = tuple(name for name in models if name not in kinds)
    schema = data.run.table_schema
    found = []
    if following:
        notes = ("labels are not read: every event counts as what came next",) if schema.labels else ()
        run = replace(data.run, table_schema=_without_labels(schema))
        found.append(Question(data=replace(data, run=run), models=following, notes=notes))
    if ranked:
        run = _ranker_run(data, ranked)
        added = () if PEER in ranked else (PEER,)
        notes = (f"{PEER} (HSTU) was not named; it is the peer that the rankers are set beside",) if added else ()
        found.append(Question(data=replace(data, run=run), models=(*ranked, *added), notes=notes))
    return _with_texts(_shared(found, data, own=own)) if ranked else tuple(found)


def _with_texts(found: list[Question]) -> tuple[Question, ...]:
    texts = {
        False: "Which item comes next? Among all items (full ranking), behind histories of up to {} events",
        True: "How does a user answer to a given item? By the label {}, behind histories of up to {} events",
    }
    made = []
    for question in found:
        schema = question.data.run.table_schema
        names = (" and ".join(label.name for label in schema.labels),) if schema.labels else ()
        text = texts[bool(names)].format(*names, schema.events.max_length)
        notes = (*question.notes, APART) if len(found) > 1 else question.notes
        made.append(replace(question, text=text, notes=notes))
    return tuple(made)


def _shared(found: list[Question], data: OwnData, *, own: Sequence[type[ModelConfig]]) -> list[Question]:
    """Each question with the settings of models that some of its models have, and the metric that is its own."""
    if len(found) < 2:
        return found
    paths: list[set[str]] = []
    for question in found:
        mine = [kind for kind in own if kind_of(kind) in question.models]
        plain = own_models(question.models, replace(question.data, model_changes=()), own=mine)
        paths.append({path for model in plain.values() for path, _, _ in settings(model)})
    made = []
    for number, question in enumerate(found):
        fitting = tuple(
            (path, text)
            for path, text in data.model_changes
            if path.replace("_", "-") in paths[number] or not any(path.replace("_", "-") in each for each in paths)
        )
        belongs = data.metric.startswith("full_") == (number == 0)
        made.append(
            replace(
                question,
                data=replace(question.data, model_changes=fitting, metric=data.metric if belongs else ""),
            )
        )
    return made


def _without_labels(schema: Schema) -> Schema:
    """The schema of the same log for a next-item model: without labels, context, pools and windows of time."""
    if not schema.labels or schema.events is None:
        return schema
    features = tuple(each for each in schema.features if each.name not in schema.events.context)
    used = {table_of(each) for each in features}
    tables = tuple(each for each in schema.tables if each.name in used)
    events = replace(schema.events, context=(), pool_by="", pools=(), window=0, min_history=0, reach=0)
    return replace(schema, features=features, tables=tables, labels=(), events=events)


def _ranker_run(data: OwnData, ranked: Sequence[str]) -> RunConfig:
    """Data and training settings of the rankers: those of the log's recipe, with what the command line changes."""
    run = data.run
    schema = data.run.table_schema
    is_movielens = run.dataset.name == movielens_events.NAME and schema == movielens_events.events_schema()
    if schema.labels:
        base = table_run(HSTU_RANKER, schema)
    elif is_movielens:
        base = movielens_hstu_ranker()
    else:
        raise _no_labels(ranked)
    changes = {
        path: text
        for path, text in data.training_changes.items()
        if not (path == "early_stop.metric" and text.startswith("full_"))
    }
    training = override(base.training, changes)
    return replace(run, recipe=base.recipe, table_schema=base.table_schema, model=base.model, training=training)


def _no_labels(ranked: Sequence[str]) -> ConfigError:
    names = ",".join(ranked)
    return ConfigError(
        expected=f"a [[label]] in the schema of the events: {', '.join(ranked)} rank candidates by how users answered",
        found="events without a label, which say what came next and nothing else",
        where=f"ziggurat compare, --models {names}",
        ways_out=(
            'say what is an answer: [[label]] name = "like", column = "rating", positive_from = 4.0; next-item models '
            "beside them do not read it",
            f"leave {names} out of --models",
            "on MovieLens-1M, whose ratings are labels: ziggurat compare sequences",
        ),
    )

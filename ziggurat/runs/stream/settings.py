"""Fit the settings of a run to a stream: one pass over each window, samples, and tables that may grow.

A recipe says how often it passes over its rows, how it splits them and when it stops. A stream sees each row once, in
order of time, and every row is first a test and then training data: these settings have no meaning, and what would
change numbers behind the back of who set it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from ziggurat.data.streams.brokers.broker import broker_of
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay, delayed_label
from ziggurat.data.teachers.join import is_joined, joined_histories, teacher_of
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Encoding, Schema, Table, column_of, table_of
from ziggurat.models.contract.reads import finds_items
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.config import AS_VALIDATION, Decay, SelfDistil
from ziggurat.training.delayed_feedback import DelayedConfig
from ziggurat.training.delayed_losses import DelayedLoss


def for_stream(config: RunConfig) -> RunConfig:
    """Return the settings of a run as a stream has them.

    Raises:
        ConfigError: one of them has no place in a stream.
    """
    training = config.training
    if config.table_schema.events is not None or finds_items(config.model):
        found = "a schema with [events]" if config.table_schema.events is not None else f"model {config.model.kind!r}"
        raise ConfigError(
            expected="a model that scores samples, one row each",
            found=f"{found}, whose rows are made of whole histories or a fixed catalogue",
            where="ziggurat stream",
            ways_out=("stream a ranker: ziggurat stream table_dlrm", "train it on all rows: ziggurat train"),
        )
    if config.warm_start.run:
        raise ConfigError(
            expected="no parent of a stream, whose tables are not there before its first window",
            found=f"--warm-start.run {config.warm_start.run}",
            where="ziggurat stream",
            ways_out=("leave --warm-start.run out", "begin a batch run from it: ziggurat train … --warm-start RUN"),
        )
    decay = training.schedule.decay
    if decay in (Decay.LINEAR, Decay.COSINE):
        raise ConfigError(
            expected="a learning rate that needs no end: a stream has none",
            found=f"schedule.decay = {decay.value}",
            where="training settings, schedule",
            ways_out=("--training.schedule.decay constant", "--training.schedule.decay inverse_sqrt"),
        )
    self_distil = training.self_distil
    if self_distil.method is not SelfDistil.NONE and not self_distil.ramp_steps:
        raise ConfigError(
            expected="a number of steps in which the weight of second views rises: a stream has no end to rise to",
            found=f"self_distil.method = {self_distil.method.value}, ramp_steps = 0",
            where="training settings, self-distil",
            ways_out=("--training.self-distil.ramp-steps 1000", "--self-distil none"),
        )
    for name, value, way in (
        ("training.max-steps", training.max_steps, "--until ends a stream"),
        ("tables.memory-limit", config.tables.memory_limit, "name the formats: --tables.weights int8"),
        ("data.valid", ", ".join(config.data.valid), "each window is scored before it is trained: ziggurat stream"),
        ("data.test", ", ".join(config.data.test), "score other files afterwards: ziggurat evaluate RUN FILES"),
        ("data.negative-rate", config.data.negative_rate if config.data.negative_rate < 1.0 else 0, "keep all rows"),
    ):
        if value:
            raise ConfigError(
                expected=f"no {name} in a stream: it is not known of windows yet",
                found=str(value),
                where=f"--{name}",
                ways_out=(way, f"leave --{name} out"),
            )
    unknown = () if training.unknown_ids == (AS_VALIDATION,) else training.unknown_ids
    return replace(config, training=replace(training, epochs=1, unknown_ids=unknown))


def with_delayed_label(config: RunConfig, delay: DelayConfig) -> RunConfig:
    """Return the settings of a run whose losses know which label comes later.

    Args:
        config: of the run.
        delay: what becomes of rows until their labels are known.

    Raises:
        ConfigError: a loss of delayed labels without rows that are corrected, or for another observation.
    """
    delayed = config.delayed
    if delayed.loss is DelayedLoss.NONE:
        _refuse_idle_settings(delayed, delay)
        return config
    if delay.policy is not LabelDelay.CORRECT:
        raise ConfigError(
            expected=f"--delay correct, with --delayed.loss {delayed.loss.value}: it weighs rows that are corrected",
            found=f"--delay {delay.policy.value}",
            where="settings of the stream",
            ways_out=("--delay correct --label-time COLUMN", "leave --delayed.loss out"),
        )
    if delay.observe_s and not delayed.loss.may_observe:
        raise ConfigError(
            expected=f"--observe-s 0 with {delayed.loss.value}, which takes every positive for a negative first",
            found=f"--observe-s {delay.observe_s:g}",
            where="settings of the stream",
            ways_out=("leave --observe-s out", "--delayed.loss es-dfm", "--delayed.loss defuse"),
        )
    label = delayed_label(config.table_schema, delay.label).name
    return replace(config, delayed=replace(delayed, label=label))


def _refuse_idle_settings(delayed: DelayedConfig, delay: DelayConfig) -> None:
    """Refuse settings of a loss of delayed labels without such a loss; `label` also serves labels that are waited for.

    Raises:
        ConfigError: names them.
    """
    needed = {"loss"} | ({"label"} if delay.is_on else set())
    others = [
        each.name for each in fields(delayed) if each.name not in needed and getattr(delayed, each.name) != each.default
    ]
    if others:
        flags = [f"--delayed.{name.replace('_', '-')}" for name in others]
        raise ConfigError(
            expected="a loss of delayed labels with these settings, which nothing else looks at",
            found=f"loss = {delayed.loss.value} with {', '.join(flags)}",
            where="settings of the stream, delayed",
            ways_out=(f"leave {' and '.join(flags)} out", "--delay correct --label-time COLUMN --delayed.loss fnc"),
        )


def for_losses(delay: DelayConfig, delayed: DelayedConfig, *, schema: Schema) -> DelayConfig:
    """Return what becomes of rows for the losses of a run: of which label, and with the states that losses need.

    Args:
        delay: as it was given.
        delayed: the losses.
        schema: of the stream.

    Raises:
        ConfigError: the schema has several labels, and none is named, or has no such label.
    """
    if not delay.is_on:
        return delay
    # By its name also where it is the only one: settings that are stored name it, and the same command compares equal.
    label = delayed_label(schema, delay.label or delayed.label).name
    loss = delayed.loss
    return replace(delay, label=label, confirms=loss.learns_delays, negatives_first=not loss.may_observe)


def refuse_half_of_labels(delay: DelayConfig, *, labels: Sequence[str], train: Sequence[str]) -> None:
    """Refuse records of labels without a key, a key without records, and messages that are rows and labels at once.

    Args:
        delay: has the key.
        labels: files, folders or a stream of a broker, with records.
        train: those of rows.

    Raises:
        ConfigError: says which.
    """
    if labels and not delay.is_on:
        raise ConfigError(
            expected="--delay wait, assume-negative or correct, with labels that have records of their own",
            found=f"--labels {labels[0]}, and no --delay",
            where="settings of the stream",
            ways_out=(
                "--delay wait --label-key COLUMN --label-time COLUMN --attribution-s 604800",
                "leave --labels out: rows then have their labels",
            ),
        )
    if labels and not delay.has_records:
        raise ConfigError(
            expected="the column by which a label finds its row, in records of both",
            found=f"--labels {labels[0]}, and no --label-key",
            where="settings of the stream",
            ways_out=("--label-key COLUMN", "leave --labels out: rows then have their labels"),
        )
    if delay.has_records and not labels:
        raise ConfigError(
            expected="records of labels, which find their rows by --label-key",
            found=f"--label-key {delay.key}, and no --labels",
            where="settings of the stream",
            ways_out=("--labels FOLDER", "leave --label-key out: rows then have their labels"),
        )
    of_labels = broker_of(labels, flag="--labels")
    of_rows = broker_of(train)
    if of_labels is None or of_rows is None or of_rows is not of_labels:
        return
    url_of_labels = labels[0]
    url_of_rows = train[0]
    is_one_name = of_labels.stream_of(url_of_labels) == of_rows.stream_of(url_of_rows)
    # Names of servers may have to be looked up, so that is asked second.
    if is_one_name and of_labels.server_of(url_of_labels) == of_rows.server_of(url_of_rows):
        raise ConfigError(
            expected="a stream of messages for rows, and another one for labels",
            found=f"{of_rows.stream_of(url_of_rows)} for both",
            where="settings of the stream, --labels",
            ways_out=(
                "have producers send labels to a stream of their own, and name that: --labels",
                "have producers send rows with their labels and --label-time, and leave --labels and --label-key out",
            ),
        )
    groups = [of_rows.group_of(url_of_rows), of_labels.group_of(url_of_labels)]
    if groups[0] != groups[1]:
        # Who reads all rows anew in a group of their own would get the labels that another group has not acknowledged.
        raise ConfigError(
            expected="one consumer group for rows and labels, as both are acknowledged together",
            found=f"{groups[0]!r} of {url_of_rows}, and {groups[1]!r} of {url_of_labels}",
            where="settings of the stream, --labels",
            ways_out=(
                f"?group={groups[0]} behind the URL of --labels",
                f"?group={groups[1]} behind the URL of --data.train",
            ),
        )


def with_teachers_of(config: RunConfig, stored: RunConfig) -> RunConfig:
    """Return the settings of a stream that goes on, with the teachers that it began with.

    The side table may have others since: a student has a head, or a feature, for each teacher from its first step on.

    Args:
        config: as it was given, with a side table or without.
        stored: as the stream began.
    """
    if not stored.data.teacher:
        return config
    own = tuple(extra for extra in config.table_schema.extras if not is_joined(column_of(extra)))
    joined = tuple(extra for extra in stored.table_schema.extras if is_joined(column_of(extra)))
    began = joined_histories(stored.table_schema)
    given = {teacher_of(feature): feature for feature in joined_histories(config.table_schema)}
    raw = tuple(each for each in config.table_schema.features if each not in given.values())
    # As they are given where they are: another length is then named as a setting that cannot change.
    histories = [given.get(teacher_of(feature), feature) for feature in began] if began else list(given.values())
    return replace(
        config,
        table_schema=replace(config.table_schema, features=(*raw, *histories), extras=(*own, *joined)),
        data=replace(config.data, teacher=config.data.teacher or stored.data.teacher),
        distil=replace(config.distil, teachers=stored.distil.teachers),
    )


def with_growing_tables(schema: Schema, *, num_rows: int) -> Schema:
    """Return the schema with tables that grow in the place of those whose vocabulary is fitted to the history.

    Args:
        schema: of the stream.
        num_rows: ids that have a row of such a table at a time.
    """
    listed = {table.name: table for table in schema.tables}
    for table in _fitted_tables(schema):
        listed[table.name] = Table(
            name=table.name,
            encoding=Encoding.GROWING,
            num_rows=num_rows,
            min_count=table.min_count,
            embedding_dim=table.embedding_dim,
        )
    return replace(schema, tables=tuple(listed.values()))


def refuse_nothing_grows(schema: Schema) -> None:
    """Refuse `--growing` for a schema none of whose tables has a vocabulary that is fitted.

    Args:
        schema: of a stream that begins.

    Raises:
        ConfigError: no table would grow.
    """
    if _fitted_tables(schema):
        return
    kinds = {table.name: table.encoding.value for table in schema.tables}
    shown = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    raise ConfigError(
        expected="a table whose vocabulary is fitted to the history, in the place of which one grows",
        found=f"none: {shown}" if shown else "none: no feature has ids",
        where="--growing",
        ways_out=("leave --growing out", 'encoding = "vocabulary" for a table of the schema'),
    )


def _fitted_tables(schema: Schema) -> list[Table]:
    """Return the tables of ids whose vocabulary is fitted."""
    of_ids = [feature for feature in schema.features if feature.num_rows is None]  # others make rows of numbers
    tables = [schema.table(name) for name in dict.fromkeys(filter(None, map(table_of, of_ids)))]
    return [table for table in tables if table.encoding is Encoding.VOCABULARY]

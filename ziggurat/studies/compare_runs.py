"""One run of a comparison: trained by the ordinary trainer in a folder of its own, finished at most once.

    folder/config.json      the whole run; `ziggurat train --config` repeats it
    folder/checkpoints …    what the trainer writes; a killed run goes on from there, bit for bit
    folder/startup.json     machine, versions, precision, kernel: a comparison says where its runs differ in them
    folder/data.json        digests of the encoded rows: a run never goes on with other data
    folder/run.json         the record: validation metrics, cost, rate; test metrics once they were read
    folder/test_scores.npy  scores of the test rows, in file order, for tests over rows

Test data is opened only where `read_test` says so, after the best weights by validation came back, and never again once
its metrics are in the record.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.data.encoded.records import label_column
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import BY_FILES
from ziggurat.embeddings import BatchShape
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.labels import Outcomes
from ziggurat.files import Format, replacing
from ziggurat.files import digest_of as digest_of_data
from ziggurat.models import Model, build_model, num_parameters
from ziggurat.models.converted import take_precision
from ziggurat.ops.lookup import KernelChoice
from ziggurat.recipes.protocols import Protocol, require_one_protocol
from ziggurat.recipes.run_config import RunConfig, load_config, run_config_to_json
from ziggurat.runs.data_record import rows_of_split
from ziggurat.runs.start import start_at_base_rates
from ziggurat.studies.counted_flops import CountedSamples
from ziggurat.training import metrics
from ziggurat.training.evaluation.evaluate import Evaluation, ordered_batches, scores_of
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.label_weights import LabelWeights, weigh_labels
from ziggurat.training.metrics.accumulator import MetricAccumulator
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import CONFIG, EVALUATION, INPUTS, STARTUP, RunFolder
from ziggurat.training.records.run_lock import RunLock
from ziggurat.training.report.progress import Progress
from ziggurat.training.report.startup import startup_report
from ziggurat.training.trainer import Trainer
from ziggurat.training.unknown_ids import with_unknown_shares
from ziggurat.typed import NotANumber, Reader

RECORD, SCORES, LABELS, DATA = "run.json", "test_scores.npy", "test_labels.npy", "data.json"
RUN_WAYS_OUT = ("remove the folder of the run, the one that holds this file: the run is then trained again",)
RECORD_FORMAT = Format(name="ziggurat.compared_run", what="the record of a compared run", ways_out=RUN_WAYS_OUT)
_DATA = Format(name="ziggurat.compared_data", what="digests of the rows of a compared run", ways_out=RUN_WAYS_OUT)


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """The cost of a model.

    Args:
        table_parameters: numbers in tables.
        dense_parameters: numbers in the dense network.
        forward_flops: of a sample; of one with a history, of the mean sample (`counted_flops.py`).
        step_flops: the same, forward and backward.
    """

    table_parameters: int
    dense_parameters: int
    forward_flops: int
    step_flops: int

    @staticmethod
    def of(model: Model, *, samples: CountedSamples) -> RunCost:
        """Counted exactly; see `models/costs/model_cost.py`.

        Args:
            model: on one device.
            samples: on which FLOPs of histories are counted.
        """
        parameters = num_parameters(model)
        flops = samples.flops(model)
        return RunCost(
            table_parameters=parameters.embedding,
            dense_parameters=parameters.dense,
            forward_flops=flops.forward,
            step_flops=flops.total,
        )


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record that is kept of one run; JSON in its folder.

    Args:
        model: name of the model.
        protocol: of the run.
        variant: which of the model's settings were tried; 0: as given.
        seed: of weights, order and dropout.
        digest: of everything that the result depends on.
        epochs: passes over the training data.
        best_step: step of the best validation metric.
        valid: validation metrics there.
        test: test metrics there; empty until test data was read.
        samples_per_s: training rate; of a resumed run that of its last process, or of its log.
        train_s: seconds from the first step to the last evaluation, of the process that finished it.
        cost: parameters and FLOPs.
    """

    model: str
    protocol: str
    variant: int
    seed: int
    digest: str
    epochs: int
    best_step: int
    valid: dict[str, float]
    test: dict[str, float] = field(default_factory=dict)
    samples_per_s: float
    train_s: float
    cost: RunCost

    def to_json(self) -> dict[str, object]:
        """The record as plain data."""
        return dataclasses.asdict(self)

    @staticmethod
    def load(folder: Path) -> RunRecord | None:
        """The record in a folder, or None."""
        if not (folder / RECORD).exists():
            return None
        data = RECORD_FORMAT.read(folder / RECORD)
        ways_out = (f"remove the file, and the run is evaluated again: rm {pasted(folder / RECORD)}",)
        reader = Reader(where=str(folder / RECORD), noun="key", ways_out=ways_out, nan=NotANumber.ALLOWED)
        return reader.build(RunRecord, data)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run that is wanted.

    Args:
        model: its name in the comparison.
        variant: see `RunRecord`.
        config: everything; the seed is in `config.training`.
        folder: where it lives.
        protocol: what it is trained by; None: found from its settings.
        metric: what decides; with several labels it names one, whose test scores are kept.
        hooks: take part in its training; what they do is no part of its settings.
        cost: of its model, where it is known; None: counted, which takes some tenths of a second.
    """

    model: str
    variant: int
    config: RunConfig
    folder: Path
    protocol: Protocol | None = None
    metric: str = metrics.USUAL
    hooks: tuple[Hook, ...] = ()
    cost: RunCost | None = None


def digest_of(config: RunConfig) -> str:
    """Return a digest of all settings that a run follows; not of names and of the kernel, which differs by rounding."""
    tables = dataclasses.replace(config.model.embedding, kernel=KernelChoice.AUTO)
    model = dataclasses.replace(config.model, embedding=tables)
    data = [*to_json([config.dataset.name, config.dataset.rows, config.data.split]), config.table_schema.to_state()]
    return digest_of_data([*data, *to_json([config.teacher, model, config.training]), *unusual_of(config)])[:16]


def unusual_of(config: RunConfig) -> list[object]:
    """Return what rows of tables are kept as, and what labels count, for digests.

    [] where they are the usual ones: digests that were written before these were a part of them stay what they are.
    """
    formats = [] if config.tables == TablesConfig() else [to_json(config.tables)]
    weights = [] if config.label_weights is LabelWeights.GIVEN else [to_json(config.label_weights)]
    return [*formats, *weights]


def finish_run(request: RunRequest, *, data: PreparedData, read_test: bool, progress: Progress) -> RunRecord:
    """Train the run, or go on with it, or take what is there; evaluate test data once if asked for.

    Raises:
        ConfigError: the folder holds a run with other settings, another process trains it, or there is no validation
            data.
    """
    with RunLock(request.folder) as lock:
        if not _is_finished(request, read_test=read_test):
            lock.acquire()
        return _finish_run(request, data=data, read_test=read_test, progress=progress, lock=lock)


def _is_finished(request: RunRequest, *, read_test: bool) -> bool:
    """Return whether nothing of a run is left to be done."""
    record = RunRecord.load(request.folder)
    return record is not None and bool(record.test or not read_test)


def _finish_run(
    request: RunRequest, *, data: PreparedData, read_test: bool, progress: Progress, lock: RunLock
) -> RunRecord:
    record = RunRecord.load(request.folder)
    # The stored settings go through the present classes, so that a setting that did not exist then has its default.
    started = (request.folder / "config.json").exists()
    if started and digest_of(_stored(request)) != digest_of(request.config):
        raise ConfigError(
            expected=f"the run of {request.model}, seed {request.config.training.seed}, with the present settings",
            found="a run with other settings of data, model or training",
            where=str(request.folder),
            ways_out=(
                "give the comparison a new folder: --out FOLDER",
                f"remove it: rm -r {pasted(request.folder)}",
            ),
        )
    if record is not None and (record.test or not read_test):
        _refuse_other_data(request.folder, data=data)
        return record
    protocol = request.protocol or require_one_protocol([(request.model, request.config)])
    if started:
        _refuse_other_data(request.folder, data=data)
    trainer, cost, starts_at = _trainer(request, data=data, read_test=read_test, progress=progress, lock=lock)
    if not started:
        # Before the first step, so that a run that was interrupted shows what it was trained on.
        _DATA.write(request.folder / DATA, content_of(data))
        CONFIG.write(trainer.folder.config, run_config_to_json(request.config))
        INPUTS.write(trainer.folder.inputs, to_json(data.inputs))
    if record is None:
        report = startup_report(trainer.step, data={})
        if starts_at:
            report.sections["Training"]["scores start at"] = starts_at
        STARTUP.write(trainer.folder.startup, report.sections)
    begin = time.perf_counter()
    fit = trainer.fit(resume=started, hooks=request.hooks)
    if record is None:
        valid = rows_of_split(data, "valid", run=request.folder)
        record = RunRecord(
            model=request.model,
            protocol=protocol.value,
            variant=request.variant,
            seed=request.config.training.seed,
            digest=digest_of(request.config),
            epochs=round(fit.steps / trainer.feed.steps_per_epoch),
            best_step=fit.best_step,
            valid=trainer.evaluate(valid, split="valid").metrics,
            samples_per_s=fit.samples_per_s or _logged_rate(trainer.folder),
            train_s=time.perf_counter() - begin,
            cost=cost,
        )
        # Without test metrics so far: a comparison chooses by validation before it reads test rows.
        RECORD_FORMAT.write(request.folder / RECORD, record.to_json())
    if read_test:
        record = _read_test(record, trainer, data=data, request=request)
    return record


def _stored(request: RunRequest) -> RunConfig:
    return load_config(request.folder, models=(type(request.config.model),))


def content_of(data: PreparedData) -> dict[str, str]:
    """A digest of the encoded rows of every split."""
    splits = {"train": data.train, "valid": data.valid, "test": data.test}
    return {name: str(getattr(each, "digest", "")) for name, each in splits.items() if each is not None}


def label_index(metric: str, inputs: InputSpec) -> int:
    """Position of the label that a metric `name/label` speaks of; the first one for a plain name."""
    names = [label.name for label in inputs.labels]
    label = metric.partition("/")[2]
    return names.index(label) if label in names else 0


def _refuse_other_data(folder: Path, *, data: PreparedData) -> None:
    """A run goes on with the rows that it began with; runs of older versions did not keep what those were."""
    if not (folder / DATA).exists():
        return
    stored = _DATA.read(folder / DATA)
    now = content_of(data)
    changed = [name for name in now if stored.get(name) != now[name]]
    if changed:
        raise ConfigError(
            expected="the data that the runs of this comparison were trained on",
            found=f"other rows in {', '.join(changed)}: files of an equal name were compared before",
            where=str(folder),
            ways_out=(
                "give the comparison a folder of its own: --out runs/another_comparison",
                "restore the raw files, to go on with the comparison that is there",
            ),
        )


def test_scores(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scores and labels of the test rows of a finished run, both (rows,) in file order."""
    return _read_array(folder / SCORES), _read_array(folder / LABELS)


def refuse_one_class(data: PreparedData, *, metric: str, splits: Sequence[str]) -> None:
    """Refuse rows to judge by that are all positive or all negative, before anything is trained.

    Args:
        data: prepared.
        metric: that decides; it names the label where there are several.
        splits: "valid", "test", or both.

    Raises:
        DataError: names the split and what its rows are.
    """
    label = data.inputs.labels[label_index(metric, data.inputs)]
    if not label.task.has_positives or label.outcomes is Outcomes.POSITIVE_ONLY:
        return
    for split in splits:
        rows = getattr(data, split)
        found: set[bool] = set()
        for group in range(len(rows.group_sizes)):
            values = rows.read_group(group)[label_column(label.name)].to_numpy()
            found |= set(np.unique(values[~np.isnan(values)] > 0.5).tolist())
            if len(found) == 2:
                break
        if len(found) < 2:
            kind = {(): "known", (True,): "negative", (False,): "positive"}[tuple(found)]
            raise DataError(
                expected=f"{split} rows of which some are positive and some negative by {label.name!r}: {metric} is "
                "undefined without",
                found=f"none that is {kind} among {rows.num_rows:,}",
                where=f"the {split} rows: {data.summary.split}",
                ways_out=(
                    f"more rows in {split}",
                    "another way to split, such as --data.split.by random",
                ),
            )


def _read_array(path: Path) -> NDArray[np.float32]:
    try:
        with open(path, "rb") as file:
            # np.load would read pickles if it were asked to.
            return np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            expected="scores and labels of the test rows of a finished run",
            found=str(error),
            where=str(path),
            ways_out=(f"remove the run, which is then trained again: rm -r {pasted(path.parent)}",),
        ) from error


def require_splits(data: PreparedData, *, with_test: bool) -> None:
    """Require what a comparison chooses by, and what it reads once.

    Raises:
        ConfigError: data lack it.
    """
    missing = [("validation", data.valid), *([("test", data.test)] if with_test else [])]
    if any(rows is None for _, rows in missing):
        raise ConfigError(
            expected="validation data to choose with" + (", and test data to read once" if with_test else ""),
            found="no " + " and no ".join(name for name, rows in missing if rows is None) + " rows",
            where="comparison of models",
            ways_out=(
                ("files of each part: --data.valid FILE, --data.test FILE",)
                if data.summary.split == BY_FILES
                else ("set data.split.valid-fraction and data.split.test-fraction",)
            ),
        )


def _trainer(
    request: RunRequest, *, data: PreparedData, read_test: bool, progress: Progress, lock: RunLock
) -> tuple[Trainer, RunCost, str]:
    """Return a trainer that has not begun, the cost of its model, and what its scores start at ("" if at 50 %)."""
    require_splits(data, with_test=read_test)
    config = request.config
    config.check()
    run = RunFolder(request.folder)
    seed = config.training.seed
    made = config.tables.make_storage(seed=seed)
    model = build_model(config.model, data.inputs, seed=seed, make_storage=made)
    starts_at = start_at_base_rates(model, data) if config.training.start_at_base_rate else ""
    model.embeddings.choose_kernel(BatchShape(batch_size=config.training.loader.batch_size))
    shares = with_unknown_shares(config.training.unknown_ids, data)
    training = dataclasses.replace(config.training, unknown_ids=shares)
    cost = request.cost or RunCost.of(model, samples=CountedSamples(data.train, loader=config.training.loader))
    # Learned weights of labels are no part of the network that is converted, counted and scored.
    take_precision(model, config.training.precision, dispatch=config.training.dispatch)
    weights = weigh_labels(model, config.label_weights)
    trainer = Trainer(
        model,
        config=training,
        train=data.train,
        valid=data.valid,
        folder=run.path,
        progress=progress,
        lock=lock,
        loss=None if weights is None else weights.loss,
    )
    return trainer, cost, starts_at


def _logged_rate(run: RunFolder) -> float:
    """Median training rate by the log, for a run that an earlier process has trained; 0 if the log has none."""
    lines = [line for line in read_records(run.metrics) if line["kind"] == "train"]
    rates = [line["timing"]["samples_per_s"] for line in lines if "samples_per_s" in line.get("timing", {})]
    return statistics.median(rates) if rates else 0.0


def _read_test(record: RunRecord, trainer: Trainer, *, data: PreparedData, request: RunRequest) -> RunRecord:
    folder = request.folder
    test = rows_of_split(data, "test", run=folder)
    label = label_index(request.metric, trainer.model.inputs)
    accumulator = MetricAccumulator(trainer.model.inputs)
    kept_labels = []
    kept_scores = []
    batches = ordered_batches(test, batch_size=_rows_at_once(trainer)).batches(epoch=0)
    for batch, scores in scores_of(trainer.model, batches):
        accumulator.update(torch.from_numpy(scores), batch.labels, batch.weights, batch.groups)
        kept_labels.append(batch.labels[:, label].numpy())
        kept_scores.append(scores[:, label])
    for name, kept in ((LABELS, kept_labels), (SCORES, kept_scores)):
        with replacing(folder / name) as temporary, temporary.open("wb") as file:
            np.save(file, np.concatenate(kept), allow_pickle=False)
    if trainer.model.finds_items:  # ranked among all items, which scores of single samples do not say
        record = dataclasses.replace(record, test=trainer.evaluate(test, split="test").metrics)
    else:
        record = dataclasses.replace(record, test=accumulator.compute())
        evaluation = Evaluation(num_rows=test.num_rows, metrics=record.test, curves={})
        EVALUATION.write(trainer.folder.evaluation("test"), evaluation.to_json())
    # Last of all: a record with test metrics says that scores and labels are there.
    RECORD_FORMAT.write(folder / RECORD, record.to_json())
    return record


def _rows_at_once(trainer: Trainer) -> int:
    """Test rows of a batch: many, but of rows with histories no more than in evaluation."""
    config = trainer.config
    many = 16_384
    own = config.evaluation_batch_size or 4 * config.loader.batch_size
    return min(many, own) if trainer.model.inputs.sequences else many

"""Measure what packed products cost a finished run: its metrics, its bytes, and the time of a score.

    checkpoint ─► FP32 weights ──► scores of the validation samples ─┐
               └► packed ────────► scores of the same samples ───────┴─► changes of metrics, with 95 % intervals
                                   model(batch) of 1, 16 and 64 rows, FP32 and packed in turns ─► how many times as fast

With `epochs` the dense network is trained on before it is packed, in the precision of the format
(`precision/in_blocks.py`: operands rounded forward and backward, FP32 master weights), from the weights of the
checkpoint and with optimizers that begin anew. Tables stay as they are: what is rounded is the network. The weights of
the best evaluation are packed.

The change of a metric is paired: both score the same samples (`quality/paired.py`). Times are of the whole model, with
lookups and what stays FP32, on as many threads as torch has here; one batch is scored again and again, so its rows are
in the processor's cache for both.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ziggurat.config import to_json
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.errors import ConfigError, NumericsError
from ziggurat.features.batch import Batch
from ziggurat.files import Format
from ziggurat.models import Model
from ziggurat.models.build import ModelConfig
from ziggurat.models.costs.model_cost import num_parameters
from ziggurat.models.packed import native_products, pack_products, packed_format
from ziggurat.numerics import BlockFormat
from ziggurat.ops.machine.memory import size_text
from ziggurat.ops.machine.turns import median_ratio, repeats_in_turn, seconds_in_turns
from ziggurat.parallel.device import Device
from ziggurat.precision import BlockArithmetic, InBlocks, Precision
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.load import Run, load_run
from ziggurat.runs.packed_run import read_products, refuse_output, refuse_packing, save_packed
from ziggurat.runs.quality.paired import paired_differences, scored_rows
from ziggurat.runs.scores.given_data import check_data
from ziggurat.runs.scores.scoring import encoded_chunks, own_rows, refuse_events
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.metrics.metric import metric_of
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.trainer import Trainer
from ziggurat.typed import CountOrNone, FloatOrZero, checked

PRODUCTS_COST = Format(name="ziggurat.products_cost", what="a report on a run with packed products")
BATCH_SIZES = (1, 16, 64)
_SCORED_ROWS = 4096
_TURNS = 25
# A turn is at least this long, so that the clock's own steps do not count.
_TURN_S = 0.004


@dataclass(frozen=True, kw_only=True)
@checked
class ProductsConfig:
    """Settings of how a run is packed, and on which samples it is compared.

    Args:
        format: of the weights: mx6, mx9, int8, …
        split: the run's own rows: train, valid or test.
        data: files to score in place of them.
        step: of the checkpoint; None: the best one by validation.
        epochs: passes over the run's train rows in the precision of the format, before packing; 0: a direct cast.
        learning_rate: of them; 0: a tenth of the run's.
    """

    format: str
    split: str = "valid"
    data: tuple[str, ...] = ()
    step: int | None = None
    epochs: CountOrNone = 0
    learning_rate: FloatOrZero = 0.0


@dataclass(frozen=True, kw_only=True)
class MetricCost:
    """A metric of the run as it is, and packed.

    Args:
        before: in FP32.
        after: packed.
        half_width: half of the 95 % interval of the change; NaN where none can be computed.
    """

    before: float
    after: float
    half_width: float

    def verdict(self, name: str) -> str:
        """Say whether the change is one."""
        change = self.after - self.before
        metric = metric_of(name)
        if metric is None or metric.higher_is_better is None or not math.isfinite(self.half_width):
            return ""
        if abs(change) <= self.half_width:
            return "no difference that these rows can show"
        return "better" if (change > 0) == metric.higher_is_better else "worse"


@dataclass(frozen=True, kw_only=True)
class TimeCost:
    """The time of scoring a batch.

    Args:
        fp32_ms: median.
        packed_ms: median.
        speedup: median over turns of FP32's time over the packed one's.
    """

    fp32_ms: float
    packed_ms: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class ProductsCost:
    """The cost and the gain of packing a run.

    Args:
        format_of_weights: that they are packed in.
        products: which were packed, and which not, in a line.
        left: modules whose products are FP32, and why.
        metrics: by name.
        weight_bytes: of the packed weights in FP32.
        packed_bytes: of the same in the format.
        dense_bytes: of all weights but tables, FP32.
        times: by batch size.
        num_rows: samples that were scored.
        step: of the checkpoint.
        rows: which samples, in words.
        tuned: how the network was trained on before it was packed, in words; "" for a direct cast.
    """

    format_of_weights: str
    products: str
    left: dict[str, str]
    metrics: dict[str, MetricCost]
    weight_bytes: int
    packed_bytes: int
    dense_bytes: int
    times: dict[int, TimeCost] = field(default_factory=dict)
    num_rows: int
    step: int
    rows: str
    tuned: str = ""

    def lines(self) -> list[str]:
        """Return what stands above the tables."""
        dense = self.dense_bytes - self.weight_bytes + self.packed_bytes
        return [
            f"{self.num_rows:,} samples ({self.rows}), checkpoint of step {self.step:,}",
            self.products,
            self.tuned or "a direct cast: nothing was trained on",
            f"packed weights: {size_text(self.packed_bytes)} instead of {size_text(self.weight_bytes)} "
            f"({self.weight_bytes / self.packed_bytes:.2f} times smaller); dense network: {size_text(dense)} "
            f"instead of {size_text(self.dense_bytes)}",
        ]

    def metric_cells(self) -> list[tuple[str, ...]]:
        """Return a row for each metric: name, FP32, packed, change, half width, verdict."""
        return [
            (
                name,
                f"{each.before:.5f}",
                f"{each.after:.5f}",
                f"{each.after - each.before:+.5f}",
                f"± {each.half_width:.5f}" if math.isfinite(each.half_width) else "",
                each.verdict(name),
            )
            for name, each in self.metrics.items()
        ]

    def time_cells(self) -> list[tuple[str, ...]]:
        """Return a row for each batch size."""
        return [
            (f"{size}", f"{each.fp32_ms:.3f}", f"{each.packed_ms:.3f}", f"{each.speedup:.2f}")
            for size, each in self.times.items()
        ]

    def to_json(self) -> dict[str, object]:
        """Return everything as plain data, without numbers that are undefined."""
        metrics = {
            name: {key: value for key, value in vars(each).items() if math.isfinite(value)}
            for name, each in self.metrics.items()
        }
        return {**to_json(replace(self, metrics={}, times={})), "metrics": metrics, "times": self._times()}

    def _times(self) -> dict[str, object]:
        return {str(size): dict(vars(each)) for size, each in self.times.items()}


METRIC_COLUMNS = ("metric", "FP32", "packed", "change", "95 %", "")
# A median of ratios, each of two times that were measured one after the other, is not the ratio of two medians.
TIME_COLUMNS = ("rows of a request", "FP32, median ms", "packed, median ms", "times as fast, median of turns")


def quantise_products(
    folder: str | Path,
    *,
    config: ProductsConfig,
    out: str | Path | None = None,
    models: Sequence[type[ModelConfig]] = (),
    progress: Progress | None = None,
) -> ProductsCost:
    """Pack the products of a run, say what that costs, and write the packed run.

    Args:
        folder: of the run.
        config: format and samples.
        out: folder of the packed run; None writes none.
        models: config classes of your own that the run may name.
        progress: shows phases.

    Raises:
        ConfigError: see `models.packed.pack_products`; or `out` cannot be written to.
        MissingFileError, CheckpointError, DataError: as loading a run and reading its data.
    """
    progress = progress or NoProgress()
    format = packed_format(config.format, where="products to pack")
    source = RunFolder(Path(folder))
    # Before the run is loaded, which takes a while.
    refuse_packing(source, read_products(source), precision=None, products=format, ranks=None, device=Device.CPU)
    run = load_run(folder, step=config.step, models=models, device=Device.CPU)
    if out is not None:
        refuse_output(run, out)
    progress.begin("the run", total=None)
    # In FP32, before the network is changed in place.
    before = scored_rows(run.model, _batches(run, config))
    further = _ranking_metrics(run, config)
    # 4 bytes of FP32 a weight.
    dense_bytes = 4 * num_parameters(run.model).dense
    progress.end()
    tuned = fine_tune(run, format, config=config, progress=progress) if config.epochs else ""
    progress.begin(f"{format}", total=None)
    packed = pack_products(run.model, format)
    run = replace(run, packed=packed)
    after = scored_rows(run.model, _batches(run, config))
    further_after = _ranking_metrics(run, config)
    progress.end()
    metrics = {
        name: MetricCost(before=value, after=further_after[name], half_width=math.nan)
        for name, value in further.items()
        if name in further_after
    }
    values = (before.metrics.compute(), after.metrics.compute())
    for name, difference in paired_differences(after.metrics, before.metrics, units=before.units).items():
        if name in values[0] and name in values[1]:
            metrics[name] = MetricCost(before=values[0][name], after=values[1][name], half_width=difference.half_width)
    progress.begin("times", total=None)
    times = scoring_times(run.model, _first_rows(run, config))
    progress.end()
    cost = ProductsCost(
        format_of_weights=format.name,
        products=packed.line(),
        left=packed.left,
        metrics={name: each for name, each in metrics.items() if math.isfinite(each.before)},
        weight_bytes=sum(4 * run.model.get_parameter(f"{name}.weight").numel() for name in packed.bits),
        packed_bytes=packed.num_bytes,
        dense_bytes=dense_bytes,
        times=times,
        num_rows=len(before.units),
        step=run.step,
        rows=", ".join(config.data) or f"the run's {config.split} rows",
        tuned=tuned,
    )
    if out is not None:
        made = save_packed(run, out, report=cost.to_json())
        if not config.data:  # the run's own rows are there, by which a finished run is judged and compared
            _write_evaluations(run, made, progress=progress)
    return cost


def fine_tune(run: Run, format: BlockFormat, *, config: ProductsConfig, progress: Progress) -> str:
    """Train the dense network of a run on, its products rounded to a format; return how, in words.

    Args:
        run: on one device, in FP32; its model is changed.
        format: of products.
        config: epochs and learning rate.
        progress: shows steps.

    Raises:
        ConfigError: the run's tables train together with the dense network, or its rows are no longer there.
    """
    optimizer = run.model.embeddings.config.optimizer
    problem = f"table optimizer {optimizer}, which trains whole tables with the network" if optimizer.is_dense else ""
    if run.config.tables.has_few_bits or run.config.tables.disk:
        problem = "tables in few bits, or on a disk"
    precision = _precision_of(format)
    if problem:
        is_listed = any(each is precision for each in Precision)
        whole = (f"train a run in the precision from the start: ziggurat train … --precision {precision}",)
        raise ConfigError(
            expected="tables in FP32 in memory, which stay as they are while the network is trained on",
            found=problem,
            where=f"{run.folder}, --epochs",
            ways_out=("leave --epochs out: a direct cast", *(whole if is_listed else ())),
        )
    before = run.config.training
    learning_rate = config.learning_rate or before.learning_rate / 10
    settings = replace(
        before,
        epochs=config.epochs,
        max_steps=0,
        learning_rate=learning_rate,
        # A rate of 0 keeps the tables as they are.
        table_learning_rate=0.0,
        precision=precision,
        dispatch="",
        start_at_base_rate=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            run.model,
            config=settings,
            train=run.own_rows("train"),
            # Validation chooses the weights, as in the run itself.
            valid=run.own_rows("valid"),
            # Nothing of this training is kept but the weights in the model.
            folder=folder,
            progress=progress,
        )
        try:
            fit = trainer.fit()
        except NumericsError as problem:
            # The batch is in a folder that is gone, and settings of training are not those of this verb.
            raise NumericsError(
                expected=problem.expected,
                found=problem.found,
                where=f"{problem.where.partition(';')[0]} of training on in {precision}; nothing was written",
                ways_out=(
                    f"a lower rate than {learning_rate:g}: --learning-rate {learning_rate / 10:g}",
                    "leave --epochs out: a direct cast",
                ),
            ) from problem
    # Training left it in its own mode, and scores are those of evaluation.
    run.model.eval()
    return f"trained on in {precision} for {fit.steps:,} steps, learning rate {learning_rate:g}, tables as they were"


def _write_evaluations(run: Run, made: RunFolder, *, progress: Progress) -> None:
    """Write the metrics of a packed run on its validation and test rows, as the end of a training does."""
    if RunFolder(run.folder).is_stream():  # it has none: what it scored before it trained is in windows.jsonl
        return
    prepared = prepare_run(run.config, progress=progress, fitted=run.preprocessing)
    for split in ("valid", "test"):
        dataset = getattr(prepared, split)
        if dataset is not None and dataset.num_rows:
            EVALUATION.write(made.evaluation(split), run.evaluate_split(split, progress=progress).to_json())


def _precision_of(format: BlockFormat) -> Precision:
    """Return the precision of training that rounds operands to a format; one that is not listed, if none is."""
    for each in Precision:
        if isinstance(each.arithmetic, BlockArithmetic) and each.arithmetic.format is format:
            return each
    return InBlocks(format)


def scoring_times(model: Model, batch: Batch, *, sizes: Sequence[int] = BATCH_SIZES) -> dict[int, TimeCost]:
    """Measure how long a packed model scores batches, and the same model with FP32 products, in turns."""
    found = dict[int, TimeCost]()
    for size in sizes:
        if size > batch.batch_size:
            continue
        rows = batch.rows(0, size)
        seconds = _seconds(model, rows, repeats=2)  # the first of these also warms up
        repeats = repeats_in_turn(seconds, least_s=_TURN_S)
        work = [functools.partial(one, model, rows, repeats) for one in (_native_seconds, _packed_seconds)]
        # In turns, so that a machine that gets slower meanwhile slows both.
        fp32, packed = seconds_in_turns(work, turns=_TURNS)
        found[size] = TimeCost(
            fp32_ms=1e3 * statistics.median(fp32),
            packed_ms=1e3 * statistics.median(packed),
            speedup=median_ratio(fp32, packed),
        )
    return found


def _native_seconds(model: Model, batch: Batch, repeats: int, turn: int) -> float:
    del turn
    with native_products(model):
        return _seconds(model, batch, repeats=repeats)


def _packed_seconds(model: Model, batch: Batch, repeats: int, turn: int) -> float:
    del turn
    return _seconds(model, batch, repeats=repeats)


@torch.no_grad()
def _seconds(model: Model, batch: Batch, *, repeats: int) -> float:
    # Once before the clock starts.
    model(batch)  # whose arithmetic was exchanged just now
    begin = time.perf_counter()
    for _ in range(repeats):
        model(batch)
    return (time.perf_counter() - begin) / repeats


def _batches(run: Run, config: ProductsConfig) -> Iterable[Batch]:
    if not config.data:
        return ordered_batches(run.own_rows(config.split), batch_size=_SCORED_ROWS).batches(epoch=0)
    data = list(config.data)
    check_data(data)
    refuse_events(run, data)
    chunks = encoded_chunks(run, data, with_labels=True, bad_rows=BadRowPolicy.ERROR, progress=NoProgress())
    return (own_rows(run, table) for _, table in chunks)


def _first_rows(run: Run, config: ProductsConfig) -> Batch:
    if config.data:
        return next(iter(_batches(run, config)))
    return table_to_batch(run.own_rows(config.split).read_group(0), run.preprocessing.inputs)


def _ranking_metrics(run: Run, config: ProductsConfig) -> dict[str, float]:
    """Return how a model that finds items ranks all of them, by which it is judged; nothing of others."""
    if not run.model.finds_items or config.data:
        return {}
    found = run.evaluate_split(config.split).metrics
    return {name: value for name, value in found.items() if name.startswith("full_")}

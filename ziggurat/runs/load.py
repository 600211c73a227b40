"""Load a finished run: its model with the best weights, its preprocessing, and evaluation of any raw file.

A run is loaded on one device, or on the ranks that torchrun started, however many it was trained on: each rank then
holds its part of the tables, as the plan says. Every rank reads the raw files, and scores its part of every chunk.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from torch import Tensor

from ziggurat.arguments import check_arguments
from ziggurat.commands import pasted
from ziggurat.config import from_json
from ziggurat.data.preprocess.grown_dataset import with_grown_rows
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.frames import as_polars, is_frame
from ziggurat.data.raw.names import in_terms_of_frame, in_terms_of_keys, missing_column
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.written_numbers import WrittenColumns
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import (
    BoundsError,
    CheckpointError,
    ConfigError,
    DataError,
    MissingFileError,
    SchemaError,
    ZigguratError,
)
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import column_of
from ziggurat.models import Model, build_model
from ziggurat.models.build import ModelConfig
from ziggurat.models.converted import dispatched_arithmetics, take_precision
from ziggurat.models.packed import PackedProducts, empty_bits, pack_products, take_bits
from ziggurat.numerics import BlockFormat
from ziggurat.parallel.device import Device, choose_device, device_of_finished_run, usable_kernel
from ziggurat.parallel.job import job
from ziggurat.parallel.tables.sharded_tables import tables_of
from ziggurat.precision import PLAIN, Precision
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.data_record import (
    DataRecord,
    known_files,
    refuse_other_data,
    refuse_other_vocabularies,
    refuse_splits_of_stream,
    rows_of_split,
)
from ziggurat.runs.display import html_of, stored_metrics, text_of
from ziggurat.runs.execute import prepare_run, raw_files
from ziggurat.runs.many_ranks import Ranks, on_any_ranks
from ziggurat.runs.packed_run import other_products, read_products, refuse_packing, with_bits
from ziggurat.runs.quality.importance import Importance, ImportanceConfig, importance_of
from ziggurat.runs.quality.slices import SliceConfig, Slicer
from ziggurat.runs.quality.trained_rows import SeenRows
from ziggurat.runs.resume import best_step, checkpoints_of
from ziggurat.runs.scores.candidate_scores import predict_of_events
from ziggurat.runs.scores.embeddings import embeddings_of
from ziggurat.runs.scores.given_data import check_data, files_in
from ziggurat.runs.scores.next_items import next_items_frame
from ziggurat.runs.scores.output import check_output, refuse_own_input, write_frames
from ziggurat.runs.scores.scoring import (
    FileReading,
    encoded_chunks,
    like,
    output_schema,
    own_rows,
    refuse_events,
    saying_unknown_ids,
    scored_frames,
)
from ziggurat.serving.export.export_folder import MANIFEST_NAME
from ziggurat.training.checkpoint import Match
from ziggurat.training.checkpoint.errors import DamagedCheckpointError
from ziggurat.training.evaluation.evaluate import Evaluation, evaluate_batches, ordered_batches, scores_of
from ziggurat.training.evaluation.full_ranking_pass import FullRankingPass, FullRankings
from ziggurat.training.growing.growing_tables import GrowingTables
from ziggurat.training.metrics.accumulator import MetricFunction
from ziggurat.training.metrics.metric import metric_of
from ziggurat.training.metrics.ranking import DEFAULT_RANKING_K
from ziggurat.training.records.run_folder import INPUTS, RunFolder
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.safety_valve import products_gone
from ziggurat.training.state import VALVE
from ziggurat.training.step.train_step import ACTIVATIONS
from ziggurat.training.team import Team

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model together with what it needs to score raw data.

    Args:
        folder: of the run.
        config: its whole configuration.
        preprocessing: as fitted on its training data.
        model: with the best weights, in evaluation mode.
        step: the step that the weights come from.
        team: the ranks that hold the model; the methods are collective over them.
        reading: how files are read; as the run's own, unless `dataclasses.replace(run, reading=…)` says otherwise.
        packed: the dense products that are packed in few bits; None where all are FP32.
    """

    folder: Path
    config: RunConfig
    preprocessing: Preprocessing
    model: Model
    step: int
    team: Team
    reading: FileReading
    packed: PackedProducts | None = None

    @property
    def written(self) -> WrittenColumns:
        """Return how numbers are written in texts: as files are read, but for columns of which the schema says more."""
        return WrittenColumns(files=self.reading.text.numbers).with_own(self.config.table_schema.numbers)

    def evaluate(
        self,
        data: object,
        *,
        bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
        progress: Progress | None = None,
        ranking_k: int = DEFAULT_RANKING_K,
        metrics: Mapping[str, MetricFunction] | None = None,
        slices: SliceConfig | Sequence[str] = (),
        full_ranking: bool = False,
    ) -> Evaluation:
        """Exact metrics on raw data that has the schema's columns, labels included.

        Says so where the files are those that the run was trained on (see `data_record.known_files`), or rows of files
        and frames equal rows that it was trained on (see `quality/trained_rows.py`).

        Args:
            data: files or globs, or a frame (polars, pandas, Arrow, a dict of columns).
            bad_rows: stop at one, or put it aside.
            progress: shows rows, and the warning; without it the warning goes to the log.
            ranking_k: places that count in ndcg@K and recall@K.
            metrics: functions of your own, by name.
            slices: columns, or features by name, to give the metrics by as well; see `quality/slices.py`.
            full_ranking: rank all items of the run's training rows, too, which are read again; see
                `training/metrics/full_ranking.py`. Only for models that find items.
        """
        by = slices if isinstance(slices, SliceConfig) else SliceConfig(columns=tuple(slices))
        slicer = Slicer(by, preprocessing=self.preprocessing) if by.columns else None
        check_data(data)
        refuse_events(self, data)
        is_known = self._warn_of_known(data, progress)
        keep = () if slicer is None else slicer.raw_columns
        seen = SeenRows()
        chunks = encoded_chunks(self, data, with_labels=True, bad_rows=bad_rows, progress=progress, keep=keep)
        ranking = self._full_ranking_of_files(progress) if full_ranking else None
        batches = self._own_batches(seen.watching(chunks), slicer)
        with saying_unknown_ids(self, progress):
            found = self._evaluated(batches, progress, ranking_k, metrics, slices=slicer, full_ranking=ranking)
        if not is_known:
            self._warn_of_trained(seen, progress)
        return found

    def evaluate_split(
        self,
        split: str,
        *,
        progress: Progress | None = None,
        ranking_k: int = DEFAULT_RANKING_K,
        metrics: Mapping[str, MetricFunction] | None = None,
    ) -> Evaluation:
        """Exact metrics on the run's own train, valid or test rows; they are prepared again if they are not there.

        Of a run with a `negative_rate`, train rows are those that it kept, which is said: valid and test hold all rows.

        Raises:
            ConfigError: the run has no such rows.
            DataError: the raw files are not those of the run any more.
        """
        prepared = self._prepared(split, progress)
        dataset = self._rows(prepared, split)
        self._warn_of_left_out(split, progress)
        settings = self.config.training
        team = self.team
        batch_size = settings.evaluation_batch_size or 4 * settings.loader.batch_size
        batches = ordered_batches(dataset, batch_size=batch_size, rank=team.rank, world_size=team.world_size)
        ranking = self._full_ranking(prepared, split=split) if self.model.finds_items else None
        return self._evaluated(batches.batches(epoch=0), progress, ranking_k, metrics, full_ranking=ranking)

    def importance(
        self,
        data: object = None,
        *,
        split: str = "valid",
        config: ImportanceConfig | None = None,
        bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
        progress: Progress | None = None,
    ) -> Importance:
        """Measure how much worse the model gets if a feature is permuted among samples; see `quality/importance.py`.

        Args:
            data: files, globs or a frame with labels; None: the run's own rows of `split`.
            split: train, valid or test.
            config: metric, rounds, samples, seed, features and groups of features.
            bad_rows: stop at one, or put it aside.
            progress: shows permutations.
        """
        config = config or ImportanceConfig()
        if data is None:
            dataset = self._rows(self._prepared(split, progress), split)
            self._warn_of_left_out(split, progress)
            tables = (dataset.read_group(index) for index in range(len(dataset.group_sizes)))
            return importance_of(self, tables, rows=f"the run's {split} rows", config=config, progress=progress)
        check_data(data)
        refuse_events(self, data)
        is_known = self._warn_of_known(data, progress)
        seen = SeenRows()
        chunks = encoded_chunks(self, data, with_labels=True, bad_rows=bad_rows, progress=progress)
        tables = (table for _, table in seen.watching(chunks))
        rows = "the frame" if is_frame(data) else "the files"
        found = importance_of(self, tables, rows=rows, config=config, progress=progress)
        if not is_known:
            self._warn_of_trained(seen, progress)
        return found

    def own_rows(self, split: str, *, progress: Progress | None = None) -> Any:
        """Return the encoded rows of the run's train, valid or test split; prepared again if they are not there.

        Raises:
            ConfigError: the run has no such rows.
            DataError: the raw files are not those of the run any more.
        """
        return self._rows(self._prepared(split, progress), split)

    def _prepared(self, split: str, progress: Progress | None) -> PreparedData:
        """The run's own data, which is still what it was trained on; `split` is what is asked for."""
        refuse_splits_of_stream(RunFolder(self.folder), asked=f"its own {split} rows")
        prepared = prepare_run(self.config, progress=self.team.progress(progress), fitted=self.preprocessing)
        way_out = f"restore the raw files, or name the test rows yourself: ziggurat evaluate {pasted(self.folder)} FILE"
        refuse_other_data(
            RunFolder(self.folder),
            prepared,
            data=raw_files(self.config, progress=NoProgress()),
            asked=f"the run's own {split} rows",
            ways_out=(way_out,),
        )
        return prepared

    def _rows(self, prepared: PreparedData, split: str) -> Any:
        return with_grown_rows(rows_of_split(prepared, split, run=self.folder), self.preprocessing.grown)

    def predict(
        self,
        data: object,
        *,
        out: str | Path | None = None,
        keep: Sequence[str] = (),
        bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
        progress: Progress | None = None,
    ) -> object:
        """Score raw data: `row` (its position), the kept columns, and a column a label; see `scores/scoring.py`.

        Of a run on events: the ten next items of each user of an event log; with labels: a score for each event.
        Labels, weights and groups need not be there. Rank 0 has the scores; a file appears only when it is complete.

        Args:
            data: files or globs, or a frame (polars, pandas, Arrow, a dict of columns).
            out: file to write, Parquet, CSV or TSV by its suffix; None returns a frame.
            keep: columns of the data that stand beside the scores.
            bad_rows: stop at one, or put it aside.
            progress: shows rows.

        Returns:
            The number of rows written; without `out` a frame of the kind of `data`, of polars for files.

        Raises:
            ConfigError: a suffix that is not known, or columns that cannot be kept.
            SchemaError, DataError: the data does not fit the schema.
        """
        # A text is a sequence, too, and its letters would be taken for columns.
        keep = (keep,) if isinstance(keep, str) else tuple(keep)
        check_data(data)
        with saying_unknown_ids(self, progress):
            return self._predicted(data, out=out, keep=keep, bad_rows=bad_rows, progress=progress)

    def _predicted(
        self,
        data: object,
        *,
        out: str | Path | None,
        keep: tuple[str, ...],
        bad_rows: BadRowPolicy,
        progress: Progress | None,
    ) -> object:
        if self.config.table_schema.events is not None:
            return predict_of_events(self, data, out=out, keep=keep, bad_rows=bad_rows, progress=progress)
        schema = output_schema(self, data, keep=keep)
        if out is not None:
            check_output(out, schema)
            refuse_own_input(out, data, trained=[Path(path) for path in self.config.data.train])
        frames = scored_frames(self, data, schema=schema, keep=keep, bad_rows=bad_rows, progress=progress)
        if out is not None and self.team.is_first:
            return write_frames(frames, out, schema=schema)
        # Ranks that write nothing go through the frames as well, since scoring is collective. The empty frame in
        # front gives columns to data without rows.
        found = pl.concat([pl.DataFrame(schema=schema), *frames])
        if out is not None:
            return len(found)
        return like(found, data) if is_frame(data) else found

    def next_items(self, data: object, *, k: int = 10, bad_rows: BadRowPolicy = BadRowPolicy.ERROR) -> pl.DataFrame:
        """The `k` items that come next for each user of an event log; see `scores/next_items.py`."""
        check_data(data)
        with saying_unknown_ids(self, None):
            return next_items_frame(self, data, k=k, bad_rows=bad_rows)

    def scores(self, frame: object) -> np.ndarray:
        """Return probabilities (or values, as float64) of a small frame or dict of raw columns: (rows, labels).

        Numbers in columns of text are read as in the files of the run; columns of numbers are taken as they are.
        """
        text = self.reading.text
        if is_frame(frame):
            refuse_events(self, frame)
        if isinstance(frame, Mapping):
            self._refuse_absent_keys(frame)
        rows = as_polars(frame, where="rows to score", written=self.written)
        with saying_unknown_ids(self, None):
            try:
                batch = self.preprocessing.batch(rows, numbers=text.numbers, list_separator=text.list_separator)
            except (SchemaError, DataError, BoundsError) as error:
                if isinstance(frame, Mapping):
                    raise in_terms_of_keys(error, tuple(frame)) from error
                raise in_terms_of_frame(error) from error
        # One batch is given, so there is one answer.
        return next(scores for _, scores in scores_of(self.model, [batch]))

    def _refuse_absent_keys(self, given: Mapping[str, object]) -> None:
        """Refuse a dict without a column of a feature, before what is wrong with the values of its other keys."""
        keys = tuple(map(str, given))
        absent = [name for name in map(column_of, self.preprocessing.schema.features) if name not in keys]
        if absent:
            raise in_terms_of_keys(missing_column(Path("dict"), absent[0], keys, others=absent[1:]), keys)

    def embeddings(self, feature: str) -> pl.DataFrame:
        """Raw ids of a feature with their vectors; see `runs/scores/embeddings.py`. Needs the run on one device."""
        return embeddings_of(self, feature)

    def __repr__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    def _own_batches(self, chunks: Iterable[tuple[RawChunk, pa.Table]], slicer: Slicer | None) -> Iterator[Batch]:
        """The rows of chunks that this rank scores; the slicer hears of all."""
        for chunk, table in chunks:
            batch = own_rows(self, table)
            if slicer is not None:
                slicer.add(chunk, table, own=batch.row_ids)
            yield batch

    def _evaluated(
        self,
        batches: Iterable[Batch],
        progress: Progress | None,
        ranking_k: int,
        metrics: Mapping[str, MetricFunction] | None,
        slices: Slicer | None = None,
        full_ranking: FullRankingPass | None = None,
    ) -> Evaluation:
        found = evaluate_batches(
            self.model,
            batches,
            inputs=self.preprocessing.inputs,
            progress=progress,
            process_group=self.team.process_group,
            ranking_k=ranking_k,
            metrics=metrics,
            slices=slices,
            full_ranking=full_ranking,
        )
        self._warn_of_lost_metrics(found, progress)
        return found

    def _warn_of_lost_metrics(self, found: Evaluation, progress: Progress | None) -> None:
        """Name the metrics that the run ended with and that nothing computes any more: those of an extension."""
        if not self.team.is_first:
            return
        stored: dict[str, dict[str, float]] = {}
        with contextlib.suppress(ZigguratError):  # a damaged record of before takes nothing from these metrics
            stored = stored_metrics(self)
        names = dict.fromkeys(name for metrics in stored.values() for name in metrics)
        lost = [name for name in names if name not in found.metrics and metric_of(name) is None]
        if lost:
            self.warn(
                f"left out: {', '.join(lost)}, which the run was judged by when it was trained and no module that is "
                "loaded computes: ziggurat --extension MODULE evaluate …, or metrics={name: function} in Python",
                progress,
            )

    def _full_ranking_of_files(self, progress: Progress | None) -> FullRankingPass:
        """The full ranking of files, which come after the run's training and validation rows."""
        if not self.model.finds_items:
            raise self._finds_no_items()
        return self._full_ranking(self._prepared("train", progress))

    def _full_ranking(self, prepared: PreparedData, split: str = "") -> FullRankingPass:
        train = self._rows(prepared, "train")
        asked = {"train": train, "valid": prepared.valid}.get(split)
        found = FullRankings(self.model, train=train, valid=None if split == "train" else prepared.valid).begin(asked)
        if found is None:
            raise self._finds_no_items()
        return found

    def _finds_no_items(self) -> ConfigError:
        return ConfigError(
            expected="a run whose model finds items: two_tower",
            found=f"model {self.config.model.kind!r}, which scores pairs of a user and an item",
            where=f"{self.folder}, full ranking",
            ways_out=("leave full ranking out", "train a model that finds items: ziggurat train table_two_tower"),
        )

    def _warn_of_left_out(self, split: str, progress: Progress | None) -> None:
        """Scores are those of all negatives, and the train rows hold a share of them."""
        rate = min(label.negative_rate for label in self.preprocessing.inputs.labels)
        if split == "train" and rate < 1:
            self.warn(
                f"the train rows hold {rate:.3g} of their negatives (negative_rate), and scores are corrected for all "
                "of them: losses, calibration and whatever counts negatives are not those of all rows, AUC is; "
                "the splits valid and test hold all rows",
                progress,
            )

    def _warn_of_known(self, data: object, progress: Progress | None) -> bool:
        """Warn of files that the run has read; return whether there were any."""
        if is_frame(data) or not self.team.is_first:
            return False
        paths = RawSource(files_in(data), format=self.reading.format).paths
        files = known_files(DataRecord.load(RunFolder(self.folder).data), paths)
        of_events = self.config.table_schema.events is not None
        for known in files:
            self.warn(replace(known, of_events=of_events).warning(self.folder), progress)
        return bool(files)

    def _warn_of_trained(self, seen: SeenRows, progress: Progress | None) -> None:
        """Warn of rows that equal rows which the run was trained on."""
        found = seen.compared_with(self.config) if self.team.is_first else None
        if found is not None and found.is_notable:
            self.warn(found.text(), progress)

    def warn(self, text: str, progress: Progress | None) -> None:
        """Say a warning once, where people see it."""
        if self.team.is_first:
            (_log.warning if progress is None else progress.say)(text if progress is None else f"warning: {text}")


@contextlib.contextmanager
def open_run(
    folder: str | Path,
    *,
    step: int | None = None,
    models: Sequence[type[ModelConfig]] = (),
    precision: Precision | None = None,
) -> Iterator[Run]:
    """`load_run` on the ranks that torchrun started, all together; on one device if it started none."""
    config = load_config(Path(folder), models=models)
    given = {"run": Path(folder).absolute(), "step": step, "precision": precision}
    # Products that are packed are computed on the CPU alone.
    is_packed = RunFolder(Path(folder)).products.exists()
    with job(
        device=Device.CPU if is_packed else device_of_finished_run(config.device), timeout_s=config.parallel.timeout_s
    ):
        ranks = Ranks(on_any_ranks(config), plan=None, given=given)
        yield load_run(folder, step=step, models=models, ranks=ranks, precision=precision)
        ranks.close()


@check_arguments
def load_run(
    folder: str | Path,
    *,
    step: int | None = None,
    models: Sequence[type[ModelConfig]] = (),
    ranks: Ranks | None = None,
    tables: TablesConfig | None = None,
    device: Device | None = None,
    precision: Precision | None = None,
    products: BlockFormat | Mapping[str, BlockFormat] | None = None,
) -> Run:
    """Load a run for evaluation or prediction.

    Args:
        folder: of the run.
        step: a checkpoint's step; None: the best one by the run's own validation, else the last.
        models: config classes of your own, if the run's model is one: `load_run(folder, models=(MyConfig,))`. A folder
            never makes this function import code.
        ranks: to load it on, together; None: one device. `open_run` finds them.
        tables: other formats of the rows, into which those of the checkpoint are rounded; None: those of the run.
        device: to compute on; None: a GPU where there is one, unless the run was asked to train on the CPU.
        precision: of dense products, whose operands it rounds (a direct cast); None: FP32, whatever the run trained in.
        products: a format that weights of dense products are packed in, for scoring on a CPU (`models/packed.py`);
            or a format for each module (`models/scoring_plan.py`). None: FP32, or what the run was packed in
            (`ziggurat quantise`).

    Raises:
        MissingFileError: there is no run, or it has no checkpoint yet.
        CheckpointError: the checkpoint of `step` is damaged, or none is intact; or the vocabularies are not those of
            the run's data. Where the best checkpoint is lost, the newest intact one is taken, with a warning.
        ConfigError: the model is neither built in nor in `models`; a precision that rounds no operands.

    Example:
        >>> frame = {"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}
        >>> config = zg.table_run(zg.LogisticRegressionConfig(), zg.inspect_file(frame).schema)
        >>> result = zg.train_run(config, folder="runs/first", data=frame)
        >>> zg.load_run("runs/first").predict({"user": ["ann", "eve"]}).keys()
        dict_keys(['row', 'bought'])
    """
    run = RunFolder(Path(folder))
    if not run.config.exists() and (run.path / MANIFEST_NAME).exists():
        raise MissingFileError(
            expected="the folder of a run",
            found="that of an export, which answers requests",
            where=str(run.path),
            ways_out=(f"zg.Recommender.load({str(run.path)!r})", "name the folder of the run that it was made of"),
        )
    config = load_config(run.path, models=models)
    asked = precision
    precision = PLAIN if precision is None else precision
    _refuse_other_precisions(precision, run)
    recorded = read_products(run)
    # Products that are packed are in no precision of training, and the reports name their format.
    is_packed = recorded is not None or products is not None
    if asked is None and not is_packed and (ranks is None or ranks.is_first):
        _say_other_products(run.path.absolute(), config.training.precision)
    if recorded is not None or products is not None:
        refuse_packing(run, recorded, precision=asked, products=products, ranks=ranks, device=device)
        device = Device.CPU
    inputs = from_json(InputSpec, INPUTS.read(run.inputs), where=str(run.inputs))
    refuse_other_vocabularies(run)
    preprocessing = load_preprocessing(run.preprocessing)
    place = choose_device(device or device_of_finished_run(config.device)).device
    embedding = config.model.embedding if tables is None else config.model.embedding.only_read
    kernel = usable_kernel(embedding.kernel, device=place)
    settings = replace(config.model, embedding=replace(embedding, kernel=kernel))
    made = (tables or config.tables).make_storage(seed=config.training.seed, is_trained=False)
    model = build_model(
        settings, inputs, seed=config.training.seed, towers=config.towers, draw_tables=False, make_storage=made
    )
    model.to(place)  # before its tables take memory; the checkpoint fills them
    take_precision(model, precision, dispatch=str(run.dispatch), is_scored=True)  # before it is parallel
    store = checkpoints_of(run, config)
    chosen = best_step(store) if step is None else step
    team = Team(None if ranks is None else ranks.parallelize(model, run=run, resume=True))
    growing = GrowingTables(model)
    into = {f"model.{name}": value for name, value in model.state_dict().items()} | growing.state()
    # Filled in place when the checkpoint is loaded, like everything else in `into`.
    bits: dict[str, Tensor] = {}
    if recorded is not None:
        bits = empty_bits(model, dict.fromkeys(recorded.modules, recorded.format))
        into = with_bits(into, bits)
    # A step that was asked for is loaded or refused; the best one gives way to another that is intact.
    try:
        loaded = store.load(step, prefer=None if step is not None else chosen, into=into, match=Match.SUBSET)
        # A run that goes on in another process may have found a better one meanwhile, and let go of this one.
        while loaded.step != chosen and (better := best_step(store)) != chosen:
            chosen = better
            loaded = store.load(prefer=chosen, into=into, match=Match.SUBSET)
    except CheckpointError as problem:
        # Damage says nothing about the format of the products, so it passes as it is.
        if recorded is None or isinstance(problem, DamagedCheckpointError):
            raise
        raise other_products(run, recorded, problem=problem) from problem
    store.close()
    gone = products_gone(loaded.state.get(VALVE))
    for arithmetic in dispatched_arithmetics(model):
        if gone and (arithmetic.module in gone or ACTIVATIONS in gone):
            arithmetic.send_back()
    if loaded.step != chosen and team.is_first:
        why = "\n".join(map(str, loaded.skipped))
        _log.warning("the best checkpoint (step %d) is lost; that of step %d is taken:\n%s", chosen, loaded.step, why)
    # The checkpoint has filled the rows: tables that are not told so refuse to be read.
    for held in tables_of(model):
        held.mark_filled()
    model.eval()
    packed = None
    if recorded is not None:
        packed = take_bits(model, dict.fromkeys(bits, recorded.format), bits)
    elif products is not None:
        packed = pack_products(model, products)
    return Run(
        folder=run.path,
        config=config,
        preprocessing=preprocessing.with_grown(growing.grown(), where=str(run.checkpoints)),
        model=model,
        step=loaded.step,
        team=team,
        reading=FileReading.of(config),
        packed=packed,
    )


@functools.cache  # a study loads a run many times, and one line is enough
def _say_other_products(folder: Path, trained: Precision) -> None:
    """Say that the numbers of a loaded run differ from those that its training printed."""
    if trained.arithmetic is not None or trained.is_dispatched:
        _log.warning(
            "%s: computed in FP32; the run was trained with products in %s (ziggurat evaluate --precision %s computes "
            "in it, as does load_run(folder, precision=Precision(%r)))",
            folder.name,
            trained,
            trained,
            trained.name,
        )


def _refuse_other_precisions(precision: Precision, run: RunFolder) -> None:
    """Refuse what belongs to training, and a dispatch whose kernels the run does not keep."""
    if precision.can_score:
        return
    if precision.is_dispatched:
        if run.dispatch.exists():
            return
        raise ConfigError(
            expected="a run that was trained with precision dispatch, which keeps its kernels",
            found=f"no {run.dispatch}",
            where="precision of a loaded run",
            ways_out="--precision fp32, which is what leaving it out means",
        )
    known = [str(each) for each in Precision if each.can_score]
    ways = [f"--precision {PLAIN}, which is what leaving it out means"]
    if precision.emulated_by:
        ways.insert(0, f"--precision {precision.emulated_by}: products of {str(precision).upper()} operands")
    raise ConfigError(
        expected=f"a precision that a finished run is scored in: {', '.join(known)}",
        found=str(precision),
        where="precision of a loaded run",
        ways_out=ways,
    )

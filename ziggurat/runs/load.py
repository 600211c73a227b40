"""Load a finished run: its model with the best weights, its preprocessing, and evaluation of any raw file.

A run is loaded on one device, or on the ranks that torchrun started, however many it was trained on: each rank then
holds its part of the tables, as the plan says. Every rank reads the raw files, and scores its part of every chunk.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.config import from_json
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.preprocess.preprocessing import Preprocessing, numeric_columns
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.errors import MissingFileError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import column_of
from ziggurat.files import replacing
from ziggurat.models import Model, build_model
from ziggurat.parallel.device import choose_device, usable_kernel
from ziggurat.parallel.tables import tables_of
from ziggurat.parallel.topology import job
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.many_ranks import Ranks
from ziggurat.training.checkpoint import CheckpointStore, Match
from ziggurat.training.evaluation import Evaluation, evaluate_batches, gathered_scores_of, scores_of
from ziggurat.training.metrics import MetricFunction
from ziggurat.training.position import Position
from ziggurat.training.progress import Progress
from ziggurat.training.ranking_metrics import DEFAULT_RANKING_K
from ziggurat.training.run_folder import INPUTS, RunFolder
from ziggurat.training.team import Team

_log = logging.getLogger(__name__)
CHUNK_ROWS = 65_536


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
    """

    folder: Path
    config: RunConfig
    preprocessing: Preprocessing
    model: Model
    step: int
    team: Team

    def evaluate(
        self,
        data: Sequence[str | Path],
        *,
        bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
        progress: Progress | None = None,
        ranking_k: int = DEFAULT_RANKING_K,
        metrics: Mapping[str, MetricFunction] | None = None,
    ) -> Evaluation:
        """Exact metrics, and functions of your own, on raw files that have the schema's columns, labels included."""
        return evaluate_batches(
            self.model,
            self._batches(data, with_labels=True, bad_rows=bad_rows),
            inputs=self.preprocessing.inputs,
            progress=progress,
            process_group=self.team.process_group,
            ranking_k=ranking_k,
            metrics=metrics,
        )

    def predict(
        self,
        data: Sequence[str | Path],
        *,
        out: str | Path,
        bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
        progress: Progress | None = None,
    ) -> int:
        """Score raw files; writes Parquet with `row` (position in the data) and one column a label. Returns the rows.

        Labels, weights and groups need not be in the files. The file appears only when it is complete. Rank 0
        writes it.
        """
        batches = self._batches(data, with_labels=False, bad_rows=bad_rows)
        gathered = gathered_scores_of(self.model, batches, progress=progress, process_group=self.team.process_group)
        if not self.team.is_first:
            return sum(len(rows) for rows, _ in gathered)  # none: the first rank has them
        names = [label.name for label in self.preprocessing.inputs.labels]
        schema = pa.schema([("row", pa.int64()), *((name, pa.float32()) for name in names)])
        num_rows = 0
        with (
            replacing(out) as temporary,
            pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for rows, scores in gathered:
                columns = [pa.array(rows), *(pa.array(scores[:, i]) for i in range(len(names)))]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                num_rows += len(rows)
        return num_rows

    def scores(self, frame: Any) -> np.ndarray:
        """Probabilities (or values) of a small polars frame with raw columns: float32 (rows, labels)."""
        batch = self.preprocessing.batch(frame)
        return next(scores for _, scores in scores_of(self.model, [batch]))

    def _batches(self, data: Sequence[str | Path], *, with_labels: bool, bad_rows: BadRowPolicy) -> Iterator[Batch]:
        schema = self.preprocessing.schema
        features = tuple(dict.fromkeys(column_of(feature) for feature in schema.features))
        with tempfile.TemporaryDirectory() as elsewhere:
            folder = (
                self.folder if self.team.is_first else Path(elsewhere)
            )  # all ranks find the same bad rows; one keeps them
            with BadRows(bad_rows, folder=folder) as collector:
                source = RawSource(data, format=self.file_format, bad_rows=collector, text=self.config.data.text)
                chunks = source.frames(
                    columns=schema.columns if with_labels else features,
                    numbers=numeric_columns(schema, with_labels=with_labels),
                    chunk_rows=CHUNK_ROWS,
                )
                for chunk in chunks:
                    table = self.preprocessing.encode(chunk, bad_rows=collector, with_labels=with_labels)
                    yield table_to_batch(self._mine(table), self.preprocessing.inputs)

    def _mine(self, table: pa.Table) -> pa.Table:
        """The rows of a chunk that this rank scores."""
        rank, world_size = self.team.rank, self.team.world_size
        first, last = (len(table) * (rank + end) // world_size for end in (0, 1))
        return table.slice(first, last - first).combine_chunks()

    @property
    def file_format(self) -> FileFormat:
        """Format of the run's own raw files; known data sets are cached as Parquet."""
        return FileFormat.AUTO if self.config.dataset.name else self.config.data.format


@contextlib.contextmanager
def open_run(folder: str | Path, *, step: int | None = None, models: Sequence[type[Any]] = ()) -> Iterator[Run]:
    """`load_run` on the ranks that torchrun started, all together; on one device if it started none."""
    config = load_config(Path(folder), models=models)
    any_size = replace(config, parallel=replace(config.parallel, tower_size=0))  # scores do not depend on it
    given = {"run": Path(folder).absolute(), "step": step}
    with job(backend=choose_device(config.device).backend, timeout_s=config.parallel.timeout_s):
        yield load_run(folder, step=step, models=models, ranks=Ranks(any_size, plan=None, given=given))


def load_run(
    folder: str | Path, *, step: int | None = None, models: Sequence[type[Any]] = (), ranks: Ranks | None = None
) -> Run:
    """Load a run for evaluation, prediction or serving.

    Args:
        folder: of the run.
        step: a checkpoint's step; None: the best one by the run's own validation, else the last.
        models: config classes of your own, if the run's model is one: `load_run(folder, models=(MyConfig,))`. A folder
            never makes this function import code.
        ranks: to load it on, together; None: one device. `open_run` finds them.

    Raises:
        MissingFileError: there is no run, or it has no checkpoint yet.
        CheckpointError: the checkpoint of `step` is damaged, or none is intact. Where the best one is lost, the newest
            intact one is taken, with a warning.
        ConfigError: the model is neither built in nor in `models`.
    """
    run = RunFolder(Path(folder))
    config = load_config(run.path, models=models)
    inputs = from_json(InputSpec, INPUTS.read(run.inputs), where=str(run.inputs))
    preprocessing = load_preprocessing(run.preprocessing)
    device = choose_device(config.device).device
    kernel = usable_kernel(config.model.embedding.kernel, device=device)
    settings = replace(config.model, embedding=replace(config.model.embedding, kernel=kernel))
    model = build_model(settings, inputs, seed=config.training.seed, towers=config.towers, draw_tables=False)
    model.to(device)  # before its tables take memory; the checkpoint fills them
    store = CheckpointStore(run.checkpoints, config=config.training.checkpoint)
    if not store.steps():
        raise MissingFileError(
            expected="a run with a checkpoint",
            found="none yet",
            where=str(run.checkpoints),
            ways_out=f"train it first, or go on: ziggurat train {run.path} --resume",
        )
    chosen = best_step(store) if step is None else step
    team = Team(None if ranks is None else ranks.parallelize(model, run=run, resume=True))
    into = {f"model.{name}": value for name, value in model.state_dict().items()}
    if step is not None:
        loaded = store.load(step, into=into, match=Match.SUBSET)
    else:
        loaded = store.load(prefer=chosen, into=into, match=Match.SUBSET)
    if loaded.step != chosen and team.is_first:
        why = "\n".join(map(str, loaded.skipped))
        _log.warning("the best checkpoint (step %d) is lost; that of step %d is taken:\n%s", chosen, loaded.step, why)
    for tables in tables_of(model):
        tables.mark_filled()
    model.eval()
    return Run(folder=run.path, config=config, preprocessing=preprocessing, model=model, step=loaded.step, team=team)


def best_step(store: CheckpointStore) -> int:
    """The best step that the newest intact checkpoint knows of, or its own step where nothing was evaluated."""
    newest = store.load(into={}, match=Match.SUBSET)
    return Position.from_json(newest.state.get("position")).best_step or newest.step

"""Partition the features of a trained run into towers: the probe, and what follows from it.

    run ─► best weights ─► pooled embeddings of a sample of its training rows ─► interactions ─┐
       └─► tables and optimizer ─► bytes;  lists ─► rows read a sample ────────────────────────┴─► partition_towers

The probe is a forward pass through the tables alone: seconds. Embeddings are compared in the space where the model
multiplies them, so DLRM's projections of narrow tables come first (`planning.interactions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.data.preprocess.grown_dataset import with_grown_rows
from ziggurat.embeddings.room import TableSize
from ziggurat.errors import ConfigError, DataError, PlanError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import JaggedSpec
from ziggurat.models import Model
from ziggurat.models.blocks.fields import FieldAlignment
from ziggurat.models.build import ModelConfig
from ziggurat.planning.towers.affinity import InteractionSums, pad_fields
from ziggurat.planning.towers.items import FeatureLoad
from ziggurat.planning.towers.partitioner import TowerPartition, TowerPartitionConfig, partition_towers
from ziggurat.runs.data_paths import located
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.load import Run, load_run
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import Count, checked

_WINDOW_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
@checked
class EmbeddingProbeConfig:
    """Settings of what the probe reads.

    Args:
        num_samples: training rows, spread over the data, rounded up to whole batches; fewer if there are fewer.
        batch_size: rows at a time.
        seed: of the sample.
    """

    num_samples: int = 65_536
    batch_size: Count = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            raise ConfigError(
                expected="num_samples >= 1, batch_size >= 1",
                found=f"num_samples = {self.num_samples}, batch_size = {self.batch_size}",
                where="EmbeddingProbeConfig",
                ways_out="correct the number",
            )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The facts that a trained model gives about its features.

    Args:
        interactions: I, in the order of `features`.
        features: loads of every feature with an embedding.
        num_samples: rows that were read.
        note: what to keep in mind about the numbers, or "".
    """

    interactions: Float64[Tensor, "F F"]
    features: tuple[FeatureLoad, ...]
    num_samples: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PartitionRunConfig:
    """Everything that decides about towers of a run."""

    partition: TowerPartitionConfig = field(default_factory=TowerPartitionConfig)
    probe: EmbeddingProbeConfig = field(default_factory=EmbeddingProbeConfig)


def partition_run(
    run: str | Path | Run,
    *,
    config: TowerPartitionConfig,
    probe: EmbeddingProbeConfig | None = None,
    models: Sequence[type[ModelConfig]] = (),
    progress: Progress | None = None,
) -> TowerPartition:
    """Towers for the features of a trained run.

    Args:
        run: its folder, or the run as `load_run` gives it.
        config: how many towers, what for.
        probe: how many rows to read.
        models: config classes of your own; see `load_run`.
        progress: where to show progress.

    Raises:
        MissingFileError: no run, or none with a checkpoint.
        PlanError: the towers that were asked for are not possible.
        DataError: the run's raw data changed since it was trained.
    """
    progress = progress or NoProgress()
    loaded = run if isinstance(run, Run) else load_run(run, models=models)
    found = probe_run(loaded, config=probe, progress=progress)
    if found.note:
        progress.say(f"note: {found.note}")
    return partition_towers(found.interactions, features=found.features, config=config)


@torch.no_grad()
def probe_run(run: Run, *, config: EmbeddingProbeConfig | None = None, progress: Progress | None = None) -> Probe:
    """Collect interactions and loads from a run's model and training data."""
    config = config or EmbeddingProbeConfig()
    progress = progress or NoProgress()
    model = run.model
    inputs = run.model.inputs
    if not inputs.lookups:
        raise PlanError(
            expected="features with an embedding",
            found="none: the model sees numbers and vectors alone",
            where=str(run.folder),
            ways_out="towers are for models with embedding tables",
        )
    prepared = prepare_run(located(run.config, folder=run.folder), progress=progress, fitted=run.preprocessing)
    if run.preprocessing.difference(prepared.preprocessing):
        raise DataError(
            expected="the training data that the run was trained on",
            found="data that preprocessing encodes in another way (files or schema changed)",
            where=str(run.folder),
            ways_out=("restore the raw files", "train again, then partition the new run"),
        )
    loader = Loader(
        with_grown_rows(prepared.train, run.preprocessing.grown),
        config=LoaderConfig(
            batch_size=min(config.batch_size, config.num_samples),
            shuffle_buffer_rows=_WINDOW_ROWS,
            seed=config.seed,
            prefetch=2,
        ),
    )
    sums = InteractionSums(len(inputs.lookups))
    num_rows = torch.zeros(len(inputs.jagged), dtype=torch.float64)
    total = min(config.num_samples, loader.num_rows)
    progress.begin("probe", total=total)
    for batch in loader.batches(epoch=0):
        sums.add(comparable_fields(model, pooled_lookups(model, batch)))
        if inputs.jagged:
            num_rows += batch.jagged.lengths(num_features=len(inputs.jagged)).sum(1)
        progress.update(min(sums.num_samples, total))
        if sums.num_samples >= total:
            break
    progress.end()
    lengths = dict(zip((spec.name for spec in inputs.jagged), num_rows / max(1, sums.num_samples), strict=True))
    return Probe(
        interactions=sums.matrix,
        features=feature_loads(model, lengths={name: float(length) for name, length in lengths.items()}),
        num_samples=sums.num_samples,
        note=_note(model),
    )


def pooled_lookups(model: Model, batch: Batch) -> Tensor:
    """One embedding for each feature that has any, in the order of `inputs.lookups`; un-pooled lists by their mean."""
    pooled_BT = model.embeddings(batch)
    if not model.inputs.sequences:
        return pooled_BT
    names = [spec.name for spec in model.inputs.fields]
    found = dict(zip(names, pooled_BT.split(model.embeddings.field_dims, dim=1), strict=True))
    found |= {spec.name: model.unpooled(batch, spec.name).mean() for spec in model.inputs.sequences}
    return torch.cat([found[spec.name] for spec in model.inputs.lookups], dim=1)


def comparable_fields(model: Model, pooled_BT: Tensor) -> Tensor:
    """Embeddings of all features (B, T) as (B, F, D) in one space: the model's, or filled with zeros where it has none.

    Args:
        model: its tables and projections.
        pooled_BT: what `pooled_lookups` gives.
    """
    projections = _projections(model)
    dims = lookup_dims(model)
    if projections is None:
        return pad_fields(pooled_BT, field_dims=dims)
    return torch.cat(projections(pooled_BT), dim=1).view(len(pooled_BT), len(dims), projections.dim)


def feature_loads(model: Model, *, lengths: dict[str, float]) -> tuple[FeatureLoad, ...]:
    """Return the cost of each feature.

    Args:
        model: its tables and their optimizer.
        lengths: mean length of each list; features without one read a row a sample.
    """
    tables = model.embeddings
    sizes = tables.tables.sizes
    loads = []
    for spec in model.inputs.lookups:
        place = tables.tables.places[spec.table]
        is_list = isinstance(spec, JaggedSpec)
        loads.append(
            FeatureLoad(
                name=spec.name,
                table=spec.table,
                table_bytes=table_bytes(sizes[spec.table]),
                lookups=lengths[spec.name] if is_list else 1.0,
                dim=place.dim,
            )
        )
    return tuple(loads)


def table_bytes(size: TableSize) -> int:
    """Weights, in their format, and optimizer state of one table."""
    return size.weight_bytes + size.state_bytes


def lookup_dims(model: Model) -> tuple[int, ...]:
    """Columns of the embedding of each feature, in the order of `inputs.lookups`."""
    return tuple(model.embeddings.tables.places[spec.table].dim for spec in model.inputs.lookups)


def _projections(model: Model) -> FieldAlignment | None:
    """The model's map of its pooled embeddings into one space, if it has one."""
    for module in model.modules():
        # A map of other columns, such as those of one tower, is not that of all features.
        if isinstance(module, FieldAlignment) and module.field_dims == lookup_dims(model):
            return module
    return None


def _note(model: Model) -> str:
    if model.towers is not None:
        return "the run has towers already; embeddings of a flat run show better what belongs together"
    if _projections(model) is None:
        return (
            "this model combines columns by learned weights, which no cosine between embeddings sees, so the towers "
            "may be no better than by chance; a DLRM run on the same data shows what belongs together"
        )
    return ""

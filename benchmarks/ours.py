"""Our own contestant: `build_model` and the trainer's `TrainStep`, nothing re-implemented. A worker like the peers.

Settings, all optional; what is left out is what `TrainingConfig` and `EmbeddingConfig` say, which is what recipes use:
`precision` "auto" | "fp32" | "bf16" | …, `dispatch` (the file of precision "dispatch"),
`compile` "off" | "default" | "max_autotune", `step_graph` "auto" | "on" | "off", `kernel` of the tables, and `mode`:

    "train"     TrainStep on batches in memory
    "score"     `scores_of`, what evaluate and predict run
    "dense"     "train" without tables: what a lookup and its update cost is the difference
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.worker import serve
from benchmarks.workload import (
    WUKONG_FIELDS,
    WUKONG_LAYERS,
    WUKONG_MLP,
    WUKONG_RANK,
    ModelKind,
    RawBatch,
    Workload,
    make_batches,
)
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import (
    BuiltInConfig,
    CrossConfig,
    CrossKind,
    DCNv2Config,
    DHENConfig,
    DHENModule,
    DLRMConfig,
    MLPConfig,
    Model,
    Normalization,
    NumericInput,
    Structure,
    WukongConfig,
    build_model,
)
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.config import Compile, Precision, StepGraphs, TrainingConfig
from ziggurat.training.step.train_step import TrainStep


class OurContestant:
    """Ziggurat's model, step and scoring."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        self.mode = str(settings.get("mode", "train"))
        self.model = build(workload, kernel=KernelChoice(str(settings.get("kernel", KernelChoice.AUTO))))
        self.train_step = TrainStep(self.model, training_config(workload, settings))
        self.model.train(self.mode != "score")
        self.batches = [with_label_sets(raw, workload) for raw in make_batches(workload)]
        if self.mode == "dense":
            pooled = [self.model.embeddings(each[0]).detach() for each in self.batches[:8]]
            self.model.embeddings = FixedPooled(pooled)  # type: ignore[assignment]
        self.step = 0
        self.info = describe(self.train_step)

    def run(self, steps: int) -> float:
        """Train on, or score, so many batches."""
        value = 0.0
        if self.mode == "score":
            from ziggurat.training.evaluation.evaluate import scores_of  # needs polars, which training steps do not

            for _, scores in scores_of(self.model, (self._next() for _ in range(steps))):
                value = float(scores[0, 0])
            return value
        for _ in range(steps):
            value = self.train_step(self._next()).loss
        return value

    def losses(self, steps: int) -> list[float]:
        """Train on so many batches and keep every loss."""
        return [self.train_step(self._next()).loss for _ in range(steps)]

    def _next(self) -> Batch:
        label_sets = self.batches[self.step % len(self.batches)]
        batch = label_sets[self.step // len(self.batches) % len(label_sets)]
        self.step += 1
        return batch


class FixedPooled(nn.Module):
    """Stands in for the tables: ready-made pooled embeddings that ask for a gradient, as the tables' output does."""

    def __init__(self, pooled: list[Tensor]) -> None:
        super().__init__()
        self._pooled = pooled
        self._calls = 0

    rounds_pooled = False

    def settle(self) -> None:
        """Complete the last update: there is none."""

    def begin(self, batch: Batch) -> None:
        """Tables are told that a step begins; here nothing waits for it."""

    def forward(self, batch: Batch) -> Tensor:
        """(B, T), the next of a few."""
        self._calls += 1
        return self._pooled[self._calls % len(self._pooled)].detach().requires_grad_()


def training_config(workload: Workload, settings: dict[str, object]) -> TrainingConfig:
    """The recipes' settings (the defaults), but for what `settings` names."""
    config = TrainingConfig(
        learning_rate=workload.learning_rate,
        table_learning_rate=workload.table_learning_rate,
        loader=LoaderConfig(batch_size=workload.batch_size),
    )
    if "precision" in settings:
        precision = Precision(str(settings["precision"]))
        config = replace(config, precision=precision, dispatch=str(settings.get("dispatch", "")))
    if "compile" in settings:
        config = replace(config, compile=Compile(str(settings["compile"])))
    if "step_graph" in settings:
        config = replace(config, step_graph=StepGraphs(str(settings["step_graph"])))
    return config


def describe(step: TrainStep) -> dict[str, object]:
    """What the report says about a contestant of ours."""
    tables = step.model.embeddings
    fused = isinstance(tables, EmbeddingTables)
    return {
        "precision": step.precision.value,
        "precision_reason": step.precision_reason,
        "compile": step.config.compile.value,
        "tables": tables.report() if fused else "none",
        "num_table_parameters": tables.num_weights if fused else 0,
        "num_dense_parameters": sum(value.numel() for value in step.model.parameters()),
        "dense_optimizer": "Adam (fused)",
        "table_optimizer": "row-wise Adagrad (exact, deduplicated)",
    }


def inputs_of(workload: Workload) -> InputSpec:
    """The workload's features as an `InputSpec`: lists of one id are single features."""
    names = [f"c{index}" for index in range(len(workload.lengths))]
    lists = [name for name, length in zip(names, workload.lengths, strict=True) if length > 1]
    return InputSpec(
        dense=tuple(f"n{index}" for index in range(workload.num_dense)),
        single=tuple(SingleSpec(name=name, table=name) for name in names if name not in lists),
        jagged=tuple(JaggedSpec(name=name, table=name, pooling=Pooling.SUM) for name in lists),
        tables=tuple(TableSpec(name=name, num_rows=workload.num_rows) for name in names),
        labels=(LabelSpec(name="click"),),
    )


def to_batch(raw: RawBatch, workload: Workload, *, labels: np.ndarray) -> Batch:
    """One batch in our form; arrays are shared where they can be."""
    single = [ids[:, 0] for ids in raw.ids if ids.shape[1] == 1]
    lists = [ids for ids in raw.ids if ids.shape[1] > 1]
    size = workload.batch_size
    jagged = JaggedRows.empty()
    if lists:
        lengths = np.concatenate([np.full(size, ids.shape[1], dtype=np.int64) for ids in lists])
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        values = np.concatenate([ids.reshape(-1) for ids in lists])
        jagged = JaggedRows(torch.from_numpy(values), torch.from_numpy(offsets))
    return Batch(
        dense=torch.from_numpy(raw.dense),
        single=torch.from_numpy(np.stack(single) if single else np.empty((0, size), dtype=np.int64)),
        jagged=jagged,
        labels=torch.from_numpy(labels).unsqueeze(1),
        row_ids=torch.arange(size),
    )


def with_label_sets(raw: RawBatch, workload: Workload) -> list[Batch]:
    """The batch with each of its label sets; everything else is shared."""
    first = to_batch(raw, workload, labels=raw.label_sets[0])
    others = [replace(first, labels=torch.from_numpy(labels).unsqueeze(1)) for labels in raw.label_sets[1:]]
    return [first, *others]


def build(workload: Workload, *, kernel: KernelChoice) -> Model:
    """The workload's network, the same layers as every other contestant's."""
    return build_model(config_of(workload, kernel=kernel), inputs_of(workload), seed=workload.seed)


def config_of(workload: Workload, *, kernel: KernelChoice = KernelChoice.AUTO) -> BuiltInConfig:
    """Settings of that network."""
    embedding = EmbeddingConfig(dim=workload.dim, kernel=kernel)
    bottom, top = MLPConfig(hidden_dims=workload.bottom_mlp[:-1]), MLPConfig(hidden_dims=workload.top_mlp)
    match workload.model:
        case ModelKind.DLRM:
            return DLRMConfig(embedding_dim=workload.dim, bottom=bottom, top=top, embedding=embedding)
        case ModelKind.DCN_V2:
            return DCNv2Config(
                embedding_dim=workload.dim,
                structure=Structure.STACKED,
                cross=CrossConfig(num_layers=workload.cross_layers, kind=CrossKind.LOW_RANK, rank=workload.cross_rank),
                numeric=NumericInput.BOTTOM_MLP,
                bottom=bottom,
                deep=top,
                embedding=embedding,
            )
        case ModelKind.FUXICTR_DCN_V2:
            return DCNv2Config(
                embedding_dim=workload.dim,
                structure=Structure.PARALLEL,
                cross=CrossConfig(num_layers=3, kind=CrossKind.FULL),
                numeric=NumericInput.FIELDS,
                deep=MLPConfig(hidden_dims=(400, 400, 400)),
                embedding=embedding,
            )
        case ModelKind.WUKONG:
            return WukongConfig(
                embedding_dim=workload.dim,
                num_layers=WUKONG_LAYERS,
                num_fm=(WUKONG_FIELDS,),
                num_linear=(WUKONG_FIELDS,),
                rank=(WUKONG_RANK,),
                numeric=NumericInput.FIELDS,
                mlp=MLPConfig(hidden_dims=WUKONG_MLP),
                head=MLPConfig(hidden_dims=WUKONG_MLP, normalization=Normalization.BATCH),
                embedding=embedding,
            )
        case ModelKind.DHEN:
            return DHENConfig(
                embedding_dim=workload.dim,
                num_layers=WUKONG_LAYERS,
                modules=(DHENModule.FM, DHENModule.LINEAR),
                num_outputs=(WUKONG_FIELDS,),
                fm_rank=WUKONG_RANK,
                numeric=NumericInput.FIELDS,
                mlp=MLPConfig(hidden_dims=WUKONG_MLP),
                head=MLPConfig(hidden_dims=WUKONG_MLP, normalization=Normalization.BATCH),
                embedding=embedding,
            )


if __name__ == "__main__":
    serve(OurContestant)

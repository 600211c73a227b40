"""Our own contestant: `build_model` and the trainer's `TrainStep`, nothing re-implemented. A worker like the peers.

Settings: `precision` "auto" | "fp32" | "bf16", `compile` "off" | "default" | "max_autotune", `kernel` of the tables
("auto" measures), `mode` "train" | "score" (what `predict` does, a batch at a time).
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.worker import serve
from benchmarks.workload import ModelKind, RawBatch, Workload, make_batches
from ziggurat.data.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import (
    CrossConfig,
    CrossKind,
    DCNv2Config,
    DLRMConfig,
    MLPConfig,
    NumericInput,
    RankingModel,
    Structure,
    build_model,
)
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.config import Compile, Precision, TrainingConfig
from ziggurat.training.step import TrainStep


class OurContestant:
    """Ziggurat's model, step and scoring."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        self.score = settings.get("mode", "train") == "score"
        self.model = build(workload, kernel=KernelChoice(str(settings.get("kernel", "auto"))))
        config = TrainingConfig(
            learning_rate=1e-4,
            table_learning_rate=1e-3,
            precision=Precision(str(settings.get("precision", "auto"))),
            compile=Compile(str(settings.get("compile", "off"))),
            loader=LoaderConfig(batch_size=workload.batch_size),
        )
        self.train_step = TrainStep(self.model, config)
        self.model.train(not self.score)
        self.batches = [
            [to_batch(raw, workload, labels=labels) for labels in raw.label_sets] for raw in make_batches(workload)
        ]
        self.step = 0
        tables = self.model.embeddings.num_weights
        self.info: dict[str, object] = {
            "precision": self.train_step.precision.value,
            "precision_reason": self.train_step.precision_reason,
            "tables": self.model.embeddings.report(),
            "num_table_parameters": tables,
            "num_dense_parameters": sum(value.numel() for value in self.model.parameters()),
            "dense_optimizer": "Adam (fused)",
            "table_optimizer": "row-wise Adagrad (exact, deduplicated)",
        }

    def run(self, steps: int) -> float:
        """Train on, or score, so many batches."""
        value = 0.0
        for _ in range(steps):
            label_sets = self.batches[self.step % len(self.batches)]
            batch = label_sets[self.step // len(self.batches) % len(label_sets)]
            self.step += 1
            if self.score:
                with torch.inference_mode():
                    value = float(self.train_step.logits(batch).sigmoid()[0])
            else:
                value = self.train_step(batch).loss
        return value


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


def build(workload: Workload, *, kernel: KernelChoice) -> RankingModel:
    """The workload's network, the same layers as every other contestant's."""
    embedding = EmbeddingConfig(dim=workload.dim, kernel=kernel)
    bottom, top = MLPConfig(hidden_dims=workload.bottom_mlp[:-1]), MLPConfig(hidden_dims=workload.top_mlp)
    match workload.model:
        case ModelKind.DLRM:
            config = DLRMConfig(embedding_dim=workload.dim, bottom=bottom, top=top, embedding=embedding)
        case ModelKind.DCN_V2:
            config = DCNv2Config(
                embedding_dim=workload.dim,
                structure=Structure.STACKED,
                cross=CrossConfig(num_layers=workload.cross_layers, kind=CrossKind.LOW_RANK, rank=workload.cross_rank),
                numeric=NumericInput.BOTTOM_MLP,
                bottom=bottom,
                deep=top,
                embedding=embedding,
            )
        case ModelKind.FUXICTR_DCN_V2:
            config = DCNv2Config(
                embedding_dim=workload.dim,
                structure=Structure.PARALLEL,
                cross=CrossConfig(num_layers=3, kind=CrossKind.FULL),
                numeric=NumericInput.FIELDS,
                deep=MLPConfig(hidden_dims=(400, 400, 400)),
                embedding=embedding,
            )
    return build_model(config, inputs_of(workload), seed=workload.seed)


if __name__ == "__main__":
    serve(OurContestant)

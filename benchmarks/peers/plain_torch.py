"""Plain torch: 26 nn.EmbeddingBag with sparse gradients, torch.optim.Adagrad on them, Adam on the rest.

What most people write first, and the tutorial's advice (sparse=True with SGD, SparseAdam or Adagrad). Adagrad is
element-wise: torch has no row-wise one. The network is the same as the other contestants', layer by layer.

Settings: `mode` "train" | "score".
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.worker import serve
from benchmarks.workload import ModelKind, Workload, make_batches


def mlp(widths: tuple[int, ...], *, last_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them (and after the last one if asked)."""
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(fan_in, fan_out))
        if last_relu or index < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class LowRankCross(nn.Module):
    """x ← x₀ ∘ (W V x + b) + x, a few times (DCNv2, Wang et al. 2021, equation 2 with the low rank of section 4)."""

    def __init__(self, width: int, *, rank: int, num_layers: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))

    def forward(self, first: Tensor) -> Tensor:
        """(B, W) to (B, W)."""
        value = first
        for down, up in zip(self.down, self.up, strict=True):
            value = first * up(down(value)) + value
        return value


class PlainModel(nn.Module):
    """DLRM or DCNv2 as one would write it on top of nn.EmbeddingBag."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.kind, dim, num_fields = workload.model, workload.dim, len(workload.lengths) + 1
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(workload.num_rows, dim, mode="sum", sparse=True) for _ in workload.lengths
        )
        for table in self.tables.parameters():
            nn.init.uniform_(table, -(workload.num_rows**-0.5), workload.num_rows**-0.5)  # as the others start
        self.bottom = mlp((workload.num_dense, *workload.bottom_mlp), last_relu=True)
        width = num_fields * dim
        if self.kind is ModelKind.DLRM:
            width = dim + num_fields * (num_fields - 1) // 2
            rows, columns = torch.triu_indices(num_fields, num_fields, offset=1)
            self.register_buffer("rows", rows)
            self.register_buffer("columns", columns)
        else:
            self.cross = LowRankCross(width, rank=workload.cross_rank, num_layers=workload.cross_layers)
        self.top = mlp((width, *workload.top_mlp, 1), last_relu=False)

    def forward(self, dense: Tensor, ids: list[Tensor]) -> Tensor:
        """Logits (B,) of numbers (B, N) and one (B, length) matrix of ids a feature."""
        bottom = self.bottom(dense)
        pooled = [bottom, *(table(rows) for table, rows in zip(self.tables, ids, strict=True))]
        if self.kind is ModelKind.DLRM:
            fields = torch.stack(pooled, dim=1)
            dots = torch.bmm(fields, fields.transpose(1, 2))[:, self.rows, self.columns]
            return self.top(torch.cat([bottom, dots], dim=1)).squeeze(-1)
        return self.top(self.cross(torch.cat(pooled, dim=1))).squeeze(-1)


class PlainTorchContestant:
    """The model above with its two optimizers."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        torch.manual_seed(workload.seed)
        self.score = settings.get("mode", "train") == "score"
        self.model = PlainModel(workload)
        if self.score:
            self.model.eval()
        dense = [value for name, value in self.model.named_parameters() if not name.startswith("tables.")]
        self.optimizers = (
            torch.optim.Adam(dense, lr=workload.learning_rate, fused=True),
            torch.optim.Adagrad(self.model.tables.parameters(), lr=workload.table_learning_rate),
        )
        self.loss = nn.BCEWithLogitsLoss()
        self.step = 0
        self.batches = [
            (
                torch.from_numpy(raw.dense),
                [torch.from_numpy(np.ascontiguousarray(ids)) for ids in raw.ids],
                [torch.from_numpy(labels) for labels in raw.label_sets],
            )
            for raw in make_batches(workload)
        ]
        self.info: dict[str, object] = {
            "num_dense_parameters": sum(value.numel() for value in dense),
            "dense_optimizer": "Adam (fused)",
            "table_optimizer": "element-wise Adagrad on sparse gradients",
        }

    def run(self, steps: int) -> float:
        """Train on, or score, so many batches."""
        value = torch.zeros(())
        for _ in range(steps):
            dense, ids, label_sets = self.batches[self.step % len(self.batches)]
            labels = label_sets[self.step // len(self.batches) % len(label_sets)]
            self.step += 1
            if self.score:
                with torch.inference_mode():
                    value = self.model(dense, ids).sigmoid()[0]
                continue
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss = self.loss(self.model(dense, ids), labels)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            value = loss.detach()
        return value.item()


if __name__ == "__main__":
    serve(PlainTorchContestant)

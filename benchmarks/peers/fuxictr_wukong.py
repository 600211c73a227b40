"""FuxiCTR 2.3.10's training step of a Wukong: its embeddings, its loop body, dense Adam, gradient clipping.

The wheel has no Wukong, so the layers are written here from the paper's equations with the choices of FuxiCTR's model
zoo: Y starts as N(0, 1), a ReLU on the output of the factorization machine block, batch norm in the final MLP, every
number a field. Everything else is FuxiCTR's: `FeatureEmbedding`, `MLP_Block`, and `BaseModel.train_step` (zero_grad,
loss, backward, clip_grad_norm_ over all parameters, Adam over whole tables).

In its favour: batches lie in memory, ready as tensors (no loader at all), and the projection of the residual has no
bias, which its zoo gives it.

Settings: `mode`: "train", or "dense": ready-made embeddings in place of the tables, so that only the network learns.
"""

from __future__ import annotations

import logging
import tempfile
import warnings

from benchmarks.peers.fuxictr_features import fuxictr_features
from benchmarks.worker import serve
from benchmarks.workload import WUKONG_FIELDS, WUKONG_LAYERS, WUKONG_MLP, WUKONG_RANK, Workload, make_batches


class FuxiCTRContestant:
    """FuxiCTR's step on batches in memory."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        warnings.filterwarnings("ignore")
        logging.disable(logging.INFO)
        import torch
        from fuxictr.pytorch.torch_utils import seed_everything

        seed_everything(workload.seed)
        features = fuxictr_features(workload)
        self.model = _wukong(features, workload)
        self.model._max_gradient_norm = 10.0
        self.model.train()
        self.batches = []
        for raw in make_batches(workload):
            columns = {f"n{index}": torch.from_numpy(raw.dense[:, index].copy()) for index in range(workload.num_dense)}
            columns |= {f"c{index}": torch.from_numpy(ids[:, 0].copy()) for index, ids in enumerate(raw.ids)}
            self.batches.append([{**columns, "click": torch.from_numpy(labels)} for labels in raw.label_sets])
        if settings.get("mode") == "dense":
            inputs = [self.model.get_inputs(each[0]) for each in self.batches[:8]]
            stacks = [self.model.embedding_layer(each).detach() for each in inputs]
            self.model.embedding_layer = _fixed(stacks)
            self.model.compile("adam", "binary_crossentropy", 1e-3)
        self.step = 0
        num_parameters = sum(value.numel() for value in self.model.parameters())
        tables = 0 if settings.get("mode") == "dense" else len(workload.lengths) * workload.num_rows * workload.dim
        lost = workload.num_dense * workload.dim if settings.get("mode") == "dense" else 0
        self.info: dict[str, object] = {
            "dense_optimizer": "Adam, clip_grad_norm_(10) over all parameters",
            "table_optimizer": "Adam on whole tables (dense gradients)",
            "num_table_parameters": tables,
            "num_dense_parameters": num_parameters - tables + lost,
        }

    def run(self, steps: int) -> float:
        """So many calls of FuxiCTR's `train_step`."""
        loss = 0.0
        for _ in range(steps):
            label_sets = self.batches[self.step % len(self.batches)]
            batch = label_sets[self.step // len(self.batches) % len(label_sets)]
            self.step += 1
            loss = float(self.model.train_step(batch))
        return loss


def _fixed(stacks: list):
    import torch

    class Fixed(torch.nn.Module):
        """Ready-made embeddings that ask for a gradient, as a table's output does."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, inputs: object) -> torch.Tensor:
            self.calls += 1
            return stacks[self.calls % len(stacks)].detach().requires_grad_()

    return Fixed()


def _wukong(features: object, workload: Workload):
    import torch
    from fuxictr.pytorch.layers import FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel
    from torch import nn

    class Layer(nn.Module):
        """LN(concat(FMB(X), LCB(X)) + residual(X))."""

        def __init__(self, num_fields: int) -> None:
            super().__init__()
            num_products, num_outputs = num_fields * WUKONG_RANK, 2 * WUKONG_FIELDS
            self.projection = nn.Parameter(torch.randn(num_fields, WUKONG_RANK))
            self.fm_norm = nn.LayerNorm(num_products)
            self.fm_mlp = MLP_Block(
                input_dim=num_products,
                output_dim=WUKONG_FIELDS * workload.dim,
                hidden_units=list(WUKONG_MLP),
                hidden_activations="ReLU",
                output_activation="ReLU",
            )
            self.linear = nn.Linear(num_fields, WUKONG_FIELDS, bias=False)
            same = num_fields == num_outputs
            self.residual = None if same else nn.Linear(num_fields, num_outputs, bias=False)
            self.norm = nn.LayerNorm(workload.dim)

        def forward(self, fields: torch.Tensor) -> torch.Tensor:
            """(B, n, d) to (B, 2·40, d)."""
            turned = fields.transpose(1, 2)
            products = torch.bmm(fields, torch.matmul(turned, self.projection))
            crossed = self.fm_mlp(self.fm_norm(products.flatten(1))).view(len(fields), -1, workload.dim)
            compressed = self.linear(turned).transpose(1, 2)
            kept = fields if self.residual is None else self.residual(turned).transpose(1, 2)
            return self.norm(torch.cat([crossed, compressed], dim=1) + kept)

    class WuKong(BaseModel):
        """Three layers and a final MLP with batch norm."""

        def __init__(self) -> None:
            folder = tempfile.mkdtemp()
            super().__init__(features, model_id="WuKong", model_root=folder, metrics=["AUC"], verbose=0)
            self.embedding_layer = FeatureEmbedding(features, workload.dim)
            widths = [features.num_fields, *[2 * WUKONG_FIELDS] * (WUKONG_LAYERS - 1)]
            self.layers = nn.Sequential(*(Layer(width) for width in widths))
            self.final = MLP_Block(
                input_dim=2 * WUKONG_FIELDS * workload.dim,
                output_dim=1,
                hidden_units=list(WUKONG_MLP),
                hidden_activations="ReLU",
                batch_norm=True,
            )
            self.compile("adam", "binary_crossentropy", 1e-3)
            self.reset_parameters()
            self.model_to_device()

        def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            """Predicted probabilities."""
            fields = self.layers(self.embedding_layer(self.get_inputs(inputs)))
            return {"y_pred": self.output_activation(self.final(fields.flatten(1)))}

    return WuKong()


if __name__ == "__main__":
    serve(FuxiCTRContestant)
